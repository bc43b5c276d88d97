"""The arithmetic of the memory plan against what scoring really holds: never less than measured, and little more.

Real drafters of several kinds score random texts on the CPU while torch's profiler notes every allocation. Weights
and states are stored in bf16, so that what is computed with in float32 is made while it looks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dflash_core.drafter.extra_metrics import ExtraMetrics, ExtraSettings, ObservedBlocks
from dflash_core.drafter.footprint import USUAL, Footprint, Slicing, Workload
from dflash_core.drafter.head import make_head
from dflash_core.drafter.memory import MemoryPlan, plan_memory
from dflash_core.drafter.model import Drafter
from dflash_core.drafter.scoring import count_anchors, score_transcripts
from dflash_core.drafter.spec import DrafterSpec, expected_shapes
from dflash_core.target.transcripts import Transcript
from tests.support.drafter_specs import small_spec
from tests.support.memory_meter import peak_bytes

CPU = torch.device("cpu")
MOST = 1.3
"""Times the measured peak that a plan may count at most, its margin aside."""
DFLASH2 = {
    "proposal_rule": "dflash2",
    "selector_rank": 32,
    "selector_top_k": 16,
    "conv_kernel_size": 2,
    "conv_group_size": 16,
}
DSPARK = {"proposal_rule": "dspark", "markov_rank": 64, "row_alignment": "anchor_shifted", "vocab_size": 4000}
MANY = ((20, 150),) * 4
"""Prompt and response of each text."""
FEW = ((20, 100),) * 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """A drafter, texts, and which stage is to be the fullest."""

    stage: str
    changes: dict[str, Any] = field(default_factory=dict)
    texts: tuple[tuple[int, int], ...] = MANY
    anchors: str = "all"
    dtype: torch.dtype = torch.float32
    extras: ExtraSettings = ExtraSettings()
    slicing: Slicing = USUAL


LONG_TEXT = ((1500, 40),)
CASES = {
    "a long context": Case(stage="drafting", texts=LONG_TEXT),
    "a long context in bf16": Case(stage="drafting", texts=LONG_TEXT, dtype=torch.bfloat16),
    "few heads and a window": Case(
        stage="drafting",
        texts=LONG_TEXT,
        changes={"num_heads": 1, "num_kv_heads": 1, "windows": (64,), "is_causal": (True,)},
    ),
    "scores in slices": Case(stage="drafting", texts=LONG_TEXT, slicing=Slicing(score_elements=500_000)),
    "a budget that the last anchors leave half empty": Case(
        stage="drafting",
        texts=((10, 300),),
        changes={"num_heads": 16, "head_dim": 4},
        slicing=Slicing(score_elements=2 * 8 * 16 * (310 + 8) - 1, num_anchors=8),
    ),
    "many anchors": Case(stage="drafting"),
    "half as many at once": Case(stage="drafting", slicing=Slicing(num_anchors=64)),
    "a wide MLP": Case(stage="drafting", changes={"intermediate_size": 1024}),
    "a wide MLP in bf16": Case(stage="drafting", changes={"intermediate_size": 1024}, dtype=torch.bfloat16),
    "convolutions": Case(
        stage="drafting", changes=DFLASH2 | {"intermediate_size": 64, "num_heads": 1, "num_kv_heads": 1}
    ),
    "features": Case(
        stage="reading",
        texts=((3000, 4),),
        changes={"hidden_size": 128, "num_layers": 1, "target_layer_ids": (1, 2, 3, 4, 5), "block_size": 2},
    ),
    "features in parts": Case(
        stage="reading",
        texts=((3000, 4),),
        changes={"hidden_size": 128, "num_layers": 1, "target_layer_ids": (1, 2, 3, 4, 5), "block_size": 2},
        slicing=Slicing(context_tokens=500),
    ),
    "groups of transcripts": Case(
        stage="drafting",
        texts=((600, 10),) * 6,
        anchors="walk",
        changes={"num_layers": 6, "num_kv_heads": 4},
        slicing=Slicing(group_tokens=1300, num_anchors=8),
    ),
    "a large vocabulary": Case(stage="judging", changes={"vocab_size": 20_000}),
    "a large vocabulary in bf16": Case(stage="judging", changes={"vocab_size": 20_000}, dtype=torch.bfloat16),
    "logits in slices": Case(
        stage="judging", changes={"vocab_size": 20_000}, slicing=Slicing(logits_elements=4_000_000)
    ),
    "capped logits": Case(stage="judging", changes={"vocab_size": 20_000, "final_logit_softcapping": 30.0}),
    "DFlash2": Case(stage="judging", changes=DFLASH2 | {"vocab_size": 20_000}),
    "DSpark, vanilla": Case(stage="drafting", changes=DSPARK | {"markov_head_type": "vanilla"}),
    "DSpark, gated": Case(
        stage="judging", changes=DSPARK | {"markov_head_type": "gated", "vocab_size": 20_000}, texts=FEW
    ),
    "DSpark, rnn": Case(stage="judging", changes=DSPARK | {"markov_head_type": "rnn", "vocab_size": 20_000}, texts=FEW),
    "recall": Case(
        stage="extras",
        changes={"vocab_size": 20_000},
        texts=FEW,
        anchors="walk",
        extras=ExtraSettings(recall_ks=(1, 4)),
    ),
    "temperatures": Case(
        stage="extras",
        changes={"vocab_size": 20_000},
        texts=FEW,
        anchors="walk",
        extras=ExtraSettings(temperatures=(1.0,)),
        slicing=Slicing(extra_logits_elements=2_000_000),
    ),
    "temperatures, a reduced vocabulary, bf16": Case(
        stage="extras",
        changes={"vocab_size": 20_000, "draft_vocab_size": 9_000},
        texts=FEW,
        anchors="walk",
        extras=ExtraSettings(temperatures=(1.0,)),
        dtype=torch.bfloat16,
        slicing=Slicing(extra_logits_elements=2_000_000),
    ),
}


class Stored:
    """Random weights, states and texts of a case, in bf16."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.spec = spec = small_spec(**case.changes)
        generator = torch.Generator().manual_seed(0)

        def numbers(*shape: int) -> Tensor:
            return (0.05 * torch.randn(shape, generator=generator)).bfloat16()

        self.num_drafted = spec.draft_vocab_size or spec.vocab_size
        self.weights = {name: numbers(*shape) for name, shape in expected_shapes(spec).items()}
        if "d2t" in self.weights:
            self.weights["d2t"] = torch.zeros(self.num_drafted, dtype=torch.long)
        self.embedding, self.target_head = (numbers(spec.vocab_size, spec.hidden_size) for _ in range(2))
        self.head = numbers(self.num_drafted, spec.hidden_size)
        self.transcripts = [
            Transcript(
                id=str(number),
                prompt_ids=(1,) * num_prompt,
                response_ids=tuple(torch.randint(spec.vocab_size, (num_response,), generator=generator).tolist()),
                stop_reason="stop",
            )
            for number, (num_prompt, num_response) in enumerate(case.texts)
        ]
        num_tokens = sum(one.num_tokens for one in self.transcripts)
        self.layers = [numbers(num_tokens, spec.hidden_size) for _ in spec.target_layer_ids]
        self.margins = torch.ones(num_tokens)

    @property
    def work(self) -> Workload:
        return Workload(
            block_size=self.spec.block_size,
            longest_tokens=max(one.num_tokens for one in self.transcripts),
            num_tokens=sum(one.num_tokens for one in self.transcripts),
            num_transcripts=len(self.transcripts),
            most_anchors=max(len(one.response_ids) for one in self.transcripts) - 1,
            extras=self.case.extras,
            is_target_head_held=bool(self.case.extras.temperatures) and self.spec.draft_vocab_size is not None,
            stored_itemsize=2,
        )

    def part(self, states_TD: Tensor, index: int) -> Tensor:
        first = sum(one.num_tokens for one in self.transcripts[:index])
        return states_TD[first : first + self.transcripts[index].num_tokens]

    def score(self, slicing: Slicing) -> list[dict[str, Any]]:
        """Load and score, as a drafter's run does."""
        drafter = Drafter(
            self.spec,
            self.weights,
            self.embedding,
            device=CPU,
            dtype=self.case.dtype,
            score_elements=slicing.score_elements,
            context_tokens=slicing.context_tokens,
        )
        head = make_head(self.head, drafter, self.weights, logits_elements=slicing.logits_elements)
        extras = None
        if self.case.extras:
            own = self.spec.draft_vocab_size is None
            target_head = head.weight_VD if own else self.target_head.to(self.case.dtype)
            extras = ExtraMetrics(
                head,
                self.case.extras,
                target_logits=lambda rows: functional.linear(rows.to(self.case.dtype), target_head).float(),
                logits_elements=slicing.extra_logits_elements,
            )
        return score_transcripts(
            drafter,
            head,
            self.transcripts,
            lambda index: torch.cat([self.part(layer, index) for layer in self.layers], dim=-1),
            self.margins,
            block_size=self.spec.block_size,
            max_new_tokens=max(len(one.response_ids) for one in self.transcripts),
            anchors=self.case.anchors,
            extras=extras,
            final_of=lambda index: self.part(self.layers[0], index),
            slicing=slicing,
        )


def counted(spec: DrafterSpec, work: Workload, dtype: torch.dtype, slicing: Slicing) -> MemoryPlan:
    footprint = Footprint(spec, work, itemsize=dtype.itemsize, on_host=True)
    return MemoryPlan(
        slicing=slicing,
        resident=footprint.resident(slicing),
        stages=footprint.stages(slicing),
        runtime_bytes=0,
        free_bytes=None,
    )


@pytest.mark.parametrize("name", CASES)
def test_what_is_counted_covers_what_is_held_and_not_much_more(name: str) -> None:
    case = CASES[name]
    stored = Stored(case)
    plan = counted(stored.spec, stored.work, case.dtype, case.slicing)
    held, rows = peak_bytes(lambda: stored.score(case.slicing))
    assert rows
    assert case.anchors == "walk" or len(rows) == count_anchors(stored.transcripts)
    assert plan.working[0] == case.stage, "the case measures the stage that it is named for"
    assert held <= plan.counted_bytes <= MOST * held, dict(plan.stages)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_trees_hold_what_is_counted_for_them(dtype: torch.dtype) -> None:
    """Blocks of eight transcripts at once, each of the budgets of 16 and 200 waiting for its own: trees alone."""
    spec = small_spec(vocab_size=20_000)
    settings = ExtraSettings(tree_budgets=(16, 200))
    work = Workload(
        block_size=8, longest_tokens=100, num_tokens=800, num_transcripts=8, most_anchors=50, extras=settings
    )
    hidden_APD = torch.randn(16, 8, spec.hidden_size, dtype=dtype, generator=torch.Generator().manual_seed(0))[:, 1:]
    drafter = Drafter(
        spec,
        {name: torch.zeros(shape) for name, shape in expected_shapes(spec).items()},
        torch.zeros(1, spec.hidden_size),
        device=CPU,
        dtype=dtype,
    )
    slicing = Slicing(extra_logits_elements=1_000_000)
    head = make_head(torch.randn(20_000, spec.hidden_size), drafter, {})
    extras = ExtraMetrics(head, settings, logits_elements=slicing.extra_logits_elements)
    whole = torch.full((16,), 7)
    blocks = ObservedBlocks(hidden_APD, whole, torch.ones(16, 7, dtype=torch.long), whole, whole)
    held, _ = peak_bytes(lambda: extras.observe_trees("p", list(range(16)), blocks))
    parts = Footprint(spec, work, itemsize=dtype.itemsize, on_host=True).extras(slicing)
    assert held <= sum(parts.values()) <= MOST * (held + hidden_APD.untyped_storage().nbytes()), parts


@pytest.mark.parametrize("share", [0.7, 0.4])
def test_a_plan_for_less_memory_keeps_to_it(share: float) -> None:
    """What a shrunk plan says is what scoring by it holds; blocks and walks are the same."""
    stored = Stored(CASES["a large vocabulary"])
    footprint = Footprint(stored.spec, stored.work, itemsize=4, on_host=True)
    usual = plan_memory(footprint, None, runtime_bytes=0)
    free = int(share * usual.needed_bytes)
    plan = plan_memory(footprint, free, runtime_bytes=0)
    assert plan.fits
    held, rows = peak_bytes(lambda: stored.score(plan.slicing))
    assert held <= free
    assert plan.counted_bytes <= MOST * held
    # Products of fewer rows round otherwise in the last digit, and ranks among 20 thousand noisy logits show it.
    for here, there in zip(rows, stored.score(usual.slicing), strict=True):
        assert here | {"miss_rank": None} == there | {"miss_rank": None}
        assert abs((here["miss_rank"] or 0) - (there["miss_rank"] or 0)) <= 2
