"""z-lab's own model classes judge the reading of z-lab's configs: kinds of attention, layers, tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dflash.model import DFlash2DraftModel, DFlashDraftModel, Qwen3DFlashAttention
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3Config

from dflash_core.checkpoints.names import read_roles
from dflash_core.drafter.shapes import expected_shapes
from dflash_core.drafter.spec import read_drafter_spec
from dflash_core.target.model_config import read_model_config

TARGET = read_model_config({"hidden_size": 32, "num_hidden_layers": 12, "vocab_size": 60})
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "vocab_size": 60,
}
SELECTOR = {"conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5}
KINDS = st.sampled_from(["full_attention", "sliding_attention"])


def config_of(kinds: list[str], is_causal: bool | None, window: int, taps: list[int] | None) -> dict[str, Any]:
    """Return a config of z-lab's for any mix of layers."""
    config = SIZES | {
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": len(kinds),
        "layer_types": kinds,
        "num_target_layers": 12,
        "block_size": 4,
        "dflash_config": {"mask_token_id": 59} | ({} if taps is None else {"target_layer_ids": taps}),
    }
    if "sliding_attention" in kinds:
        config |= {"sliding_window": window, "use_sliding_window": True}
    return config if is_causal is None else config | {"is_causal": is_causal}


def official(config: dict[str, Any], kind: type[torch.nn.Module]) -> Any:
    """Return the official model of a config, without memory for its weights."""
    with torch.device("meta"):
        return kind(Qwen3Config(**config))


def shapes_of(model: torch.nn.Module) -> dict[str, list[int]]:
    """Return the model's tensors by their canonical names: all of them are a drafter's own."""
    tensors = model.state_dict()
    roles = read_roles(tensors)
    return {str(roles[name].canonical_name): list(tensor.shape) for name, tensor in tensors.items()}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(KINDS, min_size=1, max_size=6),
    st.none() | st.booleans(),
    st.integers(1, 64),
    st.none() | st.lists(st.integers(0, 10), min_size=1, max_size=6),
)
def test_attention_layers_and_tensors_are_those_of_the_official_model(
    kinds: list[str], is_causal: bool | None, window: int, taps: list[int] | None
) -> None:
    config = config_of(kinds, is_causal, window, taps)
    model = official(config, DFlashDraftModel)
    spec = read_drafter_spec(config, shapes_of(model), TARGET, where="config.json")
    attention = [layer.self_attn for layer in model.layers]
    assert all(isinstance(one, Qwen3DFlashAttention) for one in attention)
    assert spec.is_causal == tuple(one.is_causal for one in attention)
    assert spec.windows == tuple(one.sliding_window for one in attention)
    assert spec.target_layer_ids == tuple(model.target_layer_ids)
    assert (spec.block_size, spec.mask_token_id) == (model.block_size, model.mask_token_id)
    assert expected_shapes(spec) == shapes_of(model)


@pytest.mark.parametrize("has_biases", [False, True])
@pytest.mark.parametrize("num_layers", [1, 3])
def test_the_tensors_of_dflash2_are_those_of_the_official_model(num_layers: int, has_biases: bool) -> None:
    config = config_of(["sliding_attention"] * num_layers, False, 16, [1, 4, 9])
    config |= {"architectures": ["DFlash2DraftModel"], "attention_bias": has_biases}
    config["dflash_config"] |= SELECTOR
    model = official(config, DFlash2DraftModel)
    spec = read_drafter_spec(config, shapes_of(model), TARGET, where="config.json")
    assert expected_shapes(spec) == shapes_of(model)
    assert {key: getattr(spec, key) for key in SELECTOR} == SELECTOR
    assert spec.attention_bias is has_biases
