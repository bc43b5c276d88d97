"""Draft configs of a made-up drafter, its tensors' shapes written out by hand, and how tests read them."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_core.drafter.spec import DrafterSpec, read_drafter_spec
from dflash_core.target.model_config import ModelConfig, read_model_config

TARGET = read_model_config({"hidden_size": 32, "num_hidden_layers": 36, "vocab_size": 100})
CONFIG: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "vocab_size": 100,
    "num_target_layers": 36,
    "block_size": 8,
    "dflash_config": {"mask_token_id": 99, "target_layer_ids": [3, 1, 5]},
}
HEAD_DIM = 10
ATTENTION = ("q", "k", "v", "o")


def shapes_for(num_layers: int = 2, num_selected: int = 3) -> dict[str, list[int]]:
    """Return the tensors of the config above, written out here and not by the code under test."""
    shapes = {"fc.weight": [32, 32 * num_selected], "hidden_norm.weight": [32], "norm.weight": [32]}
    per_layer = {
        "input_layernorm.weight": [32],
        "post_attention_layernorm.weight": [32],
        "self_attn.q_proj.weight": [40, 32],
        "self_attn.k_proj.weight": [20, 32],
        "self_attn.v_proj.weight": [20, 32],
        "self_attn.o_proj.weight": [32, 40],
        "self_attn.q_norm.weight": [10],
        "self_attn.k_norm.weight": [10],
        "mlp.gate_proj.weight": [48, 32],
        "mlp.up_proj.weight": [48, 32],
        "mlp.down_proj.weight": [32, 48],
    }
    for layer in range(num_layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in per_layer.items()}
    return shapes


def biases(num_layers: int = 2, only: str = "qkvo") -> dict[str, list[int]]:
    lengths = {"q": [40], "k": [20], "v": [20], "o": [32]}
    return {f"layers.{layer}.self_attn.{part}_proj.bias": lengths[part] for layer in range(num_layers) for part in only}


def read(
    shapes: dict[str, list[int]] | None = None,
    target: ModelConfig = TARGET,
    training_args: dict[str, Any] | None = None,
    without: tuple[str, ...] = (),
    nested: dict[str, Any] | None = None,
    **changes: Any,
) -> DrafterSpec:
    config = {key: value for key, value in (CONFIG | changes).items() if key not in without}
    if nested is not None:
        config["dflash_config"] = {**CONFIG["dflash_config"], **nested}
        config["dflash_config"] = {key: value for key, value in config["dflash_config"].items() if value is not None}
    return read_drafter_spec(
        config, shapes_for() if shapes is None else shapes, target, where="c.json", training_args=training_args
    )


def one_line(error: pytest.ExceptionInfo[Exception]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)
