"""Recall at k: was the target's token among the k best of the drafter, per draft position.

    teacher-forced    of all blocks where the position can be judged, whatever stands before it
    conditional       of those whose earlier drafts were all accepted: where serving came so far

At k = 1 the first is the match rate and the second the conditional acceptance.
Shapes: A anchors, P draft positions, N values of k.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

RECALL_KS = (1, 2, 4, 8, 16)


class RecallCounts(NamedTuple):
    """Counts over blocks, int64."""

    blocks_P: Tensor
    """Blocks where the position can be judged."""
    recalled_PN: Tensor
    reached_P: Tensor
    """Of the blocks, those whose earlier drafts were all accepted."""
    reached_recalled_PN: Tensor


def count_recalled(rank_AP: Tensor, available_A: Tensor, ks: Sequence[int] = RECALL_KS) -> RecallCounts:
    """Count blocks with the target's token among the k best.

    Args:
        rank_AP: rank of the target's token in each row, 1 = the draft itself; anything beyond `available_A`.
        available_A: how many positions of each block can be judged.
        ks: values of k.
    """
    import torch  # here, so that choosing the extras loads no torch

    position_P = torch.arange(1, rank_AP.shape[1] + 1, device=rank_AP.device)
    is_judged_AP = position_P <= available_A[:, None]
    is_hit_AP = is_judged_AP & (rank_AP == 1)
    before_AP = torch.cat([torch.ones_like(is_hit_AP[:, :1]), is_hit_AP[:, :-1]], dim=1)[:, : rank_AP.shape[1]]
    is_reached_AP = is_judged_AP & (before_AP.long().cumprod(dim=1) == 1)
    is_recalled_APN = is_judged_AP[:, :, None] & (rank_AP[:, :, None] <= torch.tensor(ks, device=rank_AP.device))
    return RecallCounts(
        blocks_P=is_judged_AP.sum(dim=0),
        recalled_PN=is_recalled_APN.sum(dim=0),
        reached_P=is_reached_AP.sum(dim=0),
        reached_recalled_PN=(is_recalled_APN & is_reached_AP[:, :, None]).sum(dim=0),
    )
