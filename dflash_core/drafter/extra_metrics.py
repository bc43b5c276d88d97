"""More numbers out of a drafter's pass: recall at k, draft trees, acceptance at temperatures above 0.

`ExtraMetrics` is shown blocks and keeps counts per prompt; what is counted and how is said in `acceptance`.
Logits exist for some rows at a time, never for all.

Shapes: A anchors, P draft positions, D hidden size, R rows (a block and a position each), C candidates, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dflash_core.acceptance import recall, sampled, trees
from dflash_core.acceptance.own_walk import WalkCounts, count_steps, follow
from dflash_core.acceptance.sweep import Method
from dflash_core.drafter.extra_choice import ExtraSettings
from dflash_core.drafter.head import Head, Rows
from dflash_core.drafter.held_at_once import EXTRA_LOGITS_ELEMENTS


class ObservedBlocks(NamedTuple):
    """Drafted blocks of one prompt, and what the transcript says at their positions."""

    hidden_APD: Tensor
    """The drafter's output; row p - 1 drafts position p."""
    anchor_A: Tensor
    """The anchors' tokens."""
    reference_AP: Tensor
    """The transcript's tokens at positions anchor + 1 .. anchor + P; any token beyond `available_A`."""
    available_A: Tensor
    """Positions that lie inside the transcript, at most those drafted."""
    drafted_A: Tensor
    """Positions that are drafted: fewer near the length limit."""
    final_APD: Tensor | None = None
    """The target's state after its final norm at anchor .. anchor + P - 1; needed for temperatures alone."""


class ExtraMetrics:
    """Counts of one drafter on many prompts.

    Args:
        head: the drafter's head and rule.
        settings: which numbers are wanted. Trees need rows that do not look at the token before.
        target_logits: the target's states after its final norm, [R, D], to its logits, [R, V]; -inf where there is no
            token. Needed for temperatures.
        logits_elements: logits of one kind that are held at once.
    """

    def __init__(
        self,
        head: Head,
        settings: ExtraSettings,
        *,
        target_logits: Callable[[Tensor], Tensor] | None = None,
        logits_elements: int = EXTRA_LOGITS_ELEMENTS,
    ) -> None:
        assert target_logits is not None or not settings.temperatures
        self._head = head
        self.settings = settings
        self._target_logits = target_logits
        self._logits_elements = logits_elements
        self._recall: dict[str, recall.RecallCounts] = {}
        self._sampled: dict[tuple[str, float, sampled.Rule], dict[str, Any]] = defaultdict(lambda: defaultdict(int))
        self._sweep: list[dict[str, Any]] = []
        self._trees: list[dict[str, Any]] = []
        self._pops: dict[str, dict[int, list[int]]] = defaultdict(dict)

    def observe(self, prompt_id: str, blocks: ObservedBlocks) -> None:
        """Count recall and chances on blocks of the main walk; each of them must be shown once.

        Where the device has no room for it, nothing was counted.

        Args:
            prompt_id: the prompt.
            blocks: some of its blocks.
        """
        recalled = self._recalled(blocks) if self.settings.recall_ks else None
        chances = self._chances(blocks) if self.settings.temperatures else {}
        if recalled is not None:
            before = self._recall.get(prompt_id, tuple(map(torch.zeros_like, recalled)))
            self._recall[prompt_id] = recall.RecallCounts(*(a + b for a, b in zip(before, recalled, strict=True)))
        for (temperature, rule), found in chances.items():
            sums = self._sampled[prompt_id, temperature, rule]
            for name, value in found.items():
                sums[name] += value

    def tree_anchors(self, prompt_id: str, num_response_tokens: int) -> list[int]:
        """Return the anchors that the walks under trees come to next and that were not shown yet; none when all end."""
        missing = set()
        for budget in self.settings.tree_budgets:
            missing |= {
                anchor
                for anchor, accepted in follow(num_response_tokens, self._matched(prompt_id, budget))
                if accepted is None
            }
        return sorted(missing)

    def observe_trees(self, prompt_id: str, indices: Sequence[int], blocks: ObservedBlocks) -> None:
        """Make the trees of blocks.

        Args:
            prompt_id: the prompt.
            indices: response indices of their anchors.
            blocks: the blocks.
        """
        largest = max(self.settings.tree_budgets)
        block_R, column_R = _rows_within(blocks.drafted_A, blocks.hidden_APD.shape[1])
        hidden_RD = blocks.hidden_APD[block_R, column_R]
        parts = [trees.best_candidates(self._head.logits(part), largest) for part in self._split(hidden_RD)]
        own_AP = self._head.own_ids(blocks.reference_AP)
        per_block = torch.bincount(block_R, minlength=len(indices)).tolist()
        weights = torch.cat([part.log_probability_RC for part in parts]).split(per_block) if parts else ()
        tokens = torch.cat([part.token_RC for part in parts]).split(per_block) if parts else ()
        available = blocks.available_A.tolist()
        for place, (weight_PC, token_PC) in enumerate(zip(weights, tokens, strict=True)):
            reference = own_AP[place, : available[place]].tolist()
            ranks = trees.ranks_of(token_PC.tolist(), reference)
            self._pops[prompt_id][indices[place]] = trees.pops_of_prefixes(weight_PC.tolist(), ranks, largest)
        for index in indices:
            self._pops[prompt_id].setdefault(index, [])

    def finish_trees(self, prompt_id: str, num_response_tokens: int) -> None:
        """Add up the walks under trees of a prompt, when `tree_anchors` returns none."""
        for budget in self.settings.tree_budgets:
            counts = count_steps(num_response_tokens, self._matched(prompt_id, budget))
            self._trees.append({"prompt_id": prompt_id, "budget": budget, **asdict(counts)})
        self._pops.pop(prompt_id, None)

    def note_sweep(self, prompt_id: str, block_size: int, method: Method, counts: WalkCounts) -> None:
        """Keep the walk of a shorter block."""
        self._sweep.append({"prompt_id": prompt_id, "block_size": block_size, "method": method, **asdict(counts)})

    def rows(self) -> dict[str, list[dict[str, Any]]]:
        """Return the counts of the kinds that are wanted, in the columns of `results.records.EXTRA_SCHEMAS`."""
        wanted = {
            "sweep": (self.settings.sweep_block_sizes, self._sweep),
            "recall": (self.settings.recall_ks, list(self._recall_rows())),
            "trees": (self.settings.tree_budgets, self._trees),
            "sampled": (self.settings.temperatures, list(self._sampled_rows())),
        }
        return {name: rows for name, (is_wanted, rows) in wanted.items() if is_wanted}

    def _matched(self, prompt_id: str, budget: int) -> Callable[[int], int | None]:
        pops = self._pops[prompt_id]
        return lambda anchor: trees.matched_nodes(pops[anchor], budget) if anchor in pops else None

    def _recalled(self, blocks: ObservedBlocks) -> recall.RecallCounts:
        rows, block_R, column_R = self._judged_rows(blocks)
        rank_AP = torch.zeros_like(blocks.reference_AP)
        if len(block_R):
            rank_AP[block_R, column_R] = self._head.compare(rows, blocks.reference_AP[block_R, column_R])[1]
        return recall.count_recalled(rank_AP, blocks.available_A, self.settings.recall_ks)

    def _chances(self, blocks: ObservedBlocks) -> dict[tuple[float, sampled.Rule], dict[str, float]]:
        """Return what blocks add to the sums of each temperature and rule; named even where nothing is judged."""
        assert self._target_logits is not None
        assert blocks.final_APD is not None
        rows, block_R, column_R = self._judged_rows(blocks)
        reference_R = blocks.reference_AP[block_R, column_R]
        final_RD = blocks.final_APD[block_R, column_R]
        own_R = self._head.own_ids(reference_R)
        keys = [(temperature, rule) for temperature in self.settings.temperatures for rule in sampled.RULES]
        shape = (len(keys), *blocks.reference_AP.shape)
        accepted = torch.zeros(shape, dtype=torch.float64, device=block_R.device)
        follows = torch.zeros_like(accepted)
        for part in torch.arange(len(block_R), device=block_R.device).split(self._rows_at_once()):
            logits = sampled.RowLogits(
                target_RV=self._target_logits(final_RD[part]),
                draft_RU=self._head.scores(_part(rows, part)),
                reference_R=reference_R[part],
                own_reference_R=own_R[part],
                target_of_U=self._head.target_ids,
            )
            for temperature in self.settings.temperatures:
                for rule, of_rows in sampled.chances(logits, temperature).items():
                    place = keys.index((temperature, rule))
                    accepted[place, block_R[part], column_R[part]] = of_rows.accepted_R
                    follows[place, block_R[part], column_R[part]] = of_rows.follows_R
        found = {}
        for place, key in enumerate(keys):
            expected = sampled.expected_accepted(accepted[place], follows[place], blocks.available_A)
            found[key] = {
                "num_blocks": len(blocks.anchor_A),
                "num_judged_drafts": int(blocks.available_A.sum()),
                "num_with_drafts": int((blocks.available_A > 0).sum()),
                "sum_first_acceptance": float(expected.first_A.sum()),
                "sum_expected_accepted": float(expected.teacher_forced_A.sum()),
                "sum_accepted_on_transcript": float(expected.at_least_A.sum()),
            }
        return found

    def _judged_rows(self, blocks: ObservedBlocks) -> tuple[Rows, Tensor, Tensor]:
        """Return the rows whose position lies inside the transcript, with their block and column."""
        num_drafts = blocks.hidden_APD.shape[1]
        before_AP = torch.cat([blocks.anchor_A[:, None], blocks.reference_AP[:, :-1]], dim=1)[:, :num_drafts]
        side_APS = self._head.side(blocks.hidden_APD, before_AP)
        block_R, column_R = _rows_within(blocks.available_A, num_drafts)
        side_RS = None if side_APS is None else side_APS[block_R, column_R]
        return Rows(blocks.hidden_APD[block_R, column_R], side_RS), block_R, column_R

    def _rows_at_once(self) -> int:
        return max(1, self._logits_elements // self._head.num_proposable)

    def _split(self, hidden_RD: Tensor) -> Sequence[Tensor]:
        return hidden_RD.split(self._rows_at_once()) if len(hidden_RD) else ()

    def _recall_rows(self) -> Iterator[dict[str, Any]]:
        for prompt_id, counts in self._recall.items():
            blocks, recalled, reached, both = (tensor.tolist() for tensor in counts)
            for place in range(len(blocks)):
                for number, k in enumerate(self.settings.recall_ks):
                    yield {
                        "prompt_id": prompt_id,
                        "draft_position": place + 1,
                        "k": k,
                        "num_blocks": blocks[place],
                        "num_recalled": recalled[place][number],
                        "num_reached": reached[place],
                        "num_reached_recalled": both[place][number],
                    }

    def _sampled_rows(self) -> Iterator[dict[str, Any]]:
        for (prompt_id, temperature, rule), sums in self._sampled.items():
            yield {"prompt_id": prompt_id, "temperature": temperature, "rule": rule, **sums}


def _rows_within(counts_A: Tensor, num_positions: int) -> tuple[Tensor, Tensor]:
    """Return block and column of every position up to each block's count."""
    position_P = torch.arange(1, num_positions + 1, device=counts_A.device)
    block_R, column_R = (position_P <= counts_A[:, None]).nonzero(as_tuple=True)
    return block_R, column_R


def _part(rows: Rows, part: Tensor) -> Rows:
    return Rows(rows.hidden_RD[part], None if rows.side_RS is None else rows.side_RS[part])
