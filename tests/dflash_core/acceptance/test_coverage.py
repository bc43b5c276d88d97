"""Do 95 % intervals hold the truth in 95 % of the cases? Simulated prompts, fixed seeds."""

import numpy as np
import pytest

from dflash_core.acceptance import ranking, statistics
from dflash_core.acceptance.resampling import Contrast
from tests.dflash_core.acceptance.simulated import BLOCK_SIZE, prompt_set, true_tau, walk

NUM_TRIALS = 800
"""An observed share near 0.95 has a standard error of 0.8 % in so many trials."""


@pytest.fixture(scope="module")
def truth():
    return {quality: true_tau(quality) for quality in ("middling", "weak", "strong")}


@pytest.mark.parametrize(
    ("quality", "num_prompts"),
    [("middling", 24), ("weak", 24), ("strong", 24), ("middling", 60), ("weak", 200), ("strong", 200)],
)
def test_the_interval_of_tau_holds_the_truth_about_as_often_as_it_says(truth, quality, num_prompts):
    generator = np.random.default_rng([num_prompts, len(quality)])
    num_held = 0
    for trial in range(NUM_TRIALS):
        counts = walk(generator, *prompt_set(generator, quality, num_prompts))
        interval = statistics.bootstrap_interval(*counts, num_resamples=600, seed=trial % 20, highest=BLOCK_SIZE)
        num_held += interval.low <= truth[quality] <= interval.high
    assert 0.93 <= num_held / NUM_TRIALS <= 0.97


def pair_of(generator, num_prompts, *, spread=0.1, gain=0.0):
    """Return the four counts of two drafters: the second's chance on a prompt is the first's, moved at random."""
    rate, tokens = prompt_set(generator, "middling", num_prompts)
    other = np.clip(rate + gain + generator.normal(0, spread, size=num_prompts), 0.01, 0.97)
    return (*walk(generator, rate, tokens), *walk(generator, other, tokens))


@pytest.mark.parametrize("contrast", [Contrast.DIFFERENCE, Contrast.RATIO])
@pytest.mark.parametrize("num_prompts", [24, 60])
def test_the_interval_of_a_paired_difference_holds_the_truth(contrast, num_prompts):
    many = np.random.default_rng(5)
    sums = sum(np.array([counts.sum() for counts in pair_of(many, 1000, gain=-0.04)]) for _ in range(60))
    tau_a, tau_b = sums[0] / sums[1], sums[2] / sums[3]
    truth = tau_b - tau_a if contrast is Contrast.DIFFERENCE else tau_b / tau_a - 1
    assert truth < -0.02
    generator = np.random.default_rng([num_prompts, 6])
    num_held = 0
    for trial in range(NUM_TRIALS):
        counts = pair_of(generator, num_prompts, gain=-0.04)
        interval = statistics.contrast_bounds(*counts, contrast, num_resamples=600, seed=trial % 20).interval()
        num_held += interval.low <= truth <= interval.high
    assert 0.93 <= num_held / NUM_TRIALS <= 0.97


@pytest.mark.parametrize("num_prompts", [24, 60])
def test_a_best_drafter_is_seldom_told_from_the_best(num_prompts):
    """Eight drafters of one family, equally good: each is truly a best one and stays as often as it says."""
    generator = np.random.default_rng([num_prompts, 8])
    num_thrown_out = np.zeros(8)
    num_trials = 300
    for trial in range(num_trials):
        rate, tokens = prompt_set(generator, "middling", num_prompts)
        rates = np.clip(rate + generator.normal(0, 0.08, size=(8, num_prompts)), 0.01, 0.97)
        walks = [walk(generator, one, tokens) for one in rates]
        told = ranking.told_from_best(
            [emitted for emitted, _ in walks], [steps for _, steps in walks], num_draws=500, seed=trial
        )
        num_thrown_out += told
        assert not all(told), "the one with the highest tau is never told from the best"
    assert 0.03 <= num_thrown_out.mean() / num_trials <= 0.07


def test_what_is_clearly_worse_is_told_from_the_best_and_a_copy_is_not():
    generator = np.random.default_rng(3)
    rate, tokens = prompt_set(generator, "middling", 60)
    best = walk(generator, np.clip(rate + 0.1, 0.01, 0.97), tokens)
    worse = walk(generator, np.clip(rate - 0.1, 0.01, 0.97), tokens)
    walks = [worse, best, best]
    assert ranking.told_from_best([e for e, _ in walks], [s for _, s in walks]) == [True, False, False]
    assert ranking.told_from_best([[5], [9]], [[3], [3]]) == [False, False], "one prompt tells nothing"
    assert ranking.told_from_best([[5, 6]], [[3, 3]]) == [False]
