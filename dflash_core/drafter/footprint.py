"""How many bytes scoring a drafter holds at once, stage by stage: counts of numbers times bytes per number.

Every count follows the code that it names and is an upper bound: what that code holds at its fullest moment,
views aside. Nothing is asked of a device here. `memory` makes a plan of it.

    resident   weights, head, context keys and values of one group of transcripts
    reading    features of a transcript's tokens on their way to keys and values    `model.Drafter.read_context`
    drafting   a layer's activations over all slots of the blocks of one pass       `model.Drafter.draft_hidden`
    judging    hidden rows of those blocks, and logits of some                      `judging`, `head`
    extras     the same again for recall, trees and temperatures                    `extra_scoring`, `extra_metrics`

The stages come after one another, so that the largest counts. The embedding is no part of it: whether it is
the target's or the drafter's own, it stays where it is stored, and rows of it are fetched.

Shapes: N slots of all blocks of one pass, R rows of the head; other letters as in `model`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dflash_core.drafter.extra_choice import ExtraSettings
from dflash_core.drafter.held_at_once import (
    EXTRA_LOGITS_ELEMENTS,
    LOGITS_BUDGET_ELEMENTS,
    RANKED_ELEMENTS,
    ROWS_PER_CALL,
    SCORE_BUDGET_ELEMENTS,
    WHOLE,
)
from dflash_core.drafter.spec import DrafterSpec, expected_shapes

Parts = dict[str, int]
"""Name of a part to its bytes."""
_FLOAT32 = 4
_FLOAT64 = 8
_INT64 = 8
_PLACES = 16
"""Whole numbers per row that say where it stands, what is expected there and what was found."""
_NORM = 8
"""Bytes per number that `Drafter._norm` holds beside its input: two copies in fp32, or one and two in half."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slicing:
    """How much is held at once. It decides memory and speed, and no number; the defaults cost a CPU no speed."""

    num_anchors: int = 256
    """Blocks that are drafted in one pass."""
    group_tokens: int = 32_768
    """Transcripts are taken in groups of so many tokens, whose context keys and values stay resident."""
    context_tokens: int = WHOLE
    """Tokens of a transcript whose features are read at once: all, unless memory is short."""
    score_elements: int = SCORE_BUDGET_ELEMENTS
    """Attention scores of one layer that are held at once."""
    logits_elements: int = LOGITS_BUDGET_ELEMENTS
    """Logits that the head holds at once."""
    extra_blocks: int = 64
    """Blocks whose hidden rows are held at once for the extra numbers."""
    extra_logits_elements: int = EXTRA_LOGITS_ELEMENTS
    """Logits of one kind that the extra numbers hold at once."""


USUAL = Slicing()


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What is to be scored, as far as it decides memory; upper bounds do."""

    block_size: int
    """Slots of one block."""
    longest_tokens: int
    """Tokens of the longest transcript."""
    num_tokens: int
    """Tokens of all transcripts."""
    num_transcripts: int
    most_anchors: int
    """Anchors of the transcript that has most: tokens of the longest response but one."""
    extras: ExtraSettings = ExtraSettings()
    is_target_head_held: bool = False
    """Is the target's head held beside the drafter's own? Temperatures need both."""
    stored_itemsize: int = _FLOAT32
    """Bytes of one number of the stored hidden states."""

    @property
    def num_anchors(self) -> int:
        """Return the anchors there are at most."""
        return self.num_transcripts * self.most_anchors

    @property
    def draws_extra_blocks(self) -> bool:
        """Tell whether blocks are drafted for the extra numbers, those of a sweep aside."""
        return bool(self.extras.recall_ks or self.extras.tree_budgets or self.extras.temperatures)


class Footprint:
    """Bytes of one drafter's scoring, as functions of a slicing.

    Args:
        spec: facts of the drafter.
        work: what is scored.
        itemsize: bytes of one number in the dtype of the computation.
        on_host: the device is the host's memory, so that features count before they are moved, too.
    """

    def __init__(self, spec: DrafterSpec, work: Workload, *, itemsize: int, on_host: bool) -> None:
        self._spec = spec
        self._work = work
        self._item = itemsize
        self._on_host = on_host
        self._is_half = itemsize < _FLOAT32
        self._queries = spec.num_heads * spec.head_dim
        self._keys = spec.num_kv_heads * spec.head_dim
        self._num_rows = work.block_size if spec.row_alignment == "anchor_shifted" else max(work.block_size - 1, 0)
        self._vocab = spec.vocab_size if spec.draft_vocab_size is None else spec.draft_vocab_size
        is_dflash2 = spec.proposal_rule == "dflash2"
        self._side = (spec.selector_rank or 0) if is_dflash2 else spec.markov_rank

    def resident(self, slicing: Slicing) -> dict[str, int]:
        """Return what is held from the first block to the last."""
        spec, work = self._spec, self._work
        weights = sum(math.prod(shape) for name, shape in expected_shapes(spec).items() if name != "d2t") * self._item
        if spec.draft_vocab_size is not None:
            weights += (spec.draft_vocab_size + spec.vocab_size) * _INT64
        tokens = min(work.num_tokens, max(slicing.group_tokens, work.longest_tokens))
        parts = {"weights": weights, "head": self._vocab * spec.hidden_size * self._item}
        if work.is_target_head_held:
            parts["target's head"] = spec.vocab_size * spec.hidden_size * self._item
        return parts | {"context": tokens * (2 * spec.num_layers * self._keys * self._item + _INT64)}

    def stages(self, slicing: Slicing) -> dict[str, Parts]:
        """Return stage to the parts that it holds at its fullest moment."""
        found: dict[str, Parts] = {
            "reading": self.reading(slicing),
            "drafting": self.drafting(slicing),
            "judging": self.judging(slicing),
        }
        if self._work.draws_extra_blocks:
            found["extras"] = self.extras(slicing)
        return found

    def reading(self, slicing: Slicing) -> Parts:
        """Return the bytes of making a transcript's features into keys and values, which are the context's."""
        spec, work, item = self._spec, self._work, self._item
        tokens = min(work.longest_tokens, slicing.context_tokens)
        width, features = spec.hidden_size, len(spec.target_layer_ids) * spec.hidden_size
        stored = work.longest_tokens * features * work.stored_itemsize if self._on_host else 0
        is_copied = not self._on_host or work.stored_itemsize != item or tokens < work.longest_tokens
        layer = max(self._keys * (item + _NORM), self._rotating(self._keys), 3 * self._keys * item)
        return {
            "features": stored + (tokens * features * item if is_copied else 0),
            "activations": tokens * max(width * (item + _NORM), width * item + layer),
        }

    def drafting(self, slicing: Slicing) -> Parts:
        """Return the bytes of a layer over the blocks of one pass: in its attention or in its MLP."""
        spec, item = self._spec, self._item
        slots = self._anchors_at_once(slicing) * self._work.block_size
        width, inner = spec.hidden_size, spec.intermediate_size
        convolving, corrections = 0, 0
        if spec.conv_group_size is not None and spec.conv_kernel_size is not None:
            convolving = 4 * width * item
            corrections = 2 * spec.conv_kernel_size * (width // spec.conv_group_size) * item
        entry = 2 * width * item + corrections + 3 * _INT64
        heads = (self._queries + 2 * self._keys) * item
        scores, attended = self._attending(slicing), slots * self._queries * item
        making_heads = max(
            width * _NORM,
            convolving,
            self._queries * (item + _NORM),
            self._rotating(self._queries),
            self._queries * item + max(self._keys * (item + _NORM), self._rotating(self._keys)),
        )
        # Heads and what attention gave live on to the end of the layer.
        left = entry + 2 * width * item + heads + self._queries * item + corrections
        mlp = max(width * _NORM, convolving, 3 * inner * item, (2 * inner + 2 * width) * item + convolving)
        candidates: list[Parts] = [
            {"hidden rows": slots * (entry + making_heads)},
            {"hidden rows": slots * (entry + heads) + attended, "attention scores": max(scores, attended)},
            {"hidden rows": slots * (left - width * item + max(width * item + convolving, self._queries * item))},
            {"hidden rows": slots * left, "mlp": slots * mlp},
        ]
        return max(candidates, key=lambda parts: sum(parts.values()))

    def judging(self, slicing: Slicing) -> Parts:
        """Return the bytes of asking the head how far the blocks of one pass are accepted."""
        spec, item = self._spec, self._item
        anchors = self._anchors_at_once(slicing)
        rows = anchors * self._num_rows
        # The drafter's list of rows, and the one tensor that is made of it.
        hidden = 2 * anchors * self._work.block_size * spec.hidden_size * item + rows * _PLACES * _INT64
        asked = min(rows, max(ROWS_PER_CALL, anchors))
        return {"hidden rows": hidden} | self._asking(rows, asked, slicing)

    def extras(self, slicing: Slicing) -> Parts:
        """Return the bytes of the costliest among the extra numbers."""
        spec, work = self._spec, self._work
        blocks = min(slicing.extra_blocks, work.num_anchors)
        rows = blocks * self._num_rows
        hidden = self._observed(blocks)
        if work.extras.temperatures:
            hidden += rows * spec.hidden_size * work.stored_itemsize * (1 if self._on_host else 2)
        found: list[Parts] = []
        if work.extras.recall_ks:
            found.append({"hidden rows": hidden} | self._asking(rows, rows, slicing))
        if work.extras.tree_budgets:
            # Each budget's walk waits for one block of every transcript.
            blocks = min(blocks, work.num_transcripts * len(work.extras.tree_budgets))
            found.append(self._trees(self._observed(blocks), blocks * self._num_rows, slicing))
        if work.extras.temperatures:
            found.append(self._chances(hidden, rows, slicing))
        return max(found, key=lambda parts: sum(parts.values()))

    def _anchors_at_once(self, slicing: Slicing) -> int:
        blocks = max(slicing.num_anchors, slicing.extra_blocks if self._work.draws_extra_blocks else 1)
        return min(self._work.num_anchors, blocks)

    def _rotating(self, width: int) -> int:
        """Return the bytes per row of `Drafter._rotate` over heads of a width, which are among them."""
        head_dim, item = self._spec.head_dim, self._item
        angles = head_dim * (3 * _FLOAT32 + item)
        return max(4 * width * item + head_dim * (_FLOAT32 + 2 * item), width * item + angles)

    def _attending(self, slicing: Slicing) -> int:
        """Return the bytes of `Drafter._attend_slice` for the anchors that it takes at once."""
        spec, work, item = self._spec, self._work, self._item
        slots = work.block_size
        per_anchor = slots * spec.num_heads * (work.longest_tokens + slots)
        # One transcript after the other, in slices: of long contexts few anchors fill the budget, of short ones many.
        anchors = min(self._anchors_at_once(slicing), work.most_anchors)
        scores = min(anchors * per_anchor, max(slicing.score_elements, per_anchor))
        mask, rows = scores // spec.num_heads, anchors * slots * self._queries * item
        softmax = scores * (3 * item + _FLOAT32 * (2 if self._is_half else 1)) + 2 * mask
        masking = scores * item + mask * (_INT64 + 3) + rows
        gathering = max(scores * 4 * item + rows, scores * 3 * item + 4 * rows) + 2 * mask
        return max(softmax, masking, gathering)

    def _asking(self, num_rows: int, num_asked: int, slicing: Slicing) -> Parts:
        """Return the bytes of the head: what it makes of the token before, rows taken out, and logits in slices."""
        spec, item = self._spec, self._item
        width, side = spec.hidden_size, self._side
        before = 0
        if spec.proposal_rule == "dflash2":
            before = width + 3 * side
        elif spec.markov_rank:
            before = width + {"gated": 6, "rnn": 7}.get(spec.markov_head_type or "", 1) * side
        taken = num_asked * (width + side) * item
        rows = min(num_asked, max(1, slicing.logits_elements // self._vocab))
        logits = rows * self._vocab * self._copies() * item
        ranked = min(rows, max(1, RANKED_ELEMENTS // self._vocab)) * self._vocab * (item + 1 + _FLOAT32)
        logits = max(logits, rows * self._vocab * item + ranked) + rows * self._candidates() * item
        making = num_rows * before * item
        kept = num_rows * side * item
        if making > kept + taken + logits:
            return {"rows of the rule": making}
        return {"rows of the head": kept + taken, "logits": logits}

    def _copies(self) -> int:
        """Return how many logits of a row the head holds at once while it scales, caps or biases them."""
        spec = self._spec
        is_added = spec.proposal_rule == "dspark" and spec.markov_rank > 0
        if is_added or spec.final_logit_softcapping is not None:
            return 3
        return 2 if spec.output_multiplier != 1.0 else 1

    def _candidates(self) -> int:
        """Return the numbers per row of DFlash2's candidates: their codes, and some numbers of each."""
        spec = self._spec
        return 0 if spec.selector_top_k is None else spec.selector_top_k * (self._side + 8)

    def _observed(self, blocks: int) -> int:
        """Return the bytes of the hidden rows of blocks, and of the tokens and places that belong to them."""
        hidden = self._work.block_size * self._spec.hidden_size * self._item
        return blocks * (hidden + self._num_rows * _PLACES * _INT64)

    def _trees(self, hidden: int, num_rows: int, slicing: Slicing) -> Parts:
        item, width = self._item, self._spec.hidden_size
        rows = min(num_rows, max(1, slicing.extra_logits_elements // self._vocab))
        wide = item + _FLOAT32 * (2 if self._is_half else 1)
        best = min(max(self._work.extras.tree_budgets), self._vocab)
        return {
            "hidden rows": hidden + num_rows * width * item,
            "logits": rows * self._vocab * max(wide, self._copies() * item),
            "candidates": 2 * num_rows * best * (_FLOAT32 + _INT64),
        }

    def _chances(self, hidden: int, num_rows: int, slicing: Slicing) -> Parts:
        spec, work, item = self._spec, self._work, self._item
        width, vocab = spec.hidden_size, spec.vocab_size
        rows = min(num_rows, max(1, slicing.extra_logits_elements // self._vocab))
        half = _FLOAT32 if self._is_half else 0
        making = rows * (vocab * _FLOAT32 + self._vocab * (self._copies() + 1) * item)
        # Of the target: logits and p; of the drafter: logits, q, and its smaller with p, summed in float64.
        softmax = rows * (vocab * 2 * _FLOAT32 + self._vocab * (item + half + 2 * _FLOAT32))
        mapped = _FLOAT32 if spec.draft_vocab_size is not None else 0
        summing = rows * (vocab * 2 * _FLOAT32 + self._vocab * (item + 2 * _FLOAT32 + mapped + _FLOAT64))
        target = rows * vocab * (3 * _FLOAT32 + half)
        sums = 4 * len(work.extras.temperatures) * num_rows * _FLOAT64
        taken = num_rows * (width * (item + work.stored_itemsize) + self._side * item)
        before = num_rows * (width + 7 * self._side) * item if self._side else 0
        return {
            "hidden rows": hidden + taken + before,
            "logits": max(making, softmax, summing, target) + rows * self._candidates() * item,
            "sums": sums,
        }
