"""What there is to be scored, as far as it decides the drafter's memory: expected beforehand, or counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dflash_core.drafter.extra_choice import read_settings
from dflash_core.drafter.footprint import Workload
from dflash_core.target.cpu import ITEMSIZES
from dflash_core.target.rendering import Rendering
from dflash_core.target.transcripts import Transcript

_TEMPLATE_TOKENS = 64
"""Tokens that a chat template adds to one more turn, at most."""


def expected_workload(
    rendering: Rendering,
    transcripts: Mapping[str, Any],
    *,
    block_size: int,
    extras: Mapping[str, Any],
    has_own_head: bool,
    store_dtype: str,
) -> Workload:
    """Return an upper bound of what is scored, without reading the transcripts.

    A response ends at `max_new_tokens`. A later turn of a conversation holds the turns before it and their answers;
    its text has no more tokens than bytes.

    Args:
        rendering: the prompts as token ids, and the turns that follow.
        transcripts: meta of their artifact.
        block_size: slots of a block.
        extras: `extras` of the evaluation's spec.
        has_own_head: may the drafter have a head of its own?
        store_dtype: of the hidden states.
    """
    limit = int(transcripts["max_new_tokens"])
    lengths = {prompt.id: len(prompt.prompt_ids) + limit for prompt in rendering.prompts}
    for turn in rendering.later:
        if turn.prompt_ids is not None:
            lengths[turn.id] = len(turn.prompt_ids) + limit
            continue
        text = sum(len(content.encode()) + _TEMPLATE_TOKENS for _, content in turn.messages)
        lengths[turn.id] = lengths.get(turn.follows or "", 0) + text + limit
    num_tokens = int(transcripts["num_tokens"])
    return _workload(
        block_size,
        extras,
        longest_tokens=min(max(lengths.values(), default=0), num_tokens),
        num_tokens=num_tokens,
        num_transcripts=int(transcripts["num_transcripts"]),
        most_anchors=max(limit - 1, 0),
        has_own_head=has_own_head,
        store_dtype=store_dtype,
    )


def counted_workload(
    transcripts: Sequence[Transcript],
    *,
    block_size: int,
    extras: Mapping[str, Any],
    has_own_head: bool,
    store_dtype: str,
) -> Workload:
    """Return what is scored, of the transcripts themselves; other arguments as for `expected_workload`."""
    return _workload(
        block_size,
        extras,
        longest_tokens=max((transcript.num_tokens for transcript in transcripts), default=0),
        num_tokens=sum(transcript.num_tokens for transcript in transcripts),
        num_transcripts=len(transcripts),
        most_anchors=max((len(transcript.response_ids) - 1 for transcript in transcripts), default=0),
        has_own_head=has_own_head,
        store_dtype=store_dtype,
    )


def _workload(
    block_size: int,
    extras: Mapping[str, Any],
    *,
    longest_tokens: int,
    num_tokens: int,
    num_transcripts: int,
    most_anchors: int,
    has_own_head: bool,
    store_dtype: str,
) -> Workload:
    settings = read_settings(extras)
    return Workload(
        block_size=block_size,
        longest_tokens=longest_tokens,
        num_tokens=num_tokens,
        num_transcripts=num_transcripts,
        most_anchors=max(most_anchors, 0),
        extras=settings,
        is_target_head_held=bool(settings.temperatures) and has_own_head,
        stored_itemsize=ITEMSIZES[store_dtype],
    )
