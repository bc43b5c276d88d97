"""A small drafter of any kind, and a slow forward pass that takes one anchor and one row at a time."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dflash_core.drafter.model import Anchors, Drafter
from dflash_core.drafter.spec import DrafterSpec, backbone_shapes, expected_shapes, read_drafter_spec
from dflash_core.target.model_config import read_model_config

D, VOCAB, MASK, BLOCK = 24, 40, 39, 5
NUM_TOKENS = 14
TARGET = read_model_config({"hidden_size": D, "num_hidden_layers": 8, "vocab_size": VOCAB})


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
