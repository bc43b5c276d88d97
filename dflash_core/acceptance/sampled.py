"""Acceptance expected at temperatures above 0, under the two rules in use, along a greedy transcript.

    rule       draft                 accepted with         a: expected over the draft    m: and it is x
    one_hot    arg-max d of q        p(d)                  p(d)                          p(x) where d = x, else 0
    sampled    drawn from q          min(1, p(d)/q(d))     sum over d of min(p, q)       min(p(x), q(x))

p is the target's distribution after the transcript's own tokens, q the drafter's, x the transcript's next token; both
are at the temperature, without top-k or top-p. A free-running loop stands on what was drafted and accepted
instead, so that only the first position's a is its own. Of a block there are two numbers:

    teacher-forced    a1 + a1 a2 + a1 a2 a3 + ...        as if p and q did not depend on what was accepted
    at least          a1 + m1 a2 + m1 m2 a3 + ...        only drafts that follow the transcript so far: these
                                                         chances are the loop's own, other drafts' are left out

Shapes: R rows, A anchors, P draft positions, V the target's tokens, U tokens that can be proposed.
Sources: PyPI `dflash` 0.1.0 `dflash/model.py: _rejection_sample` (sampled); vLLM, SGLang (one_hot).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Rule = Literal["one_hot", "sampled"]
RULES: tuple[Rule, ...] = ("one_hot", "sampled")


class Chances(NamedTuple):
    """Chances of rows, float64."""

    accepted_R: Tensor
    """a: the draft is accepted."""
    follows_R: Tensor
    """m: it is accepted and is the transcript's token; at most a."""


class RowLogits(NamedTuple):
    """What the two models say about the same positions, before the temperature."""

    target_RV: Tensor
    draft_RU: Tensor
    """What the drafter's choice is made from; -inf where it can propose nothing."""
    reference_R: Tensor
    """The transcript's tokens, in the target's numbering."""
    own_reference_R: Tensor
    """The same in the drafter's numbering; negative where it cannot propose it."""
    target_of_U: Tensor | None = None
    """The drafter's numbering to the target's; None where they are one."""


class Expected(NamedTuple):
    """Expected accepted drafts of blocks, float64."""

    first_A: Tensor
    """Of the first draft alone; 0 where there is none."""
    teacher_forced_A: Tensor
    at_least_A: Tensor


def chances(rows: RowLogits, temperature: float) -> dict[Rule, Chances]:
    """Return the chances of rows under both rules.

    Args:
        rows: logits and the transcript's tokens.
        temperature: above 0.
    """
    p_RV = torch.softmax(rows.target_RV.float() / temperature, dim=-1)
    return {"one_hot": _one_hot(rows, p_RV), "sampled": _sampled(rows, p_RV, temperature)}


def _one_hot(rows: RowLogits, p_RV: Tensor) -> Chances:
    draft_R = rows.draft_RU.max(dim=-1).indices
    token_R = draft_R if rows.target_of_U is None else rows.target_of_U[draft_R]
    accepted_R = p_RV.gather(1, token_R[:, None])[:, 0].double()
    return Chances(accepted_R, accepted_R * (draft_R == rows.own_reference_R))


def _sampled(rows: RowLogits, p_RV: Tensor, temperature: float) -> Chances:
    q_RU = torch.softmax(rows.draft_RU.float() / temperature, dim=-1)
    p_own_R = p_RV.gather(1, rows.reference_R[:, None])[:, 0]
    q_own_R = q_RU.gather(1, rows.own_reference_R.clamp(min=0)[:, None])[:, 0] * (rows.own_reference_R >= 0)
    p_RU = p_RV[:, : q_RU.shape[1]] if rows.target_of_U is None else p_RV[:, rows.target_of_U]
    overlap_R = torch.minimum(p_RU, q_RU[:, : p_RU.shape[1]]).sum(dim=-1, dtype=torch.float64).clamp(max=1.0)
    # Summed in another order, the whole may fall short of its part in the last digit.
    follows_R = torch.minimum(p_own_R, q_own_R).double()
    return Chances(torch.maximum(overlap_R, follows_R), follows_R)


def expected_accepted(accepted_AP: Tensor, follows_AP: Tensor, available_A: Tensor) -> Expected:
    """Return what is expected of blocks; positions beyond the transcript count as not accepted.

    Args:
        accepted_AP: a of every position, float64.
        follows_AP: m of every position.
        available_A: how many positions of each block lie inside the transcript.
    """
    position_P = torch.arange(1, accepted_AP.shape[1] + 1, device=accepted_AP.device)
    accepted_AP = torch.where(position_P <= available_A[:, None], accepted_AP, 0.0)
    before_AP = torch.cat([torch.ones_like(follows_AP[:, :1]), follows_AP[:, :-1]], dim=1)[:, : accepted_AP.shape[1]]
    return Expected(
        first_A=accepted_AP[:, :1].sum(dim=1),
        teacher_forced_A=accepted_AP.cumprod(dim=1).sum(dim=1),
        at_least_A=(before_AP.cumprod(dim=1) * accepted_AP).sum(dim=1),
    )
