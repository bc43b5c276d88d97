"""Draft trees: against a plain heap over full-vocabulary log-probabilities, and against listing every prefix."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dflash_core.acceptance.trees import best_candidates, matched_nodes, pops_of_prefixes, ranks_of

BUDGETS = (1, 2, 3, 4, 8, 16, 32, 64)


def plain_tree(logits_PV: Tensor, budget: int) -> set[tuple[int, ...]]:
    """Build the tree of one budget as the paper's code does and return its nodes as tuples of tokens.

    Tokens in the order of their logits, the candidates cut at the budget, one heap per budget, nodes kept whole.
    """
    log_probability_PV = logits_PV.float() - torch.logsumexp(logits_PV.float(), dim=-1, keepdim=True)
    num_candidates = min(budget, logits_PV.shape[1])
    token_PC = torch.topk(logits_PV.float(), num_candidates, dim=-1).indices
    weights = [
        [float(row[token]) for token in tokens] for row, tokens in zip(log_probability_PV, token_PC, strict=True)
    ]
    nodes: list[tuple[int, ...]] = []
    heap = [(-weights[0][0], (0,), -1, 1, 0, weights[0][0])]
    while heap and len(nodes) < budget:
        _, ranks, parent, depth, rank, weight = heapq.heappop(heap)
        above = nodes[parent] if parent >= 0 else ()
        nodes.append((*above, int(token_PC[depth - 1, rank])))
        if rank + 1 < num_candidates:
            sibling = weight - weights[depth - 1][rank] + weights[depth - 1][rank + 1]
            heapq.heappush(heap, (-sibling, (*ranks[:-1], rank + 1), parent, depth, rank + 1, sibling))
        if depth < len(weights):
            child = weight + weights[depth][0]
            heapq.heappush(heap, (-child, (*ranks, 0), len(nodes) - 1, depth + 1, 0, child))
    return set(nodes)


def longest_prefix(nodes: set[tuple[int, ...]], reference: Sequence[int]) -> int:
    return max(length for length in range(len(reference) + 1) if not length or tuple(reference[:length]) in nodes)


def ours(logits_PV: Tensor, reference: Sequence[int], budget: int) -> list[int]:
    best = best_candidates(logits_PV, budget)
    return pops_of_prefixes(best.log_probability_RC.tolist(), ranks_of(best.token_RC.tolist(), list(reference)), budget)


@st.composite
def blocks(draw: st.DrawFn) -> tuple[Tensor, list[int]]:
    num_positions, num_tokens = draw(st.integers(1, 6)), draw(st.integers(2, 12))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    logits_PV = torch.randn(num_positions, num_tokens, generator=generator) * draw(st.sampled_from([0.3, 2.0, 6.0]))
    # Likely texts, so that deep prefixes are in the tree; it may end before the block does.
    text = [int(torch.multinomial(torch.softmax(row, -1), 1, generator=generator)) for row in logits_PV]
    return logits_PV, text[: draw(st.integers(0, num_positions))]


@settings(max_examples=300, deadline=None)
@given(blocks())
def test_matched_nodes_are_those_of_a_plain_heap_for_every_budget_at_once(drawn: tuple[Tensor, list[int]]) -> None:
    logits_PV, reference = drawn
    pops = ours(logits_PV, reference, max(BUDGETS))
    assert pops == sorted(set(pops))
    for budget in BUDGETS:
        expected = longest_prefix(plain_tree(logits_PV, budget), reference)
        assert matched_nodes(pops, budget) == expected
        assert matched_nodes(ours(logits_PV, reference, budget), budget) == expected, (
            "a smaller tree is its first nodes"
        )


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_the_tree_holds_the_most_probable_prefixes_of_all(seed: int) -> None:
    """Every prefix over 4 tokens and 3 positions is listed, 84 of them; weights are far apart almost surely."""
    logits_PV = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)).double().float()
    weights = torch.log_softmax(logits_PV.double(), dim=-1)
    listed = {
        path: float(sum(weights[depth, token] for depth, token in enumerate(path)))
        for length in (1, 2, 3)
        for path in itertools.product(range(4), repeat=length)
    }
    order = sorted(listed, key=lambda path: -listed[path])
    for path in listed:
        pops = ours(logits_PV, path, len(listed))
        assert pops == [order.index(path[:length]) + 1 for length in range(1, len(path) + 1)]


def test_among_equals_the_first_ranks_come_first() -> None:
    """Two tokens of one half each, at two positions: (0,) (1,), then the four pairs in order."""
    half = [[-0.5, -0.5], [-0.5, -0.5]]
    nodes = {path: pops_of_prefixes(half, path, 6) for path in itertools.product(range(2), repeat=2)}
    assert nodes == {(0, 0): [1, 3], (0, 1): [1, 4], (1, 0): [2, 5], (1, 1): [2, 6]}


@pytest.mark.parametrize(
    ("ranks", "matched"),
    [([0, 0, 0], 3), ([0, 0, 1], 2), ([0, None, 0], 1), ([None, 0, 0], 0), ([], 0)],
    ids=["all best", "last is second", "none of the candidates", "first is none", "no text left"],
)
def test_a_tree_as_large_as_the_chain_holds_the_chain_where_the_drafter_is_sure(
    ranks: list[int | None], matched: int
) -> None:
    sure = [[-0.01, -5.0]] * 3
    assert matched_nodes(pops_of_prefixes(sure, ranks, 3), 3) == matched


@settings(max_examples=60, deadline=None)
@given(blocks())
def test_a_larger_budget_never_matches_less_and_one_node_is_the_first_draft(drawn: tuple[Tensor, list[int]]) -> None:
    logits_PV, reference = drawn
    pops = ours(logits_PV, reference, max(BUDGETS))
    matched = [matched_nodes(pops, budget) for budget in BUDGETS]
    assert matched == sorted(matched)
    assert all(0 <= count <= min(len(reference), budget) for count, budget in zip(matched, BUDGETS, strict=True))
    assert matched[0] == (bool(reference) and reference[0] == int(logits_PV[0].argmax()))


def test_log_probabilities_are_over_the_whole_vocabulary_in_float32() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    best = best_candidates(logits, 3)
    expected = torch.log_softmax(logits.float(), dim=-1).topk(3, dim=-1)
    assert best.log_probability_RC.dtype == torch.float32
    torch.testing.assert_close(best.log_probability_RC, expected.values, rtol=0, atol=1e-6)
    assert best.token_RC.shape == (4, 3)
    assert best_candidates(logits, 99).token_RC.shape == (4, 50)
