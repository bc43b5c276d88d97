"""Acceptance lengths of a set of prompts, their uncertainty, and paired differences.

Letters: N prompts, R resamples. Inputs are one pair of counts per prompt, added up over the
verification steps of its serving walk: tokens emitted and steps taken. Everything here is
arithmetic in float64 on those counts; a missing measurement is NaN, never 0 or 1, with a word that
says why.

The unit of resampling is the prompt. Blocks of one answer resemble each other, so an error bar
made from blocks as if they were independent is several times too short. Turns of one conversation
(`mt-7#1`, `mt-7#2`) build on each other: name them in `clusters`, and they are drawn together.

Intervals are those of the studentised bootstrap ("bootstrap-t", Efron 1981; Davison and Hinkley,
Bootstrap Methods and their Application, 1997, 5.2): each resample's ratio of sums is divided by its own
standard error, which takes the skewness of tau and the few prompts into account. On simulated prompts of
realistic spread 95 % intervals hold the truth in 93 to 97 % of the cases from 24 prompts on (the plain
percentile interval: 88 to 94 % at 24). With fewer than 6 prompts there are too few different resamples:
the interval is Student's t on the same standard error, and holds it in about 87 % at 4.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dflash_core.acceptance import power, resampling
from dflash_core.acceptance.resampling import TIE_TOLERANCE, Contrast

DEFAULT_NUM_RESAMPLES = 4000
DEFAULT_SEED = 20260206
DEFAULT_LEVEL = 0.95
MIN_BOOTSTRAP_UNITS = 6
"""With fewer prompts the interval is Student's t."""
LOWEST_TAU = 1.0
"""A verification step emits at least the target's own token."""

NOTHING_MEASURED = "not measured: no prompt has a verification step"
NOTHING_SHARED = "not measured: no prompt has a verification step of both"
ONE_PROMPT = "no interval: it takes 2 prompts at least (turns of one conversation count as one)"
SAME_TAU = "no interval: every prompt has the same tau"
SAME_COUNTS = "no interval: both did the same on every prompt"
SAME_DIFFERENCE = "no interval: the difference is the same on every prompt"

FloatArray = NDArray[np.float64]

_TURN = re.compile(r"(.+)#\d+")


class Interval(NamedTuple):
    """The two ends of an interval; both NaN where there is none."""

    low: float
    high: float
    word: str | None = None
    """Why there is no interval."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedDifference:
    """How much better the second of two drafters is on the prompts that both were scored on."""

    difference: float
    """Pooled tau of b minus pooled tau of a, in tokens per verification step; NaN without prompts."""
    difference_prompt_mean: float
    """Mean over prompts of tau of b minus tau of a, every prompt weighing the same; NaN without prompts."""
    ci_low: float
    ci_high: float
    """Interval of `difference`, resampling prompts; NaN where `word` says why."""
    p_value: float
    """Two-sided, from exchanging a and b within prompts; NaN with fewer than 2 prompts."""
    standard_error: float
    """Of `difference`, by linearisation; NaN where there is no interval."""
    smallest_detectable: float
    """True difference that prompts like these show in 80 % of the cases (5 % level); NaN without interval."""
    num_prompts: int
    num_units: int
    """What is resampled: prompts, turns of one conversation counting as one."""
    word: str | None
    """Why there is no interval; None where there is one."""


def conversation_of(prompt_id: str) -> str:
    """Return the name of the conversation that a prompt is a turn of: `mt-7` for `mt-7#2`, else the prompt's own."""
    turn = _TURN.fullmatch(prompt_id)
    return turn[1] if turn else prompt_id


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
    clusters: Sequence[str] | None = None,
    num_resamples: int = DEFAULT_NUM_RESAMPLES,
    seed: int = DEFAULT_SEED,
    level: float = DEFAULT_LEVEL,
    highest: float = math.inf,
) -> Interval:
    """Return the studentised bootstrap interval of `tau_pooled`, resampling whole prompts.

    Each resample draws N prompts with replacement and takes the ratio of their sums, so a long
    answer counts as one draw with all of its steps. The same counts and seed give the same
    interval, whatever the order of the prompts. Cut at 1, which tau cannot be below. Both ends are NaN,
    with a word that says why, for fewer than 2 prompts and where all prompts have the same tau.

    Args:
        emitted_per_prompt: tokens emitted on each prompt's walk, [N].
        steps_per_prompt: verification steps of each prompt's walk, [N].
        clusters: a name per prompt; prompts of one name are drawn together. None: each by itself.
        num_resamples: R, at least 100.
        seed: of the random generator.
        level: chance with which the interval holds the truth, in the open interval (0, 1).
        highest: what tau cannot pass, the block size; the interval is cut there.

    Raises:
        ValueError: level or num_resamples is out of range, or the counts do not fit together.
    """
    _check_settings(num_resamples, level)
    emitted_N, steps_N = _counts(emitted_per_prompt, steps_per_prompt)
    counts_N4 = np.stack([np.zeros_like(steps_N), np.zeros_like(steps_N), emitted_N, steps_N], axis=1)
    has_steps_N = steps_N > 0
    units_U4 = _units(counts_N4[has_steps_N], _chosen(clusters, has_steps_N))
    if len(units_U4) == 0:
        return _no_interval(NOTHING_MEASURED)
    if len(units_U4) == 1:
        return _no_interval(ONE_PROMPT)
    low, high = _interval(units_U4, Contrast.TAU, num_resamples, seed, level)
    return _no_interval(SAME_TAU) if math.isnan(low) else Interval(max(low, LOWEST_TAU), min(high, highest))


def contrast_interval(
    emitted_a: ArrayLike,
    steps_a: ArrayLike,
    emitted_b: ArrayLike,
    steps_b: ArrayLike,
    contrast: Contrast,
    *,
    clusters: Sequence[str] | None = None,
    num_resamples: int = DEFAULT_NUM_RESAMPLES,
    seed: int = DEFAULT_SEED,
    level: float = DEFAULT_LEVEL,
) -> Interval:
    """Return the interval of a difference or ratio of two drafters' pooled taus on the same prompts.

    Arguments and errors as for `paired_difference`.
    """
    _check_settings(num_resamples, level)
    units_U4 = _paired_units(_paired_counts((emitted_a, steps_a), (emitted_b, steps_b)), clusters)
    if len(units_U4) < 2:
        return _no_interval(ONE_PROMPT if len(units_U4) else NOTHING_SHARED)
    low, high = _interval(units_U4, contrast, num_resamples, seed, level)
    return _no_interval(_why_flat(units_U4)) if math.isnan(low) else Interval(low, high)


def paired_difference(
    emitted_a: ArrayLike,
    steps_a: ArrayLike,
    emitted_b: ArrayLike,
    steps_b: ArrayLike,
    *,
    clusters: Sequence[str] | None = None,
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
        clusters: a name per prompt; prompts of one name are drawn and exchanged together.
        num_resamples: R, of the bootstrap and of the exchange, at least 100.
        seed: of the random generator.
        level: of the interval, in the open interval (0, 1).

    Raises:
        ValueError: the four do not have one length, or a setting is out of range.
    """
    _check_settings(num_resamples, level)
    counts_N4 = _paired_counts((emitted_a, steps_a), (emitted_b, steps_b))
    units_U4 = _paired_units(counts_N4, clusters)
    shared_N4 = counts_N4[_is_shared(counts_N4)]
    interval, p_value, error = _no_interval(NOTHING_SHARED), math.nan, math.nan
    difference = difference_prompt_mean = math.nan
    if len(units_U4):
        difference = float(resampling.estimate(units_U4, Contrast.DIFFERENCE).value)
        per_prompt_N = resampling.contrast_of_sums(shared_N4, Contrast.DIFFERENCE)
        difference_prompt_mean = math.fsum(per_prompt_N) / len(per_prompt_N)
        interval = _no_interval(ONE_PROMPT)
    if len(units_U4) > 1:
        interval = Interval(*_interval(units_U4, Contrast.DIFFERENCE, num_resamples, seed, level))
        p_value = _exchange_p_value(units_U4, difference, num_resamples, seed)
        if math.isnan(interval.low):
            interval = _no_interval(_why_flat(units_U4))
        else:
            error = resampling.estimate(units_U4, Contrast.DIFFERENCE).standard_error
    return PairedDifference(
        difference=difference,
        difference_prompt_mean=difference_prompt_mean,
        ci_low=interval.low,
        ci_high=interval.high,
        p_value=p_value,
        standard_error=error,
        smallest_detectable=power.smallest_detectable(error, len(units_U4)),
        num_prompts=len(shared_N4),
        num_units=len(units_U4),
        word=interval.word,
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


def _check_settings(num_resamples: int, level: float) -> None:
    if not 0.0 < level < 1.0:
        raise ValueError(f"level must be in the open interval (0, 1), got {level!r}")
    if num_resamples < 100:
        raise ValueError(f"num_resamples must be at least 100, got {num_resamples!r}")


def _chosen(clusters: Sequence[str] | None, is_in_N: NDArray[np.bool_]) -> list[str] | None:
    """Return the clusters of the prompts that are left."""
    if clusters is None:
        return None
    if len(clusters) != len(is_in_N):
        raise ValueError(f"clusters must name one per prompt, got {len(clusters)} for {len(is_in_N)} prompts")
    return [name for name, is_in in zip(clusters, is_in_N, strict=True) if is_in]


def _units(counts_N4: FloatArray, clusters: Sequence[str] | None) -> FloatArray:
    """Return the sums of the counts per cluster, in an order that does not depend on that of the prompts."""
    if clusters is not None:
        _, place_N = np.unique(np.asarray(clusters, dtype=object).astype(str), return_inverse=True)
        sums_U4 = np.zeros((int(place_N.max(initial=-1)) + 1, 4))
        np.add.at(sums_U4, place_N, counts_N4)
        counts_N4 = sums_U4
    return counts_N4[np.lexsort(counts_N4.T)]


def _paired_counts(a: tuple[ArrayLike, ArrayLike], b: tuple[ArrayLike, ArrayLike]) -> FloatArray:
    counts_a, counts_b = _counts(*a), _counts(*b)
    if len(counts_a[0]) != len(counts_b[0]):
        raise ValueError(
            f"paired counts must belong to the same prompts, got {len(counts_a[0])} and {len(counts_b[0])}"
        )
    return np.stack([*counts_a, *counts_b], axis=1)


def _is_shared(counts_N4: FloatArray) -> NDArray[np.bool_]:
    is_shared_N: NDArray[np.bool_] = (counts_N4[:, 1] > 0) & (counts_N4[:, 3] > 0)
    return is_shared_N


def _paired_units(counts_N4: FloatArray, clusters: Sequence[str] | None) -> FloatArray:
    is_shared_N = _is_shared(counts_N4)
    return _units(counts_N4[is_shared_N], _chosen(clusters, is_shared_N))


def _interval(
    units_U4: FloatArray, contrast: Contrast, num_resamples: int, seed: int, level: float
) -> tuple[float, float]:
    """Return the ends of the interval of at least 2 units; NaN where they do not differ."""
    value, error = resampling.estimate(units_U4, contrast)
    if error < TIE_TOLERANCE:
        return math.nan, math.nan
    if len(units_U4) >= MIN_BOOTSTRAP_UNITS:
        _, ratios_R = resampling.studentised(units_U4, contrast, num_resamples=num_resamples, seed=seed)
        # Not interpolated: the ends may be infinite, where many resamples hold only prompts that are alike.
        low, high = np.quantile(ratios_R, [(1 - level) / 2, (1 + level) / 2], method="inverted_cdf")
        if math.isfinite(low) and math.isfinite(high):
            return value - float(high) * error, value - float(low) * error
    reach = power.student_t_quantile((1 + level) / 2, len(units_U4) - 1) * error
    return value - reach, value + reach


def _why_flat(units_U4: FloatArray) -> str:
    is_same = bool((units_U4[:, :2] == units_U4[:, 2:]).all())
    return SAME_COUNTS if is_same else SAME_DIFFERENCE


def _exchange_p_value(units_U4: FloatArray, observed: float, num_resamples: int, seed: int) -> float:
    """Return the share of exchanges of a and b whose difference is as large in size as observed."""
    num_as_large = num_patterns = 0
    for sums_R4 in resampling.exchanged_sums(units_U4, num_resamples, seed):
        found_R = resampling.contrast_of_sums(sums_R4, Contrast.DIFFERENCE)
        num_as_large += int((np.abs(found_R) >= abs(observed) - TIE_TOLERANCE).sum())
        num_patterns += len(found_R)
    if len(units_U4) <= resampling.MAX_EXACT_UNITS:
        return num_as_large / num_patterns
    # The observed pattern is one of the possible ones: count it, so that p is never 0.
    return (num_as_large + 1) / (num_patterns + 1)


def _no_interval(word: str) -> Interval:
    return Interval(math.nan, math.nan, word)
