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
    # Draft tokens that the drafter proposed: `num_drafts`, less near the length limit.
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

_WALK_COUNTS: dict[str, Any] = {
    # Blocks of the walk that this drafting has of its own.
    "num_verification_steps": polars.Int64,
    "num_accepted_drafts": polars.Int64,
    "num_emitted_tokens": polars.Int64,
}
SWEEP_SCHEMA: dict[str, Any] = {
    "prompt_id": polars.String,
    "block_size": polars.Int64,
    # `prefix` of the longer block's draft, or `redrafted` with fewer slots.
    "method": polars.String,
    **_WALK_COUNTS,
}
TREES_SCHEMA: dict[str, Any] = {
    "prompt_id": polars.String,
    # Nodes of the tree, the anchor not counted.
    "budget": polars.Int64,
    **_WALK_COUNTS,
}
RECALL_SCHEMA: dict[str, Any] = {
    "prompt_id": polars.String,
    "draft_position": polars.Int64,
    "k": polars.Int64,
    # Blocks on the walk where this position could be judged, and those with the target's token among the k best.
    "num_blocks": polars.Int64,
    "num_recalled": polars.Int64,
    # The same of blocks whose earlier drafts were all accepted.
    "num_reached": polars.Int64,
    "num_reached_recalled": polars.Int64,
}
SAMPLED_SCHEMA: dict[str, Any] = {
    "prompt_id": polars.String,
    "temperature": polars.Float64,
    "rule": polars.String,
    "num_blocks": polars.Int64,
    "num_judged_drafts": polars.Int64,
    # Blocks with at least one judged draft.
    "num_with_drafts": polars.Int64,
    "sum_first_acceptance": polars.Float64,
    "sum_expected_accepted": polars.Float64,
    "sum_accepted_on_transcript": polars.Float64,
}
EXTRA_SCHEMAS: dict[str, dict[str, Any]] = {
    "sweep": SWEEP_SCHEMA,
    "recall": RECALL_SCHEMA,
    "trees": TREES_SCHEMA,
    "sampled": SAMPLED_SCHEMA,
}
"""Columns of one row per prompt and setting of each extra; results/README.md defines the numbers."""

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
class Extras:
    """More numbers from the pass that scored the blocks, per prompt; None where they were not asked for."""

    sweep: polars.DataFrame | None = None
    """Shorter blocks: rows of `SWEEP_SCHEMA`."""
    recall: polars.DataFrame | None = None
    """Recall at k: rows of `RECALL_SCHEMA`."""
    trees: polars.DataFrame | None = None
    """Draft trees: rows of `TREES_SCHEMA`."""
    sampled: polars.DataFrame | None = None
    """Expected acceptance at temperatures above 0: rows of `SAMPLED_SCHEMA`."""

    def frames(self) -> dict[str, polars.DataFrame]:
        """Return name to frame of those that there are."""
        return {name: frame for name in EXTRA_SCHEMAS if (frame := getattr(self, name)) is not None}


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
    """Slots of one draft pass, the anchor included."""
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
    num_drafts: int | None = None
    """Tokens that a whole block drafts; None is block size - 1, as for all rows but anchor-shifted ones."""
    extras: Extras = Extras()
    """More numbers of the same drafter, where they were asked for."""
