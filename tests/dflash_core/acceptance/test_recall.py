"""Recall at k per draft position: against a plain loop, and its identities with match rate and survival."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dflash_core.acceptance.recall import RECALL_KS, RecallCounts, count_recalled


@st.composite
def ranked(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    num_blocks, num_positions = draw(st.integers(0, 6)), draw(st.integers(1, 5))
    cells = st.lists(st.integers(1, 20), min_size=num_positions, max_size=num_positions)
    ranks = draw(st.lists(cells, min_size=num_blocks, max_size=num_blocks))
    available = draw(st.lists(st.integers(0, num_positions), min_size=num_blocks, max_size=num_blocks))
    rank_AP = torch.tensor(ranks, dtype=torch.long).reshape(num_blocks, num_positions)
    return rank_AP, torch.tensor(available, dtype=torch.long)


def plain_counts(rank_AP: Tensor, available_A: Tensor) -> list[list[int]]:
    """Count by the definition, cell by cell: blocks, recalled per k, reached, reached and recalled per k."""
    rows = []
    for position in range(rank_AP.shape[1]):
        judged = [row for row, count in zip(rank_AP.tolist(), available_A.tolist(), strict=True) if position < count]
        reached = [row for row in judged if all(rank == 1 for rank in row[:position])]
        counts = [len(judged), *(sum(row[position] <= k for row in judged) for k in RECALL_KS)]
        rows.append([*counts, len(reached), *(sum(row[position] <= k for row in reached) for k in RECALL_KS)])
    return rows


def as_lists(counts: RecallCounts) -> list[list[int]]:
    parts = [counts.blocks_P[:, None], counts.recalled_PN, counts.reached_P[:, None], counts.reached_recalled_PN]
    return torch.cat(parts, dim=1).tolist()


@given(ranked())
def test_it_equals_a_plain_loop(drawn: tuple[Tensor, Tensor]) -> None:
    assert as_lists(count_recalled(*drawn)) == plain_counts(*drawn)


@given(ranked())
def test_conditional_recall_at_one_is_conditional_acceptance(drawn: tuple[Tensor, Tensor]) -> None:
    """Blocks that reach position p + 1 in the text are those that hit at p, less where the text ends."""
    rank_AP, available_A = drawn
    counts = count_recalled(rank_AP, available_A)
    hits = (rank_AP == 1) & (torch.arange(1, rank_AP.shape[1] + 1) <= available_A[:, None])
    survived_P = (hits.long().cumprod(dim=1) == 1).sum(dim=0)
    assert counts.reached_recalled_PN[:, 0].tolist() == survived_P.tolist()
    assert counts.recalled_PN[:, 0].tolist() == hits.sum(dim=0).tolist()


@given(ranked())
def test_recall_rises_with_k_and_nothing_exceeds_its_base(drawn: tuple[Tensor, Tensor]) -> None:
    counts = count_recalled(*drawn)
    assert (counts.recalled_PN.diff(dim=1) >= 0).all()
    assert (counts.recalled_PN <= counts.blocks_P[:, None]).all()
    assert (counts.reached_P <= counts.blocks_P).all()
    assert (counts.reached_recalled_PN <= torch.minimum(counts.recalled_PN, counts.reached_P[:, None])).all()


def test_blocks_counted_by_hand() -> None:
    """Ranks 1 3 1, 2 1 1 and 1 1 (text ends): the second never reaches position 2."""
    counts = count_recalled(torch.tensor([[1, 3, 1], [2, 1, 1], [1, 1, 9]]), torch.tensor([3, 3, 2]), (1, 2, 4))
    assert counts.blocks_P.tolist() == [3, 3, 2]
    assert counts.recalled_PN.tolist() == [[2, 3, 3], [2, 2, 3], [2, 2, 2]]
    assert counts.reached_P.tolist() == [3, 2, 0]
    assert counts.reached_recalled_PN.tolist() == [[2, 3, 3], [1, 1, 2], [0, 0, 0]]
