"""Reading the results database with SQL that a person typed.

The connection can do nothing but read this one file: it is opened read-only, other files, the
network and extensions are switched off, Python variables are out of sight, nothing is swapped to disk, and
the settings are locked.
"""

from __future__ import annotations

from typing import Any

import duckdb
import polars

from dflash_core.errors import QueryError
from dflash_core.results.connection import DEFAULT_WAIT_S, PathLike, age_note, first_line, reading

LOCK_STATEMENTS = (
    # What does not fit into memory is an error: DuckDB would write it into a folder beside the database.
    "SET temp_directory = ''",
    "SET python_enable_replacements = false",
    "SET enable_external_access = false",
    "SET lock_configuration = true",
)
READING_STATEMENTS = frozenset({"SELECT", "EXPLAIN", "PRAGMA"})
"""Kinds of statement that may run; SHOW, DESCRIBE, SUMMARIZE and FROM ... are SELECT to DuckDB."""

# Types that polars reads out of DuckDB's Arrow stream as what they are; any other comes as text.
# (An INTERVAL makes polars 2.1 panic; a VARIANT or a BIGNUM would arrive as raw bytes.)
_PLAIN_TYPES = frozenset(
    (
        *("boolean", "tinyint", "smallint", "integer", "bigint", "hugeint"),
        *("utinyint", "usmallint", "uinteger", "ubigint", "uhugeint"),
        *("float", "double", "decimal", "varchar", "blob", "uuid", "enum", "null"),
        *("date", "time", "timestamp", "timestamp_s", "timestamp_ms", "timestamp_ns", "timestamp with time zone"),
    )
)
_NESTED_TYPES = frozenset({"list", "array", "struct", "map"})


def run_query(path: PathLike, sql: str, *, wait_s: float = DEFAULT_WAIT_S) -> polars.DataFrame:
    """Return the rows of one reading statement.

    Sums of integers, which DuckDB makes 128 bits wide, come as 64-bit integers where they fit.

    Args:
        path: of the database.
        sql: one statement.
        wait_s: how long to wait, in seconds, while another process writes.

    Raises:
        QueryError: the statement does not run, is not a read, or is more than one.
        NoResults: there is no database yet.
        ResultsError: the database cannot be read.
    """
    with reading(path, wait_s=wait_s) as connection:
        for statement in LOCK_STATEMENTS:
            connection.execute(statement)
        try:
            return _read(connection, sql)
        except (duckdb.CatalogException, duckdb.BinderException) as error:
            raise QueryError(f"the query does not run: {first_line(error)}{age_note(connection)}") from error
        except duckdb.Error as error:
            raise QueryError(f"the query does not run: {first_line(error)}") from error


def _read(connection: duckdb.DuckDBPyConnection, sql: str) -> polars.DataFrame:
    statements = connection.extract_statements(sql)
    if len(statements) != 1:
        raise QueryError(f"expected one SQL statement, got {len(statements)}")
    kind = statements[0].type.name
    if kind not in READING_STATEMENTS:
        raise QueryError(f"a query may only read: expected a SELECT, got a statement of kind {kind}")
    relation = connection.sql(sql)
    names = relation.columns
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise QueryError(f"two columns of the result are called {twice[0]!r}: rename one with AS")
    columns = [_column(name, kind) for name, kind in zip(names, relation.types, strict=True)]
    frame = polars.DataFrame(relation.project(", ".join(columns)))
    return frame.with_columns(
        _narrowed(frame[name]) for name, kind in zip(names, relation.types, strict=True) if kind.id.endswith("hugeint")
    )


def _column(name: str, column_type: Any) -> str:
    """Return the SQL that reads one column of the result, as text where polars cannot take its type."""
    quoted = '"' + name.replace('"', '""') + '"'
    return quoted if _is_readable(column_type) else f"CAST({quoted} AS VARCHAR) AS {quoted}"


def _is_readable(column_type: Any) -> bool:
    if column_type.id in _NESTED_TYPES:
        return all(_is_readable(child) for name, child in column_type.children if name != "size")
    return column_type.id in _PLAIN_TYPES


def _narrowed(column: polars.Series) -> polars.Series:
    narrow = column.cast(polars.Int64, strict=False)
    return narrow if narrow.null_count() == column.null_count() else column.cast(polars.Int128)
