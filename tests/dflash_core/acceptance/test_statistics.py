"""The statistics against closed forms, against loops, and as properties."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.acceptance import resampling, statistics
from dflash_core.acceptance.power import student_t_quantile
from dflash_core.acceptance.resampling import Contrast

EMITTED = [30, 12, 45, 20, 9, 27]
STEPS = [10, 10, 15, 5, 9, 9]


@st.composite
def prompt_counts(draw, min_size=1, max_size=30, block_size=8):
    steps = draw(st.lists(st.integers(1, 40), min_size=min_size, max_size=max_size))
    emitted = [draw(st.integers(n, n * block_size)) for n in steps]
    return emitted, steps


def test_pooled_and_prompt_mean_differ_when_answers_have_different_lengths():
    # One answer of 2 blocks at 8 tokens, one of 20 blocks at 2.
    assert statistics.tau_prompt_mean([16, 40], [2, 20]) == 5.0
    assert statistics.tau_pooled([16, 40], [2, 20]) == pytest.approx(56 / 22)


def test_the_two_means_can_rank_two_drafters_in_opposite_order():
    steady = ([8, 800], [2, 200])
    uneven = ([16, 740], [2, 200])
    assert statistics.tau_pooled(*steady) > statistics.tau_pooled(*uneven)
    assert statistics.tau_prompt_mean(*steady) < statistics.tau_prompt_mean(*uneven)


def test_nothing_measured_is_nan_and_not_a_number():
    for counts in (([], []), ([0], [0])):
        assert math.isnan(statistics.tau_pooled(*counts))
        assert math.isnan(statistics.tau_prompt_mean(*counts))
        interval = statistics.bootstrap_interval(*counts)
        assert math.isnan(interval.low)
        assert math.isnan(interval.high)
        assert interval.word == "not measured: no prompt has a verification step"
    nothing = statistics.paired_difference([], [], [], [])
    assert nothing.word == "not measured: no prompt has a verification step of both"
    assert math.isnan(nothing.smallest_detectable)
    assert math.isnan(nothing.difference)
    assert math.isnan(nothing.p_value)
    assert nothing.num_prompts == 0


def test_a_prompt_without_a_step_changes_nothing():
    assert statistics.tau_prompt_mean([*EMITTED, 0], [*STEPS, 0]) == statistics.tau_prompt_mean(EMITTED, STEPS)
    assert statistics.bootstrap_interval([*EMITTED, 0], [*STEPS, 0]) == statistics.bootstrap_interval(EMITTED, STEPS)


@given(prompt_counts())
def test_both_means_lie_between_the_worst_and_the_best_prompt(counts):
    taus = [e / s for e, s in zip(*counts, strict=True)]
    for tau in (statistics.tau_pooled(*counts), statistics.tau_prompt_mean(*counts)):
        assert min(taus) - 1e-12 <= tau <= max(taus) + 1e-12


@settings(deadline=None, max_examples=30)
@given(prompt_counts(min_size=2), st.randoms(use_true_random=False))
def test_no_number_depends_on_the_order_of_prompts_and_the_interval_holds_the_estimate(counts, random):
    interval = statistics.bootstrap_interval(*counts, num_resamples=400, highest=8)
    shuffled = list(zip(*counts, strict=True))
    random.shuffle(shuffled)
    reordered = tuple(zip(*shuffled, strict=True))
    again = statistics.bootstrap_interval(*reordered, num_resamples=400, highest=8)
    assert repr(again) == repr(interval)
    assert statistics.tau_prompt_mean(*reordered) == statistics.tau_prompt_mean(*counts)
    if len({e / s for e, s in zip(*counts, strict=True)}) == 1:
        assert interval.word == "no interval: every prompt has the same tau"
    else:
        assert interval.word is None
        assert 1 <= interval.low <= statistics.tau_pooled(*counts) <= interval.high <= 8


@pytest.mark.parametrize(
    ("emitted", "steps", "word"),
    [
        pytest.param([12], [4], "it takes 2 prompts at least", id="one prompt"),
        pytest.param([12, 0, 0], [4, 0, 0], "it takes 2 prompts at least", id="one prompt with a step"),
        pytest.param([12, 30, 6], [4, 10, 2], "every prompt has the same tau", id="constant"),
        pytest.param([7] * 24, [7] * 24, "every prompt has the same tau", id="nothing ever accepted"),
    ],
)
def test_where_there_is_no_spread_there_is_a_word_and_no_interval(emitted, steps, word):
    interval = statistics.bootstrap_interval(emitted, steps)
    assert math.isnan(interval.low)
    assert math.isnan(interval.high)
    assert word in interval.word
    assert statistics.tau_pooled(emitted, steps) >= 1


def test_interval_of_few_prompts_is_students_t_on_the_linearised_ratio():
    # Residuals of [12, 20, 40] tokens in 10 steps each around 2.4: -12, -4, 16 over 30 steps.
    error = math.sqrt(3 / 2 * (12**2 + 4**2 + 16**2)) / 30
    low, high, _ = statistics.bootstrap_interval([12, 20, 40], [10, 10, 10], level=0.5)
    assert (low, high) == pytest.approx((2.4 - 0.816497 * error, 2.4 + 0.816497 * error))


def test_interval_equals_a_plain_loop_over_the_same_draws():
    emitted, steps = [30, 12, 45, 20, 9, 27, 16, 33], [10, 10, 15, 5, 9, 9, 8, 7]
    pairs = sorted(zip(emitted, steps, strict=True), key=lambda pair: (pair[1], pair[0]))
    tau = sum(emitted) / sum(steps)

    def error(chosen, tau):
        spread = sum((e - tau * s) ** 2 for e, s in chosen)
        return math.sqrt(spread * len(chosen) / (len(chosen) - 1)) / sum(s for _, s in chosen)

    generator = np.random.default_rng(5)
    ratios = []
    for row in generator.integers(len(pairs), size=(400, len(pairs))):
        chosen = [pairs[place] for place in row]
        resampled = sum(e for e, _ in chosen) / sum(s for _, s in chosen)
        ratios.append((resampled - tau) / error(chosen, resampled))
    student = student_t_quantile(0.975, len(pairs) - 1)
    low, high = min(sorted(ratios)[10], -student), max(sorted(ratios)[-11], student)
    assert {low, high} != {-student, student}, "both ways to find an end are seen"
    interval = statistics.bootstrap_interval(emitted, steps, num_resamples=400, seed=5)
    expected = (tau - high * error(pairs, tau), tau - low * error(pairs, tau))
    assert interval[:2] == pytest.approx((max(expected[0], 1), expected[1]))


def test_interval_does_not_depend_on_the_size_of_the_slices(monkeypatch):
    whole = statistics.bootstrap_interval(EMITTED, STEPS)
    paired = statistics.paired_difference(EMITTED * 3, STEPS * 3, EMITTED[::-1] * 3, STEPS[::-1] * 3)
    monkeypatch.setattr(resampling, "CHUNK_CELLS", 100)
    assert statistics.bootstrap_interval(EMITTED, STEPS) == pytest.approx(whole, nan_ok=True)
    sliced = statistics.paired_difference(EMITTED * 3, STEPS * 3, EMITTED[::-1] * 3, STEPS[::-1] * 3)
    assert (sliced.ci_low, sliced.ci_high) == pytest.approx((paired.ci_low, paired.ci_high))


def test_a_higher_level_widens_the_interval():
    widths = []
    for level in (0.5, 0.8, 0.95, 0.99):
        low, high, _ = statistics.bootstrap_interval(EMITTED, STEPS, level=level)
        widths.append(high - low)
    assert widths == sorted(widths)
    assert widths[0] < widths[-1]


def test_turns_of_one_conversation_are_drawn_together():
    generator = np.random.default_rng(2)
    conversations = [f"mt-{number}" for number in range(40)]
    rate = generator.beta(2, 2, size=40)
    ids = [f"{name}#{turn}" for name in conversations for turn in (1, 2, 3)]
    emitted = np.repeat(20 + np.round(140 * rate), 3)
    alone = statistics.bootstrap_interval(emitted, [20] * 120)
    together = statistics.bootstrap_interval(
        emitted, [20] * 120, clusters=[statistics.conversation_of(name) for name in ids]
    )
    # Three equal turns are one observation: the interval is wider by the root of 3.
    assert (together.high - together.low) / (alone.high - alone.low) == pytest.approx(math.sqrt(3), rel=0.06)
    one = statistics.bootstrap_interval([30, 40], [10, 10], clusters=["mt-1", "mt-1"])
    assert "turns of one conversation count as one" in one.word


@pytest.mark.parametrize(
    ("prompt_id", "conversation"),
    [
        ("mt-7#2", "mt-7"),
        ("a#b#12", "a#b"),
        ("gsm8k-1", "gsm8k-1"),
        ("c#", "c#"),
        ("#3", "#3"),
        ("issue #x1", "issue #x1"),
    ],
)
def test_a_turn_names_its_conversation(prompt_id, conversation):
    assert statistics.conversation_of(prompt_id) == conversation


def test_blocks_taken_as_independent_understate_the_error_several_times():
    # 40 prompts, half easy (every block full at 8), half hard (every block 1 token): all spread lies between prompts.
    emitted = [8 * 50] * 20 + [50] * 20
    low, high, _ = statistics.bootstrap_interval(emitted, [50] * 40)
    prompt_error = (high - low) / (2 * 1.96)
    tokens_per_block = np.repeat([8, 1], 20 * 50)
    block_error = tokens_per_block.std() / math.sqrt(len(tokens_per_block))
    assert prompt_error == pytest.approx(3.5 / math.sqrt(40), rel=0.1)
    assert prompt_error / block_error == pytest.approx(math.sqrt(50), rel=0.1)


def test_equal_drafters_have_no_difference_and_no_evidence():
    same = statistics.paired_difference(EMITTED, STEPS, EMITTED, STEPS)
    assert (same.difference, same.difference_prompt_mean, same.p_value) == (0.0, 0.0, 1.0)
    assert math.isnan(same.ci_low)
    assert math.isnan(same.ci_high)
    assert same.word == "no interval: both did the same on every prompt"
    assert same.num_prompts == 6


def test_a_constant_gain_is_seen_through_the_spread_of_the_prompts():
    emitted_b = [e + 2 * s for e, s in zip(EMITTED, STEPS, strict=True)]
    gain = statistics.paired_difference(EMITTED, STEPS, emitted_b, STEPS)
    assert gain.difference == pytest.approx(2.0)
    assert gain.difference_prompt_mean == pytest.approx(2.0)
    assert math.isnan(gain.ci_low)
    assert gain.word == "no interval: the difference is the same on every prompt"
    # As likely as a coin that falls six times on one side.
    assert gain.p_value == pytest.approx(2 / 64)
    unpaired = statistics.bootstrap_interval(EMITTED, STEPS)
    assert unpaired.high - unpaired.low > 1


@settings(deadline=None, max_examples=25)
@given(prompt_counts(min_size=2, max_size=20), st.data())
def test_changing_places_changes_only_the_sign(counts, data):
    emitted_a, steps = counts
    emitted_b = [data.draw(st.integers(n, 8 * n)) for n in steps]
    there = statistics.paired_difference(emitted_a, steps, emitted_b, steps, num_resamples=100)
    back = statistics.paired_difference(emitted_b, steps, emitted_a, steps, num_resamples=100)
    assert back.difference == pytest.approx(-there.difference)
    assert back.difference_prompt_mean == pytest.approx(-there.difference_prompt_mean)
    assert (back.word is None) == (there.word is None)
    if len(steps) < statistics.MIN_BOOTSTRAP_UNITS:
        assert back.p_value == pytest.approx(there.p_value)


def test_p_values_are_spread_evenly_when_nothing_differs():
    generator = np.random.default_rng(11)
    p_values = []
    for _ in range(200):
        steps = generator.integers(5, 30, size=24)
        rate = generator.beta(2, 2, size=24)
        emitted_a, emitted_b = (steps + generator.binomial(steps * 7, rate) for _ in range(2))
        p_values.append(statistics.paired_difference(emitted_a, steps, emitted_b, steps, num_resamples=400).p_value)
    # 10 of 200 expected below 0.05; more than 22 has a chance below 1 in 1000.
    assert sum(p < 0.05 for p in p_values) <= 22
    assert np.mean(p_values) == pytest.approx(0.5, abs=0.07)


def test_the_linearised_error_is_what_a_jackknife_says():
    generator = np.random.default_rng(4)
    steps_a, steps_b = (generator.integers(20, 60, size=200) for _ in range(2))
    rate = generator.beta(5, 5, size=200)
    emitted_a = steps_a + generator.binomial(steps_a * 7, rate)
    emitted_b = steps_b + generator.binomial(steps_b * 7, rate)
    counts = np.stack([emitted_a, steps_a, emitted_b, steps_b], axis=1).astype(float)
    for contrast in Contrast:
        whole = resampling.estimate(counts, contrast)
        without = [resampling.estimate(np.delete(counts, place, axis=0), contrast).value for place in range(200)]
        jackknife = math.sqrt(199 / 200 * ((np.array(without) - np.mean(without)) ** 2).sum())
        assert whole.standard_error == pytest.approx(jackknife, rel=0.02)


def test_a_ratio_is_a_relative_difference_with_its_own_interval():
    found = statistics.contrast_bounds([100, 90] * 20, [30] * 40, [90, 85] * 20, [30] * 40, Contrast.RATIO).interval()
    assert found.low < 175 / 190 - 1 < found.high < 0


def test_holm_multiplies_by_what_is_left_and_never_falls():
    assert statistics.holm_adjusted([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert statistics.holm_adjusted([0.9, 0.8]) == [1.0, 1.0]
    with_gap = statistics.holm_adjusted([math.nan, 0.02, 0.5])
    assert math.isnan(with_gap[0])
    assert with_gap[1:] == pytest.approx([0.04, 0.5])


@pytest.mark.parametrize(
    ("emitted", "steps", "words"),
    [
        pytest.param([1, 2], [1], "one entry per prompt", id="lengths differ"),
        pytest.param([math.nan], [1], "NaN", id="nan"),
        pytest.param([3], [4], "fewer tokens than steps", id="a step without a token"),
        pytest.param([[1]], [[1]], "one entry per prompt", id="two dimensions"),
    ],
)
def test_counts_that_cannot_be_are_refused(emitted, steps, words):
    with pytest.raises(ValueError, match=words):
        statistics.tau_pooled(emitted, steps)


def test_settings_out_of_range_are_refused_with_their_value():
    with pytest.raises(ValueError, match="open interval"):
        statistics.bootstrap_interval(EMITTED, STEPS, level=1.0)
    with pytest.raises(ValueError, match="at least 100, got 10"):
        statistics.bootstrap_interval(EMITTED, STEPS, num_resamples=10)
    with pytest.raises(ValueError, match="same prompts, got 6 and 1"):
        statistics.paired_difference(EMITTED, STEPS, [4], [2])
