"""Resamples of prompts, and the studentised bootstrap made of them.

Letters: N units (prompts, or whole conversations), R resamples, C columns of counts.

A unit brings four counts: tokens and steps of drafter a, then of drafter b (zeros where there is
one drafter alone). What is estimated is a smooth function of their sums, so a resample needs the sums of
the counts and of their products only: everything is one matrix product per interval.
"""

from __future__ import annotations

from enum import Enum
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

# Two values that are equal in exact arithmetic differ by less than this.
TIE_TOLERANCE = 1e-9
# Resamples are drawn in slices of about this many choices, to bound the memory used.
CHUNK_CELLS = 2_000_000
# Multiplications up to which OpenBLAS leaves a product to one thread. Beyond, its threads wait busily for the next
# one: 8 ms of a CPU for a product of 2.
_ONE_THREAD_PRODUCT = 65_536 * 4
_LEAST_ROWS = 4

_PAIRS = [(row, column) for row in range(4) for column in range(row, 4)]


class Contrast(Enum):
    """What is estimated from the sums of the counts."""

    TAU = "pooled tau of b"
    DIFFERENCE = "pooled tau of b minus that of a"
    RATIO = "pooled tau of b over that of a, minus 1"


class Estimate(NamedTuple):
    """An estimate and its standard error by linearisation (N - 1 in the denominator)."""

    value: float
    standard_error: float


def estimate(counts_N4: FloatArray, contrast: Contrast) -> Estimate:
    """Return the estimate of a contrast over all units, and its standard error.

    The standard error is that of a ratio of sums: of each unit's tokens beyond what its steps would
    emit at the pooled rate, over the sum of the steps. 0 (to rounding) where no unit departs from it.
    """
    values_1, influence_1N = _linearised(counts_N4, contrast)
    num_units = len(counts_N4)
    spread = float((influence_1N**2).sum()) * num_units / max(num_units - 1, 1)
    return Estimate(float(values_1), float(np.sqrt(spread)))


def influences(counts_N4: FloatArray, contrast: Contrast) -> FloatArray:
    """Return by how much each unit moves the estimate, [N]; they add up to 0."""
    return _linearised(counts_N4, contrast)[1]


def studentised(
    counts_N4: FloatArray, contrast: Contrast, *, num_resamples: int, seed: int
) -> tuple[Estimate, FloatArray]:
    """Return the estimate and (resampled - estimated) / resampled standard error, [R].

    Infinite where the units of a resample do not differ although its estimate does.
    """
    num_units = len(counts_N4)
    found = estimate(counts_N4, contrast)
    centred_N4, tau_a, tau_b = _centred(counts_N4)
    products_NP = np.stack([centred_N4[:, row] * centred_N4[:, column] for row, column in _PAIRS], axis=1)
    columns_NC = np.concatenate([centred_N4, products_NP], axis=1)
    # Columns of zeros, those of the drafter that is not there, need no product.
    is_used_C = columns_NC.any(axis=0)
    sums = np.zeros((num_resamples, columns_NC.shape[1]))
    sums[:, is_used_C] = resampled_sums(columns_NC[:, is_used_C], num_resamples, seed)
    shift_a, shift_b = _ratio(sums[:, 0], sums[:, 1]), _ratio(sums[:, 2], sums[:, 3])
    values_R, weight_a, weight_b = _contrast(tau_a + shift_a, tau_b + shift_b, contrast)
    factors = np.stack(
        [
            *(-weight_a * part for part in (_inverse(sums[:, 1]), -shift_a * _inverse(sums[:, 1]))),
            *(weight_b * part for part in (_inverse(sums[:, 3]), -shift_b * _inverse(sums[:, 3]))),
        ],
        axis=1,
    )
    spread_R = np.zeros(num_resamples)
    for place, (row, column) in enumerate(_PAIRS):
        spread_R += (1 if row == column else 2) * factors[:, row] * factors[:, column] * sums[:, 4 + place]
    errors_R = np.sqrt(np.maximum(spread_R, 0.0) * num_units / (num_units - 1))
    moved_R = values_R - found.value
    is_flat_R = errors_R < TIE_TOLERANCE
    far_R = np.where(np.abs(moved_R) < TIE_TOLERANCE, 0.0, np.copysign(np.inf, moved_R))
    return found, np.where(is_flat_R, far_R, moved_R / np.where(is_flat_R, 1.0, errors_R))


def resampled_sums(counts_NC: FloatArray, num_resamples: int, seed: int) -> FloatArray:
    """Return the column sums of R draws of N units with replacement, [R, C]."""
    num_units = len(counts_NC)
    if num_resamples * num_units <= CHUNK_CELLS:
        return _product(_draws(num_units, num_resamples, seed), counts_NC)
    generator = np.random.default_rng(seed)
    sizes = [len(rows) for rows in _slices(num_resamples, num_units)]
    return np.concatenate([_product(_draw(generator, num_units, size), counts_NC) for size in sizes])


def _product(times_RN: FloatArray, counts_NC: FloatArray) -> FloatArray:
    """Return the matrix product [R, C], made of products of some rows each, which no other thread is asked to share."""
    num_rows, num_units = times_RN.shape
    num_columns = counts_NC.shape[1]
    at_once = _ONE_THREAD_PRODUCT // max(num_units * num_columns, 1)
    sums_RC = np.empty((num_rows, num_columns))
    # Where few rows fill a product, threads pay.
    even = 0 if at_once < _LEAST_ROWS else num_rows // at_once * at_once
    if even:
        parts = times_RN[:even].reshape(-1, at_once, num_units)
        np.matmul(parts, counts_NC, out=sums_RC[:even].reshape(-1, at_once, num_columns))
    np.matmul(times_RN[even:], counts_NC, out=sums_RC[even:])
    return sums_RC


def contrast_of_sums(sums_R4: FloatArray, contrast: Contrast) -> FloatArray:
    """Return the contrast of each row of sums, [R]."""
    return _contrast(_ratio(sums_R4[:, 0], sums_R4[:, 1]), _ratio(sums_R4[:, 2], sums_R4[:, 3]), contrast)[0]


def _linearised(counts_N4: FloatArray, contrast: Contrast) -> tuple[FloatArray, FloatArray]:
    """Return the contrast of all units and the influence of each on it."""
    centred_N4, tau_a, tau_b = _centred(counts_N4)
    value, weight_a, weight_b = _contrast(tau_a, tau_b, contrast)
    steps_a, steps_b = counts_N4[:, 1].sum(), counts_N4[:, 3].sum()
    influence_N = weight_b * centred_N4[:, 2] * _inverse(steps_b) - weight_a * centred_N4[:, 0] * _inverse(steps_a)
    return value, influence_N


def _centred(counts_N4: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the counts with tokens replaced by tokens beyond the pooled rate, and both pooled taus.

    Without this the sums of squares would cancel to rounding errors where prompts hardly differ.
    """
    sums_4 = counts_N4.sum(axis=0)
    tau_a, tau_b = _ratio(sums_4[0], sums_4[1]), _ratio(sums_4[2], sums_4[3])
    centred_N4 = counts_N4.copy()
    centred_N4[:, 0] -= tau_a * counts_N4[:, 1]
    centred_N4[:, 2] -= tau_b * counts_N4[:, 3]
    return centred_N4, tau_a, tau_b


def _contrast(tau_a: FloatArray, tau_b: FloatArray, contrast: Contrast) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the contrast and by how much it falls with tau of a and rises with tau of b."""
    one = np.ones_like(tau_b)
    if contrast is Contrast.TAU:
        return tau_b, np.zeros_like(tau_b), one
    if contrast is Contrast.DIFFERENCE:
        return tau_b - tau_a, one, one
    return tau_b / tau_a - 1, tau_b / tau_a**2, one / tau_a


def _inverse(steps: FloatArray) -> FloatArray:
    return 1 / np.where(steps > 0, steps, 1.0)


def _ratio(tokens: FloatArray, steps: FloatArray) -> FloatArray:
    """Return tokens over steps; 0 for the drafter that is not there."""
    return np.where(steps > 0, tokens * _inverse(steps), 0.0)


def _slices(num_rows: int, num_units: int) -> list[range]:
    size = max(1, CHUNK_CELLS // num_units)
    return [range(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]


@lru_cache(maxsize=8)
def _draws(num_units: int, num_resamples: int, seed: int) -> FloatArray:
    """Return all draws at once; many evaluations of the same prompts share them."""
    return _draw(np.random.default_rng(seed), num_units, num_resamples)


def _draw(generator: np.random.Generator, num_units: int, num_resamples: int) -> FloatArray:
    """Return how often each resample draws each unit, [R, N]."""
    chosen_RN = generator.integers(num_units, size=(num_resamples, num_units))
    chosen_RN += np.arange(num_resamples)[:, None] * num_units
    times = np.bincount(chosen_RN.ravel(), minlength=chosen_RN.size)
    return times.reshape(chosen_RN.shape).astype(np.float64)
