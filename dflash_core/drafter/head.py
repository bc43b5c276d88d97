"""From a block's hidden rows to its drafts: the rules of proposing, over the head.

    rule       draft at position p, from its row's hidden state h and the token before it
    argmax     arg-max of the logits
    dflash2    arg-max of logit(b) + (A[before] * P h) . B[b] over the k tokens b of the largest logits
    dspark     arg-max of logits + W2 z, where z is
               vanilla   e = W1[before]
               gated     sigmoid(G [h; e]) * e
               rnn       tanh(o); g, c, o = J [s; e; h] and s <- sigmoid(g) s + (1 - sigmoid(g)) tanh(c), s = 0 first

The token before is the drafter's own choice. But a draft counts only while all before it are accepted, and
an accepted draft is the target's token. So with the target's tokens put in for the ones before, every draft
up to and including the first miss is what it would have been, whatever stands after it: the rows of a block
are judged without waiting for one another. `Head.propose` walks row by row and needs no target.

Shapes: A anchors, P draft positions, R rows, D hidden size, S what a rule makes of the token before, V tokens
that can be proposed, C candidates.

Sources: z-lab/dflash `dflash/model.py: CandidateSelector`, as in PyPI `dflash` 0.1.0; speculators
`models/dspark/model_definitions.py`; SpecForge `modeling/draft/dspark.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from dflash_core.drafter.draft_vocabulary import target_ids
from dflash_core.drafter.held_at_once import LOGITS_BUDGET_ELEMENTS, RANKED_ELEMENTS
from dflash_core.drafter.model import HEAD_PARTS, Drafter
from dflash_core.errors import UnsupportedCheckpoint

_NOT_PROPOSABLE = -1


class Rows(NamedTuple):
    """Rows of blocks, and what the rule makes of the token before each."""

    hidden_RD: Tensor
    side_RS: Tensor | None = None
    """None where the rule does not look at it."""


class Head:
    """A head on the drafter's device, and the rule `argmax`: hidden rows to logits or choices.

    Args:
        head_VD: the target's head or the drafter's own, as stored.
        drafter: names device, dtype, and what its config does to logits.
        num_token_rows: rows from the first that are tokens; what lies beyond is padding and never a choice.
            None: all are.
        tensors: the drafter's other tensors; those of `model.HEAD_PARTS` are used.
        logits_elements: logits that are held at once.
    """

    def __init__(
        self,
        head_VD: Tensor,
        drafter: Drafter,
        *,
        num_token_rows: int | None = None,
        tensors: Mapping[str, Tensor] | None = None,
        logits_elements: int = LOGITS_BUDGET_ELEMENTS,
    ) -> None:
        self._device, self._dtype = drafter.device, drafter.dtype
        self._tensors = tensors or {}
        self._weight_VD = head_VD.to(device=drafter.device, dtype=drafter.dtype)
        self._num_token_rows = head_VD.shape[0] if num_token_rows is None else num_token_rows
        self._multiplier = drafter.spec.output_multiplier
        self._softcap = drafter.spec.final_logit_softcapping
        self._rows_at_once = max(1, logits_elements // head_VD.shape[0])
        self._target_of_V: Tensor | None = None
        self._own_of_U: Tensor | None = None
        if "d2t" in self._tensors:
            self._map_vocabulary(self._tensors["d2t"], drafter.spec.vocab_size)

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Return logits_RV of hidden rows, scaled and soft-capped as the drafter's config says.

        Neither moves the arg-max of exact numbers. Of rounded ones capping makes ties, which the first of
        equals wins, so that both are computed as serving computes them.
        """
        logits_RV = functional.linear(hidden_RD, self._weight_VD)
        if self._multiplier != 1.0:
            logits_RV = logits_RV * self._multiplier
        if self._softcap is not None:
            logits_RV = torch.tanh(logits_RV / self._softcap) * self._softcap
        if self._num_token_rows < logits_RV.shape[-1]:
            logits_RV[..., self._num_token_rows :] = -torch.inf
        return logits_RV

    def side(self, hidden_APD: Tensor, before_AP: Tensor) -> Tensor | None:
        """Return side_APS, what the rule makes of the tokens before, or None where it does not look at them.

        Args:
            hidden_APD: the rows of whole blocks: row p - 1 drafts position p.
            before_AP: the token before each position, in the target's numbering: the anchor first.
        """
        del hidden_APD, before_AP
        return None

    def scores(self, rows: Rows) -> Tensor:
        """Return scores_RV, whose arg-max is the draft: over all tokens that can be proposed, in their own order."""
        return self.logits(rows.hidden_RD)

    def choose(self, rows: Rows) -> Tensor:
        """Return the drafted token of every row, in the target's numbering."""
        parts = [self._to_target(self._choose(part)) for part in self._slices(rows)]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.long, device=self._device)

    def propose(self, hidden_PD: Tensor, anchor: int) -> list[int]:
        """Return the drafts of one block, row by row: each on the draft before it, as serving does."""
        before = [anchor]
        for position in range(1, hidden_PD.shape[0] + 1):
            hidden_1PD = hidden_PD[None, :position]
            side_1PS = self.side(hidden_1PD, torch.tensor([before], device=self._device))
            if side_1PS is None:
                return [int(token) for token in self.choose(Rows(hidden_PD)).tolist()]
            before.append(int(self.choose(Rows(hidden_1PD[0, -1:], side_1PS[0, -1:]))))
        return before[1:]

    def compare(self, rows: Rows, reference_R: Tensor) -> tuple[Tensor, Tensor]:
        """Return whether each row's draft is the reference, and the reference's rank (1 = best).

        A token that the drafter cannot propose is no hit and ranks after all that it can.
        """
        own_R = reference_R if self._own_of_U is None else self._own_of_U[reference_R]
        hits, ranks = [], []
        for part, own in zip(self._slices(rows), own_R.split(self._rows_at_once), strict=True):
            hit, rank = self._compare(part, own)
            hits.append(hit)
            ranks.append(rank)
        return torch.cat(hits), torch.cat(ranks)

    def confidence(self, hidden_APD: Tensor, before_AP: Tensor) -> Tensor | None:
        """Return confidence_AP, the chance of acceptance that the drafter's own head predicts; None without one.

        Serving may end a draft where it is low. Nothing here does: all drafts are judged.
        """
        weight_1I = self._tensor("confidence_head.proj.weight")
        if weight_1I is None:
            return None
        bias = self._tensor("confidence_head.proj.bias")
        read = hidden_APD
        if weight_1I.shape[1] > hidden_APD.shape[-1]:
            # Its own look-up: a head that reads the token before is trained beside any kind of Markov head.
            read = torch.cat([read, functional.embedding(before_AP, self._need("markov_head.markov_w1.weight"))], -1)
        return torch.sigmoid(functional.linear(read, weight_1I, bias)[..., 0])

    @property
    def weight_VD(self) -> Tensor:  # noqa: N802 - the shape belongs to the name
        """Return the head itself, on the device."""
        return self._weight_VD

    @property
    def num_proposable(self) -> int:
        """Return U, the tokens that logits and scores are over, padding included."""
        return self._weight_VD.shape[0]

    @property
    def target_ids(self) -> Tensor | None:
        """Return target_of_U, the target's number of every token that can be proposed; None where they are the same."""
        return self._target_of_V

    def own_ids(self, token_ids: Tensor) -> Tensor:
        """Return tokens of the target in the numbering of logits and scores, any shape; -1 where there is none."""
        return token_ids if self._own_of_U is None else self._own_of_U[token_ids]

    def _choose(self, rows: Rows) -> Tensor:
        return _first_best(self.scores(rows))

    def _compare(self, rows: Rows, own_R: Tensor) -> tuple[Tensor, Tensor]:
        scores_RV = self.scores(rows)
        hit_R = _first_best(scores_RV) == own_R
        return hit_R, self._ranks(scores_RV, hit_R, own_R)

    def _ranks(self, scores_RV: Tensor, hit_R: Tensor, own_R: Tensor) -> Tensor:
        rank_R = torch.ones_like(own_R)
        missed = torch.nonzero(~hit_R)[:, 0]
        rank_R[missed] = _ranks(scores_RV, missed, own_R[missed])
        return rank_R

    def _slices(self, rows: Rows) -> list[Rows]:
        hidden = rows.hidden_RD.split(self._rows_at_once)
        if rows.side_RS is None:
            return [Rows(part) for part in hidden]
        return [Rows(*part) for part in zip(hidden, rows.side_RS.split(self._rows_at_once), strict=True)]

    def _to_target(self, own_R: Tensor) -> Tensor:
        return own_R if self._target_of_V is None else self._target_of_V[own_R]

    def _map_vocabulary(self, d2t_V: Tensor, vocab_size: int) -> None:
        """Read `d2t`: what is to be added to a token's own number for the target's."""
        target_of_V = target_ids(d2t_V, self._tensors.get("t2d"), vocab_size)
        own_of_U = torch.full((vocab_size,), _NOT_PROPOSABLE)
        own_of_U[target_of_V] = torch.arange(len(target_of_V))
        self._target_of_V, self._own_of_U = target_of_V.to(self._device), own_of_U.to(self._device)

    def _tensor(self, name: str) -> Tensor | None:
        """Return one of the rule's tensors on the device, moved at its first use."""
        if name not in self._tensors:
            return None
        tensor = self._tensors[name].to(device=self._device, dtype=self._dtype)
        self._tensors = {**self._tensors, name: tensor}
        return tensor

    def _need(self, name: str) -> Tensor:
        tensor = self._tensor(name)
        assert tensor is not None, name
        return tensor


class SelectorHead(Head):
    """DFlash2's rule: a selector scores the k best tokens of each row again, with the token before in mind.

    The rank of a token is its place among the candidates, or by its logit where it is none of them.
    """

    def __init__(
        self,
        head_VD: Tensor,
        drafter: Drafter,
        *,
        num_token_rows: int | None = None,
        tensors: Mapping[str, Tensor] | None = None,
        logits_elements: int = LOGITS_BUDGET_ELEMENTS,
    ) -> None:
        super().__init__(
            head_VD, drafter, num_token_rows=num_token_rows, tensors=tensors, logits_elements=logits_elements
        )
        assert drafter.spec.selector_top_k is not None
        self._num_candidates = drafter.spec.selector_top_k

    def side(self, hidden_APD: Tensor, before_AP: Tensor) -> Tensor:
        """Return the product of the predecessor's code and the projected hidden state."""
        projected_APS = functional.linear(hidden_APD, self._need("candidate_selector.hidden_projection.weight"))
        return functional.embedding(before_AP, self._need("candidate_selector.predecessor_codebook")) * projected_APS

    def candidates(self, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits_RV, token_RC and score_RC of the candidates, in no order."""
        assert rows.side_RS is not None
        logits_RV = self.logits(rows.hidden_RD)
        best_RC, token_RC = torch.topk(logits_RV, self._num_candidates, dim=-1, sorted=False)
        codes_RCS = functional.embedding(token_RC, self._need("candidate_selector.successor_codebook"))
        return logits_RV, token_RC, best_RC + torch.einsum("rs,rcs->rc", rows.side_RS, codes_RCS)

    def scores(self, rows: Rows) -> Tensor:
        """Return scores_RV: what is no candidate is out of the question."""
        logits_RV, token_RC, score_RC = self.candidates(rows)
        return torch.full_like(logits_RV, -torch.inf).scatter_(1, token_RC, score_RC)

    def _choose(self, rows: Rows) -> Tensor:
        _, token_RC, score_RC = self.candidates(rows)
        return token_RC.gather(1, _first_best(score_RC)[:, None])[:, 0]

    def _compare(self, rows: Rows, own_R: Tensor) -> tuple[Tensor, Tensor]:
        logits_RV, token_RC, score_RC = self.candidates(rows)
        hit_R = token_RC.gather(1, _first_best(score_RC)[:, None])[:, 0] == own_R
        is_own_RC = token_RC == own_R[:, None]
        own_score_R1 = score_RC.masked_fill(~is_own_RC, -torch.inf).amax(dim=1, keepdim=True)
        rank_R = (score_RC >= own_score_R1).sum(dim=1)
        by_logit_R = self._ranks(logits_RV, is_own_RC.any(dim=1), own_R)
        return hit_R, torch.where(hit_R, 1, torch.where(is_own_RC.any(dim=1), rank_R, by_logit_R))


class MarkovHead(Head):
    """DSpark's rule: the token before biases the logits, through a bottleneck of a few hundred numbers."""

    def side(self, hidden_APD: Tensor, before_AP: Tensor) -> Tensor:
        """Return the bottleneck z of every row."""
        before_APS = functional.embedding(before_AP, self._need("markov_head.markov_w1.weight"))
        weight, bias = self._tensor("markov_head.gate_proj.weight"), self._tensor("markov_head.gate_proj.bias")
        if weight is not None:
            gate = functional.linear(torch.cat([hidden_APD, before_APS], dim=-1), weight, bias)
            return torch.sigmoid(gate) * before_APS
        weight, bias = self._tensor("markov_head.joint_proj.weight"), self._tensor("markov_head.joint_proj.bias")
        return before_APS if weight is None else _recur(hidden_APD, before_APS, weight, bias)

    def scores(self, rows: Rows) -> Tensor:
        """Return the biased logits."""
        assert rows.side_RS is not None
        return self.logits(rows.hidden_RD) + functional.linear(rows.side_RS, self._need("markov_head.markov_w2.weight"))


_RULES: dict[str, type[Head]] = {"argmax": Head, "dflash2": SelectorHead, "dspark": MarkovHead}


def make_head(
    head_VD: Tensor,
    drafter: Drafter,
    tensors: Mapping[str, Tensor],
    *,
    num_token_rows: int | None = None,
    logits_elements: int = LOGITS_BUDGET_ELEMENTS,
) -> Head:
    """Return the head that follows a drafter's rule of proposing.

    Args:
        head_VD: the target's head or the drafter's own, as stored: one row per token that can be proposed.
        drafter: the drafter on its device.
        tensors: the drafter's tensors; those of `model.HEAD_PARTS` are used.
        num_token_rows: rows of the target's numbering that are tokens and no padding; None: all are.
        logits_elements: logits that are held at once.

    Raises:
        UnsupportedCheckpoint: the drafter has a reduced vocabulary, but no head over it, or a `d2t` that is no map.
    """
    num_drafted = drafter.spec.draft_vocab_size
    if num_drafted is not None:
        num_token_rows = None
        if head_VD.shape[0] != num_drafted:
            raise UnsupportedCheckpoint(
                f"draft_vocab_size = {num_drafted}, but the checkpoint holds no lm_head.weight of its own over as many "
                f"tokens; such a head is trained, so it cannot be taken from the target's"
            )
    own = {name: tensor for name, tensor in tensors.items() if name.startswith(HEAD_PARTS)}
    rule = _RULES[drafter.spec.proposal_rule]
    return rule(head_VD, drafter, num_token_rows=num_token_rows, tensors=own, logits_elements=logits_elements)


def _first_best(logits_RV: Tensor) -> Tensor:
    """Return the arg-max of every row, the first of equals: `max` is five times faster than `argmax` on a CPU."""
    return logits_RV.max(dim=-1).indices


def _ranks(logits_RV: Tensor, rows_M: Tensor, token_M: Tensor) -> Tensor:
    """Return the rank of a token in some rows, 1 = best; few rows at a time, which a CPU's cache holds."""
    count = max(1, RANKED_ELEMENTS // logits_RV.shape[1])
    ranks = []
    for rows, token in zip(rows_M.split(count), token_M.split(count), strict=True):
        logits = logits_RV[rows]
        rank = (logits >= logits.gather(1, token.clamp(min=0)[:, None])).sum(dim=-1, dtype=torch.int32)
        ranks.append(torch.where(token < 0, logits_RV.shape[1] + 1, rank))
    return torch.cat(ranks).long()


def _recur(hidden_APD: Tensor, before_APS: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Run the recurrent Markov head over the positions of each block; the state begins at zero."""
    # What a position adds without the state is computed for all at once.
    width = before_APS.shape[-1]
    of_state, of_rest = weight[:, :width], weight[:, width:]
    fixed_APW = functional.linear(torch.cat([before_APS, hidden_APD], dim=-1), of_rest, bias)
    state_AS = before_APS.new_zeros(before_APS.shape[0], width)
    outputs = []
    for fixed_AW in fixed_APW.unbind(dim=1):
        gate, candidate, output = (fixed_AW + functional.linear(state_AS, of_state)).chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        state_AS = gate * state_AS + (1.0 - gate) * torch.tanh(candidate)
        outputs.append(torch.tanh(output))
    return torch.stack(outputs, dim=1) if outputs else before_APS
