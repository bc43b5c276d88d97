"""The gate: is a checkpoint worse than it may be? The interval decides, and says when the data cannot tell.

    worse         the whole interval lies below the limit             exit status 1
    not worse     the whole interval lies at the limit or above it    exit status 0
    cannot tell   the limit lies inside the interval                  exit status 0

With several checkpoints the intervals are widened by Holm's rule (`bounds.judged_together`): level 1 - 0.05 / number
judged first, and less wide for the others once some are told. So a gate over checkpoints that all are exactly
at the limit is wrongly closed in at most 5 % of the cases, however many they are: half of that for one
checkpoint, since an interval errs on two sides. The interval shown is the one that decided.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from dflash_core.acceptance import statistics
from dflash_core.acceptance.bounds import DEFAULT_LEVEL, Bounds, Interval, judged_together
from dflash_core.acceptance.resampling import TIE_TOLERANCE, Contrast
from dflash_core.acceptance.statistics import conversation_of
from dflash_core.errors import InputError
from dflash_core.results.compare import Comparison, ComparisonRow, columns_of

Verdict = Literal["worse", "not worse", "cannot tell"]

_LIMIT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)\s*%?")


class Limit(NamedTuple):
    """What `--fail-below` says: tokens per verification step, or a share of the baseline's tau."""

    value: float
    """-0.02 for `-2%`."""
    is_relative: bool = False

    def text(self, value: float) -> str:
        """Return a value in the limit's own unit."""
        return f"{100 * value:.1f} %" if self.is_relative else f"{value:.3f}"

    def __str__(self) -> str:
        return f"{100 * self.value:g} %" if self.is_relative else f"{self.value:g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """What the gate says of one checkpoint."""

    label: str
    verdict: Verdict
    value: float
    """Difference to the baseline (relative where the limit is), or tau without one; NaN where not measured."""
    level: float
    """Of the interval that decided, by Holm's rule: 0.95 for a single checkpoint, more for one of many."""
    ci_low: float
    ci_high: float
    word: str | None
    """Why there is no interval."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GateResult:
    """Whether a gate was passed, and one line that says why."""

    passed: bool
    verdict: Verdict
    """Worse where any checkpoint is; else cannot tell where any cannot be told."""
    message: str
    judgements: tuple[Judgement, ...]


def parse_limit(text: str) -> Limit:
    """Read a limit: a number, or per cent of the baseline's tau (`-2%`).

    Raises:
        InputError: it is neither.
    """
    if not _LIMIT.fullmatch(text.strip()):
        raise InputError(f"--fail-below must be a number or per cent such as -2%, got {text!r}")
    number = text.strip().removesuffix("%")
    return Limit(float(number) / 100, True) if text.strip().endswith("%") else Limit(float(number))


def gate(comparison: Comparison, limit: Limit) -> GateResult:
    """Judge a comparison for `--fail-below T`.

    With a baseline: is a checkpoint's difference to it below T (tokens per verification step, or relative)?
    0 asks whether it is worse at all, -0.05 forgives a loss of 0.05. Without: is its pooled tau below T?
    The gate closes when any checkpoint is worse, or when there is nothing to judge or nothing was measured.

    Raises:
        InputError: the limit is not a number, or cannot be judged without a baseline.
    """
    _check(limit, comparison.baseline)
    rows = [row for row in comparison.rows if comparison.baseline is None or row.compared_with is not None]
    what = "tau" if comparison.baseline is None else f"difference to {comparison.baseline}"
    judged = _judged(comparison, rows, limit)
    unmeasured = next((one for one in judged if math.isnan(one.value)), None)
    if not judged or unmeasured is not None:
        missing = (
            f"the {what} of {unmeasured.label} was" if unmeasured else f"there is nothing to judge the {what} of: "
        )
        message = f"gate failed: {missing} not measured" if unmeasured else f"gate failed: {missing}name a checkpoint"
        return GateResult(passed=False, verdict="cannot tell", message=message, judgements=judged)
    verdict = _overall(judged)
    worst = min((one for one in judged if one.verdict == verdict), key=lambda one: one.value)
    return GateResult(
        passed=verdict != "worse",
        verdict=verdict,
        message=_message(worst, what, limit, sum(one.verdict == verdict for one in judged), len(judged)),
        judgements=judged,
    )


def as_json(result: GateResult) -> dict[str, Any]:
    """Return the gate's answer as plain values; NaN is None."""
    entries = [
        {
            "checkpoint": one.label,
            "verdict": one.verdict,
            **{name: _known(getattr(one, name)) for name in ("value", "level", "ci_low", "ci_high")},
            "word": one.word,
        }
        for one in result.judgements
    ]
    top = {name: getattr(result, name) for name in ("passed", "verdict", "message")}
    return {**top, "judgements": entries}


def _check(limit: Limit, baseline: str | None) -> None:
    if not math.isfinite(limit.value):
        raise InputError(f"--fail-below must be a number, got {limit.value!r}")
    if baseline is None and limit.is_relative:
        raise InputError(f"--fail-below {limit} is per cent of a baseline: give --baseline")
    if baseline is None and limit.value < 1:
        raise InputError(
            f"--fail-below {limit} without --baseline is a limit for tau, which is never below 1; "
            f"give --baseline to judge a difference"
        )


def _judged(comparison: Comparison, rows: list[ComparisonRow], limit: Limit) -> tuple[Judgement, ...]:
    """Judge all rows together; a row of which nothing was measured has no say in the level of the others."""
    bounds = [_tau_bounds(row) if comparison.baseline is None else _difference_bounds(row, limit) for row in rows]
    highest = comparison.conditions.highest_tau or math.inf
    told = judged_together([None if math.isnan(one.value) else _is_told(one, limit, highest) for one in bounds])
    judged = []
    for row, one, found in zip(rows, bounds, told, strict=True):
        level = DEFAULT_LEVEL if found is None else found.level
        interval = one.interval(level)
        if comparison.baseline is None:
            interval = statistics.cut(interval, highest)
        verdict = _verdict(one, limit, level, highest)
        judged.append(
            Judgement(
                label=row.label,
                verdict=verdict,
                value=one.value,
                level=level,
                ci_low=interval.low,
                ci_high=interval.high,
                word=interval.word,
            )
        )
    return tuple(judged)


def _tau_bounds(row: ComparisonRow) -> Bounds:
    counts = row.counts
    return statistics.tau_bounds(
        [found.num_emitted_tokens for found in counts.values()],
        [found.num_verification_steps for found in counts.values()],
        clusters=[conversation_of(prompt_id) for prompt_id in counts],
    )


def _difference_bounds(row: ComparisonRow, limit: Limit) -> Bounds:
    assert row.difference is not None
    if not limit.is_relative:
        return row.difference.bounds
    (emitted_a, steps_a, emitted_b, steps_b), clusters = columns_of(row.counts_of_other, row.counts)
    return statistics.contrast_bounds(emitted_a, steps_a, emitted_b, steps_b, Contrast.RATIO, clusters=clusters)


def _is_told(bounds: Bounds, limit: Limit, highest: float) -> Callable[[float], bool]:
    return lambda level: _verdict(bounds, limit, level, highest) != "cannot tell"


def _verdict(bounds: Bounds, limit: Limit, level: float, highest: float) -> Verdict:
    low, high, word = bounds.interval(level)
    if word == statistics.SAME_TAU:
        low, high, word = _flat_bounds(bounds, level, highest)
    elif word in (statistics.SAME_COUNTS, statistics.SAME_DIFFERENCE) and _is_seen_often(bounds, level):
        low = high = limit.value if abs(bounds.value - limit.value) < TIE_TOLERANCE else bounds.value
    if high < limit.value:
        return "worse"
    return "not worse" if low >= limit.value else "cannot tell"


def _is_seen_often(bounds: Bounds, level: float) -> bool:
    """Tell whether so many prompts with one and the same value are an answer without an interval: a sign test."""
    return bounds.p_value(math.inf) <= 1 - level


def _flat_bounds(bounds: Bounds, level: float, highest: float) -> Interval:
    """Return bounds of tau where all N prompts have the same.

    Prompts of which none of N was seen are a share of at most 1 - ((1 - level) / 2)^(1 / N); they may have any
    tau from 1 to the highest there is.
    """
    unseen = 1 - ((1 - level) / 2) ** (1 / bounds.num_units)
    tau = bounds.value
    return Interval(tau - unseen * (tau - statistics.LOWEST_TAU), tau + unseen * (highest - tau))


def _overall(judged: tuple[Judgement, ...]) -> Verdict:
    verdicts = {one.verdict for one in judged}
    order: tuple[Verdict, ...] = ("worse", "cannot tell", "not worse")
    return next(verdict for verdict in order if verdict in verdicts)


def _message(worst: Judgement, what: str, limit: Limit, num_alike: int, num_judged: int) -> str:
    interval = (
        worst.word
        if math.isnan(worst.ci_low)
        else f"{100 * worst.level:.4g} % interval {limit.text(worst.ci_low)} to {limit.text(worst.ci_high)}"
    )
    number = f"the {what} of {worst.label}, {limit.text(worst.value)} ({interval}),"
    beside = "" if num_judged == 1 else f"; {num_alike} of {num_judged} checkpoints are judged so"
    if worst.verdict == "worse":
        return f"gate failed, worse: {number} is below {limit}{beside}"
    if worst.verdict == "not worse":
        return f"gate passed, not worse: {number} is not below {limit}{beside}"
    return (
        f"gate passed, but the data cannot tell: {number} may lie on either side of {limit}{beside}; "
        f"more prompts would tell"
    )


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
