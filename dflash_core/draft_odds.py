"""How sure a drafter was of its drafts, and where it had the target's token at the first miss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_core.drafter.head import Head, Rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Odds:
    """What a drafter thought of one block."""

    probabilities: tuple[float, ...]
    """Softmax of the scores that chose it, per draft: at temperature 1, whatever serving would sample at."""
    miss_rank: int | None
    """Rank (1 = best) that the drafter gave to the target's token at the first miss; None without a miss."""
    miss_probability: float | None
    """Its probability; 0 where the drafter cannot propose it. None without a miss."""


def read_odds(
    head: Head, hidden_PD: Tensor, before_1P: Tensor, draft: Sequence[int], missed_token: int | None, num_accepted: int
) -> Odds:
    """Return the odds of one block's drafts.

    Args:
        head: the rule of proposing.
        hidden_PD: the rows that draft.
        before_1P: the token before each draft position.
        draft: the tokens drafted, in the target's numbering.
        missed_token: the target's token at the first miss, or None.
        num_accepted: drafts before the first miss.
    """
    if not draft:
        return Odds(probabilities=(), miss_rank=None, miss_probability=None)
    side_1PS = head.side(hidden_PD[None], before_1P)
    rows = Rows(hidden_PD, None if side_1PS is None else side_1PS[0])
    chances_PV = torch.softmax(head.scores(rows).float(), dim=-1)
    own_P = head.own_ids(torch.tensor(draft, device=chances_PV.device))
    probabilities = chances_PV.gather(1, own_P[:, None])[:, 0].tolist()
    if missed_token is None:
        return Odds(probabilities=tuple(probabilities), miss_rank=None, miss_probability=None)
    missed_1 = torch.tensor([missed_token], device=chances_PV.device)
    at = slice(num_accepted, num_accepted + 1)
    _, rank_1 = head.compare(Rows(hidden_PD[at], None if rows.side_RS is None else rows.side_RS[at]), missed_1)
    own = int(head.own_ids(missed_1))
    return Odds(
        probabilities=tuple(probabilities),
        miss_rank=int(rank_1),
        miss_probability=float(chances_PV[num_accepted, own]) if own >= 0 else 0.0,
    )
