"""Writing evaluations into the results database and reading them back.

One evaluation is one transaction that replaces all its rows; rows go in by column name.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import duckdb
import polars
import polars.selectors

from dflash_core.errors import NoResults, ResultsError
from dflash_core.results.aggregate import ACCEPTANCE_SCHEMA, aggregate
from dflash_core.results.aggregate_extras import aggregate_extra
from dflash_core.results.checks import check_finite, check_record, json_text, num_drafts
from dflash_core.results.connection import DEFAULT_WAIT_S, PathLike, reading, writing
from dflash_core.results.extras_reading import read_extras
from dflash_core.results.records import EXTRA_SCHEMAS, SPEC_COLUMNS, WITHOUT_NUMBERS, EvaluationRecord

# On a second look at one checkpoint, what is known now wins and what is unknown now is kept.
_ADD_CHECKPOINT = """
    INSERT INTO checkpoints BY NAME SELECT * FROM incoming
    ON CONFLICT (checkpoint_id) DO UPDATE SET
        run = excluded.run, step = excluded.step, url = excluded.url,
        layout = coalesce(excluded.layout, layout), identity = coalesce(excluded.identity, identity),
        weights_sha256 = coalesce(excluded.weights_sha256, weights_sha256),
        bytes_total = coalesce(CAST(excluded.bytes_total AS BIGINT), bytes_total),
        bytes_wanted = coalesce(CAST(excluded.bytes_wanted AS BIGINT), bytes_wanted)
"""
_ADD = {
    "checkpoints": _ADD_CHECKPOINT,
    "evaluations": "INSERT INTO evaluations BY NAME SELECT * FROM incoming",
    "prompts": "INSERT OR REPLACE INTO prompts BY NAME SELECT * FROM incoming",
    "blocks": "INSERT INTO blocks BY NAME SELECT * FROM incoming",
    "acceptance": "INSERT INTO acceptance BY NAME SELECT * FROM incoming",
    "survival": "INSERT INTO survival BY NAME SELECT * FROM incoming",
    "hosts": "INSERT OR REPLACE INTO hosts BY NAME SELECT * FROM incoming",
} | {name: f"INSERT INTO {name} BY NAME SELECT * FROM incoming" for name in EXTRA_SCHEMAS}
_TABLES_OF_ONE_EVALUATION = (*EXTRA_SCHEMAS, "survival", "acceptance", "blocks", "evaluations")

_EVALUATION = """
    SELECT
        url AS checkpoint, run, step, status, error, evaluation_id, block_size, bytes_read, bytes_total, bytes_wanted,
        cached, seconds, total_seconds, device, dtype, target, target_dtype, thinking, transcripts_digest,
        verification_rule, counting_rule, row_alignment, metrics_version, spec, started_at
    FROM evaluations JOIN checkpoints USING (checkpoint_id)
    WHERE evaluation_id = ?
"""
_JSON_COLUMNS = ("cached", "seconds", "spec")
_SURVIVAL = """
    SELECT slice, dataset, list(survival ORDER BY draft_position)
    FROM survival WHERE evaluation_id = ? GROUP BY ALL
"""
_WALKS = """
    SELECT prompt_id, list(num_emitted_tokens ORDER BY walk_step)
    FROM blocks WHERE evaluation_id = ? AND is_on_walk GROUP BY prompt_id ORDER BY prompt_id
"""


class _ArrowStream:
    """A polars frame seen as nothing but an Arrow stream; DuckDB asks pyarrow for the frame itself."""

    def __init__(self, frame: polars.DataFrame) -> None:
        self._frame = frame

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self._frame.__arrow_c_stream__(requested_schema)


def write_evaluation(path: PathLike, record: EvaluationRecord, *, wait_s: float = DEFAULT_WAIT_S) -> None:
    """Store one evaluation, in place of all rows of the same `evaluation_id`.

    One that failed, or whose checkpoint vanished, stores its checkpoint and its error; it never
    replaces one that is done, because the numbers of that one still hold.

    Args:
        path: of the database; it and its folder are made when missing.
        record: what was measured.
        wait_s: how long to wait, in seconds, while another process holds the database.

    Raises:
        ResultsError: the record contradicts itself, or the database cannot be written.
    """
    check_record(record)
    tables = _rows(record)
    for name, rows in tables.items():
        check_finite(name, rows)
    with writing(path, wait_s=wait_s) as connection:
        if record.status in WITHOUT_NUMBERS and _is_done(connection, record.evaluation_id):
            return
        for name in _TABLES_OF_ONE_EVALUATION:
            connection.execute(f"DELETE FROM {name} WHERE evaluation_id = ?", [record.evaluation_id])
        _insert(connection, tables)


def write_hosts(path: PathLike, rows: Iterable[Mapping[str, Any]], *, wait_s: float = DEFAULT_WAIT_S) -> None:
    """Store what `probe` found, in place of the previous row of each host of the same name.

    Args:
        path: of the database; it and its folder are made when missing.
        rows: mappings with `name`, `url`, `status`, `problem` (or None), `probed_at` (a datetime
            with its time zone) and `facts` (anything JSON can say, or None). Passwords in a URL
            are dropped.
        wait_s: how long to wait, in seconds, while another process holds the database.
    """
    hosts = [
        {
            "name": row["name"],
            "url": _without_secrets(row["url"]),
            "status": row["status"],
            "problem": row.get("problem"),
            "probed_at": _utc(row["probed_at"]),
            "facts": None if row.get("facts") is None else json_text(row["facts"], f"facts of host {row['name']!r}"),
        }
        for row in rows
    ]
    if hosts:
        with writing(path, wait_s=wait_s) as connection:
            _insert(connection, {"hosts": _frame(hosts)})


def has_evaluation(
    path: PathLike,
    evaluation_id: str,
    *,
    extras: Mapping[str, Any] | None = None,
    wait_s: float = DEFAULT_WAIT_S,
) -> bool:
    """Tell whether an evaluation is stored and done; False also where there is no database.

    Args:
        path: of the database.
        evaluation_id: in full.
        extras: `extras` of the spec, where more numbers are wanted: it must have been stored with the same.
        wait_s: how long to wait, in seconds, while another process writes.
    """
    try:
        with reading(path, wait_s=wait_s) as connection:
            if not _is_done(connection, evaluation_id):
                return False
            if not extras:
                return True
            statement = "SELECT spec FROM evaluations WHERE evaluation_id = ?"
            row = connection.execute(statement, [evaluation_id]).fetchone()
    except NoResults:
        return False
    stored = json.loads(row[0]).get("extras") if row is not None else None
    return bool(json_text(stored, "extras") == json_text(extras, "extras"))


def read_evaluation(
    path: PathLike, evaluation_id: str, *, blocks: bool = False, wait_s: float = DEFAULT_WAIT_S
) -> dict[str, Any] | None:
    """Return one evaluation as the JSON object of `dflash-eval evaluate`, or None if it is unknown.

    Args:
        path: of the database.
        evaluation_id: in full.
        blocks: add `walks`: prompt id to the list of tokens emitted per verification step.
        wait_s: how long to wait, in seconds, while another process writes.

    Returns:
        `extras` is in it only where such numbers were asked for; see `extras_reading`.
    """
    try:
        with reading(path, wait_s=wait_s) as connection:
            found = _as_dicts(connection.execute(_EVALUATION, [evaluation_id]))
            if not found:
                return None
            acceptance = _as_dicts(connection.execute("FROM acceptance WHERE evaluation_id = ?", [evaluation_id]))
            survival = connection.execute(_SURVIVAL, [evaluation_id]).fetchall()
            walks = connection.execute(_WALKS, [evaluation_id]).fetchall() if blocks else []
            extras = read_extras(connection, evaluation_id)
    except NoResults:
        return None
    evaluation = found[0]
    for name in _JSON_COLUMNS:
        evaluation[name] = json.loads(evaluation[name])
    evaluation["warnings"] = evaluation["spec"].get("warnings", [])
    evaluation["started_at"] = evaluation["started_at"].replace(tzinfo=UTC).isoformat()
    slices = _slices(acceptance, {(kind, name): values for kind, name, values in survival})
    evaluation["datasets"] = slices["all"] | slices["dataset"]
    evaluation["groups"] = slices["group"]
    if extras:
        evaluation["extras"] = extras
    if blocks:
        evaluation["walks"] = dict(walks)
    return evaluation


def _is_done(connection: duckdb.DuckDBPyConnection, evaluation_id: str) -> bool:
    statement = "SELECT count(*) FROM evaluations WHERE evaluation_id = ? AND status = 'done'"
    row = connection.execute(statement, [evaluation_id]).fetchone()
    return row is not None and row[0] == 1


def _insert(connection: duckdb.DuckDBPyConnection, tables: Mapping[str, polars.DataFrame]) -> None:
    for name, rows in tables.items():
        if rows.height:
            connection.register("incoming", _ArrowStream(rows))
            connection.execute(_ADD[name])
            connection.unregister("incoming")


def _rows(record: EvaluationRecord) -> dict[str, polars.DataFrame]:
    """Return the rows of one evaluation per table, in the order in which they are written."""
    key = polars.lit(record.evaluation_id).alias("evaluation_id")
    tables = {"checkpoints": _frame([_checkpoint_row(record)]), "evaluations": _frame([_evaluation_row(record)])}
    if record.blocks is None or record.block_size is None:
        return tables
    has_all_anchors = record.spec.get("anchors") == "all" or not record.blocks["is_on_walk"].all()
    most = num_drafts(record, record.block_size)
    aggregates = aggregate(record.blocks, record.prompts, num_drafts=most, has_all_anchors=has_all_anchors)
    extras = {
        name: aggregate_extra(name, frame, record.prompts).with_columns(key)
        for name, frame in record.extras.frames().items()
    }
    return tables | {
        "prompts": _frame(_prompt_rows(record)),
        "blocks": record.blocks.with_columns(key),
        "acceptance": aggregates.acceptance.with_columns(key),
        "survival": aggregates.survival.with_columns(key),
        **extras,
    }


def _frame(rows: list[dict[str, Any]]) -> polars.DataFrame:
    """Return rows as a frame; a column of nothing but None is text, since DuckDB reads no Arrow column of type null."""
    frame = polars.DataFrame(rows, infer_schema_length=None)
    return frame.with_columns(polars.selectors.by_dtype(polars.Null).cast(polars.String))


def _checkpoint_row(record: EvaluationRecord) -> dict[str, Any]:
    checkpoint = record.checkpoint
    return {
        "checkpoint_id": checkpoint.checkpoint_id,
        "run": checkpoint.run,
        "step": checkpoint.step,
        "url": _without_secrets(checkpoint.url),
        "layout": checkpoint.layout,
        "identity": checkpoint.identity,
        "weights_sha256": checkpoint.weights_sha256,
        "bytes_total": checkpoint.bytes_total,
        "bytes_wanted": checkpoint.bytes_wanted,
    }


def _evaluation_row(record: EvaluationRecord) -> dict[str, Any]:
    what = f"evaluation {record.evaluation_id[:12]!r}"
    conditions = {name: _condition(name, record.spec.get(name)) for name in SPEC_COLUMNS}
    return conditions | {
        "evaluation_id": record.evaluation_id,
        "checkpoint_id": record.checkpoint.checkpoint_id,
        "status": record.status,
        "error": record.error,
        "target": record.target,
        "block_size": record.block_size,
        "num_drafts": num_drafts(record, record.block_size) if record.status == "done" and record.block_size else None,
        "device": record.device,
        "dtype": record.dtype,
        "transcripts_digest": record.transcripts_digest,
        "spec": json_text(record.spec, f"spec of {what}"),
        "started_at": _utc(record.started_at),
        "seconds": json_text(record.seconds, f"seconds of {what}"),
        "total_seconds": float(sum(record.seconds.values())),
        "bytes_read": record.bytes_read,
        "cached": json_text(record.cached, f"cached of {what}"),
    }


def _condition(name: str, value: Any) -> Any:
    """Return a value of the spec as its column holds it: a flag, JSON, or text."""
    if value is None or name == "thinking":
        return value
    return json_text(value, name) if name == "packages" else str(value)


def _prompt_rows(record: EvaluationRecord) -> list[dict[str, Any]]:
    return [
        {
            "transcripts_digest": record.transcripts_digest,
            "prompt_id": prompt.prompt_id,
            "dataset": prompt.dataset,
            "prompt_group": prompt.group,
            "num_prompt_tokens": prompt.num_prompt_tokens,
            "num_response_tokens": prompt.num_response_tokens,
            "stop_reason": prompt.stop_reason,
            "prompt_text": prompt.prompt_text,
            "response_text": prompt.response_text,
        }
        for prompt in record.prompts
    ]


def _slices(
    acceptance: list[dict[str, Any]], survival: Mapping[tuple[str, str], list[float | None]]
) -> dict[str, dict[str, Any]]:
    """Return slice kind to name to the numbers of that slice."""
    kinds: dict[str, dict[str, Any]] = defaultdict(dict)
    for row in acceptance:
        # A file of an older version lacks columns, which is the same as not measured.
        numbers = {name: row.get(name) for name in ACCEPTANCE_SCHEMA if name not in ("slice", "dataset")}
        numbers["survival"] = survival.get((row["slice"], row["dataset"]), [])
        kinds[row["slice"]][row["dataset"]] = numbers
    return kinds


def _as_dicts(cursor: duckdb.DuckDBPyConnection) -> list[dict[str, Any]]:
    names = [column[0] for column in cursor.description or []]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def _utc(moment: datetime) -> datetime:
    """Return a time as the database holds it: UTC, without a zone.

    Raises:
        ResultsError: it has no time zone, so that nobody could say when it was.
    """
    if moment.tzinfo is None:
        raise ResultsError(f"the time {moment.isoformat()} has no time zone and was not stored")
    return moment.astimezone(UTC).replace(tzinfo=None)


def _without_secrets(url: str) -> str:
    """Return a URL without its password and, for http, without its query, which may be a signature."""
    if "://" not in url:
        return url
    parts = urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    query = "" if parts.scheme in ("http", "https") else parts.query
    return urlunsplit(parts._replace(netloc=user.partition(":")[0] + at + host, query=query))
