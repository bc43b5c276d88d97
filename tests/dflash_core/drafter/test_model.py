"""The batched forward pass against a slow one that takes one anchor and one row at a time."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_core.drafter.model import Anchors, Drafter
from dflash_core.drafter.spec import DrafterSpec
from tests.support.slow_block import (
    BLOCK,
    MASK,
    NUM_TOKENS,
    D,
    anchors_at,
    assert_is_slow_block,
    draft,
    embedding,
    features,
    make_drafter,
    make_spec,
    make_weights,
    slow_block,
)

SLIDING = {"layer_types": ["sliding_attention", "sliding_attention"], "sliding_window": 4, "use_sliding_window": True}
MIXED = SLIDING | {"layer_types": ["sliding_attention", "full_attention"]}
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "causal window": SLIDING,
    "window both ways": SLIDING | {"is_causal": False},
    "window of one": SLIDING | {"sliding_window": 1},
    "window and full": MIXED,
}


class TableUses(TorchDispatchMode):
    """Notes how many numbers come out of every operation on a table."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self._table = table
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(one is self._table for one in args):
            self.sizes.append(result.numel())
        return result


class TestAgainstTheSlowPass:
    @pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
    def test_every_kind_of_attention(self, kind: dict[str, Any]) -> None:
        spec = make_spec(**kind)
        weights = make_weights(spec)
        drafter = make_drafter(spec, weights)
        for position, found in zip((3, 9, 1), draft(drafter, features(), 3, 9, 1), strict=True):
            assert_is_slow_block(spec, weights, position, found=found)

    @pytest.mark.parametrize("kv_heads", [4, 2, 1], ids=["ratio 1", "ratio 2", "ratio 4"])
    @pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
    def test_shared_heads_and_biases(self, kv_heads: int, bias: bool) -> None:
        spec = make_spec(num_key_value_heads=kv_heads, attention_bias=bias)
        weights = make_weights(spec, bias=bias)
        (found,) = draft(make_drafter(spec, weights), features(), 6)
        assert_is_slow_block(spec, weights, 6, found=found)

    @pytest.mark.parametrize(
        "changes",
        [
            {"rope_theta": 1e6},
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            {"input_embedding_scale": 4.0},
            {"rms_norm_eps": 0.5},
            {"dflash_config": {"target_layer_ids": [2, 5]}},
        ],
        ids=["base", "linear scaling", "embedding scale", "epsilon", "two layers read"],
    )
    def test_every_fact_that_is_no_shape(self, changes: dict[str, Any]) -> None:
        spec = make_spec(**changes)
        weights = make_weights(spec)
        read = features()[:, : len(spec.target_layer_ids) * D]
        (found,) = draft(make_drafter(spec, weights), read, 6)
        expected = slow_block(spec, weights, read, 6, 9, BLOCK)
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize("num_slots", [1, 2, 3])
    def test_blocks_shorter_than_trained(self, num_slots: int) -> None:
        spec = make_spec(**MIXED)
        weights = make_weights(spec)
        (found,) = draft(make_drafter(spec, weights), features(), 6, num_slots=num_slots)
        assert_is_slow_block(spec, weights, 6, found=found, num_slots=num_slots)

    @pytest.mark.parametrize("kind", [{}, SLIDING, SLIDING | {"is_causal": False}], ids=["full", "causal", "both ways"])
    def test_a_block_cut_by_the_length_limit_is_a_shorter_block(self, kind: dict[str, Any]) -> None:
        """Blocks of 5, 3 and 1 slots in one pass; rows beyond a block's end mean nothing."""
        spec = make_spec(**kind)
        weights = make_weights(spec)
        drafter = make_drafter(spec, weights)
        (hidden,) = drafter.draft_hidden(
            [drafter.read_context(features())], [anchors_at(4, 5, 6, slots=[5, 3, 1])], BLOCK
        )
        for found, position, slots in zip(hidden, (4, 5, 6), (5, 3, 1), strict=True):
            assert_is_slow_block(spec, weights, position, found=found[:slots], num_slots=slots)
        assert torch.isfinite(hidden).all()

    def test_yarn_scales_cosine_and_sine(self) -> None:
        yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
        spec = make_spec(rope_scaling=yarn)
        drafter = make_drafter(spec, make_weights(spec))
        heads = torch.randn(1, 1, 1, 6, generator=torch.Generator().manual_seed(0))
        turned = drafter._rotate(heads, torch.tensor([[7]]))
        assert float(turned.norm() / heads.norm()) == pytest.approx(0.1 * math.log(8.0) + 1)
        plain = make_drafter(make_spec(), make_weights(spec))._rotate(heads, torch.tensor([[7]]))
        assert float(plain.norm() / heads.norm()) == pytest.approx(1.0)


class TestConvolutionsAndOtherWindows:
    """What DFlash2 and speculators add, against the slow pass."""

    def spec(self, kind: dict[str, Any], **facts: Any) -> DrafterSpec:
        return replace(make_spec(**kind), **facts)

    @pytest.mark.parametrize("is_causal", [False, True], ids=["both ways", "causal"])
    @pytest.mark.parametrize("window", [1, 3, 100])
    def test_a_window_from_the_anchor_on_is_the_same_for_all_rows(self, window: int, is_causal: bool) -> None:
        spec = self.spec(MIXED | {"sliding_window": window, "is_causal": is_causal}, window_rule="anchor")
        weights = make_weights(spec)
        drafter = make_drafter(spec, weights)
        for position, found in zip((3, 9, 1), draft(drafter, features(), 3, 9, 1), strict=True):
            assert_is_slow_block(spec, weights, position, found=found)

    @pytest.mark.parametrize("kind", [{}, MIXED, SLIDING | {"is_causal": False}], ids=["full", "mixed", "both ways"])
    @pytest.mark.parametrize(("num_taps", "group_size"), [(1, 24), (2, 4), (3, 1), (7, 6)])
    def test_convolutions_inside_the_block(self, kind: dict[str, Any], num_taps: int, group_size: int) -> None:
        spec = self.spec(
            kind,
            proposal_rule="dflash2",
            conv_kernel_size=num_taps,
            conv_group_size=group_size,
            selector_rank=2,
            selector_top_k=2,
        )
        weights = make_weights(spec)
        drafter = make_drafter(spec, weights)
        for position, found in zip((6, 1), draft(drafter, features(), 6, 1), strict=True):
            assert_is_slow_block(spec, weights, position, found=found)
        (short,) = draft(drafter, features(), 6, num_slots=2)
        assert_is_slow_block(spec, weights, 6, found=short, num_slots=2)


class TestBatching:
    @pytest.fixture
    def drafter(self) -> Drafter:
        spec = make_spec(**MIXED)
        return make_drafter(spec, make_weights(spec))

    def test_anchors_in_any_order_and_company_give_the_same(self, drafter: Drafter) -> None:
        """Some are closer to each other than a block is long; none may see another's block."""
        alone = {position: draft(drafter, features(), position)[0] for position in (1, 4, 5, 6, 13)}
        for order in ((1, 4, 5, 6, 13), (13, 6, 5, 4, 1), (5, 13), (4, 4)):
            for position, found in zip(order, draft(drafter, features(), *order), strict=True):
                torch.testing.assert_close(found, alone[position], atol=1e-6, rtol=1e-5)

    def test_transcripts_of_different_lengths_share_a_pass(self, drafter: Drafter) -> None:
        texts = [features(14), features(6, seed=1), features(9, seed=2)]
        chosen = [(3, 9), (2,), (5, 6, 1)]
        together = drafter.draft_hidden(
            [drafter.read_context(text) for text in texts], [anchors_at(*positions) for positions in chosen], BLOCK
        )
        for found, text, positions in zip(together, texts, chosen, strict=True):
            torch.testing.assert_close(found, draft(drafter, text, *positions), atol=1e-6, rtol=1e-5)

    def test_a_transcript_without_anchors_is_left_out(self, drafter: Drafter) -> None:
        contexts = [drafter.read_context(features()), drafter.read_context(features(seed=1))]
        none = Anchors(*(torch.empty(0, dtype=torch.long) for _ in range(3)))
        first, second = drafter.draft_hidden(contexts, [none, anchors_at(4)], BLOCK)
        assert first.shape == (0, BLOCK, D)
        torch.testing.assert_close(second, draft(drafter, features(seed=1), 4), atol=1e-6, rtol=1e-5)

    @pytest.mark.parametrize("budget", [1, 200])
    def test_slices_of_anchors_give_the_same(
        self, drafter: Drafter, monkeypatch: pytest.MonkeyPatch, budget: int
    ) -> None:
        whole = draft(drafter, features(), 3, 9, 1, 12)
        monkeypatch.setattr(drafter, "score_elements", budget)
        torch.testing.assert_close(draft(drafter, features(), 3, 9, 1, 12), whole, atol=1e-6, rtol=1e-5)

    @pytest.mark.parametrize("tokens", [1, 3, NUM_TOKENS - 1, NUM_TOKENS, 1000])
    def test_a_context_read_in_parts_is_the_same(
        self, drafter: Drafter, monkeypatch: pytest.MonkeyPatch, tokens: int
    ) -> None:
        whole = drafter.read_context(features())
        monkeypatch.setattr(drafter, "context_tokens", tokens)
        for here, there in zip(drafter.read_context(features()), whole, strict=True):
            torch.testing.assert_close(here.keys_GTE, there.keys_GTE, atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(here.values_GTE, there.values_GTE, atol=1e-6, rtol=1e-5)

    def test_the_embedding_stays_where_it_is(self) -> None:
        """Only rows of tokens that occur are moved: as stored, and never the table in the computation's dtype."""
        spec, table = make_spec(), embedding().bfloat16()
        drafter = Drafter(spec, make_weights(spec), table, device=torch.device("cpu"), dtype=torch.float32)
        assert drafter._embedding_VD is table
        with TableUses(table) as uses:
            rows = drafter.embed(torch.tensor([[5, MASK, MASK], [7, MASK, MASK]]))
        assert rows.dtype == torch.float32
        assert uses.sizes == [3 * D], "two anchors and the mask token"

    def test_the_dtype_is_that_of_the_computation(self) -> None:
        spec = make_spec()
        drafter = Drafter(spec, make_weights(spec), embedding(), device=torch.device("cpu"), dtype=torch.bfloat16)
        found = draft(drafter, features().bfloat16(), 6)
        assert found.dtype == torch.bfloat16
        exact = slow_block(spec, make_weights(spec), features(), 6, 9, BLOCK)
        assert torch.nn.functional.cosine_similarity(found[0].double(), exact).min() > 0.99


class TestWhatIsSeen:
    """Whatever is not seen can be replaced by anything, to the last bit."""

    ANCHOR = 9

    def changed_rows(self, spec: DrafterSpec, *tokens: int) -> list[bool]:
        """Tell which rows of a block at the anchor change when the features of some tokens do."""
        drafter = make_drafter(spec, make_weights(spec))
        # A second anchor near the end keeps the later context in the pass.
        before = draft(drafter, features(), self.ANCHOR, NUM_TOKENS - 1)[0]
        replaced = features()
        replaced[list(tokens)] = 1000 * features(seed=77)[list(tokens)]
        after = draft(drafter, replaced, self.ANCHOR, NUM_TOKENS - 1)[0]
        return [not torch.equal(one, other) for one, other in zip(before, after, strict=True)]

    @pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
    def test_no_row_sees_the_target_at_the_anchor_or_after_it(self, kind: dict[str, Any]) -> None:
        assert self.changed_rows(make_spec(**kind), *range(self.ANCHOR, NUM_TOKENS)) == [False] * BLOCK

    def test_without_a_window_every_row_sees_the_first_token_and_the_one_before_the_anchor(self) -> None:
        assert self.changed_rows(make_spec(), 0) == [True] * BLOCK
        assert self.changed_rows(make_spec(), self.ANCHOR - 1) == [True] * BLOCK

    @pytest.mark.parametrize(
        ("token", "expected"),
        [
            (5, [False, False, False, False, False]),
            (6, [True, False, False, False, False]),
            (7, [True, True, False, False, False]),
            (8, [True, True, True, False, False]),
        ],
    )
    def test_a_window_of_four_counts_the_row_itself(self, token: int, expected: list[bool]) -> None:
        """One sliding layer, anchor at 9: row j stands at 9 + j and sees back to 9 + j - 3."""
        assert (
            self.changed_rows(make_spec(num_hidden_layers=1, **SLIDING | {"layer_types": ["sliding_attention"]}), token)
            == expected
        )

    def test_a_token_before_the_window_never_matters_to_sliding_layers_alone(self) -> None:
        assert self.changed_rows(make_spec(**SLIDING), *range(6)) == [False] * BLOCK
        assert self.changed_rows(make_spec(**SLIDING), 6)[0]

    def rows_that_change_with_the_anchor_token(self, spec: DrafterSpec) -> list[bool]:
        drafter = make_drafter(spec, make_weights(spec))
        before = draft(drafter, features(), self.ANCHOR, tokens=[3])[0]
        after = draft(drafter, features(), self.ANCHOR, tokens=[4])[0]
        return [not torch.equal(one, other) for one, other in zip(before, after, strict=True)]

    def test_the_anchor_token_is_seen_by_every_row_but_those_beyond_a_window(self) -> None:
        assert self.rows_that_change_with_the_anchor_token(make_spec()) == [True] * BLOCK
        one_layer = SLIDING | {"layer_types": ["sliding_attention"], "num_hidden_layers": 1}
        assert self.rows_that_change_with_the_anchor_token(make_spec(**one_layer)) == [True] * 4 + [False]
        both_ways = one_layer | {"is_causal": False}
        assert self.rows_that_change_with_the_anchor_token(make_spec(**both_ways)) == [True] * 4 + [False]

    @pytest.mark.parametrize(("is_causal", "sees_later"), [(True, False), (False, True)])
    def test_rows_see_later_slots_unless_they_are_causal(self, is_causal: bool, sees_later: bool) -> None:
        """A longer block adds slots at its end; earlier rows notice them only where attention goes both ways."""
        spec = make_spec(is_causal=is_causal)
        drafter = make_drafter(spec, make_weights(spec))
        short = draft(drafter, features(), self.ANCHOR, num_slots=3)[0]
        long = draft(drafter, features(), self.ANCHOR, num_slots=5)[0, :3]
        assert (not torch.allclose(short, long, atol=1e-5)) == sees_later

    def test_the_order_of_the_target_layers_matters(self) -> None:
        spec = make_spec()
        drafter = make_drafter(spec, make_weights(spec))
        swapped = torch.cat([features()[:, D : 2 * D], features()[:, :D], features()[:, 2 * D :]], dim=1)
        assert not torch.allclose(draft(drafter, features(), 6), draft(drafter, swapped, 6), atol=1e-3)

    def test_the_embedding_is_scaled_and_left_as_it_was(self) -> None:
        table = embedding()
        spec = make_spec(input_embedding_scale=3.0)
        drafter = Drafter(spec, make_weights(spec), table, device=torch.device("cpu"), dtype=torch.float32)
        assert torch.equal(drafter.embed(torch.tensor([[5, MASK]])), embedding()[[5, MASK]][None] * 3.0)
        assert torch.equal(table, embedding())
