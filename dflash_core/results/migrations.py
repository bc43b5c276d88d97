"""Steps that bring a results database of an older version up to date, one transaction each.

A step changes what `schema.sql` declared before into what it declares after; its SQL is written out
here, since `schema.sql` moves on. The next change of the schema is one more function at the end of
`MIGRATIONS`, which also raises `SCHEMA_VERSION`. A test keeps both in agreement: a migrated file is
declared exactly like a new one.

No step may use ALTER TABLE: a killed process leaves it in DuckDB's log, and DuckDB 2.0 cannot read
such a log back where a CHECK of the table calls a function.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from typing import Any

import duckdb

from dflash_core.acceptance.statistics import bootstrap_interval, conversation_of

_EVALUATIONS_2 = """
    evaluation_id VARCHAR PRIMARY KEY,
    checkpoint_id VARCHAR NOT NULL,
    status VARCHAR NOT NULL CHECK (status IN ('done', 'failed', 'vanished')),
    error VARCHAR,
    target VARCHAR NOT NULL,
    block_size BIGINT CHECK (block_size >= 2),
    device VARCHAR,
    dtype VARCHAR,
    target_dtype VARCHAR,
    transcripts_digest VARCHAR,
    thinking BOOLEAN,
    chat_template_digest VARCHAR,
    verification_rule VARCHAR,
    counting_rule VARCHAR,
    row_alignment VARCHAR,
    metrics_version VARCHAR,
    extraction_version VARCHAR,
    packages JSON,
    spec JSON NOT NULL,
    started_at TIMESTAMP NOT NULL,
    seconds JSON NOT NULL,
    total_seconds DOUBLE NOT NULL CHECK (isfinite(total_seconds) AND total_seconds >= 0),
    bytes_read BIGINT NOT NULL CHECK (bytes_read >= 0),
    cached JSON NOT NULL,
    CHECK ((status = 'done') = (error IS NULL))
"""
_EVALUATIONS_3 = """
    evaluation_id VARCHAR PRIMARY KEY,
    checkpoint_id VARCHAR NOT NULL,
    status VARCHAR NOT NULL CHECK (status IN ('done', 'failed', 'vanished')),
    error VARCHAR,
    target VARCHAR NOT NULL,
    block_size BIGINT CHECK (block_size >= 1),
    num_drafts BIGINT CHECK (num_drafts >= 0),
    device VARCHAR,
    dtype VARCHAR,
    target_dtype VARCHAR,
    transcripts_digest VARCHAR,
    thinking BOOLEAN,
    chat_template_digest VARCHAR,
    verification_rule VARCHAR,
    counting_rule VARCHAR,
    row_alignment VARCHAR,
    metrics_version VARCHAR,
    extraction_version VARCHAR,
    packages JSON,
    spec JSON NOT NULL,
    started_at TIMESTAMP NOT NULL,
    seconds JSON NOT NULL,
    total_seconds DOUBLE NOT NULL CHECK (isfinite(total_seconds) AND total_seconds >= 0),
    bytes_read BIGINT NOT NULL CHECK (bytes_read >= 0),
    cached JSON NOT NULL,
    CHECK ((status = 'done') = (error IS NULL))
"""
_ACCEPTANCE_3 = """
    evaluation_id VARCHAR NOT NULL,
    slice VARCHAR NOT NULL CHECK (slice IN ('all', 'dataset', 'group')),
    dataset VARCHAR NOT NULL,
    num_prompts BIGINT NOT NULL,
    num_verification_steps BIGINT NOT NULL,
    num_drafted_tokens BIGINT NOT NULL,
    num_accepted_drafts BIGINT NOT NULL,
    num_emitted_tokens BIGINT NOT NULL,
    num_full_blocks BIGINT NOT NULL,
    num_near_ties BIGINT,
    num_anchors BIGINT NOT NULL,
    tau_pooled DOUBLE CHECK (isfinite(tau_pooled)),
    ci_low DOUBLE CHECK (isfinite(ci_low)),
    ci_high DOUBLE CHECK (isfinite(ci_high)),
    tau_prompt_mean DOUBLE CHECK (isfinite(tau_prompt_mean)),
    tau_all_anchors DOUBLE CHECK (isfinite(tau_all_anchors)),
    num_prompts_without_near_ties BIGINT,
    num_emitted_without_near_ties BIGINT,
    tau_without_near_ties DOUBLE CHECK (isfinite(tau_without_near_ties)),
    tau_prompt_mean_without_near_ties DOUBLE CHECK (isfinite(tau_prompt_mean_without_near_ties)),
    acceptance_rate DOUBLE CHECK (isfinite(acceptance_rate)),
    share_full_blocks DOUBLE CHECK (isfinite(share_full_blocks)),
    PRIMARY KEY (evaluation_id, slice, dataset)
"""
# Every block that was counted so far had its anchor in slot 0 and drafted the rest.
_KEPT_EVALUATIONS_3 = "SELECT *, CASE WHEN status = 'done' THEN block_size - 1 END AS num_drafts FROM kept_evaluations"
# The new columns of each slice, from its blocks; NULL as `num_near_ties` is.
_KEPT_ACCEPTANCE_3 = """
    WITH labelled AS (
        SELECT
            evaluation_id, prompt_id, dataset, prompt_group, num_emitted_tokens,
            CASE WHEN NOT is_near_tie THEN num_emitted_tokens END AS num_emitted_without
        FROM blocks JOIN evaluations USING (evaluation_id) JOIN prompts USING (transcripts_digest, prompt_id)
        WHERE is_on_walk
    ),
    sliced AS (
        SELECT *, 'all' AS slice, 'all' AS name FROM labelled
        UNION ALL SELECT *, 'dataset', dataset FROM labelled
        UNION ALL SELECT *, 'group', prompt_group FROM labelled WHERE prompt_group IS NOT NULL
    ),
    per_prompt AS (
        SELECT
            evaluation_id, slice, name, prompt_id,
            sum(num_emitted_without) AS num_emitted, count(num_emitted_without) AS num_steps
        FROM sliced GROUP BY ALL
    ),
    found AS (
        SELECT
            evaluation_id, slice, name AS dataset,
            count(*) FILTER (num_steps > 0) AS num_prompts_without_near_ties,
            CAST(coalesce(sum(num_emitted), 0) AS BIGINT) AS num_emitted_without_near_ties,
            avg(num_emitted / num_steps) FILTER (num_steps > 0) AS tau_prompt_mean_without_near_ties
        FROM per_prompt GROUP BY ALL
    )
    SELECT
        kept.*,
        CASE WHEN kept.num_near_ties IS NOT NULL THEN coalesce(num_prompts_without_near_ties, 0) END
            AS num_prompts_without_near_ties,
        CASE WHEN kept.num_near_ties IS NOT NULL THEN coalesce(num_emitted_without_near_ties, 0) END
            AS num_emitted_without_near_ties,
        CASE WHEN kept.num_near_ties IS NOT NULL THEN tau_prompt_mean_without_near_ties END
            AS tau_prompt_mean_without_near_ties
    FROM kept_acceptance AS kept LEFT JOIN found USING (evaluation_id, slice, dataset)
"""
# Per evaluation and slice the counts of its prompts; `acceptance` names the slices that there are.
_COUNTS_OF_SLICES = """
    WITH counted AS (
        SELECT
            evaluation_id, prompt_id, dataset, prompt_group, any_value(num_drafts) AS num_drafts,
            CAST(sum(num_emitted_tokens) AS BIGINT) AS num_emitted, count(*) AS num_steps
        FROM blocks JOIN evaluations USING (evaluation_id) JOIN prompts USING (transcripts_digest, prompt_id)
        WHERE is_on_walk GROUP BY ALL
    ),
    sliced AS (
        SELECT *, 'all' AS slice, 'all' AS name FROM counted
        UNION ALL SELECT *, 'dataset', dataset FROM counted
        UNION ALL SELECT *, 'group', prompt_group FROM counted WHERE prompt_group IS NOT NULL
    )
    SELECT
        evaluation_id, slice, name, any_value(num_drafts),
        list(prompt_id ORDER BY prompt_id), list(num_emitted ORDER BY prompt_id), list(num_steps ORDER BY prompt_id)
    FROM sliced GROUP BY ALL
"""
_SET_INTERVAL = """
    UPDATE acceptance SET ci_low = ?, ci_high = ? WHERE evaluation_id = ? AND slice = ? AND dataset = ?
"""
_COLUMNS = """
    SELECT column_name, data_type FROM duckdb_columns()
    WHERE database_name = current_database() AND table_name = ? ORDER BY column_index
"""
# Without those of primary keys, which come with the table.
_INDEXES = """
    SELECT sql FROM duckdb_indexes()
    WHERE database_name = current_database() AND table_name = ? AND sql IS NOT NULL
"""


def migrate_one_step(connection: duckdb.DuckDBPyConnection, version: int) -> None:
    """Bring the tables from one version to the next; the caller holds the transaction.

    Args:
        connection: open for writing, in a transaction.
        version: of the tables as they are, at least 1 and below `SCHEMA_VERSION`.

    Raises:
        duckdb.Error: the step does not work on this file; the caller rolls back.
    """
    MIGRATIONS[version - 1](connection)
    connection.execute("UPDATE meta SET schema_version = ?", [version + 1])


def _add_status_vanished(connection: duckdb.DuckDBPyConnection) -> None:
    """From 1 to 2: an evaluation may be 'vanished'; every evaluation that is not done has an error."""
    _declare_anew(connection, "evaluations", _EVALUATIONS_2)


def _add_extras(connection: duckdb.DuckDBPyConnection) -> None:
    """From 2 to 3: drafts of a whole block, both taus without near-ties, and tables of extras."""
    _declare_anew(connection, "evaluations", _EVALUATIONS_3, kept_rows=_KEPT_EVALUATIONS_3)
    _declare_anew(connection, "acceptance", _ACCEPTANCE_3, kept_rows=_KEPT_ACCEPTANCE_3)
    connection.execute(_text("to_version_3.sql"))


def _name_conditions(connection: duckdb.DuckDBPyConnection) -> None:
    """From 3 to 4: views tell all conditions apart; intervals of before version 3 are made anew, as all others are."""
    connection.execute(_text("to_version_4.sql"))
    for evaluation_id, kind, name, num_drafts, prompt_ids, emitted, steps in connection.execute(
        _COUNTS_OF_SLICES
    ).fetchall():
        clusters = [conversation_of(prompt_id) for prompt_id in prompt_ids]
        interval = bootstrap_interval(emitted, steps, clusters=clusters, highest=num_drafts + 1)
        ends: list[Any] = [None if interval.word else end for end in interval[:2]]
        connection.execute(_SET_INTERVAL, [*ends, evaluation_id, kind, name])


def _text(name: str) -> str:
    return resources.files("dflash_core.results").joinpath(name).read_text(encoding="utf-8")


def _declare_anew(
    connection: duckdb.DuckDBPyConnection, table: str, elements: str, *, kept_rows: str | None = None
) -> None:
    """Declare a table with other columns or constraints and keep its rows, which wait in a temporary table.

    `kept_rows` selects them, with what new columns hold, from `kept_<table>`; None takes them as they are.

    Columns and indexes that somebody added stay, such a column by name and type alone. Views hold the
    table's name and stay as they are. DuckDB refuses where a foreign key of somebody's table points here.
    """
    kept = f"kept_{table}"
    columns = dict(connection.execute(_COLUMNS, [table]).fetchall())
    indexes = [sql for (sql,) in connection.execute(_INDEXES, [table]).fetchall()]
    connection.execute(f"CREATE TEMPORARY TABLE {kept} AS FROM {table}")
    connection.execute(f"DROP TABLE {table}")
    connection.execute(f"CREATE TABLE {table} ({elements})")
    declared = dict(connection.execute(_COLUMNS, [table]).fetchall())
    added = [f', "{_escaped(name)}" {kind}' for name, kind in columns.items() if name not in declared]
    if added:
        connection.execute(f"CREATE OR REPLACE TABLE {table} ({elements}{''.join(added)})")
    connection.execute(f"INSERT INTO {table} BY NAME {kept_rows or f'FROM {kept}'}")
    connection.execute(f"DROP TABLE {kept}")
    for sql in indexes:
        connection.execute(sql)


def _escaped(name: str) -> str:
    return name.replace('"', '""')


MIGRATIONS: tuple[Callable[[duckdb.DuckDBPyConnection], None], ...] = (
    _add_status_vanished,
    _add_extras,
    _name_conditions,
)
"""The step from version 1 to 2, from 2 to 3, and so on."""

SCHEMA_VERSION = 1 + len(MIGRATIONS)
"""Version of `schema.sql`."""
