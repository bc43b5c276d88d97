r"""Draft trees out of one block pass (DDTree): which prefixes of the target's text they hold.

A block's rows are independent distributions, so a prefix d1 ... dn has the log-probability
log q1(d1) + ... + log qn(dn). The tree of budget N holds the N most probable prefixes; they are found best
first, each node giving way to its next sibling and its first child:

                    anchor                      not counted in the budget
                 /    |                         popped:  1   a        (0,)
               a      b                                  2   a c      (0, 0)
             /   \                                        3   b        (1,)
            c     d                                      4   a d      (0, 1)

Among equals the lexicographically first tuple of ranks is taken. The order does not depend on the budget, so
the tree of a smaller one is the first nodes of a larger one. Under a tree the walk moves on by matched nodes + 1.

Shapes: R rows, P draft positions, C candidates per row, V vocabulary.
Source: arXiv 2604.12989; liranringel/ddtree `ddtree.py`.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Candidates(NamedTuple):
    """The best tokens of some rows, the best first."""

    log_probability_RC: Tensor
    """Over the whole vocabulary; float32."""
    token_RC: Tensor


def best_candidates(logits_RV: Tensor, count: int) -> Candidates:
    """Return the best tokens of each row, `count` of them or all; a tree of N nodes can use no more than N."""
    wide_RV = logits_RV.float()
    best_RC, token_RC = torch.topk(wide_RV, min(count, wide_RV.shape[1]), dim=-1)
    return Candidates(best_RC - torch.logsumexp(wide_RV, dim=-1, keepdim=True), token_RC)


def ranks_of(token_PC: Sequence[Sequence[int]], reference: Sequence[int]) -> list[int | None]:
    """Return at each position the place of the target's token among the candidates, 0 first; None where it is none."""
    return [
        row.index(token) if token in row else None for row, token in zip(map(list, token_PC), reference, strict=False)
    ]


def pops_of_prefixes(
    log_probability_PC: Sequence[Sequence[float]], ranks: Sequence[int | None], budget: int
) -> list[int]:
    """Return which node each prefix of the target's text is, counted from 1 in the order in which nodes are taken.

    Args:
        log_probability_PC: candidates of every position, the best first.
        ranks: places of the target's tokens among them, as far as the text goes; see `ranks_of`.
        budget: nodes of the largest tree.

    Returns:
        Rising node numbers; it ends at the longest prefix that the tree holds.
    """
    taken: list[int] = []
    if not log_probability_PC or not ranks or ranks[0] is None:
        return taken
    wanted: tuple[int, ...] = (ranks[0],)
    first = log_probability_PC[0][0]
    waiting: list[tuple[float, tuple[int, ...], float]] = [(-first, (0,), first)]
    for node in range(1, budget + 1):
        if not waiting:
            break
        _, path, weight = heapq.heappop(waiting)
        if path == wanted:
            taken.append(node)
            rank = ranks[len(path)] if len(path) < len(ranks) else None
            if rank is None:
                break
            wanted = (*path, rank)
        row = log_probability_PC[len(path) - 1]
        if path[-1] + 1 < len(row):
            beside = weight - row[path[-1]] + row[path[-1] + 1]
            heapq.heappush(waiting, (-beside, (*path[:-1], path[-1] + 1), beside))
        if len(path) < len(log_probability_PC):
            below = weight + log_probability_PC[len(path)][0]
            heapq.heappush(waiting, (-below, (*path, 0), below))
    return taken


def matched_nodes(pops: Sequence[int], budget: int) -> int:
    """Return how many drafts a tree of a budget would have accepted, from what `pops_of_prefixes` returned.

    >>> [matched_nodes([1, 3, 20], budget) for budget in (1, 4, 32)]
    [1, 2, 3]
    """
    return sum(node <= budget for node in pops)
