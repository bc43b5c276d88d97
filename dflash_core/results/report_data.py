"""What the report shows, read from the database and arranged: values, no HTML.

Taus are drawn together only where they may be compared, so the report has one section for each
set of conditions, the one that was evaluated last first.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import duckdb

from dflash_core.errors import InputError
from dflash_core.results.compare import url_of
from dflash_core.results.connection import DEFAULT_WAIT_S, PathLike, reading
from dflash_core.results.report_differences import Difference, differences, labels_not_told
from dflash_core.results.report_prompts import PromptList, read_prompt_lists
from dflash_core.results.report_steps import SliceKey, StepCounts, read_step_counts
from dflash_core.results.selection import CONDITIONS_SQL, Conditions

ALL: SliceKey = ("all", "all")

_CURVE = f"""
    SELECT
        evaluation_id, learning_curve.run, learning_curve.step, slice, dataset, acceptance.tau_pooled,
        acceptance.ci_low, acceptance.ci_high, acceptance.tau_prompt_mean, acceptance.num_prompts,
        acceptance.num_verification_steps, acceptance.share_full_blocks, acceptance.num_near_ties AS near_ties,
        acceptance.tau_without_near_ties AS tau_without_ties, evaluations.device, evaluations.started_at,
        evaluations.bytes_read, evaluations.seconds, evaluations.total_seconds, evaluations.cached,
        checkpoints.bytes_wanted, checkpoints.bytes_total, checkpoints.url, {CONDITIONS_SQL}
    FROM learning_curve
    JOIN evaluations USING (evaluation_id)
    JOIN checkpoints ON checkpoints.checkpoint_id = evaluations.checkpoint_id
    JOIN acceptance USING (evaluation_id, slice, dataset)
    WHERE is_newest_of_step
    ORDER BY learning_curve.run, learning_curve.step NULLS FIRST, evaluations.started_at
"""
_SURVIVAL = """
    SELECT evaluation_id, slice, dataset, list(num_survived ORDER BY draft_position)
    FROM survival WHERE list_contains(?, evaluation_id)
    GROUP BY evaluation_id, slice, dataset
"""
# The newest outcome without numbers at each address, until a checkpoint there was scored after all. (By
# address: a checkpoint that failed before it was streamed has another id than after.)
_WITHOUT_NUMBERS = """
    WITH outcomes AS (FROM evaluations JOIN checkpoints USING (checkpoint_id))
    SELECT run, step, url, status, error, started_at
    FROM outcomes AS missed
    WHERE status <> 'done' AND NOT EXISTS (
        FROM outcomes AS later
        WHERE later.status = 'done' AND later.url = missed.url AND later.started_at >= missed.started_at
    )
    QUALIFY row_number() OVER (PARTITION BY url ORDER BY started_at DESC, evaluation_id) = 1
    ORDER BY run, step NULLS FIRST, started_at
"""
# Extras of all prompts; columns in the order in which the page reads them.
_EXTRAS = {
    "sweep": "block_size, method, tau_pooled, tau_prompt_mean, num_verification_steps",
    "recall": "draft_position, k, num_recalled, num_blocks, num_reached_recalled, num_reached",
    "trees": "budget, tau_pooled, tau_prompt_mean, num_verification_steps",
    "sampled": "temperature, rule, first_acceptance, expected_accepted_teacher_forced, expected_accepted_at_least",
}

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """Checkpoints that were scored under the same conditions."""

    rows: tuple[Row, ...]
    """One row per checkpoint, by run and step: `learning_curve` of all prompts, with more conditions."""
    slices: dict[SliceKey, dict[str, Row]]
    """All prompts, each dataset and each group to evaluation id to the same row for that part."""
    survival: dict[tuple[str, SliceKey], list[int]]
    """(Evaluation, part of the prompts) to the blocks with at least 1, 2, ... accepted drafts."""
    steps: StepCounts
    baseline: Row | None
    """The checkpoint that the others are compared with; None where there is no other."""
    differences: dict[tuple[str, SliceKey], Difference]
    """(Evaluation, part of the prompts) to its paired difference to the baseline."""
    not_told: frozenset[str]
    """Evaluations that cannot be told from the best; empty where there is nothing to tell."""
    extras: dict[str, list[tuple[Any, ...]]]
    """Name of an extra to its rows of all prompts, evaluation id first; without those that nobody asked for."""
    prompt_lists: tuple[PromptList, ...]
    """The best and worst prompts of the best and the latest checkpoint."""

    @property
    def ranked(self) -> list[Row]:
        """The rows with a tau, the best first."""
        return ranked(self.rows)

    @property
    def latest(self) -> Row | None:
        """The row of the checkpoint that was evaluated last."""
        return latest(self.rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportData:
    """Everything that the report shows."""

    sections: tuple[Section, ...]
    failures: tuple[Row, ...]
    """Evaluations that failed, and nothing at that address was scored since."""
    vanished: tuple[Row, ...]
    """The same for checkpoints that were gone before they were read whole."""


def read_report_data(path: PathLike, *, baseline: str | None = None, wait_s: float = DEFAULT_WAIT_S) -> ReportData:
    """Read everything that the report shows.

    Args:
        path: of the database.
        baseline: a selector of `compare` for the checkpoint that others are compared with; None takes in each
            section a drafter without a step, such as a published one, else the first step of the latest run.
        wait_s: how long to wait, in seconds, while another process writes.

    Raises:
        InputError: the baseline stands for nothing that was evaluated.
        NoResults: there is no database yet.
        ResultsError: it cannot be read.
    """
    baseline_url = None if baseline is None else url_of(path, baseline, wait_s=wait_s)
    with reading(path, wait_s=wait_s) as connection:
        curve = _rows(connection, _CURVE)
        missed = _rows(connection, _WITHOUT_NUMBERS)
        groups = list(_grouped(curve, Conditions._fields).values())
        ids = sorted({row["evaluation_id"] for row in curve})
        steps = read_step_counts(connection, ids)
        survival = {
            (evaluation_id, (kind, name)): survived
            for evaluation_id, kind, name, survived in connection.execute(_SURVIVAL, [ids]).fetchall()
        }
        extras = _read_extras(connection, ids)
        sections = [_section(connection, rows, steps, survival, extras, baseline_url) for rows in groups]
    if baseline_url is not None and all(section.baseline is None for section in sections):
        raise InputError(f"the baseline {baseline!r} has no numbers beside other checkpoints': evaluate another one")
    sections.sort(key=lambda section: max(row["started_at"] for row in section.rows), reverse=True)
    return ReportData(
        sections=tuple(sections),
        failures=tuple(row for row in missed if row["status"] == "failed"),
        vanished=tuple(row for row in missed if row["status"] == "vanished"),
    )


def ranked(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with a tau, the best first."""
    return sorted((row for row in rows if row["tau_pooled"] is not None), key=lambda row: -row["tau_pooled"])


def latest(rows: Sequence[Row]) -> Row | None:
    """Return the row with a tau that was evaluated last; of those the furthest step."""
    measured = [row for row in rows if row["tau_pooled"] is not None]
    return max(measured, key=lambda row: (row["started_at"], row["step"] or 0), default=None)


def _section(
    connection: duckdb.DuckDBPyConnection,
    rows: Sequence[Row],
    all_steps: StepCounts,
    survival: dict[tuple[str, SliceKey], list[int]],
    extras: dict[str, list[tuple[Any, ...]]],
    baseline_url: str | None,
) -> Section:
    slices: dict[SliceKey, dict[str, Row]] = {ALL: {}}
    for row in sorted(rows, key=lambda row: (row["slice"], row["dataset"])):
        slices.setdefault((row["slice"], row["dataset"]), {})[row["evaluation_id"]] = row
    totals = tuple(row for row in rows if row["slice"] == "all")
    ids = [row["evaluation_id"] for row in totals]
    steps = all_steps.of(ids)
    baseline = _baseline(totals, baseline_url)
    return Section(
        rows=totals,
        slices=slices,
        survival={(name, part): counts for (name, part), counts in survival.items() if name in set(ids)},
        steps=steps,
        baseline=baseline,
        differences=({} if baseline is None else differences(steps.prompts, baseline["evaluation_id"], list(slices))),
        not_told=labels_not_told(steps.prompts, [row["evaluation_id"] for row in ranked(totals)]),
        extras={
            name: found
            for name, entries in extras.items()
            if (found := [entry for entry in entries if entry[0] in set(ids)])
        },
        prompt_lists=read_prompt_lists(connection, steps.prompts, ranked(totals)[:1], latest(totals), baseline),
    )


def _baseline(rows: Sequence[Row], url: str | None) -> Row | None:
    """Return what the others are compared with, where there are others."""
    measured = [row for row in rows if row["tau_pooled"] is not None]
    newest = latest(rows)
    if newest is None or len(measured) < 2:
        return None
    if url is not None:
        return next((row for row in measured if row["url"] == url), None)
    without_step = [row for row in measured if row["step"] is None]
    if without_step:
        return without_step[0]
    first = next(row for row in measured if row["run"] == newest["run"])
    # A run of one checkpoint, and other runs: its only checkpoint is what they should be compared with least.
    return next(row for row in measured if row is not first) if first is newest else first


def _read_extras(connection: duckdb.DuckDBPyConnection, ids: Sequence[str]) -> dict[str, list[tuple[Any, ...]]]:
    """Return the extras that are stored; files of schema versions below 3 have no such tables."""
    tables = {name for (name,) in connection.execute("SELECT table_name FROM duckdb_tables()").fetchall()}
    return {
        name: connection.execute(
            f"SELECT evaluation_id, {columns} FROM {name} WHERE slice = 'all' AND list_contains(?, evaluation_id) "
            "ORDER BY ALL",
            [list(ids)],
        ).fetchall()
        for name, columns in _EXTRAS.items()
        if name in tables
    }


def _rows(connection: duckdb.DuckDBPyConnection, statement: str) -> list[Row]:
    cursor = connection.execute(statement)
    names = [column[0] for column in cursor.description or []]
    rows = [dict(zip(names, values, strict=True)) for values in cursor.fetchall()]
    for row in rows:
        for name in ("seconds", "cached"):
            if name in row:
                row[name] = json.loads(row[name])
    return rows


def _grouped(rows: Sequence[Row], names: Sequence[str]) -> dict[tuple[Any, ...], list[Row]]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups
