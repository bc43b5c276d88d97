"""How far blocks are accepted, asking the head only about slots that can still matter.

The head is the costliest part: position p of a block matters only while positions 1..p-1 match, so it is
asked in rounds, and no more about blocks that have missed. But a call costs its fixed price (the head's
weights are read once), so that few rows cost as much as some dozens: a round asks about several positions
of a block while it has few rows.

Shapes: A anchors, P draft positions, D hidden size, B blocks of one round, S positions of one round, R rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dflash_core.drafter.head import Head, Rows
from dflash_core.drafter.held_at_once import ROWS_PER_CALL


class Blocks(NamedTuple):
    """Drafted blocks, and what the target says at their positions."""

    hidden_APD: Tensor
    """The drafter's output; row p - 1 drafts position p."""
    anchor_A: Tensor
    """The anchors' tokens."""
    reference_AP: Tensor
    """The target's tokens at positions anchor + 1 .. anchor + P; any token beyond `available_A`."""
    available_A: Tensor
    """How many of the P positions are drafted and lie inside the transcript."""


class Judgement(NamedTuple):
    """How far the blocks at A anchors are accepted."""

    accepted_A: Tensor
    miss_rank_A: Tensor
    """Rank that the drafter gave the target's token at the first miss, 1 = best; 0 where nothing missed."""


def judge_blocks(head: Head, blocks: Blocks) -> Judgement:
    """Count each block's accepted drafts.

    Rules that look at the token before get the target's: they differ only after the first miss, which ends a block.

    Returns:
        Accepted drafts and the rank of the target's token at the first miss.
    """
    available_A = blocks.available_A
    accepted_A = torch.zeros_like(available_A)
    miss_rank_A = torch.zeros_like(available_A)
    num_drafts = blocks.hidden_APD.shape[1]
    before_AP = torch.cat([blocks.anchor_A[:, None], blocks.reference_AP[:, :-1]], dim=1)[:, :num_drafts]
    side_APS = head.side(blocks.hidden_APD, before_AP)
    alive = torch.nonzero(available_A > 0)[:, 0]
    first = 1
    while first <= num_drafts and alive.numel() > 0:
        last = min(num_drafts, first - 1 + max(1, ROWS_PER_CALL // alive.numel()))
        hit_BS, rank_BS = _ask(head, blocks, side_APS, alive, first, last)
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
    head: Head, blocks: Blocks, side_APS: Tensor | None, alive: Tensor, first: int, last: int
) -> tuple[Tensor, Tensor]:
    """Ask the head about positions first..last of some blocks; those beyond the text are no hits, of rank 0."""
    position_S = torch.arange(first, last + 1, device=alive.device)
    is_inside_BS = position_S <= blocks.available_A[alive, None]
    block_R, place_R = is_inside_BS.nonzero(as_tuple=True)
    block_R, column_R = alive[block_R], position_S[place_R] - 1
    rows = Rows(blocks.hidden_APD[block_R, column_R], None if side_APS is None else side_APS[block_R, column_R])
    hit_R, rank_R = head.compare(rows, blocks.reference_AP[block_R, column_R])
    hit_BS = torch.zeros_like(is_inside_BS).masked_scatter(is_inside_BS, hit_R)
    rank_BS = torch.zeros_like(is_inside_BS, dtype=torch.long).masked_scatter(is_inside_BS, rank_R)
    return hit_BS, rank_BS
