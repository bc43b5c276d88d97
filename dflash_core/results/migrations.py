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

import duckdb

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


def _declare_anew(connection: duckdb.DuckDBPyConnection, table: str, elements: str) -> None:
    """Declare a table with other constraints and keep its rows, which wait in a temporary table.

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
    connection.execute(f"INSERT INTO {table} BY NAME FROM {kept}")
    connection.execute(f"DROP TABLE {kept}")
    for sql in indexes:
        connection.execute(sql)


def _escaped(name: str) -> str:
    return name.replace('"', '""')


MIGRATIONS: tuple[Callable[[duckdb.DuckDBPyConnection], None], ...] = (_add_status_vanished,)
"""The step from version 1 to 2, from 2 to 3, and so on."""

SCHEMA_VERSION = 1 + len(MIGRATIONS)
"""Version of `schema.sql`."""
