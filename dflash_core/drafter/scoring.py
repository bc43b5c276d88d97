"""Scoring a drafter on transcripts: which blocks it would draft and how far each is accepted.

Two modes give the same walk: `walk` drafts only at the anchors that serving visits, one per transcript
and step, batched over transcripts; `all` drafts at every anchor and reads the walk off the table.

A pass costs its fixed price (weights are read once), so that few blocks cost as much as some dozens. Hence a
bet, which changes no result: the walk drafts ahead while the drafter is weak (the next anchor then lies
close), dropping what it did not come by. `judging` makes another on the head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from dflash_core import progress
from dflash_core.acceptance import walk
from dflash_core.drafter.extra_metrics import ExtraMetrics
from dflash_core.drafter.extra_scoring import Group, observe_group
from dflash_core.drafter.footprint import USUAL, Slicing
from dflash_core.drafter.head import Head
from dflash_core.drafter.judging import Blocks, Judgement, judge_blocks
from dflash_core.drafter.model import Anchors, Drafter, LayerContext
from dflash_core.drafter.slices import Slices, halved
from dflash_core.target.agreement import TIE_MARGIN
from dflash_core.target.transcripts import Transcript

STAGE = "run_drafter"
_FREE_BLOCKS = 24
"""Blocks whose work is worth one more pass: drafter and head read their weights once a pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockRule:
    """How blocks are laid out under one limit: see `acceptance.walk`."""

    block_size: int
    max_new_tokens: int
    row_alignment: walk.RowAlignment

    @property
    def num_drafts(self) -> int:
        """Return P, the drafts of a whole block."""
        return walk.num_drafts(self.block_size, self.row_alignment)

    def num_drafted(self, index: int) -> int:
        """Return the drafts at a response index."""
        return walk.num_drafted(
            index,
            block_size=self.block_size,
            max_new_tokens=self.max_new_tokens,
            row_alignment=self.row_alignment,
        )

    def num_slots(self, index: int) -> int:
        """Return the slots of the block at a response index."""
        return walk.num_slots(
            index,
            block_size=self.block_size,
            max_new_tokens=self.max_new_tokens,
            row_alignment=self.row_alignment,
        )

    def anchors(self, transcript: Transcript, indices: Sequence[int]) -> Anchors:
        """Return the anchors of a transcript at some response indices."""
        index_A = torch.tensor(indices, dtype=torch.long)
        return Anchors(
            position_A=index_A + len(transcript.prompt_ids),
            token_A=torch.tensor([transcript.response_ids[index] for index in indices], dtype=torch.long),
            num_slots_A=torch.tensor([self.num_slots(index) for index in indices], dtype=torch.long),
        )

    def drafting_rows(self, hidden_AKD: Tensor) -> Tensor:
        """Return hidden_APD, the rows that draft: row p - 1 drafts position p."""
        first = walk.first_row(self.row_alignment)
        return hidden_AKD[:, first : first + self.num_drafts]


class _Track:
    """One transcript being scored: its context, its response and the blocks judged so far."""

    def __init__(self, transcript: Transcript, context: list[LayerContext], rule: BlockRule) -> None:
        self.transcript = transcript
        self.context = context
        self.response_R = torch.tensor(transcript.response_ids)
        self.num_response = len(transcript.response_ids)
        self.rule = rule
        self.rows: dict[int, dict[str, int]] = {}
        self.place = 0
        """The next anchor of the walk."""

    @property
    def prompt_id(self) -> str:
        return self.transcript.id

    def walk_anchors(self) -> list[int]:
        """Return the response indices of the walk, whose blocks were all judged."""
        table = [
            self.rows[index]["num_emitted_tokens"] if index in self.rows else 1
            for index in range(self.num_response - 1)
        ]
        return walk.serving_walk(table)

    def next_anchors(self, count: int) -> list[int]:
        """Return the next anchor of the walk and those right after it, as far as there is something to predict."""
        return list(range(self.place, min(self.place + count, self.num_response - 1)))

    def walk_on(self, judged: Sequence[int]) -> None:
        """Follow the walk over judged anchors, ascending, and drop those that it does not visit."""
        for index in judged:
            if index == self.place:
                self.place += self.rows[index]["num_emitted_tokens"]
            else:
                del self.rows[index]

    def anchors(self, indices: Sequence[int]) -> Anchors:
        return self.rule.anchors(self.transcript, indices)

    def references(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return reference_AP (padded with 0) and available_A."""
        available = [walk.num_available(index, self.num_response, self.rule.num_drafted(index)) for index in indices]
        reference_AP = torch.zeros(len(indices), self.rule.num_drafts, dtype=torch.long)
        for row, (index, count) in enumerate(zip(indices, available, strict=True)):
            reference_AP[row, :count] = self.response_R[index + 1 : index + 1 + count]
        return reference_AP, torch.tensor(available, dtype=torch.long)

    def note(self, indices: Sequence[int], judgement: Judgement) -> None:
        for index, accepted, rank in zip(
            indices, judgement.accepted_A.tolist(), judgement.miss_rank_A.tolist(), strict=True
        ):
            drafted = self.rule.num_drafted(index)
            self.rows[index] = {
                "num_drafted": drafted,
                "num_available": walk.num_available(index, self.num_response, drafted),
                "num_accepted_drafts": accepted,
                "num_emitted_tokens": walk.num_emitted(index, self.num_response, accepted),
                "miss_rank": rank,
            }

    def block_rows(self, margins_T: Tensor) -> Iterator[dict[str, Any]]:
        """Yield one row per anchor in the columns of `results.records.BLOCK_SCHEMA`."""
        step_of = {anchor: step for step, anchor in enumerate(self.walk_anchors())}
        first = len(self.transcript.prompt_ids)
        for index, row in sorted(self.rows.items()):
            # The target's choices at anchor .. anchor + accepted decide: those accepted and the one missed.
            deciding = margins_T[first + index : first + index + row["num_emitted_tokens"]]
            yield {
                "prompt_id": self.transcript.id,
                "anchor_index": index,
                "walk_step": step_of.get(index),
                "is_on_walk": index in step_of,
                **row,
                "is_near_tie": bool((deciding < TIE_MARGIN).any()),
                "miss_rank": row["miss_rank"] or None,
            }


@torch.inference_mode()
def score_transcripts(
    drafter: Drafter,
    head: Head,
    transcripts: Sequence[Transcript],
    features_of: Callable[[int], Tensor],
    margins_T: Tensor,
    *,
    block_size: int,
    max_new_tokens: int,
    anchors: str,
    extras: ExtraMetrics | None = None,
    final_of: Callable[[int], Tensor] | None = None,
    slicing: Slicing = USUAL,
) -> list[dict[str, Any]]:
    """Score a drafter and return one row per block.

    Args:
        drafter: the drafter, on its device.
        head: the head and its rule of proposing, on the same device.
        transcripts: what the target wrote.
        features_of: index of a transcript to its features_TF.
        margins_T: the target's margins over all transcripts, concatenated.
        block_size: slots per block, the anchor included; at most the drafter's own.
        max_new_tokens: the limit under which the transcripts were written.
        anchors: `walk` or `all`.
        extras: counts more numbers, where they are wanted.
        final_of: index of a transcript to final_TD, the target's states after its final norm; temperatures need it.
        slicing: how much is held at once. Drafter, head and extras have their own parts of it.

    Returns:
        Rows in the columns of `results.records.BLOCK_SCHEMA`.
    """
    assert anchors in ("walk", "all"), anchors
    assert 1 <= block_size <= drafter.spec.block_size, (block_size, drafter.spec.block_size)
    rule = BlockRule(block_size=block_size, max_new_tokens=max_new_tokens, row_alignment=drafter.spec.row_alignment)
    run = _score_walk if anchors == "walk" else _score_all
    rows: list[dict[str, Any]] = []
    total = count_anchors(transcripts)
    done = first_token = 0
    slices, extra_slices = Slices(num_anchors=slicing.num_anchors), Slices(num_anchors=slicing.extra_blocks)
    for group in _groups(transcripts, slicing.group_tokens):
        tracks = [_Track(transcripts[index], _read_context(drafter, features_of(index)), rule) for index in group]
        run(drafter, head, tracks, slices, lambda count, before=done: _tell(before + count, total))  # type: ignore[misc]
        if extras is not None:
            observe_group(
                drafter,
                extras,
                Group(
                    tracks=tracks,
                    rule=rule,
                    has_all_anchors=anchors == "all",
                    finals=[final_of(index) if final_of and extras.settings.temperatures else None for index in group],
                    score_again=lambda size, tracks=tracks: _score_again(drafter, head, tracks, slices, size),  # type: ignore[misc]
                    slices=extra_slices,
                ),
            )
        for track in tracks:
            # The next group's contexts take their place.
            track.context = []
            done += max(0, track.num_response - 1)
            rows.extend(track.block_rows(margins_T[first_token : first_token + track.transcript.num_tokens]))
            first_token += track.transcript.num_tokens
        _tell(done, total)
    return rows


def _tell(done: int, total: int) -> None:
    progress.report(STAGE, done, total, unit="anchors")


def count_anchors(transcripts: Sequence[Transcript]) -> int:
    """Return the anchors there are: every response token but the last, after which nothing is to be predicted."""
    return sum(max(0, len(transcript.response_ids) - 1) for transcript in transcripts)


def _read_context(drafter: Drafter, features_TF: Tensor) -> list[LayerContext]:
    """Read a transcript's context, fewer tokens at once from the first time on that there is no room.

    Raises:
        DoesNotFit: there is no room for one.
    """
    while True:
        try:
            return drafter.read_context(features_TF)
        except torch.OutOfMemoryError as error:
            tried = min(features_TF.shape[0], drafter.context_tokens)
            drafter.context_tokens = halved(tried, "token", error)


def _groups(transcripts: Sequence[Transcript], group_tokens: int) -> Iterator[list[int]]:
    group: list[int] = []
    num_tokens = 0
    for index, transcript in enumerate(transcripts):
        if group and num_tokens + transcript.num_tokens > group_tokens:
            yield group
            group, num_tokens = [], 0
        group.append(index)
        num_tokens += transcript.num_tokens
    if group:
        yield group


def _draft_and_judge(
    drafter: Drafter, head: Head, tracks: Sequence[_Track], indices: Sequence[Sequence[int]], slices: Slices
) -> None:
    """Draft blocks at the given anchors of each transcript, as many at once as there is room for, and judge them.

    Raises:
        DoesNotFit: there is no room for one.
    """
    left = [(track, index) for track, chosen in zip(tracks, indices, strict=True) for index in chosen]
    while left:
        part = left[: slices.num_anchors]
        chosen = [(track, [index for _, index in pairs]) for track, pairs in groupby(part, key=itemgetter(0))]
        try:
            _draft_at_once(drafter, head, [track for track, _ in chosen], [group for _, group in chosen])
        except torch.OutOfMemoryError as error:
            slices.halve(len(part), error)
            continue
        left = left[len(part) :]


def _draft_at_once(drafter: Drafter, head: Head, tracks: Sequence[_Track], indices: Sequence[Sequence[int]]) -> None:
    """Draft blocks at the given anchors of each transcript in one pass and note how far they are accepted."""
    rule = tracks[0].rule
    anchors = [track.anchors(chosen) for track, chosen in zip(tracks, indices, strict=True)]
    hidden = drafter.draft_hidden([track.context for track in tracks], anchors, rule.block_size)
    references = [track.references(chosen) for track, chosen in zip(tracks, indices, strict=True)]
    blocks = Blocks(
        hidden_APD=rule.drafting_rows(torch.cat(hidden)),
        anchor_A=torch.cat([one.token_A for one in anchors]).to(drafter.device),
        reference_AP=torch.cat([reference for reference, _ in references]).to(drafter.device),
        available_A=torch.cat([available for _, available in references]).to(drafter.device),
    )
    judged = judge_blocks(head, blocks)
    counts = [len(chosen) for chosen in indices]
    parts = zip(judged.accepted_A.split(counts), judged.miss_rank_A.split(counts), strict=True)
    for track, chosen, (accepted_A, miss_rank_A) in zip(tracks, indices, parts, strict=True):
        track.note(chosen, Judgement(accepted_A, miss_rank_A))


def _score_walk(
    drafter: Drafter, head: Head, tracks: list[_Track], slices: Slices, tell: Callable[[int], None]
) -> None:
    while active := [track for track in tracks if track.next_anchors(1)]:
        num_steps, num_emitted = sum(len(track.rows) for track in tracks), sum(track.place for track in tracks)
        count = _look_ahead(len(active), num_steps, num_emitted, slices.num_anchors)
        chosen = [track.next_anchors(count) for track in active]
        _draft_and_judge(drafter, head, active, chosen, slices)
        for track, indices in zip(active, chosen, strict=True):
            track.walk_on(indices)
        tell(sum(track.place for track in tracks))


def _score_again(
    drafter: Drafter, head: Head, tracks: Sequence[_Track], slices: Slices, block_size: int
) -> dict[str, list[dict[str, Any]]]:
    """Score shorter blocks on transcripts whose contexts are at hand and return the rows of their own walks."""
    rule = replace(tracks[0].rule, block_size=block_size)
    again = [_Track(track.transcript, track.context, rule) for track in tracks]
    _score_walk(drafter, head, again, slices, lambda _: None)
    return {track.prompt_id: [row for _, row in sorted(track.rows.items())] for track in again}


def _look_ahead(num_tracks: int, num_steps: int, num_emitted: int, num_anchors: int) -> int:
    """Return how many consecutive anchors of each transcript to draft from in one pass.

    With n of them a pass over A transcripts costs as much as f + A n blocks and brings each n + tau - 1
    tokens further, since all but the last block overlap. That price per token falls with n where
    A (tau - 1) < f, and rises elsewhere: so it is many or one.
    """
    if num_tracks * (num_emitted - num_steps) < _FREE_BLOCKS * num_steps:
        return max(1, num_anchors // num_tracks)
    return 1


def _score_all(drafter: Drafter, head: Head, tracks: list[_Track], slices: Slices, tell: Callable[[int], None]) -> None:
    anchors = [(track, index) for track in tracks for index in track.next_anchors(track.num_response)]
    count = slices.num_anchors
    for first in range(0, len(anchors), count):
        part = anchors[first : first + count]
        chosen = [(track, [index for _, index in pairs]) for track, pairs in groupby(part, key=itemgetter(0))]
        _draft_and_judge(drafter, head, [track for track, _ in chosen], [indices for _, indices in chosen], slices)
        tell(first + len(part))
