"""Comparing checkpoints on the same prompts, and the gate that a script can act on.

With a baseline every other row is compared with it; without one every row is compared with the
row before it: in the order typed, or else with the step before in the same run. Differences are
paired over the prompts that both rows have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import duckdb

from dflash_core.acceptance.statistics import PairedDifference, holm_adjusted, paired_difference
from dflash_core.errors import InputError
from dflash_core.results.connection import DEFAULT_WAIT_S, PathLike, reading
from dflash_core.results.records import ALL
from dflash_core.results.selection import Candidate, Conditions, select

_CANDIDATES = """
    SELECT
        evaluation_id, checkpoint_id, run, step, url, status, error, started_at, dtype, target_dtype, device,
        target, transcripts_digest, block_size, metrics_version
    FROM evaluations JOIN checkpoints USING (checkpoint_id)
"""
_ACCEPTANCE = """
    SELECT evaluation_id, tau_pooled, ci_low, ci_high, tau_prompt_mean, num_prompts, num_verification_steps
    FROM acceptance WHERE slice = 'all' AND list_contains(?, evaluation_id)
"""
_COUNTS = """
    SELECT evaluation_id, dataset, prompt_id, num_emitted_tokens, num_verification_steps
    FROM prompt_acceptance WHERE list_contains(?, evaluation_id)
"""


class Counts(NamedTuple):
    """What one drafter did on one prompt."""

    dataset: str
    num_emitted_tokens: int
    num_verification_steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparisonRow:
    """One checkpoint in the table."""

    evaluation_id: str
    label: str
    """`run:step`, or the run where there is no step."""
    run: str
    step: int | None
    url: str
    tau_pooled: float | None
    ci_low: float | None
    ci_high: float | None
    tau_prompt_mean: float | None
    num_prompts: int
    num_verification_steps: int
    compared_with: str | None
    """Label of the row that the difference is to; None for the baseline and for a first row."""
    difference: PairedDifference | None
    """This row's pooled tau minus the other's, on the prompts that both have."""
    p_adjusted: float
    """The p-value after Holm's correction for all rows of the table; NaN where there is none."""
    datasets: Mapping[str, PairedDifference]
    """The same difference per dataset."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A table of checkpoints that may be compared."""

    rows: tuple[ComparisonRow, ...]
    conditions: Conditions
    """What all rows share."""
    baseline: str | None
    """Label of the row that `--baseline` named; None: each row is compared with the one before."""
    notes: tuple[str, ...]
    """What a reader must know beside the numbers, one line each."""

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as JSON values; a number that was not measured is None."""
        return _without_nan(
            {
                "baseline": self.baseline,
                "conditions": self.conditions._asdict(),
                "notes": list(self.notes),
                "rows": [
                    asdict(row) | {"datasets": {k: asdict(v) for k, v in row.datasets.items()}} for row in self.rows
                ],
            }
        )


class GateResult(NamedTuple):
    """Whether a gate was passed, and one line that says why."""

    passed: bool
    message: str


def compare(
    path: PathLike, selectors: Sequence[str] = (), baseline: str | None = None, *, wait_s: float = DEFAULT_WAIT_S
) -> Comparison:
    """Compare evaluations on the prompts that they share.

    Args:
        path: of the database.
        selectors: what to compare, see `selection.select`; none: every step of every run.
        baseline: a selector for the row that all others are compared with; None compares each row
            with the row before it (without selectors: only within one run).
        wait_s: how long to wait, in seconds, while another process writes.

    Raises:
        InputError: a selector is wrong, or the evaluations may not be compared.
        NoResults: there is no database yet.
    """
    with reading(path, wait_s=wait_s) as connection:
        selection = select(_candidates(connection), selectors, baseline)
        ids = [row.evaluation_id for row in selection.rows]
        acceptance = {row[0]: row[1:] for row in connection.execute(_ACCEPTANCE, [ids]).fetchall()}
        counts: dict[str, dict[str, Counts]] = {evaluation_id: {} for evaluation_id in ids}
        for evaluation_id, dataset, prompt_id, emitted, steps in connection.execute(_COUNTS, [ids]).fetchall():
            counts[evaluation_id][prompt_id] = Counts(dataset, emitted, steps)
    others = _compared_with(selection.rows, selection.baseline, is_typed=bool(selectors))
    differences = [
        None if other is None else _differences(counts[other.evaluation_id], counts[row.evaluation_id])
        for row, other in zip(selection.rows, others, strict=True)
    ]
    adjusted = holm_adjusted([math.nan if found is None else found[ALL].p_value for found in differences])
    rows = [
        _row(row, acceptance[row.evaluation_id], other, found, p_adjusted)
        for row, other, found, p_adjusted in zip(selection.rows, others, differences, adjusted, strict=True)
    ]
    return Comparison(
        rows=tuple(rows),
        conditions=selection.rows[0].conditions,
        baseline=None if selection.baseline is None else selection.baseline.label,
        notes=selection.notes,
    )


def gate(comparison: Comparison, fail_below: float) -> GateResult:
    """Judge a comparison for `--fail-below T`.

    Without `--baseline` the gate fails when the pooled tau of any row is below T (tokens per
    verification step). With `--baseline` it fails when the difference of any other row to the
    baseline is below T: 0 demands "not worse", -0.05 forgives a loss of 0.05. The measured value
    decides, not the end of its interval, which the message gives along. Nothing to judge, or a
    number that was not measured, fails.

    Raises:
        InputError: T is not a number.
    """
    if not math.isfinite(fail_below):
        raise InputError(f"--fail-below must be a number, got {fail_below!r}")
    what = "tau" if comparison.baseline is None else f"difference to {comparison.baseline}"
    is_judged = [comparison.baseline is None or row.compared_with is not None for row in comparison.rows]
    judged = [_judged(row, comparison.baseline) for row, is_in in zip(comparison.rows, is_judged, strict=True) if is_in]
    if not judged:
        return GateResult(False, f"gate failed: there is nothing to judge the {what} of")
    label, value, low, high = min(judged, key=lambda entry: -math.inf if math.isnan(entry[1]) else entry[1])
    if math.isnan(value):
        return GateResult(False, f"gate failed: the {what} of {label} was not measured")
    passed = value >= fail_below
    verdict = "gate passed: the smallest" if passed else "gate failed: the"
    interval = "no interval" if math.isnan(low) else f"95 % interval {low:.3f} to {high:.3f}"
    comparator = "is not below" if passed else "is below"
    return GateResult(passed, f"{verdict} {what}, {value:.3f} of {label} ({interval}), {comparator} {fail_below:g}")


def _judged(row: ComparisonRow, baseline: str | None) -> tuple[str, float, float, float]:
    """Return label, value and interval of what the gate looks at."""
    if baseline is None:
        numbers = (row.tau_pooled, row.ci_low, row.ci_high)
    else:
        found = row.difference
        numbers = (None, None, None) if found is None else (found.difference, found.ci_low, found.ci_high)
    value, low, high = (math.nan if number is None else number for number in numbers)
    return row.label, value, low, high


def _candidates(connection: duckdb.DuckDBPyConnection) -> list[Candidate]:
    cursor = connection.execute(_CANDIDATES)
    names = [column[0] for column in cursor.description or []]
    found = []
    for values in cursor.fetchall():
        row = dict(zip(names, values, strict=True))
        conditions = Conditions(**{name: row.pop(name) for name in Conditions._fields})
        found.append(Candidate(**row, conditions=conditions))
    return found


def _compared_with(rows: Sequence[Candidate], baseline: Candidate | None, *, is_typed: bool) -> list[Candidate | None]:
    if baseline is not None:
        return [None if row is baseline else baseline for row in rows]
    before = [None, *rows[:-1]]
    return [
        other if other is not None and (is_typed or other.run == row.run) else None
        for row, other in zip(rows, before, strict=True)
    ]


def _differences(a: Mapping[str, Counts], b: Mapping[str, Counts]) -> dict[str, PairedDifference]:
    """Return b minus a over the prompts that both have: of all, and of each dataset."""
    shared = sorted(a.keys() & b.keys())
    found = {ALL: _paired(a, b, shared)}
    for dataset in sorted({a[prompt_id].dataset for prompt_id in shared}):
        found[dataset] = _paired(a, b, [prompt_id for prompt_id in shared if a[prompt_id].dataset == dataset])
    return found


def _paired(a: Mapping[str, Counts], b: Mapping[str, Counts], prompt_ids: list[str]) -> PairedDifference:
    sides = [
        [getattr(side[prompt_id], name) for prompt_id in prompt_ids]
        for side in (a, b)
        for name in ("num_emitted_tokens", "num_verification_steps")
    ]
    return paired_difference(*sides)


def _row(
    candidate: Candidate,
    acceptance: Sequence[Any],
    other: Candidate | None,
    differences: Mapping[str, PairedDifference] | None,
    p_adjusted: float,
) -> ComparisonRow:
    tau_pooled, ci_low, ci_high, tau_prompt_mean, num_prompts, num_steps = acceptance
    return ComparisonRow(
        evaluation_id=candidate.evaluation_id,
        label=candidate.label,
        run=candidate.run,
        step=candidate.step,
        url=candidate.url,
        tau_pooled=tau_pooled,
        ci_low=ci_low,
        ci_high=ci_high,
        tau_prompt_mean=tau_prompt_mean,
        num_prompts=num_prompts,
        num_verification_steps=num_steps,
        compared_with=None if other is None else other.label,
        difference=None if differences is None else differences[ALL],
        p_adjusted=p_adjusted,
        datasets={} if differences is None else {k: v for k, v in differences.items() if k != ALL},
    )


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_without_nan(entry) for entry in value]
    return None if isinstance(value, float) and math.isnan(value) else value
