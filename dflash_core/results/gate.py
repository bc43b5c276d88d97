"""The gate: is a checkpoint worse than it may be? The interval decides, and says when the data cannot tell.

    worse         the whole interval lies below the limit             exit status 1
    not worse     the whole interval lies at the limit or above it    exit status 0
    cannot tell   the limit lies inside the interval                  exit status 0

With several checkpoints the intervals are widened (level 1 - 0.05 / number judged, Bonferroni), so that a
gate over checkpoints that all are exactly at the limit is wrongly closed in at most 5 % of the cases,
however many they are: half of that for one checkpoint, since an interval errs on two sides.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from dflash_core.acceptance import statistics
from dflash_core.acceptance.resampling import Contrast
from dflash_core.acceptance.statistics import Interval, conversation_of
from dflash_core.errors import InputError
from dflash_core.results.compare import Comparison, ComparisonRow, columns_of

FALSE_ALARMS = 0.05
MIN_FLAT_UNITS = 6
"""So many prompts with one and the same difference are an answer without an interval: a sign test (2 x 2^-6)."""

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
    level: float
    """Of the intervals, widened for the number of checkpoints judged."""
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
    level = 1 - FALSE_ALARMS / max(len(rows), 1)
    judged = tuple(_judge(comparison, row, limit, level) for row in rows)
    unmeasured = next((one for one in judged if math.isnan(one.value)), None)
    if not judged or unmeasured is not None:
        missing = (
            f"the {what} of {unmeasured.label} was" if unmeasured else f"there is nothing to judge the {what} of: "
        )
        message = f"gate failed: {missing} not measured" if unmeasured else f"gate failed: {missing}name a checkpoint"
        return GateResult(passed=False, verdict="cannot tell", message=message, level=level, judgements=judged)
    verdict = _overall(judged)
    worst = min((one for one in judged if one.verdict == verdict), key=lambda one: one.value)
    return GateResult(
        passed=verdict != "worse",
        verdict=verdict,
        message=_message(worst, what, limit, level, sum(one.verdict == verdict for one in judged), len(judged)),
        level=level,
        judgements=judged,
    )


def as_json(result: GateResult) -> dict[str, Any]:
    """Return the gate's answer as plain values; NaN is None."""
    entries = [
        {
            "checkpoint": one.label,
            "verdict": one.verdict,
            **{name: _known(getattr(one, name)) for name in ("value", "ci_low", "ci_high")},
            "word": one.word,
        }
        for one in result.judgements
    ]
    top = {name: getattr(result, name) for name in ("passed", "verdict", "message", "level")}
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


def _judge(comparison: Comparison, row: ComparisonRow, limit: Limit, level: float) -> Judgement:
    if comparison.baseline is None:
        value, interval = row.tau.tau_pooled, _tau_interval(row, level)
        bounds = _flat_bounds(row, level) if interval.word == statistics.SAME_TAU else interval
    else:
        value, interval = _against_baseline(row, limit, level)
        is_flat = interval.word in (statistics.SAME_COUNTS, statistics.SAME_DIFFERENCE)
        is_known = is_flat and row.difference is not None and row.difference.num_units >= MIN_FLAT_UNITS
        bounds = Interval(value, value) if is_known else interval
    return Judgement(
        label=row.label,
        verdict=_verdict(bounds, limit.value),
        value=value,
        ci_low=interval.low,
        ci_high=interval.high,
        word=interval.word,
    )


def _against_baseline(row: ComparisonRow, limit: Limit, level: float) -> tuple[float, Interval]:
    (emitted_a, steps_a, emitted_b, steps_b), clusters = columns_of(row.counts_of_other, row.counts)
    contrast = Contrast.RATIO if limit.is_relative else Contrast.DIFFERENCE
    interval = statistics.contrast_interval(
        emitted_a, steps_a, emitted_b, steps_b, contrast, clusters=clusters, level=level
    )
    if not limit.is_relative:
        return (math.nan if row.difference is None else row.difference.difference), interval
    return statistics.tau_pooled(emitted_b, steps_b) / statistics.tau_pooled(emitted_a, steps_a) - 1, interval


def _tau_interval(row: ComparisonRow, level: float) -> Interval:
    counts = row.counts
    return statistics.bootstrap_interval(
        [found.num_emitted_tokens for found in counts.values()],
        [found.num_verification_steps for found in counts.values()],
        clusters=[conversation_of(prompt_id) for prompt_id in counts],
        level=level,
    )


def _flat_bounds(row: ComparisonRow, level: float) -> Interval:
    """Return bounds of tau where all N prompts have the same.

    Prompts of which none of N was seen are a share of at most 1 - ((1 - level) / 2)^(1 / N); they may have any
    tau from 1 to the block size.
    """
    num_units = len({conversation_of(prompt_id) for prompt_id in row.counts})
    unseen = 1 - ((1 - level) / 2) ** (1 / num_units)
    tau = row.tau.tau_pooled
    highest = row.block_size or math.inf
    return Interval(tau - unseen * (tau - statistics.LOWEST_TAU), tau + unseen * (highest - tau))


def _verdict(bounds: Interval, limit: float) -> Verdict:
    if bounds.high < limit:
        return "worse"
    return "not worse" if bounds.low >= limit else "cannot tell"


def _overall(judged: tuple[Judgement, ...]) -> Verdict:
    verdicts = {one.verdict for one in judged}
    order: tuple[Verdict, ...] = ("worse", "cannot tell", "not worse")
    return next(verdict for verdict in order if verdict in verdicts)


def _message(worst: Judgement, what: str, limit: Limit, level: float, num_alike: int, num_judged: int) -> str:
    interval = (
        worst.word
        if math.isnan(worst.ci_low)
        else f"{100 * level:.4g} % interval {limit.text(worst.ci_low)} to {limit.text(worst.ci_high)}"
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
