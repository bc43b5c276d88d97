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
standard error, which takes the skewness of tau and the few prompts into account. No end is closer than
Student's t on the same standard error puts it (`bounds`). On simulated prompts of realistic spread 95 %
intervals hold the truth in 93 to 97 % of the cases from 24 prompts on (the plain percentile interval: 88 to
94 % at 24). With fewer than 6 prompts there are too few different resamples: the interval is Student's t
alone, and holds it in about 87 % at 4.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dflash_core.acceptance import power, resampling
from dflash_core.acceptance.bounds import DEFAULT_LEVEL, Bounds, Interval, usable
from dflash_core.acceptance.resampling import TIE_TOLERANCE, Contrast

DEFAULT_NUM_RESAMPLES = 4000
DEFAULT_SEED = 20260206
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
    """Two-sided, from the resamples of the interval: at most 0.05 exactly where that leaves 0 out; NaN with
    fewer than 2 prompts."""
    standard_error: float
    """Of `difference`, by linearisation; NaN where there is no interval."""
    smallest_detectable: float
    """True difference that prompts like these show in 80 % of the cases (5 % level); NaN without interval."""
    num_prompts: int
    num_units: int
    """What is resampled: prompts, turns of one conversation counting as one."""
    word: str | None
    """Why there is no interval; None where there is one."""
    bounds: Bounds = field(repr=False, compare=False)
    """The interval at any other level."""

    def as_json(self) -> dict[str, Any]:
        """Return the numbers as plain values."""
        return {one.name: getattr(self, one.name) for one in dataclasses.fields(self) if one.name != "bounds"}


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
    _check_level(level)
    bounds = tau_bounds(emitted_per_prompt, steps_per_prompt, clusters=clusters, num_resamples=num_resamples, seed=seed)
    return cut(bounds.interval(level), highest)


def tau_bounds(
    emitted_per_prompt: ArrayLike,
    steps_per_prompt: ArrayLike,
    *,
    clusters: Sequence[str] | None = None,
    num_resamples: int = DEFAULT_NUM_RESAMPLES,
    seed: int = DEFAULT_SEED,
) -> Bounds:
    """Return `tau_pooled` with intervals of any level, not cut; arguments as for `bootstrap_interval`."""
    _check_resamples(num_resamples)
    emitted_N, steps_N = _counts(emitted_per_prompt, steps_per_prompt)
    counts_N4 = np.stack([np.zeros_like(steps_N), np.zeros_like(steps_N), emitted_N, steps_N], axis=1)
    has_steps_N = steps_N > 0
    units_U4 = _units(counts_N4[has_steps_N], _chosen(clusters, has_steps_N))
    return _bounds(units_U4, Contrast.TAU, num_resamples, seed)


def cut(interval: Interval, highest: float) -> Interval:
    """Return an interval of tau without what tau cannot be: below 1, or above the block size."""
    if math.isnan(interval.low):
        return interval
    return Interval(max(interval.low, LOWEST_TAU), min(interval.high, highest))


def contrast_bounds(
    emitted_a: ArrayLike,
    steps_a: ArrayLike,
    emitted_b: ArrayLike,
    steps_b: ArrayLike,
    contrast: Contrast,
    *,
    clusters: Sequence[str] | None = None,
    num_resamples: int = DEFAULT_NUM_RESAMPLES,
    seed: int = DEFAULT_SEED,
) -> Bounds:
    """Return a difference or ratio of two drafters' pooled taus on the same prompts, with intervals of any level.

    Arguments and errors as for `paired_difference`.
    """
    _check_resamples(num_resamples)
    units_U4 = _paired_units(_paired_counts((emitted_a, steps_a), (emitted_b, steps_b)), clusters)
    return _bounds(units_U4, contrast, num_resamples, seed)


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

    The interval resamples prompts, taking both drafters' counts of a prompt together; pairing removes
    what hard and easy prompts do to both drafters alike. The p-value is the interval's: 1 minus the highest
    level at which it leaves 0 out. Prompts where either has no step are left out.

    Args:
        emitted_a: tokens emitted by drafter a, [N]; entry i of all four is the same prompt.
        steps_a: its verification steps, [N].
        emitted_b: tokens emitted by drafter b, [N].
        steps_b: its verification steps, [N].
        clusters: a name per prompt; prompts of one name are drawn together.
        num_resamples: R, at least 100.
        seed: of the random generator.
        level: of the interval, in the open interval (0, 1).

    Raises:
        ValueError: the four do not have one length, or a setting is out of range.
    """
    _check_level(level)
    _check_resamples(num_resamples)
    counts_N4 = _paired_counts((emitted_a, steps_a), (emitted_b, steps_b))
    bounds = _bounds(_paired_units(counts_N4, clusters), Contrast.DIFFERENCE, num_resamples, seed)
    shared_N4 = counts_N4[_is_shared(counts_N4)]
    per_prompt_N = resampling.contrast_of_sums(shared_N4, Contrast.DIFFERENCE)
    interval = bounds.interval(level)
    error = math.nan if bounds.word is not None else bounds.error
    return PairedDifference(
        difference=bounds.value,
        difference_prompt_mean=math.fsum(per_prompt_N) / len(per_prompt_N) if len(per_prompt_N) else math.nan,
        ci_low=interval.low,
        ci_high=interval.high,
        p_value=bounds.p_value(),
        standard_error=error,
        smallest_detectable=power.smallest_detectable(error, bounds.num_units),
        num_prompts=len(shared_N4),
        num_units=bounds.num_units,
        word=bounds.word,
        bounds=bounds,
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


def _check_level(level: float) -> None:
    if not 0.0 < level < 1.0:
        raise ValueError(f"level must be in the open interval (0, 1), got {level!r}")


def _check_resamples(num_resamples: int) -> None:
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


def _bounds(units_U4: FloatArray, contrast: Contrast, num_resamples: int, seed: int) -> Bounds:
    """Return the estimate of a contrast over units, with what resamples of them say."""
    num_units = len(units_U4)
    if num_units == 0:
        word = NOTHING_MEASURED if contrast is Contrast.TAU else NOTHING_SHARED
        return Bounds(value=math.nan, error=math.nan, num_units=0, ratios_R=None, word=word)
    value, error = resampling.estimate(units_U4, contrast)
    if num_units == 1:
        return Bounds(value=value, error=math.nan, num_units=1, ratios_R=None, word=ONE_PROMPT)
    if error < TIE_TOLERANCE:
        return Bounds(value=value, error=0.0, num_units=num_units, ratios_R=None, word=_why_flat(units_U4, contrast))
    ratios_R = None
    if num_units >= MIN_BOOTSTRAP_UNITS:
        drawn_R = resampling.studentised(units_U4, contrast, num_resamples=num_resamples, seed=seed)[1]
        ratios_R = usable(drawn_R, num_units)
    return Bounds(value=value, error=error, num_units=num_units, ratios_R=ratios_R, word=None)


def _why_flat(units_U4: FloatArray, contrast: Contrast) -> str:
    if contrast is Contrast.TAU:
        return SAME_TAU
    is_same = bool((units_U4[:, :2] == units_U4[:, 2:]).all())
    return SAME_COUNTS if is_same else SAME_DIFFERENCE
