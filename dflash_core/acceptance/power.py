"""What a set of prompts can show: the smallest difference it detects, and how many prompts another would need."""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

POWER = 0.8
"""Chance with which the smallest detectable difference would be seen."""
LEVEL = 0.95
"""Of the two-sided interval that has to leave 0 outside."""
_MOST_STEPS = 200
_STEP_ROUNDING = 1e-12
_MOST_TERMS = 10_000
_ROUNDING = 1e-15


def smallest_detectable(
    standard_error: float, num_prompts: int, *, level: float = LEVEL, power: float = POWER
) -> float:
    """Return the true difference that an interval of this level would tell from 0 with this chance.

    (t for the level + t for the power) x standard error, with N - 1 degrees of freedom. In the unit
    of the standard error. NaN with fewer than 2 prompts, or where the prompts do not differ.
    """
    if num_prompts < 2 or not standard_error > 0:
        return math.nan
    degrees = num_prompts - 1
    return (student_t_quantile((1 + level) / 2, degrees) + student_t_quantile(power, degrees)) * standard_error


def prompts_needed(standard_error: float, num_prompts: int, wanted: float) -> int | None:
    """Return how many prompts like these would detect a wanted difference; None where nothing can be said.

    The standard error shrinks with the root of the number of prompts; the t quantiles are those of the
    number that results.
    """
    if num_prompts < 2 or not standard_error > 0 or not wanted:
        return None
    per_prompt = standard_error * math.sqrt(num_prompts)
    low, high = 1, 2
    while not smallest_detectable(per_prompt / math.sqrt(high), high) <= abs(wanted):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if smallest_detectable(per_prompt / math.sqrt(middle), middle) <= abs(wanted):
            high = middle
        else:
            low = middle
    return high


@lru_cache(maxsize=1024)
def student_t_quantile(probability: float, degrees: int) -> float:
    """Return the value below which Student's t with whole degrees of freedom falls with a probability.

    >>> round(student_t_quantile(0.975, 23), 4)
    2.0687
    """
    if not 0 < probability < 1 or degrees < 1:
        raise ValueError(f"expected a probability inside (0, 1) and degrees >= 1, got {probability!r} and {degrees!r}")
    if probability < 0.5:
        return -student_t_quantile(1 - probability, degrees)
    low, high, value = 0.0, math.inf, NormalDist().inv_cdf(probability)
    log_scale = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - math.log(degrees * math.pi) / 2
    for _ in range(_MOST_STEPS):
        beyond = student_t_below(value, degrees) - probability
        low, high = (low, value) if beyond > 0 else (value, high)
        # Newton's step by the density, or a bisection where that would leave what is known.
        density = math.exp(log_scale - (degrees + 1) / 2 * math.log1p(value**2 / degrees))
        following = value - beyond / density if density > 0 else math.inf
        if not low <= following <= high:
            following = (low + high) / 2 if math.isfinite(high) else 2 * value + 1
        if abs(following - value) <= _STEP_ROUNDING * following:
            return following
        value = following
    return value


def student_t_below(value: float, degrees: int) -> float:
    """Return the chance of falling below a value >= 0.

    >>> round(student_t_below(2.0687, 23), 4)
    0.975
    """
    inside = degrees / (degrees + value**2)
    return 1 - _incomplete_beta(inside, degrees / 2, 0.5) / 2


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """Return the regularised incomplete beta function I_x(a, b), by its continued fraction (DLMF 8.17.22).

    It converges in some tens of terms, also for thousands of degrees of freedom.
    """
    if not 0 < x < 1:
        return min(max(x, 0.0), 1.0)
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(1 - x, b, a)
    front = math.exp(a * math.log(x) + b * math.log1p(-x) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)) / a
    # Lentz's way to add up a continued fraction, as its ratio of two sums from one term to the next.
    above, below, fraction = 1.0, 0.0, 1.0
    for term in range(_MOST_TERMS):
        half = term // 2
        if term == 0:
            step = 1.0
        elif term % 2 == 0:
            step = half * (b - half) * x / ((a + term - 1) * (a + term))
        else:
            step = -(a + half) * (a + b + half) * x / ((a + term - 1) * (a + term))
        below = 1 / (1 + step * below)
        above = 1 + step / above
        fraction *= above * below
        if abs(above * below - 1) < _ROUNDING:
            break
    return front * (fraction - 1)
