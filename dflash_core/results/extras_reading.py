"""The extra numbers of one evaluation as plain data, as `dflash-eval evaluate --json` prints them.

    extra ── datasets ── `all`, or a dataset's name ── rows such as {"budget": 16, "tau_pooled": 4.5, ...}
         └── groups ──── a group's name ────────────── the same

A row has the columns of the extra's table, without those that say where it belongs.
"""

from __future__ import annotations

from typing import Any

import duckdb

from dflash_core.results.records import EXTRA_SCHEMAS

_ORDER = {
    "sweep": "block_size",
    "recall": "draft_position, k",
    "trees": "budget",
    "sampled": "temperature, rule",
}


def read_extras(connection: duckdb.DuckDBPyConnection, evaluation_id: str) -> dict[str, Any]:
    """Return name of the extra to `datasets` and `groups`, name of the slice to its rows; empty where there is none.

    Files of schema versions below 3 have no such tables, and so no such numbers.
    """
    tables = {name for (name,) in connection.execute("SELECT table_name FROM duckdb_tables()").fetchall()}
    found = {name: _read(connection, name, evaluation_id) for name in EXTRA_SCHEMAS if name in tables}
    return {name: slices for name, slices in found.items() if slices["datasets"]}


def _read(connection: duckdb.DuckDBPyConnection, name: str, evaluation_id: str) -> dict[str, Any]:
    cursor = connection.execute(
        f"SELECT * EXCLUDE (evaluation_id) FROM {name} WHERE evaluation_id = ? ORDER BY slice, dataset, {_ORDER[name]}",
        [evaluation_id],
    )
    columns = [column[0] for column in cursor.description or []]
    slices: dict[str, Any] = {"datasets": {}, "groups": {}}
    for values in cursor.fetchall():
        row = dict(zip(columns, values, strict=True))
        kind, place = row.pop("slice"), row.pop("dataset")
        slices["groups" if kind == "group" else "datasets"].setdefault(place, []).append(row)
    return slices
