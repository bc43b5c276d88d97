"""What a set of prompts can show."""

import math

import numpy as np
import pytest

from dflash_core.acceptance import power, statistics


@pytest.mark.parametrize(
    ("probability", "degrees", "value"),
    [(0.975, 1, 12.7062), (0.975, 2, 4.3027), (0.95, 5, 2.0150), (0.975, 23, 2.0687), (0.8, 59, 0.8478), (0.5, 9, 0.0)],
)
def test_quantiles_are_those_of_the_printed_tables(probability, degrees, value):
    assert power.student_t_quantile(probability, degrees) == pytest.approx(value, abs=6e-5)
    assert power.student_t_quantile(1 - probability, degrees) == pytest.approx(-value, abs=6e-5)


def test_many_degrees_of_freedom_are_the_normal_distribution():
    assert power.student_t_quantile(0.975, 100_000) == pytest.approx(1.95996, abs=1e-4)


def test_so_many_prompts_detect_the_wanted_difference_and_one_less_do_not():
    for wanted in (0.02, 0.1, 0.5, 3.0):
        num_prompts = power.prompts_needed(0.1, 24, wanted)
        error = 0.1 * math.sqrt(24)
        assert power.smallest_detectable(error / math.sqrt(num_prompts), num_prompts) <= wanted
        if num_prompts > 2:
            fewer = num_prompts - 1
            assert power.smallest_detectable(error / math.sqrt(fewer), fewer) > wanted


@pytest.mark.parametrize(("error", "num_prompts"), [(math.nan, 24), (0.0, 24), (0.1, 1), (0.1, 0)])
def test_nothing_is_said_where_the_prompts_show_no_spread(error, num_prompts):
    assert math.isnan(power.smallest_detectable(error, num_prompts))
    assert power.prompts_needed(error, num_prompts, 0.1) is None


def test_the_smallest_detectable_difference_is_detected_in_four_of_five_cases():
    """Simulated pairs with a true gain of that size: the interval leaves 0 outside in 80 % of them."""
    generator = np.random.default_rng(7)
    errors, found = [], []
    for _ in range(300):
        steps, gain = generator.integers(20, 60, size=60), 0.15
        shift = generator.normal(gain, 0.4, size=60)
        emitted_a = steps * 3.0
        both = statistics.paired_difference(emitted_a, steps, steps * (3.0 + shift), steps, num_resamples=400)
        errors.append(both.standard_error)
        found.append(both.ci_low > 0)
    detectable = power.smallest_detectable(float(np.mean(errors)), 60)
    # The true gain is a little above what 60 prompts detect; 300 trials leave 2.3 % of chance.
    assert detectable == pytest.approx(0.155, abs=0.01)
    assert 0.70 <= np.mean(found) <= 0.86
