"""Scoring a drafter on transcripts: which blocks it would draft and how far each is accepted.

Two modes give the same walk: `walk` drafts only at the anchors that serving visits, one per transcript
and step, batched over transcripts; `all` drafts at every anchor and reads the walk off the table.

The head is the costliest part: slot p of a block matters only while slots 1..p-1 match, so it is asked in
rounds, and no more about blocks that have missed. But a call costs its fixed price (the head's weights are
read once), so that few rows cost as much as some dozens. Hence two bets, which change no result: a round asks
about several slots of a block while it has few rows, and the walk drafts ahead while the drafter is weak
(the next anchor then lies close), dropping what it did not come by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from dflash_core import progress
from dflash_core.acceptance import walk
from dflash_core.drafter.model import Anchors, Drafter, LayerContext
from dflash_core.target.transcripts import Transcript

STAGE = "run_drafter"
TIE_MARGIN = 1e-3
"""Logit difference below which the target's choice may flip with the kernel; such blocks are flagged."""
_LOGITS_BUDGET_ELEMENTS = 32 << 20
_RANKED_ELEMENTS = 2 << 20
_GROUP_TOKENS = 32_768
"""Transcripts are taken in groups of so many tokens, whose context keys and values stay resident."""
_ANCHORS_AT_ONCE = 256
_ROWS_PER_CALL = 96
"""Rows that a call of the head is filled up to; up to about so many cost little more than one."""
_FREE_BLOCKS = 24
"""Blocks whose work is worth one more pass: drafter and head read their weights once a pass."""


class Judgement(NamedTuple):
    """How far the blocks at A anchors are accepted."""

    accepted_A: Tensor
    miss_rank_A: Tensor
    """Rank that the drafter gave the target's token at the first miss, 1 = best; 0 where nothing missed."""


class Head:
    """The target's head on the drafter's device: hidden rows to logits or choices."""

    def __init__(self, head_VD: Tensor, drafter: Drafter) -> None:
        self._weight_VD = head_VD.to(device=drafter.device, dtype=drafter.dtype)
        self._multiplier = drafter.spec.output_multiplier
        self._softcap = drafter.spec.final_logit_softcapping
        self._rows_at_once = max(1, _LOGITS_BUDGET_ELEMENTS // head_VD.shape[0])

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Return logits_RV of hidden rows, scaled and soft-capped as the drafter's config says."""
        logits_RV = functional.linear(hidden_RD, self._weight_VD)
        if self._multiplier != 1.0:
            logits_RV = logits_RV * self._multiplier
        if self._softcap is not None:
            logits_RV = torch.tanh(logits_RV / self._softcap) * self._softcap
        return logits_RV

    def choose(self, hidden_RD: Tensor) -> Tensor:
        """Return the arg-max token of every hidden row."""
        parts = [_first_best(self.logits(part)) for part in hidden_RD.split(self._rows_at_once)]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.long, device=hidden_RD.device)

    def compare(self, hidden_RD: Tensor, reference_R: Tensor) -> tuple[Tensor, Tensor]:
        """Return whether each row's arg-max is the reference, and the reference's rank (1 = best)."""
        hits, ranks = [], []
        for hidden, reference in zip(
            hidden_RD.split(self._rows_at_once), reference_R.split(self._rows_at_once), strict=True
        ):
            logits = self.logits(hidden)
            hit = _first_best(logits) == reference
            rank = torch.ones_like(reference)
            missed = torch.nonzero(~hit)[:, 0]
            rank[missed] = _ranks(logits, missed, reference[missed])
            hits.append(hit)
            ranks.append(rank)
        return torch.cat(hits), torch.cat(ranks)


def _first_best(logits_RV: Tensor) -> Tensor:
    """Return the arg-max of every row, the first of equals: `max` is five times faster than `argmax` on a CPU."""
    return logits_RV.max(dim=-1).indices


def _ranks(logits_RV: Tensor, rows_M: Tensor, token_M: Tensor) -> Tensor:
    """Return the rank of a token in some rows, 1 = best; few rows at a time, which a CPU's cache holds."""
    count = max(1, _RANKED_ELEMENTS // logits_RV.shape[1])
    ranks = []
    for rows, token in zip(rows_M.split(count), token_M.split(count), strict=True):
        logits = logits_RV[rows]
        ranks.append((logits >= logits.gather(1, token[:, None])).sum(dim=-1, dtype=torch.int32))
    return torch.cat(ranks).long()


def judge_blocks(head: Head, hidden_AKD: Tensor, reference_AP: Tensor, available_A: Tensor) -> Judgement:
    """Count each block's accepted drafts, asking the head only about slots that can still matter.

    Args:
        head: the target's head.
        hidden_AKD: drafter's output rows; row p predicts position anchor + p.
        reference_AP: the target's tokens at positions anchor + 1 .. anchor + P; padded beyond `available_A`.
        available_A: how many of the P positions are drafted and lie inside the transcript.

    Returns:
        Accepted drafts and the rank of the target's token at the first miss.
    """
    accepted_A = torch.zeros_like(available_A)
    miss_rank_A = torch.zeros_like(available_A)
    num_drafts = hidden_AKD.shape[1] - 1
    alive = torch.nonzero(available_A > 0)[:, 0]
    first = 1
    while first <= num_drafts and alive.numel() > 0:
        last = min(num_drafts, first - 1 + max(1, _ROWS_PER_CALL // alive.numel()))
        hit_BS, rank_BS = _ask(head, hidden_AKD, reference_AP, available_A, alive, first, last)
        num_hits_B = hit_BS.long().cumprod(dim=1).sum(dim=1)
        accepted_A[alive] += num_hits_B
        is_over_B = num_hits_B < hit_BS.shape[1]
        # Where the text ends, nothing was asked: its rank is 0, no miss.
        over, miss_B1 = alive[is_over_B], num_hits_B[is_over_B, None]
        miss_rank_A[over] = rank_BS[is_over_B].gather(1, miss_B1)[:, 0]
        alive = alive[~is_over_B & (available_A[alive] > last)]
        first = last + 1
    return Judgement(accepted_A, miss_rank_A)


def _ask(
    head: Head, hidden_AKD: Tensor, reference_AP: Tensor, available_A: Tensor, blocks: Tensor, first: int, last: int
) -> tuple[Tensor, Tensor]:
    """Ask the head about slots first..last of some blocks; slots beyond the text are no hits, of rank 0."""
    slot_S = torch.arange(first, last + 1, device=blocks.device)
    is_inside_BS = slot_S <= available_A[blocks, None]
    block_R, place_R = is_inside_BS.nonzero(as_tuple=True)
    block_R, slot_R = blocks[block_R], slot_S[place_R]
    hit_R, rank_R = head.compare(hidden_AKD[block_R, slot_R], reference_AP[block_R, slot_R - 1])
    hit_BS = torch.zeros_like(is_inside_BS).masked_scatter(is_inside_BS, hit_R)
    rank_BS = torch.zeros_like(is_inside_BS, dtype=torch.long).masked_scatter(is_inside_BS, rank_R)
    return hit_BS, rank_BS


class _Track:
    """One transcript being scored: its context, its response and the blocks judged so far."""

    def __init__(self, transcript: Transcript, context: list[LayerContext], *, block_size: int, max_new_tokens: int):
        self.transcript = transcript
        self.context = context
        self.response_R = torch.tensor(transcript.response_ids)
        self.num_response = len(transcript.response_ids)
        self.block_size = block_size
        self.max_new_tokens = max_new_tokens
        self.rows: dict[int, dict[str, int]] = {}
        self.place = 0
        """The next anchor of the walk."""

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
        index_A = torch.tensor(indices, dtype=torch.long)
        slots = [self._drafted(index) + 1 for index in indices]
        first = len(self.transcript.prompt_ids)
        return Anchors(index_A + first, self.response_R[index_A], torch.tensor(slots, dtype=torch.long))

    def references(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return reference_AP (padded with 0) and available_A."""
        available = [walk.num_available(index, self.num_response, self._drafted(index)) for index in indices]
        reference_AP = torch.zeros(len(indices), self.block_size - 1, dtype=torch.long)
        for row, (index, count) in enumerate(zip(indices, available, strict=True)):
            reference_AP[row, :count] = self.response_R[index + 1 : index + 1 + count]
        return reference_AP, torch.tensor(available, dtype=torch.long)

    def note(self, indices: Sequence[int], judgement: Judgement) -> None:
        for index, accepted, rank in zip(
            indices, judgement.accepted_A.tolist(), judgement.miss_rank_A.tolist(), strict=True
        ):
            drafted = self._drafted(index)
            self.rows[index] = {
                "num_drafted": drafted,
                "num_available": walk.num_available(index, self.num_response, drafted),
                "num_accepted_drafts": accepted,
                "num_emitted_tokens": walk.num_emitted(index, self.num_response, accepted),
                "miss_rank": rank,
            }

    def _drafted(self, index: int) -> int:
        return walk.num_drafted(index, block_size=self.block_size, max_new_tokens=self.max_new_tokens)

    def block_rows(self, margins_T: Tensor) -> Iterator[dict[str, Any]]:
        """Yield one row per anchor in the columns of `results.records.BLOCK_SCHEMA`."""
        table = [
            self.rows[index]["num_emitted_tokens"] if index in self.rows else 1
            for index in range(self.num_response - 1)
        ]
        step_of = {anchor: step for step, anchor in enumerate(walk.serving_walk(table))}
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
) -> list[dict[str, Any]]:
    """Score a drafter and return one row per block.

    Args:
        drafter: the drafter, on its device.
        head: the target's head, on the same device.
        transcripts: what the target wrote.
        features_of: index of a transcript to its features_TF.
        margins_T: the target's margins over all transcripts, concatenated.
        block_size: slots per block, the anchor included; at most the drafter's own.
        max_new_tokens: the limit under which the transcripts were written.
        anchors: `walk` or `all`.

    Returns:
        Rows in the columns of `results.records.BLOCK_SCHEMA`.
    """
    assert anchors in ("walk", "all"), anchors
    assert 1 <= block_size <= drafter.spec.block_size, (block_size, drafter.spec.block_size)
    rows: list[dict[str, Any]] = []
    total = sum(max(0, len(transcript.response_ids) - 1) for transcript in transcripts)
    done = first_token = 0
    for group in _groups(transcripts):
        tracks = [
            _Track(
                transcripts[index],
                drafter.read_context(features_of(index)),
                block_size=block_size,
                max_new_tokens=max_new_tokens,
            )
            for index in group
        ]
        run = _score_walk if anchors == "walk" else _score_all
        run(drafter, head, tracks, lambda count, before=done: progress.report(STAGE, before + count, total))  # type: ignore[misc]
        for track in tracks:
            done += max(0, track.num_response - 1)
            rows.extend(track.block_rows(margins_T[first_token : first_token + track.transcript.num_tokens]))
            first_token += track.transcript.num_tokens
        progress.report(STAGE, done, total)
    return rows


def _groups(transcripts: Sequence[Transcript]) -> Iterator[list[int]]:
    group: list[int] = []
    num_tokens = 0
    for index, transcript in enumerate(transcripts):
        if group and num_tokens + transcript.num_tokens > _GROUP_TOKENS:
            yield group
            group, num_tokens = [], 0
        group.append(index)
        num_tokens += transcript.num_tokens
    if group:
        yield group


def _draft_and_judge(drafter: Drafter, head: Head, tracks: Sequence[_Track], indices: Sequence[Sequence[int]]) -> None:
    """Draft blocks at the given anchors of each transcript in one pass and note how far they are accepted."""
    hidden = drafter.draft_hidden(
        [track.context for track in tracks],
        [track.anchors(chosen) for track, chosen in zip(tracks, indices, strict=True)],
        tracks[0].block_size,
    )
    references = [track.references(chosen) for track, chosen in zip(tracks, indices, strict=True)]
    judged = judge_blocks(
        head,
        torch.cat(hidden),
        torch.cat([reference for reference, _ in references]).to(drafter.device),
        torch.cat([available for _, available in references]).to(drafter.device),
    )
    counts = [len(chosen) for chosen in indices]
    parts = zip(judged.accepted_A.split(counts), judged.miss_rank_A.split(counts), strict=True)
    for track, chosen, (accepted_A, miss_rank_A) in zip(tracks, indices, parts, strict=True):
        track.note(chosen, Judgement(accepted_A, miss_rank_A))


def _score_walk(drafter: Drafter, head: Head, tracks: list[_Track], tell: Callable[[int], None]) -> None:
    while active := [track for track in tracks if track.next_anchors(1)]:
        num_steps, num_emitted = sum(len(track.rows) for track in tracks), sum(track.place for track in tracks)
        count = _look_ahead(len(active), num_steps, num_emitted)
        chosen = [track.next_anchors(count) for track in active]
        _draft_and_judge(drafter, head, active, chosen)
        for track, indices in zip(active, chosen, strict=True):
            track.walk_on(indices)
        tell(sum(track.place for track in tracks))


def _look_ahead(num_tracks: int, num_steps: int, num_emitted: int) -> int:
    """Return how many consecutive anchors of each transcript to draft from in one pass.

    With n of them a pass over A transcripts costs as much as f + A n blocks and brings each n + tau - 1
    tokens further, since all but the last block overlap. That price per token falls with n where
    A (tau - 1) < f, and rises elsewhere: so it is many or one.
    """
    if num_tracks * (num_emitted - num_steps) < _FREE_BLOCKS * num_steps:
        return max(1, _ANCHORS_AT_ONCE // num_tracks)
    return 1


def _score_all(drafter: Drafter, head: Head, tracks: list[_Track], tell: Callable[[int], None]) -> None:
    anchors = [(track, index) for track in tracks for index in track.next_anchors(track.num_response)]
    for first in range(0, len(anchors), _ANCHORS_AT_ONCE):
        part = anchors[first : first + _ANCHORS_AT_ONCE]
        chosen = [(track, [index for _, index in pairs]) for track, pairs in groupby(part, key=itemgetter(0))]
        _draft_and_judge(drafter, head, [track for track, _ in chosen], [indices for _, indices in chosen])
        tell(first + len(part))
