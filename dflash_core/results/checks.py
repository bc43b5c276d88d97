"""What must hold of a record before it may enter the database: values only, no connection.

The tables repeat the ranges as CHECK constraints, for rows that others write.
"""

from __future__ import annotations

import json
from typing import Any

import polars

from dflash_core.errors import ResultsError
from dflash_core.results.records import (
    ALL,
    BLOCK_SCHEMA,
    EXTRA_SCHEMAS,
    NULLABLE_BLOCK_COLUMNS,
    WITHOUT_NUMBERS,
    EvaluationRecord,
)


def check_record(record: EvaluationRecord) -> None:
    """Refuse an evaluation that contradicts itself.

    Raises:
        ResultsError: it names the evaluation and what is wrong with it.
    """
    if record.started_at.tzinfo is None:
        raise _refused(record, f"started_at {record.started_at.isoformat()} has no time zone")
    if record.status in WITHOUT_NUMBERS:
        if not record.error or record.blocks is not None or record.extras.frames():
            raise _refused(record, f"an evaluation that is {record.status!r} has an error, no blocks and no extras")
        return
    if record.status != "done" or record.error is not None:
        raise _refused(record, f"status must be 'done' without an error, 'failed' or 'vanished', got {record.status!r}")
    if record.blocks is None or record.block_size is None or record.transcripts_digest is None:
        raise _refused(record, "a done evaluation has blocks, a block size and a transcripts digest")
    _check_prompts(record)
    _check_blocks(record, record.blocks, num_drafts(record, record.block_size))
    for name, frame in record.extras.frames().items():
        _check_extra(record, name, frame)


def num_drafts(record: EvaluationRecord, block_size: int) -> int:
    """Return how many tokens a whole block of a done evaluation drafts."""
    return block_size - 1 if record.num_drafts is None else record.num_drafts


def check_finite(table: str, rows: polars.DataFrame) -> None:
    """Refuse NaN and infinity in any column of numbers.

    Raises:
        ResultsError: it names the table and the column.
    """
    for name, dtype in rows.schema.items():
        if dtype.is_float() and not rows[name].drop_nulls().is_finite().all():
            raise ResultsError(f"a NaN or an infinity in {table}.{name}: a number that was not measured must be NULL")


def json_text(value: Any, what: str) -> str:
    """Return a value as JSON text with sorted keys.

    Raises:
        ResultsError: it holds NaN, an infinity or something that JSON cannot say.
    """
    try:
        return json.dumps(value, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ResultsError(f"{what} cannot be stored as JSON: {error}") from error


def _refused(record: EvaluationRecord, problem: str) -> ResultsError:
    return ResultsError(
        f"evaluation {record.evaluation_id[:12]!r} of {record.checkpoint.url!r} was not stored: {problem}"
    )


def _check_prompts(record: EvaluationRecord) -> None:
    ids = [prompt.prompt_id for prompt in record.prompts]
    if len(set(ids)) != len(ids):
        raise _refused(record, "two prompts share one id")
    if any(ALL in (prompt.dataset, prompt.group) for prompt in record.prompts):
        raise _refused(record, f"a dataset or group is called {ALL!r}, which is the name of all prompts together")


def _check_blocks(record: EvaluationRecord, blocks: polars.DataFrame, most: int) -> None:
    if dict(blocks.schema) != BLOCK_SCHEMA:
        raise _refused(record, f"blocks must have the columns {BLOCK_SCHEMA}, got {dict(blocks.schema)}")
    for name in set(BLOCK_SCHEMA) - NULLABLE_BLOCK_COLUMNS:
        if blocks[name].null_count():
            raise _refused(record, f"blocks.{name} holds a NULL")
    unknown = set(blocks["prompt_id"].unique()) - {prompt.prompt_id for prompt in record.prompts}
    if unknown:
        raise _refused(record, f"blocks of prompts that the record lacks: {sorted(unknown)[:3]}")
    if blocks.select("prompt_id", "anchor_index").is_duplicated().any():
        raise _refused(record, "two blocks share one prompt and anchor")
    drafted, available = polars.col("num_drafted"), polars.col("num_available")
    accepted, emitted = polars.col("num_accepted_drafts"), polars.col("num_emitted_tokens")
    rules = {
        "anchor_index >= 0": polars.col("anchor_index") >= 0,
        f"0 <= num_accepted_drafts <= num_available <= num_drafted <= {most}": (
            (accepted >= 0) & (accepted <= available) & (available <= drafted) & (drafted <= most)
        ),
        "1 <= num_emitted_tokens <= num_accepted_drafts + 1": (emitted >= 1) & (emitted <= accepted + 1),
        "miss_rank >= 1": polars.col("miss_rank").fill_null(1) >= 1,
        "walk_step exactly on the walk": polars.col("is_on_walk") == polars.col("walk_step").is_not_null(),
    }
    for rule, holds in rules.items():
        broken = blocks.filter(~holds)
        if broken.height:
            raise _refused(record, f"the rule {rule} does not hold for {broken.row(0, named=True)}")
    _check_walks(record, blocks)


def _check_walks(record: EvaluationRecord, blocks: polars.DataFrame) -> None:
    """Each prompt's walk counts 0, 1, 2, ... and each step starts where the one before ended."""
    walk = blocks.filter("is_on_walk").sort("prompt_id", "walk_step")
    previous_end = (polars.col("anchor_index") + polars.col("num_emitted_tokens")).shift(1).over("prompt_id")
    broken = walk.filter(
        (polars.col("walk_step") != polars.int_range(polars.len()).over("prompt_id"))
        | (polars.col("anchor_index") != previous_end.fill_null(0))
    )
    if broken.height:
        raise _refused(record, f"the walk has a gap or an overlap before {broken.row(0, named=True)}")


def _check_extra(record: EvaluationRecord, name: str, frame: polars.DataFrame) -> None:
    """Refuse an extra of other columns, of unknown prompts, twice the same setting, or counts that contradict."""
    schema = EXTRA_SCHEMAS[name]
    if dict(frame.schema) != schema:
        raise _refused(record, f"{name} must have the columns {schema}, got {dict(frame.schema)}")
    if sum(frame.null_count().row(0)):
        raise _refused(record, f"{name} holds a NULL")
    unknown = set(frame["prompt_id"].unique()) - {prompt.prompt_id for prompt in record.prompts}
    if unknown:
        raise _refused(record, f"{name} of prompts that the record lacks: {sorted(unknown)[:3]}")
    if frame.select(KEYS_OF_EXTRAS[name]).is_duplicated().any():
        raise _refused(record, f"{name} holds two rows for one prompt and setting")
    broken = frame.filter(~_COUNTS_HOLD[name])
    if broken.height:
        raise _refused(record, f"the counts of {name} contradict one another: {broken.row(0, named=True)}")


KEYS_OF_EXTRAS = {
    "sweep": ["prompt_id", "block_size"],
    "recall": ["prompt_id", "draft_position", "k"],
    "trees": ["prompt_id", "budget"],
    "sampled": ["prompt_id", "temperature", "rule"],
}
"""What tells two rows of an extra apart."""
_STEPS, _ACCEPTED, _EMITTED = (
    polars.col(name) for name in ("num_verification_steps", "num_accepted_drafts", "num_emitted_tokens")
)
# Only the last block of a walk may be cut, by its bonus token.
_IS_WALK = (_STEPS <= _EMITTED) & (_EMITTED <= _ACCEPTED + _STEPS) & (_ACCEPTED + _STEPS <= _EMITTED + 1)
_COUNTS_HOLD = {
    "sweep": _IS_WALK,
    "trees": _IS_WALK,
    "recall": (
        polars.max_horizontal("num_recalled", "num_reached").le(polars.col("num_blocks"))
        & polars.col("num_reached_recalled").le(polars.min_horizontal("num_recalled", "num_reached"))
    ),
    "sampled": (
        polars.col("num_with_drafts").le(polars.min_horizontal("num_blocks", "num_judged_drafts"))
        & polars.col("sum_first_acceptance").is_between(0, polars.col("num_with_drafts") + 1e-6)
        & polars.col("sum_accepted_on_transcript").ge(polars.col("sum_first_acceptance") - 1e-6)
        & polars.col("sum_expected_accepted").ge(polars.col("sum_accepted_on_transcript") - 1e-6)
        & polars.col("sum_expected_accepted").le(polars.col("num_judged_drafts") + 1e-6)
    ),
}
