"""The plan of a drafter's memory: its parts add up, it takes no less than it may, and shrinks where memory is short."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.drafter.extra_metrics import ExtraSettings
from dflash_core.drafter.footprint import USUAL, Footprint, Slicing, Workload
from dflash_core.drafter.memory import MemoryPlan, plan_memory
from dflash_core.drafter.spec import DrafterSpec
from tests.support.drafter_specs import LARGE, SMALL_WORK, small_spec

MIB, GIB = 1 << 20, 1 << 30
FREE = 14_500_000_000
"""Of the 16 GB of the workstation's GPU."""
LONG = Workload(
    block_size=16,
    longest_tokens=4096,
    num_tokens=500 * 2048,
    num_transcripts=500,
    most_anchors=2047,
    stored_itemsize=2,
)
EXTRAS = ExtraSettings(recall_ks=(1, 8), tree_budgets=(16, 64), temperatures=(0.6, 1.0))
CUDA = {"runtime_bytes": 512 * MIB}


def plan(spec: DrafterSpec, work: Workload, free: int | None, *, itemsize: int = 2, **more: Any) -> MemoryPlan:
    footprint = Footprint(spec, work, itemsize=itemsize, on_host=more.pop("on_host", False))
    return plan_memory(footprint, free, **(CUDA | more))


class TestThePublishedDrafterOfA27BTarget:
    """1.73 B weights, hidden 5120, vocabulary 248320, blocks of 16, texts of 4096 tokens, bf16, 14.5 GB free."""

    def test_it_is_planned_part_by_part(self) -> None:
        found = plan(LARGE, LONG, FREE)
        slots = 256 * 16
        q, kv, width, inner = 4096, 1024, 5120, 17408
        expected = {
            "weights": 2 * 1_730_213_120,
            "head": 2 * 248_320 * width,
            # Keys and values of five layers, and a place of eight bytes, for each of 32768 tokens.
            "context": 32_768 * (2 * 5 * 2 * kv + 8),
            # Four rows of the residual's width and two of the queries', one each of keys and values; three places.
            "drafting: hidden rows": slots * (2 * (4 * width + 2 * q + 2 * kv) + 3 * 8),
            # Gate, up and their product.
            "drafting: mlp": slots * 2 * 3 * inner,
        }
        parts = found.parts()
        assert {name: parts[name] for name in expected} == expected
        assert parts["margin"] == 512 * MIB + (expected["drafting: hidden rows"] + expected["drafting: mlp"]) // 10
        assert sum(parts.values()) == found.needed_bytes
        assert found.needed_bytes == pytest.approx(7.41 * GIB, rel=0.01)
        assert found.fits
        assert found.slicing == USUAL, "there is room for all that is useful"

    def test_stages_that_hold_less_are_counted_too(self) -> None:
        stages = plan(LARGE, LONG, FREE).stages
        tokens, width = 4096, 5120
        # Five layers' states of every token; of the projected ones a row and two in fp32 for the norm.
        assert stages["reading"] == {
            "features": tokens * 2 * 5 * width,
            "activations": tokens * width * (2 + 4 + 4),
        }
        # 135 rows of logits within the budget, and 8 of them once more to be ranked, with what compares them.
        assert stages["judging"]["logits"] == 135 * 248_320 * 2 + 8 * 248_320 * (2 + 1 + 4)

    def test_its_attention_counts_where_the_text_is_long(self) -> None:
        long = Workload(block_size=16, longest_tokens=32_768, num_tokens=32_768, num_transcripts=1, most_anchors=30)
        # Of one layer, as many as the budget lets, for an anchor in the middle of the text fills less of it than
        # the last one: three copies in bf16, two in fp32, and two masks for all 32 heads.
        scores, masks = 32 << 20, 1 << 20
        stages = plan(LARGE, long, 10**12).stages
        assert stages["drafting"]["attention scores"] == scores * (3 * 2 + 2 * 4) + 2 * masks

    def test_with_every_extra_and_the_targets_head_beside_its_own_it_still_fits(self) -> None:
        work = Workload(
            **{one.name: getattr(LONG, one.name) for one in fields(LONG)}
            | {"extras": EXTRAS, "is_target_head_held": True}
        )
        found = plan(LARGE, work, FREE)
        assert found.fits
        assert found.resident["target's head"] == 2 * 248_320 * 5120
        assert found.stages["extras"]["logits"] >= 33 * 248_320 * (4 + 2 + 4 + 4 + 4 + 8)

    def test_in_float32_it_fits_with_less_at_once_or_says_so(self) -> None:
        assert not plan(LARGE, LONG, 12 * 10**9, itemsize=4).fits
        found = plan(LARGE, LONG, FREE, itemsize=4)
        assert found.fits
        assert found.slicing.group_tokens < USUAL.group_tokens or found.slicing.num_anchors < USUAL.num_anchors

    def test_a_text_of_128_thousand_tokens_is_read_in_parts(self) -> None:
        long = Workload(block_size=16, longest_tokens=131_072, num_tokens=10**7, num_transcripts=100, most_anchors=2047)
        found = plan(LARGE, long, FREE)
        assert found.fits
        assert found.slicing.context_tokens < 131_072
        assert found.resident["context"] >= 131_072 * 2 * 5 * 1024 * 2


class TestShrinking:
    @pytest.mark.parametrize("extras", [ExtraSettings(), EXTRAS], ids=["plain", "extras"])
    @pytest.mark.parametrize("on_host", [False, True], ids=["device", "host"])
    def test_less_memory_never_gives_a_larger_plan_and_each_fits_or_is_the_least(
        self, on_host: bool, extras: ExtraSettings
    ) -> None:
        work = Workload(**{one.name: getattr(SMALL_WORK, one.name) for one in fields(SMALL_WORK)} | {"extras": extras})
        spec = small_spec(vocab_size=20_000)
        usual = plan(spec, work, None, on_host=on_host, runtime_bytes=0)
        assert usual.slicing == USUAL
        least = plan(spec, work, 0, on_host=on_host, runtime_bytes=0)
        assert not least.fits
        before = usual.needed_bytes
        for free in range(usual.needed_bytes, least.needed_bytes, -(usual.needed_bytes - least.needed_bytes) // 40):
            found = plan(spec, work, free, on_host=on_host, runtime_bytes=0)
            assert found.fits
            assert found.needed_bytes <= before
            before = found.needed_bytes
        assert plan(spec, work, least.needed_bytes, on_host=on_host, runtime_bytes=0).fits
        assert not plan(spec, work, least.needed_bytes - 1, on_host=on_host, runtime_bytes=0).fits

    def test_what_is_enough_is_not_exceeded(self) -> None:
        assert plan(small_spec(), SMALL_WORK, 10**15).slicing == USUAL

    def test_where_nobody_knows_what_is_free_nothing_shrinks(self) -> None:
        found = plan(LARGE, LONG, None)
        assert found.fits
        assert found.slicing == USUAL
        assert "free" not in found.text()

    @settings(max_examples=60, deadline=None)
    @given(
        st.builds(
            Slicing,
            num_anchors=st.integers(1, 512),
            group_tokens=st.integers(1, 50_000),
            context_tokens=st.integers(1, 50_000),
            score_elements=st.integers(1, 1 << 26),
            logits_elements=st.integers(1, 1 << 26),
            extra_blocks=st.integers(1, 128),
            extra_logits_elements=st.integers(1, 1 << 24),
        ),
        st.sampled_from([one.name for one in fields(Slicing)]),
    )
    def test_more_at_once_never_takes_less(self, slicing: Slicing, name: str) -> None:
        work = Workload(**{one.name: getattr(LONG, one.name) for one in fields(LONG)} | {"extras": EXTRAS})
        footprint = Footprint(LARGE, work, itemsize=2, on_host=False)
        values = {one.name: getattr(slicing, one.name) for one in fields(Slicing)}
        larger = Slicing(**values | {name: 2 * values[name]})

        def total(one: Slicing) -> int:
            return sum(footprint.resident(one).values()) + max(
                sum(parts.values()) for parts in footprint.stages(one).values()
            )

        assert total(larger) >= total(slicing)


def test_the_text_names_each_part_that_counts_and_what_is_free() -> None:
    text = plan(LARGE, LONG, FREE).text()
    assert text.startswith(
        "7.4 GiB needed (weights 3.2 GiB, head 2.4 GiB, context 640 MiB, drafting: hidden rows 240 MiB,"
    )
    assert text.endswith("13.5 GiB free")


def test_the_facts_are_plain_and_add_up() -> None:
    facts = plan(LARGE, LONG, FREE).facts()
    assert sum(facts["parts"].values()) == facts["needed_bytes"]
    assert facts["at_once"]["num_anchors"] == 256
    assert facts["free_bytes"] == FREE
