"""Acceptance of drafted blocks against the target's own continuation, and the walk of serving.

Shapes: A anchors, P draft positions. Accepted drafts exclude the bonus token, the
acceptance length (tau) includes it.

    response index   0    1    2    3    4    5
    token            t0   t1   t2   t3   t4   stop
    anchor 1         .    A    d1   d2   d3          drafts are judged against t2 t3 t4
    2 accepted       .    .    ok   ok   no          emits t2 t3 and the bonus t4: 3 tokens
    next anchor                          A           1 + 3 = 4

The last block of a transcript is counted as PyPI `dflash` 0.1.0 counts it: it emits no more than what
is left, and nothing after a stop token. A block near the length limit drafts fewer tokens, counted from
the limit (prompt + max_new_tokens), not from where the text stopped.

How many tokens a block of K slots drafts, and what becomes of it near the limit, is a matter of its rows:

    row_alignment    row j predicts      drafts   near the limit, where n more tokens may be emitted
    same_position    anchor + j          K - 1    min(K, n + 1) slots, n drafts, as `dflash` 0.1.0 cuts it
    shifted_short    anchor + j + 1      K - 1    the same (JetSpec is causal, so that slots cut off matter to none)
    anchor_shifted   anchor + j + 1      K        K slots, as DeepSpec's loop always has; drafts beyond n are dropped

Slots matter where attention goes both ways: a shorter block then drafts other tokens.

Sources: z-lab/dflash `dflash/model.py: dflash_generate`; deepseek-ai/DeepSpec
`deepspec/eval/base_evaluator.py`; vLLM `v1/spec_decode/metrics.py` (tau).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from dflash_core.errors import ShapeMismatch

if TYPE_CHECKING:
    from torch import Tensor

METRICS_VERSION = 2
"""Raised in the commit that changes a number."""
VERIFICATION_RULE = "greedy: a draft token is accepted when it equals the target's arg-max"
COUNTING_RULE = "tau counts the bonus token; the last block is cut at the stop token and at max_new_tokens"
COUNTING_RULE_SHIFTED = (
    "tau counts the bonus token; what is emitted ends at the stop token and at max_new_tokens; every block is drafted "
    "whole"
)
RowAlignment = Literal["same_position", "anchor_shifted", "shifted_short"]


def counting_rule(row_alignment: RowAlignment) -> str:
    """Return how blocks are counted, in words, as it stands in every record."""
    return COUNTING_RULE_SHIFTED if row_alignment == "anchor_shifted" else COUNTING_RULE


def num_drafts(block_size: int, row_alignment: RowAlignment) -> int:
    """Return P, the tokens that a whole block drafts.

    >>> [num_drafts(8, one) for one in ("same_position", "anchor_shifted", "shifted_short")]
    [7, 8, 7]
    """
    return block_size if row_alignment == "anchor_shifted" else block_size - 1


def first_row(row_alignment: RowAlignment) -> int:
    """Return which row of a block drafts position anchor + 1."""
    return 1 if row_alignment == "same_position" else 0


def count_accepted_drafts(draft_ids_AP: Tensor, reference_ids_AP: Tensor) -> Tensor:
    """Count each block's accepted draft tokens: its longest matching prefix.

    Args:
        draft_ids_AP: drafted token ids.
        reference_ids_AP: the target's greedy tokens at the same positions.

    Returns:
        accepted_A: int64 in [0, P], the bonus token not counted.

    Raises:
        ShapeMismatch: the two are not 2-D tensors of one shape.
    """
    if draft_ids_AP.ndim != 2 or draft_ids_AP.shape != reference_ids_AP.shape:
        raise ShapeMismatch(
            "draft and reference ids must share one [anchors, draft positions] shape, "
            f"got {list(draft_ids_AP.shape)} and {list(reference_ids_AP.shape)}"
        )
    return (draft_ids_AP == reference_ids_AP).long().cumprod(dim=1).sum(dim=1)


def num_drafted(
    anchor_index: int, *, block_size: int, max_new_tokens: int, row_alignment: RowAlignment = "same_position"
) -> int:
    """Return how many tokens are drafted at an anchor: fewer near the length limit.

    >>> [num_drafted(index, block_size=4, max_new_tokens=6) for index in range(5)]
    [3, 3, 3, 2, 1]
    """
    return min(num_drafts(block_size, row_alignment), max_new_tokens - anchor_index - 1)


def num_slots(anchor_index: int, *, block_size: int, max_new_tokens: int, row_alignment: RowAlignment) -> int:
    """Return how many slots the block at an anchor has.

    >>> [num_slots(3, block_size=4, max_new_tokens=6, row_alignment=one) for one in ("same_position", "anchor_shifted")]
    [3, 4]
    """
    return block_size if row_alignment == "anchor_shifted" else min(block_size, max_new_tokens - anchor_index)


def num_available(anchor_index: int, num_response_tokens: int, num_drafted: int) -> int:
    """Return how many of the drafted tokens lie before the end of the transcript."""
    return min(num_drafted, num_response_tokens - 1 - anchor_index)


def num_emitted(anchor_index: int, num_response_tokens: int, num_accepted: int) -> int:
    """Return how many tokens a verification step emits: accepted + bonus, cut at the end of the transcript."""
    return min(num_accepted + 1, num_response_tokens - 1 - anchor_index)


def serving_walk(num_emitted_by_anchor: Sequence[int]) -> list[int]:
    """Return the anchors that serving visits, in order, from a table over all anchors of one transcript.

    Args:
        num_emitted_by_anchor: tokens emitted at anchor 0, 1, ...; the last response token is no anchor.

    >>> serving_walk([2, 1, 3, 1, 1])
    [0, 2]
    """
    visited = []
    anchor = 0
    while anchor < len(num_emitted_by_anchor):
        visited.append(anchor)
        anchor += num_emitted_by_anchor[anchor]
    return visited
