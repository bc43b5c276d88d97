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

from dflash_core.acceptance.statistics import PairedDifference
from dflash_core.results.compare import compare
from dflash_core.results.connection import DEFAULT_WAIT_S, PathLike, reading
from dflash_core.results.selection import Conditions

_CURVE = """
    SELECT
        learning_curve.*, evaluations.target_dtype, evaluations.thinking, evaluations.chat_template_digest,
        evaluations.verification_rule, evaluations.counting_rule, evaluations.row_alignment,
        acceptance.share_full_blocks, acceptance.num_near_ties AS near_ties,
        acceptance.tau_without_near_ties AS tau_without_ties, checkpoints.url
    FROM learning_curve
    JOIN evaluations USING (evaluation_id)
    JOIN checkpoints ON checkpoints.checkpoint_id = learning_curve.checkpoint_id
    JOIN acceptance USING (evaluation_id, slice, dataset)
    WHERE is_newest_of_step
    ORDER BY learning_curve.run, learning_curve.step NULLS FIRST, learning_curve.started_at
"""
_SURVIVAL = """
    SELECT evaluation_id, draft_position, num_blocks, num_survived, survival, conditional_acceptance
    FROM survival WHERE slice = 'all' ORDER BY evaluation_id, draft_position
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

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """Checkpoints that were scored under the same conditions."""

    rows: tuple[Row, ...]
    """One row per checkpoint, by run and step: `learning_curve` of all prompts, with more conditions."""
    slices: dict[tuple[str, str], tuple[Row, ...]]
    """(slice, name) to the same rows for one dataset or group."""
    survival: dict[str, tuple[Row, ...]]
    """Evaluation id to its survival by draft position, of all prompts."""
    differences: dict[str, PairedDifference]
    """Evaluation id to the paired difference to the step before in the same run."""

    @property
    def measured(self) -> list[Row]:
        """The rows that have a tau."""
        return [row for row in self.rows if row["tau_pooled"] is not None]

    @property
    def ranked(self) -> list[Row]:
        """The rows with a tau, the best first."""
        return sorted(self.measured, key=lambda row: row["tau_pooled"], reverse=True)

    @property
    def latest(self) -> Row | None:
        """The row of the checkpoint that was evaluated last; of those the furthest step."""
        return max(self.measured, key=lambda row: (row["started_at"], row["step"] or 0), default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportData:
    """Everything that the report shows."""

    sections: tuple[Section, ...]
    failures: tuple[Row, ...]
    """Evaluations that failed, and nothing at that address was scored since."""
    vanished: tuple[Row, ...]
    """The same for checkpoints that were gone before they were read whole."""


def read_report_data(path: PathLike, *, wait_s: float = DEFAULT_WAIT_S) -> ReportData:
    """Read everything that the report shows.

    Raises:
        NoResults: there is no database yet.
        ResultsError: it cannot be read.
    """
    with reading(path, wait_s=wait_s) as connection:
        curve = _rows(connection, _CURVE)
        survival = _rows(connection, _SURVIVAL)
        missed = _rows(connection, _WITHOUT_NUMBERS)
    by_evaluation = _grouped(survival, ("evaluation_id",))
    sections = []
    for rows in _grouped(curve, Conditions._fields).values():
        totals = [row for row in rows if row["slice"] == "all"]
        sections.append(
            Section(
                rows=tuple(totals),
                slices={key: found for key, found in _grouped(rows, ("slice", "dataset")).items() if key[0] != "all"},
                survival={row["evaluation_id"]: by_evaluation.get((row["evaluation_id"],), ()) for row in totals},
                differences=_differences(path, totals, wait_s),
            )
        )
    sections.sort(key=lambda section: max(row["started_at"] for row in section.rows), reverse=True)
    return ReportData(
        sections=tuple(sections),
        failures=tuple(row for row in missed if row["status"] == "failed"),
        vanished=tuple(row for row in missed if row["status"] == "vanished"),
    )


def _differences(path: PathLike, rows: Sequence[Row], wait_s: float) -> dict[str, PairedDifference]:
    """Compare each step with the step before in its run; drafters without a step are not compared."""
    found: dict[str, PairedDifference] = {}
    for run in _grouped([row for row in rows if row["step"] is not None], ("run",)).values():
        if len(run) > 1:
            comparison = compare(path, [row["evaluation_id"] for row in run], wait_s=wait_s)
            found |= {row.evaluation_id: row.difference for row in comparison.rows if row.difference is not None}
    return found


def _rows(connection: duckdb.DuckDBPyConnection, statement: str) -> list[Row]:
    cursor = connection.execute(statement)
    names = [column[0] for column in cursor.description or []]
    rows = [dict(zip(names, values, strict=True)) for values in cursor.fetchall()]
    for row in rows:
        if "seconds" in row:
            row["seconds"] = json.loads(row["seconds"])
    return rows


def _grouped(rows: Sequence[Row], names: Sequence[str]) -> dict[tuple[Any, ...], tuple[Row, ...]]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return {key: tuple(found) for key, found in groups.items()}
