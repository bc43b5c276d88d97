"""What one evaluation hands to the results database: values, no connection, no SQL.

Every record is written by column name; a missing number is None (SQL NULL), never NaN or 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import polars

BLOCK_SCHEMA: dict[str, Any] = {
    "prompt_id": polars.String,
    # Place of the anchor in the response: 0 is the first token that the target wrote.
    "anchor_index": polars.Int64,
    # Place of this block in the serving walk of its prompt, from 0; NULL when serving skips it.
    "walk_step": polars.Int64,
    "is_on_walk": polars.Boolean,
    # Draft tokens that the drafter proposed: block size - 1, less near the length limit.
    "num_drafted": polars.Int64,
    # Of those, the ones that lie before the end of the transcript and can be judged.
    "num_available": polars.Int64,
    # Longest matching prefix, 0..num_available; the bonus token is not counted.
    "num_accepted_drafts": polars.Int64,
    # Tokens this verification step emits: accepted + bonus, cut at the end of the transcript.
    "num_emitted_tokens": polars.Int64,
    # The target's best two tokens are closer than the tie margin at a position that decided.
    "is_near_tie": polars.Boolean,
    # Rank (1 = best) that the drafter gave the target's token at the first miss; NULL without one.
    "miss_rank": polars.Int64,
}
"""Columns of one row per anchor, in order."""

NULLABLE_BLOCK_COLUMNS = frozenset({"walk_step", "is_near_tie", "miss_rank"})
"""Columns of `BLOCK_SCHEMA` that may be NULL; a target without margins leaves `is_near_tie` NULL."""

SPEC_COLUMNS = (
    "target_dtype",
    "thinking",
    "chat_template_digest",
    "verification_rule",
    "counting_rule",
    "row_alignment",
    "metrics_version",
    "extraction_version",
    "packages",
)
"""Keys of `EvaluationRecord.spec` that the table `evaluations` repeats as columns; absent is NULL."""

WITHOUT_NUMBERS = frozenset({"failed", "vanished"})
"""Values of `EvaluationRecord.status` that come with an error and without a number."""

ALL = "all"
"""Name of the slice of all prompts; no dataset and no group may be called so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRecord:
    """One saved drafter as it was found."""

    checkpoint_id: str
    """Digest of run, step and content: the same step with new bytes is a new checkpoint."""
    run: str
    step: int | None
    url: str
    layout: str | None
    """What kind of file or folder it is, for example `torch_zip`; None when it could not be read."""
    identity: str | None
    """Content identity read from the index, without the tensors' bytes; None when it could not be read."""
    weights_sha256: str | None
    """Digest of the drafter's own tensors once they were streamed."""
    bytes_total: int | None
    """Size of all files of the checkpoint; None when it could not be read."""
    bytes_wanted: int | None
    """Bytes of the drafter's own tensors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptRecord:
    """One prompt and the transcript that the target wrote for it."""

    prompt_id: str
    dataset: str
    group: str | None
    """A second way to slice the prompts, for example trained-on and held-out."""
    num_prompt_tokens: int
    num_response_tokens: int
    stop_reason: str
    """`stop` (a stop token ended it) or `length`."""
    prompt_text: str
    response_text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationRecord:
    """One scoring of one checkpoint: its conditions, its outcome and one row per block.

    One that came to no number (`WITHOUT_NUMBERS`) has an `error` of one line and no blocks.
    """

    evaluation_id: str
    """Digest of everything that decides the numbers."""
    checkpoint: CheckpointRecord
    status: str
    """`done`, `failed`, or `vanished`: the checkpoint was found, and gone before it was read whole."""
    error: str | None
    spec: dict[str, Any]
    """What decided the numbers: target, transcripts, template, thinking flag, dtype, rules, versions.

    JSON values only. The keys named in `SPEC_COLUMNS` become columns; `anchors` (`all` or `walk`)
    says which anchors were drafted from.
    """
    target: str
    """Name of the target as people know it."""
    block_size: int | None
    device: str | None
    dtype: str | None
    transcripts_digest: str | None
    started_at: datetime
    """With its time zone; stored as UTC."""
    seconds: dict[str, float]
    """Seconds per stage."""
    cached: dict[str, bool]
    """Per stage: was it answered from the store?"""
    bytes_read: int
    """Bytes that this evaluation read from the checkpoint's host; 0 when the store had them."""
    prompts: tuple[PromptRecord, ...] = ()
    blocks: polars.DataFrame | None = None
    """Rows of `BLOCK_SCHEMA`."""
