"""The batched forward pass against a slow one, written here, that takes one anchor and one row at a time."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_core.drafter.model import Anchors, Drafter
from dflash_core.drafter.spec import DrafterSpec, backbone_shapes, expected_shapes, read_drafter_spec
from dflash_core.target.model_config import read_model_config

D, VOCAB, MASK, BLOCK = 24, 40, 39, 5
NUM_TOKENS = 14
TARGET = read_model_config({"hidden_size": D, "num_hidden_layers": 8, "vocab_size": VOCAB})
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


def make_spec(**changes: Any) -> DrafterSpec:
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "hidden_size": D,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100.0,
        "max_position_embeddings": 64,
        "vocab_size": VOCAB,
        "block_size": BLOCK,
        "mask_token_id": MASK,
        "dflash_config": {"target_layer_ids": [2, 0, 5]},
    } | changes
    heads, kv_heads, size = config["num_attention_heads"], config["num_key_value_heads"], 6

    class Facts:
        hidden_size, intermediate_size, head_dim = D, config["intermediate_size"], size
        num_heads, num_kv_heads, num_layers = heads, kv_heads, config["num_hidden_layers"]
        target_layer_ids = config["dflash_config"]["target_layer_ids"]

    shapes = dict(backbone_shapes(Facts))  # type: ignore[arg-type]
    if config.get("attention_bias"):
        for layer in range(config["num_hidden_layers"]):
            for part, length in {"q": heads * size, "k": kv_heads * size, "v": kv_heads * size, "o": D}.items():
                shapes[f"layers.{layer}.self_attn.{part}_proj.bias"] = [length]
    return read_drafter_spec(config, shapes, TARGET, where="config")


def make_weights(spec: DrafterSpec, *, bias: bool = False, seed: int = 0) -> dict[str, Tensor]:
    """Return random weights; those of norms are random too, so that a norm left out would show."""
    generator = torch.Generator().manual_seed(seed)
    shapes = dict(expected_shapes(spec))
    if bias:
        for name, shape in expected_shapes(spec).items():
            if ".self_attn." in name and name.endswith("_proj.weight"):
                shapes[name.replace(".weight", ".bias")] = shape[:1]
    return {
        name: torch.rand(shape, generator=generator) + 0.5
        if name.endswith("norm.weight")
        else torch.randn(shape, generator=generator) * (shape[-1] ** -0.5 if len(shape) == 2 else 0.5)
        for name, shape in shapes.items()
    }


def make_drafter(spec: DrafterSpec, weights: dict[str, Tensor]) -> Drafter:
    return Drafter(spec, weights, embedding(), device=torch.device("cpu"), dtype=torch.float32)


def embedding() -> Tensor:
    return torch.randn(VOCAB, D, generator=torch.Generator().manual_seed(8))


def features(num_tokens: int = NUM_TOKENS, seed: int = 9) -> Tensor:
    return torch.randn(num_tokens, 3 * D, generator=torch.Generator().manual_seed(seed))


def anchors_at(*positions: int, tokens: list[int] | None = None, slots: int | list[int] = BLOCK) -> Anchors:
    tokens = tokens or [3 + position for position in positions]
    counts = slots if isinstance(slots, list) else [slots] * len(positions)
    return Anchors(torch.tensor(positions), torch.tensor(tokens), torch.tensor(counts))


def draft(drafter: Drafter, features_TF: Tensor, *positions: int, num_slots: int = BLOCK, **more: Any) -> Tensor:
    (hidden,) = drafter.draft_hidden(
        [drafter.read_context(features_TF)], [anchors_at(*positions, slots=num_slots, **more)], num_slots
    )
    return hidden


def slow_block(
    spec: DrafterSpec, weights: dict[str, Tensor], features_TF: Tensor, position: int, token: int, num_slots: int
) -> Tensor:
    """Draft one block in float64: attention over cat(context, block), row by row, head by head, under an explicit rule.

    Returns:
        hidden_KD after the final norm.
    """
    w = {name: tensor.double() for name, tensor in weights.items()}
    rope = dict(spec.rope)
    scaling = rope.get("factor", 1.0) if rope["rope_type"] == "linear" else 1.0

    def norm(x: Tensor, name: str) -> Tensor:
        return x / torch.sqrt((x * x).mean() + spec.rms_norm_eps) * w[name]

    def linear(x: Tensor, name: str) -> Tensor:
        bias = w.get(f"{name}.bias")
        return w[f"{name}.weight"] @ x + (0 if bias is None else bias)

    def rotate(head: Tensor, at: int) -> Tensor:
        half = spec.head_dim // 2
        turned = head.clone()
        for pair in range(half):
            angle = at / scaling * rope["rope_theta"] ** (-pair / half)
            one, other = head[pair], head[pair + half]
            turned[pair] = one * math.cos(angle) - other * math.sin(angle)
            turned[pair + half] = other * math.cos(angle) + one * math.sin(angle)
        return turned

    def heads_of(x: Tensor, layer: int, part: str, at: int) -> list[Tensor]:
        prefix = f"layers.{layer}.self_attn"
        pieces = linear(x, f"{prefix}.{part}_proj").split(spec.head_dim)
        if part == "v":
            return list(pieces)
        return [rotate(norm(piece, f"{prefix}.{part}_norm.weight"), at) for piece in pieces]

    def sees(layer: int, query_at: int, key_at: int) -> bool:
        """Positions are absolute; a window counts the query itself, or reaches back from the anchor."""
        window = spec.windows[layer]
        if spec.is_causal[layer] and key_at > query_at:
            return False
        if window is None:
            return True
        if spec.window_rule == "anchor":
            return key_at >= position - window
        return query_at - key_at < window and key_at - query_at < window

    def convolved(inputs: list[Tensor], normed: list[Tensor], name: str, side: int) -> list[Tensor]:
        """Sum each slot and those before it, channel by channel, with kernels that a slot's own state corrects."""
        if spec.conv_kernel_size is None or spec.conv_group_size is None:
            return inputs
        num_groups = D // spec.conv_group_size
        outputs = []
        for slot in range(len(inputs)):
            corrections = w[f"{name}.kernel_projection.weight"] @ normed[slot]
            output = torch.zeros(D, dtype=torch.float64)
            for tap in range(min(spec.conv_kernel_size, slot + 1)):
                for channel in range(D):
                    group = channel // spec.conv_group_size
                    place = (side * spec.conv_kernel_size + tap) * num_groups + group
                    kernel = w[f"{name}.base_kernel"][side, tap, channel] + corrections[place]
                    output[channel] += kernel * inputs[slot - tap][channel]
            outputs.append(output)
        return outputs

    context = [norm(w["fc.weight"] @ row.double(), "hidden_norm.weight") for row in features_TF[:position]]
    ids = [token] + [spec.mask_token_id] * (num_slots - 1)
    rows = [embedding()[one].double() * spec.input_embedding_scale for one in ids]
    for layer in range(spec.num_layers):
        unmixed = [norm(row, f"layers.{layer}.input_layernorm.weight") for row in rows]
        normed = convolved(unmixed, unmixed, f"layers.{layer}.attention_conv", 0)
        inputs = [*context, *normed]
        keys = [heads_of(x, layer, "k", at) for at, x in enumerate(inputs)]
        values = [heads_of(x, layer, "v", at) for at, x in enumerate(inputs)]
        after = []
        for slot in range(len(rows)):
            at = position + slot
            visible = [place for place in range(len(inputs)) if sees(layer, at, place)]
            attended = []
            for head, query in enumerate(heads_of(normed[slot], layer, "q", at)):
                shared = head // (spec.num_heads // spec.num_kv_heads)
                scores = torch.stack([query @ keys[place][shared] for place in visible]) / math.sqrt(spec.head_dim)
                share = torch.softmax(scores, dim=0)
                attended.append(sum(share[n] * values[place][shared] for n, place in enumerate(visible)))
            after.append(linear(torch.cat(attended), f"layers.{layer}.self_attn.o_proj"))  # type: ignore[arg-type]
        mixed = convolved(after, unmixed, f"layers.{layer}.attention_conv", 1)
        rows = [row + more for row, more in zip(rows, mixed, strict=True)]
        unmixed = [norm(row, f"layers.{layer}.post_attention_layernorm.weight") for row in rows]
        after = []
        for x in convolved(unmixed, unmixed, f"layers.{layer}.mlp_conv", 0):
            gate = linear(x, f"layers.{layer}.mlp.gate_proj")
            inner = gate * torch.sigmoid(gate) * linear(x, f"layers.{layer}.mlp.up_proj")
            after.append(linear(inner, f"layers.{layer}.mlp.down_proj"))
        mixed = convolved(after, unmixed, f"layers.{layer}.mlp_conv", 1)
        rows = [row + more for row, more in zip(rows, mixed, strict=True)]
    return torch.stack([norm(row, "norm.weight") for row in rows])


def assert_is_slow_block(
    spec: DrafterSpec, weights: dict[str, Tensor], position: int, *, found: Tensor, num_slots: int = BLOCK
) -> None:
    expected = slow_block(spec, weights, features(), position, 3 + position, num_slots)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


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
