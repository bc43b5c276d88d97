"""Acceptance lengths of a set of prompts, their uncertainty, and paired differences.

Letters: N prompts, R resamples. Inputs are one pair of counts per prompt, added up over the
verification steps of its serving walk: tokens emitted and steps taken. Everything here is
arithmetic in float64 on those counts; a missing measurement is NaN, never 0 or 1.

The unit of resampling is the prompt. Blocks of one answer resemble each other, so an error bar
made from blocks as if they were independent is several times too short.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

DEFAULT_NUM_RESAMPLES = 4000
DEFAULT_SEED = 20260206
DEFAULT_LEVEL = 0.95
# Sign patterns of so many prompts are all tried (2^N); with more prompts they are drawn.
MAX_EXACT_PROMPTS = 12
# Two differences of pooled taus that are equal in exact arithmetic differ by less than this.
TIE_TOLERANCE = 1e-9
# Resamples are drawn in slices of about this many prompt choices, to bound the memory used.
CHUNK_CELLS = 4_000_000

FloatArray = NDArray[np.float64]


class Interval(NamedTuple):
    """The two ends of an interval; both NaN where there is none."""

    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedDifference:
    """How much better the second of two drafters is on the prompts that both were scored on."""

    difference: float
    """Pooled tau of b minus pooled tau of a, in tokens per verification step; NaN without prompts."""
    ci_low: float
    ci_high: float
    """Percentile bootstrap interval over prompts; NaN with fewer than 2 prompts."""
    p_value: float
    """Two-sided, from exchanging a and b within prompts; NaN with fewer than 2 prompts."""
    num_prompts: int


def tau_pooled(emitted_per_prompt: ArrayLike, steps_per_prompt: ArrayLike) -> float:
    """Return tokens emitted per verification step, every step weighing the same.

    tau = sum of emitted tokens / sum of verification steps. vLLM's server log and DeepSpec report
    this one; long answers weigh more. Range 1..block size; NaN without a step.
    """
    emitted_N, steps_N = _counts(emitted_per_prompt, steps_per_prompt)
    total_steps = steps_N.sum()
    return float(emitted_N.sum() / total_steps) if total_steps > 0 else math.nan


def tau_prompt_mean(emitted_per_prompt: ArrayLike, steps_per_prompt: ArrayLike) -> float:
    """Return the mean over prompts of each prompt's own tau, every prompt weighing the same.

    mean of (emitted / steps). z-lab's benchmark, SGLang's clients and SpecForge report this one.
    Prompts without a step are left out; NaN when none is left.
    """
    emitted_N, steps_N = _counts(emitted_per_prompt, steps_per_prompt)
    has_steps_N = steps_N > 0
    if not has_steps_N.any():
        return math.nan
    tau_N = emitted_N[has_steps_N] / steps_N[has_steps_N]
    # fsum rounds once, so that the order in which prompts come does not show in the last digit.
    return math.fsum(tau_N) / len(tau_N)


def bootstrap_interval(
    emitted_per_prompt: ArrayLike,
    steps_per_prompt: ArrayLike,
    *,
    num_resamples: int = DEFAULT_NUM_RESAMPLES,
    seed: int = DEFAULT_SEED,
    level: float = DEFAULT_LEVEL,
) -> Interval:
    """Return the percentile bootstrap interval of `tau_pooled`, resampling whole prompts.

    Each resample draws N prompts with replacement and takes the ratio of their sums, so a long
    answer counts as one draw with all of its steps. The same counts and seed give the same
    interval, whatever the order of the prompts. With few prompts (under about 10) an interval of
    this kind is somewhat too short. Both ends are NaN with fewer than 2 prompts that have a step.

    Args:
        emitted_per_prompt: tokens emitted on each prompt's walk, [N].
        steps_per_prompt: verification steps of each prompt's walk, [N].
        num_resamples: R, at least 100.
        seed: of the random generator.
        level: share of resamples inside, in the open interval (0, 1).

    Raises:
        ValueError: level or num_resamples is out of range, or the counts do not fit together.
    """
    _check_settings(num_resamples, level)
    emitted_N, steps_N = _with_steps(*_counts(emitted_per_prompt, steps_per_prompt))
    if len(steps_N) < 2:
        return Interval(math.nan, math.nan)
    order_N = np.lexsort((steps_N, emitted_N))
    sums_R2 = _resampled_sums(np.stack([emitted_N, steps_N], axis=1)[order_N], num_resamples, seed)
    return _percentiles(sums_R2[:, 0] / sums_R2[:, 1], level)


def paired_difference(
    emitted_a: ArrayLike,
    steps_a: ArrayLike,
    emitted_b: ArrayLike,
    steps_b: ArrayLike,
    *,
    num_resamples: int = DEFAULT_NUM_RESAMPLES,
    seed: int = DEFAULT_SEED,
    level: float = DEFAULT_LEVEL,
) -> PairedDifference:
    """Compare two drafters on the same prompts: `tau_pooled` of b minus that of a.

    The interval resamples prompts, taking both drafters' counts of a prompt together. The p-value
    exchanges the two drafters' counts within random prompts (all patterns up to 12 prompts) and
    asks how often the difference is at least as large in size; pairing removes what hard and easy
    prompts do to both drafters alike. Prompts where either has no step are left out.

    Args:
        emitted_a: tokens emitted by drafter a, [N]; entry i of all four is the same prompt.
        steps_a: its verification steps, [N].
        emitted_b: tokens emitted by drafter b, [N].
        steps_b: its verification steps, [N].
        num_resamples: R, of the bootstrap and of the exchange, at least 100.
        seed: of the random generator.
        level: of the interval, in the open interval (0, 1).

    Raises:
        ValueError: the four do not have one length, or a setting is out of range.
    """
    _check_settings(num_resamples, level)
    a = _counts(emitted_a, steps_a)
    b = _counts(emitted_b, steps_b)
    if len(a[0]) != len(b[0]):
        raise ValueError(f"paired counts must belong to the same prompts, got {len(a[0])} and {len(b[0])}")
    counts_N4 = np.stack([*a, *b], axis=1)
    counts_N4 = counts_N4[(counts_N4[:, 1] > 0) & (counts_N4[:, 3] > 0)]
    counts_N4 = counts_N4[np.lexsort(counts_N4.T)]
    num_prompts = len(counts_N4)
    if num_prompts == 0:
        return _no_difference(math.nan, num_prompts)
    difference = float(_differences(counts_N4.sum(axis=0, keepdims=True))[0])
    if num_prompts < 2:
        return _no_difference(difference, num_prompts)
    interval = _percentiles(_differences(_resampled_sums(counts_N4, num_resamples, seed)), level)
    p_value = _exchange_p_value(counts_N4, difference, num_resamples, seed)
    return PairedDifference(
        difference=difference, ci_low=interval.low, ci_high=interval.high, p_value=p_value, num_prompts=num_prompts
    )


def holm_adjusted(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for having looked at all of them at once (Holm's step-down rule).

    The k-th smallest of m is multiplied by m - k + 1, kept from falling below its predecessor and
    from passing 1. NaN stays NaN and is not counted in m.
    """
    known = sorted((p, place) for place, p in enumerate(p_values) if not math.isnan(p))
    adjusted = [math.nan] * len(p_values)
    largest = 0.0
    for rank, (p, place) in enumerate(known):
        largest = max(largest, min(1.0, p * (len(known) - rank)))
        adjusted[place] = largest
    return adjusted


def _counts(emitted_per_prompt: ArrayLike, steps_per_prompt: ArrayLike) -> tuple[FloatArray, FloatArray]:
    """Return both counts as float64 [N], checked against each other."""
    emitted_N = np.asarray(emitted_per_prompt, dtype=np.float64)
    steps_N = np.asarray(steps_per_prompt, dtype=np.float64)
    if emitted_N.ndim != 1 or emitted_N.shape != steps_N.shape:
        raise ValueError(
            "emitted tokens and steps must be two lists with one entry per prompt, "
            f"got shapes {list(emitted_N.shape)} and {list(steps_N.shape)}"
        )
    if not (np.isfinite(emitted_N).all() and np.isfinite(steps_N).all()):
        raise ValueError("emitted tokens and steps are counts, got a NaN or an infinity among them")
    if (steps_N < 0).any() or (emitted_N < steps_N).any():
        raise ValueError("a verification step emits at least one token, got a prompt with fewer tokens than steps")
    return emitted_N, steps_N


def _with_steps(emitted_N: FloatArray, steps_N: FloatArray) -> tuple[FloatArray, FloatArray]:
    has_steps_N = steps_N > 0
    return emitted_N[has_steps_N], steps_N[has_steps_N]


def _check_settings(num_resamples: int, level: float) -> None:
    if not 0.0 < level < 1.0:
        raise ValueError(f"level must be in the open interval (0, 1), got {level!r}")
    if num_resamples < 100:
        raise ValueError(f"num_resamples must be at least 100, got {num_resamples!r}")


def _resampled_sums(counts_NC: FloatArray, num_resamples: int, seed: int) -> FloatArray:
    """Return the column sums of R draws of N prompts with replacement, [R, C]."""
    num_prompts = len(counts_NC)
    if num_resamples * num_prompts <= CHUNK_CELLS:
        sums_RC: FloatArray = _draws(num_prompts, num_resamples, seed) @ counts_NC
        return sums_RC
    generator = np.random.default_rng(seed)
    rows_per_chunk = max(1, CHUNK_CELLS // num_prompts)
    sizes = [min(rows_per_chunk, num_resamples - start) for start in range(0, num_resamples, rows_per_chunk)]
    return np.concatenate([_draw(generator, num_prompts, size) @ counts_NC for size in sizes])


@lru_cache(maxsize=8)
def _draws(num_prompts: int, num_resamples: int, seed: int) -> NDArray[np.uint16]:
    """Return all draws at once; many evaluations of the same prompts share them."""
    return _draw(np.random.default_rng(seed), num_prompts, num_resamples)


def _draw(generator: np.random.Generator, num_prompts: int, num_resamples: int) -> NDArray[np.uint16]:
    """Return how often each resample draws each prompt, [R, N]."""
    chosen_RN = generator.integers(num_prompts, size=(num_resamples, num_prompts))
    chosen_RN += np.arange(num_resamples)[:, None] * num_prompts
    times = np.bincount(chosen_RN.ravel(), minlength=chosen_RN.size)
    return times.reshape(chosen_RN.shape).astype(np.uint16)


def _percentiles(values_R: FloatArray, level: float) -> Interval:
    low, high = np.quantile(values_R, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(low), float(high))


def _differences(sums_R4: FloatArray) -> FloatArray:
    """Return tau of b minus tau of a per row of (emitted_a, steps_a, emitted_b, steps_b)."""
    difference_R: FloatArray = sums_R4[:, 2] / sums_R4[:, 3] - sums_R4[:, 0] / sums_R4[:, 1]
    return difference_R


def _exchange_p_value(counts_N4: FloatArray, observed: float, num_resamples: int, seed: int) -> float:
    """Return the share of exchanges of a and b whose difference is as large in size as observed."""
    num_prompts = len(counts_N4)
    is_exact = num_prompts <= MAX_EXACT_PROMPTS
    num_patterns = 2**num_prompts if is_exact else num_resamples
    generator = np.random.default_rng([seed, 1])
    # What exchanging a prompt's two drafters adds to the four sums.
    change_N4 = counts_N4[:, [2, 3, 0, 1]] - counts_N4
    rows_per_chunk = max(1, CHUNK_CELLS // num_prompts)
    num_as_large = 0
    for start in range(0, num_patterns, rows_per_chunk):
        rows = np.arange(start, min(start + rows_per_chunk, num_patterns))
        if is_exact:
            is_exchanged_RN = (rows[:, None] >> np.arange(num_prompts)) & 1
        else:
            is_exchanged_RN = generator.integers(2, size=(len(rows), num_prompts), dtype=np.uint8)
        sums_R4 = counts_N4.sum(axis=0) + is_exchanged_RN @ change_N4
        num_as_large += int((np.abs(_differences(sums_R4)) >= abs(observed) - TIE_TOLERANCE).sum())
    if is_exact:
        return num_as_large / num_patterns
    # The observed pattern is one of the possible ones: count it, so that p is never 0.
    return (num_as_large + 1) / (num_patterns + 1)


def _no_difference(difference: float, num_prompts: int) -> PairedDifference:
    return PairedDifference(
        difference=difference, ci_low=math.nan, ci_high=math.nan, p_value=math.nan, num_prompts=num_prompts
    )
