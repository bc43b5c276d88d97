"""What a set of prompts can show: the smallest difference it detects, and how many prompts another would need."""

from __future__ import annotations

import math
from functools import lru_cache

POWER = 0.8
"""Chance with which the smallest detectable difference would be seen."""
LEVEL = 0.95
"""Of the two-sided interval that has to leave 0 outside."""


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
    low, high = 0.0, 1.0
    while _student_t_below(high, degrees) < probability:
        low, high = high, 2 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        if not low < middle < high:
            break
        if _student_t_below(middle, degrees) < probability:
            low = middle
        else:
            high = middle
    return high


def _student_t_below(value: float, degrees: int) -> float:
    """Return the chance of falling below a value >= 0: Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan(value / math.sqrt(degrees))
    cosine_squared = math.cos(angle) ** 2
    is_odd = degrees % 2 == 1
    term = math.cos(angle) if is_odd else 1.0
    total = term if degrees > 1 else 0.0
    for k in range(3 if is_odd else 2, degrees - 1, 2):
        term *= cosine_squared * (k - 1) / k
        total += term
    inside = math.sin(angle) * total
    if is_odd:
        inside = 2 / math.pi * (angle + inside)
    return 0.5 + inside / 2
