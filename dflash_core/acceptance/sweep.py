"""Shorter blocks than the one that was scored, each with a walk of its own.

    slots see                        a shorter block is
    all slots of the block           another forward pass: fewer mask tokens stand beside a slot
    only slots before them           a prefix of the longer draft, token by token

The second holds where every layer is causal in the block (convolutions always are), whatever the windows. It
needs the longer block's counts at every anchor that the shorter block's walk visits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from dflash_core.acceptance import walk
from dflash_core.acceptance.own_walk import WalkCounts, count_steps

Method = Literal["prefix", "redrafted"]


def choose_method(is_causal: Sequence[bool], *, has_all_anchors: bool) -> Method:
    """Return how shorter blocks are had.

    Args:
        is_causal: per layer, whether a slot sees only itself and slots before it.
        has_all_anchors: whether the longer block was scored at every anchor, not at its own walk's alone.
    """
    return "prefix" if has_all_anchors and all(is_causal) else "redrafted"


def shorter_walk(
    accepted_at: Callable[[int], int],
    num_response_tokens: int,
    *,
    block_size: int,
    max_new_tokens: int,
    row_alignment: walk.RowAlignment,
) -> WalkCounts:
    """Return the walk of a block that is a prefix of a longer one.

    Args:
        accepted_at: response index to the longer block's accepted drafts.
        num_response_tokens: length of the response.
        block_size: slots of the shorter block; at most those of the longer.
        max_new_tokens: the limit under which the transcript was written.
        row_alignment: of the drafter's rows.
    """

    def shorter(index: int) -> int:
        drafted = walk.num_drafted(
            index, block_size=block_size, max_new_tokens=max_new_tokens, row_alignment=row_alignment
        )
        return min(accepted_at(index), walk.num_available(index, num_response_tokens, drafted))

    return count_steps(num_response_tokens, shorter)
