"""Intervals and p-values off the same resamples, and several judged together."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.acceptance import statistics
from dflash_core.acceptance.bounds import FAR_RESAMPLES, Bounds, judged_together, usable
from dflash_core.acceptance.power import student_t_quantile
from dflash_core.acceptance.resampling import Contrast
from dflash_core.results.verdicts import judge_differences
from tests.dflash_core.acceptance.simulated import prompt_set, walk


def drawn(num_prompts, *, seed=1, gain=0.0, spread=0.1, num_resamples=1000):
    """Return the bounds of a paired difference between two drafters of one family."""
    generator = np.random.default_rng(seed)
    rate, tokens = prompt_set(generator, "middling", num_prompts)
    other = np.clip(rate + gain + generator.normal(0, spread, size=num_prompts), 0.01, 0.97)
    counts = (*walk(generator, rate, tokens), *walk(generator, other, tokens))
    return statistics.contrast_bounds(*counts, Contrast.DIFFERENCE, num_resamples=num_resamples)


@pytest.fixture(scope="module", params=[4, 9, 40], ids=lambda number: f"{number} prompts")
def bounds(request):
    found = drawn(request.param)
    assert (found.ratios_R is None) == (request.param == 4), "Student's t with few prompts"
    return found


@settings(max_examples=300, deadline=None)
@given(supposed=st.floats(-4, 4), level=st.floats(0.01, 0.99999))
def test_an_interval_leaves_out_exactly_what_its_p_value_rejects(bounds, supposed, level):
    low, high, _ = bounds.interval(level)
    p_value = bounds.p_value(supposed)
    if abs(p_value - (1 - level)) > 1e-9 and min(abs(supposed - low), abs(supposed - high)) > 1e-9:
        assert (low > supposed or high < supposed) == (p_value <= 1 - level)


def test_levels_widen_the_interval_without_a_jump_backwards_far_into_the_tails(bounds):
    levels = [0.5, 0.8, 0.9, 0.95, 0.975, *(1 - 0.05 / number for number in range(2, 400, 3)), 0.999999]
    ends = [bounds.interval(level) for level in levels]
    assert [one.low for one in ends] == sorted((one.low for one in ends), reverse=True)
    assert [one.high for one in ends] == sorted(one.high for one in ends)
    assert ends[-1].high < math.inf


def test_the_tails_beyond_the_resamples_are_those_of_a_long_draw():
    """A thousand resamples, continued by Student's t, against what 400,000 say at a level that they reach."""
    short, long = drawn(40, num_resamples=1000), drawn(40, num_resamples=400_000)
    level = 1 - 0.05 / 100
    assert 400_000 * (1 - level) / 2 >= FAR_RESAMPLES > 1000 * (1 - level) / 2
    here, there = short.interval(level), long.interval(level)
    assert (here.high - here.low) / (there.high - there.low) == pytest.approx(1, abs=0.12)


def test_ratios_whose_tails_are_infinite_give_way_to_student_t():
    fine = np.linspace(-3, 3, 201)
    assert usable(fine, 9) is not None
    assert usable(np.where(fine > 2.5, np.inf, fine), 9) is None
    assert usable(np.abs(fine), 9) is None, "no ratio below 0"
    plain = Bounds(value=1.0, error=0.5, num_units=9, ratios_R=None, word=None)
    assert plain.interval(0.95).high == pytest.approx(1 + 0.5 * student_t_quantile(0.975, 8))
    assert plain.p_value(1.0) == 1.0
    assert plain.p_value(1 + 0.5 * student_t_quantile(0.975, 8)) == pytest.approx(0.05)


def test_prompts_that_all_say_the_same_are_a_sign_test():
    steps = np.full(8, 20)
    shifted = statistics.contrast_bounds(steps * 2, steps, steps * 3, steps, Contrast.DIFFERENCE)
    assert shifted.p_value(1.0) == 1.0
    assert shifted.p_value(0.0) == 2 * 0.5**8
    assert math.isnan(shifted.interval(0.95).low)
    one = statistics.contrast_bounds([40], [20], [60], [20], Contrast.DIFFERENCE)
    assert math.isnan(one.p_value(0.0))
    assert math.isnan(statistics.contrast_bounds([], [], [], [], Contrast.DIFFERENCE).p_value(0.0))


P_VALUES = st.lists(st.one_of(st.floats(0, 1), st.floats(0, 0.06), st.just(math.nan)), max_size=12)


def told_by(p_values):
    judges = [None if math.isnan(p) else (lambda level, p=p: p <= 1 - level) for p in p_values]
    return judged_together(judges)


@settings(max_examples=300)
@given(P_VALUES)
def test_step_by_step_it_is_holms_rule_and_never_tells_less_than_bonferroni(p_values):
    told = told_by(p_values)
    adjusted = statistics.holm_adjusted(p_values)
    num_known = sum(not math.isnan(p) for p in p_values)
    for p, p_adjusted, one in zip(p_values, adjusted, told, strict=True):
        if math.isnan(p):
            assert one is None
            continue
        if abs(p_adjusted - 0.05) > 1e-9:
            assert one.is_told == (p_adjusted <= 0.05)
        assert one.is_told == (p <= 1 - one.level), "its own interval says what was told"
        assert 0.95 <= one.level <= 1 - 0.05 / num_known + 1e-12
        if p <= 0.05 / num_known - 1e-9:
            assert one.is_told


def test_the_level_falls_as_more_is_told():
    assert told_by([0.001, 0.02, 0.3]) == [(True, 1 - 0.05 / 3), (True, 1 - 0.05 / 2), (False, 0.95)]
    assert told_by([0.03]) == [(True, 0.95)]
    assert told_by([]) == []


def test_a_verdict_its_p_value_and_its_interval_agree():
    """Some gains are told and some not; whatever is said, all three say the same."""
    steps_and_words = []
    for seed in range(12):
        generator = np.random.default_rng([seed, 3])
        rate, tokens = prompt_set(generator, "middling", 40)
        first = walk(generator, rate, tokens)
        differences = [
            statistics.paired_difference(*first, *walk(generator, np.clip(rate + gain, 0.01, 0.97), tokens))
            for gain in (0.0, 0.004, 0.02, -0.03, -0.2)
        ]
        for family in (differences, [differences[0], differences[-1]]):
            verdicts = judge_differences([None, *family])
            assert verdicts[0] is None
            for found, verdict in zip(family, verdicts[1:], strict=True):
                is_told = verdict.word != "cannot tell"
                assert is_told == (verdict.p_adjusted <= 0.05)
                assert is_told == (verdict.ci_low > 0 or verdict.ci_high < 0)
                assert verdict.level >= 0.95
                assert verdict.p_adjusted >= found.p_value
                if is_told:
                    assert verdict.word == ("better" if found.difference > 0 else "worse")
                steps_and_words.append((verdict.level > 0.95 + 1e-9, verdict.word))
    assert {word for _, word in steps_and_words} == {"better", "worse", "cannot tell"}
    assert {is_wider for is_wider, _ in steps_and_words} == {True, False}


@pytest.mark.parametrize(("num_prompts", "num_worse", "num_alike"), [(24, 2, 2), (60, 3, 5)])
def test_with_some_truly_worse_the_others_are_still_seldom_called_so_and_more_is_found(
    num_prompts, num_worse, num_alike
):
    """The step down must not pay for its power with false alarms on those that are as good as the baseline."""
    generator = np.random.default_rng([num_prompts, num_worse])
    num_trials, num_false, num_found, num_found_before = 200, 0, 0, 0
    number = num_worse + num_alike
    for _ in range(num_trials):
        rate, tokens = prompt_set(generator, "middling", num_prompts)
        moved = np.clip(rate + generator.normal(0, 0.08, size=(number + 1, num_prompts)), 0.01, 0.97)
        moved[1 : num_worse + 1] -= 0.07
        walks = [walk(generator, np.clip(one, 0.01, 0.97), tokens) for one in moved]
        all_bounds = [
            statistics.contrast_bounds(*walks[0], *one, Contrast.DIFFERENCE, num_resamples=1000) for one in walks[1:]
        ]
        p_values = [one.p_value() for one in all_bounds]
        told = told_by(p_values)
        num_false += any(one.is_told for one in told[num_worse:])
        num_found += sum(one.is_told for one in told[:num_worse])
        num_found_before += sum(p <= 0.05 / number for p in p_values[:num_worse])
    # 5 % of tables with a false verdict on either side, 1 % more for so few prompts, and three standard errors.
    assert num_false / num_trials <= 0.06 + 3 * math.sqrt(0.05 * 0.95 / num_trials)
    assert num_found > num_found_before
