"""Draft configs as trainers write them, at the sizes of published drafters, and what each means in common terms.

A config and its meaning stand side by side, both written by hand; the reader under test must lead from
the one to the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from dflash_core.drafter.shapes import expected_shapes
from dflash_core.drafter.spec import DrafterSpec, read_drafter_spec
from dflash_core.target.model_config import ModelConfig, read_model_config

QWEN36 = read_model_config({"hidden_size": 5120, "num_hidden_layers": 64, "vocab_size": 248320})
QWEN3_8B = read_model_config({"hidden_size": 4096, "num_hidden_layers": 36, "vocab_size": 151936})
MUSE = read_model_config({"hidden_size": 6656, "num_hidden_layers": 52, "vocab_size": 202048})
TAPS_36 = (1, 16, 31, 46, 61)
TAPS_38 = (5, 19, 33, 47, 61)
TAPS_8B = (1, 9, 17, 25, 33)


def large(**changes: Any) -> DrafterSpec:
    """Return the meaning of a drafter of a 27 B target: five full layers, DFlash."""
    facts: dict[str, Any] = {
        "hidden_size": 5120,
        "num_layers": 5,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "intermediate_size": 17408,
        "vocab_size": 248320,
        "rms_norm_eps": 1e-6,
        "rope": {"rope_theta": 1e7, "rope_type": "default"},
        "max_position_embeddings": 262144,
        "block_size": 16,
        "mask_token_id": 248070,
        "target_layer_ids": TAPS_36,
        "is_causal": (False,) * 5,
        "windows": (None,) * 5,
        "input_embedding_scale": 1.0,
        "output_multiplier": 1.0,
        "final_logit_softcapping": None,
    }
    return DrafterSpec(**facts | changes)


def small(**changes: Any) -> DrafterSpec:
    """Return the meaning of a drafter of an 8 B target: five full layers, DFlash."""
    facts: dict[str, Any] = {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "vocab_size": 151936,
        "rope": {"rope_theta": 1e6, "rope_type": "default"},
        "max_position_embeddings": 40960,
        "mask_token_id": 151669,
        "target_layer_ids": TAPS_8B,
    }
    return large(**facts | changes)


_LARGE_SIZES: dict[str, Any] = {
    "model_type": "qwen3",
    "attention_bias": False,
    "dtype": "bfloat16",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "max_position_embeddings": 262144,
    "max_window_layers": 5,
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "vocab_size": 248320,
}
_SMALL_SIZES = _LARGE_SIZES | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
    "rope_theta": 1000000,
}


def qwen36_zlab() -> dict[str, Any]:
    """z-lab's drafter of Qwen3.6-27B: four causal sliding layers and a full one; block size at the top."""
    return _LARGE_SIZES | {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": 16,
        "dflash_config": {"mask_token_id": 248070, "target_layer_ids": list(TAPS_36)},
        "eos_token_id": 248044,
        "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
        "num_target_layers": 64,
        "rope_scaling": None,
        "rope_theta": 10000000,
        "sliding_window": 2048,
        "use_sliding_window": True,
    }


def qwen3_8b_zlab() -> dict[str, Any]:
    """z-lab's first form: everything at the top, no list of layers."""
    return _SMALL_SIZES | {
        "architectures": ["DFlashDraftModel"],
        "block_size": 16,
        "mask_token_id": 151669,
        "num_target_layers": 36,
        "use_sliding_window": False,
        "sliding_window": None,
    }


def qwen38_dflash2() -> dict[str, Any]:
    """z-lab's DFlash2 of Qwen3.8-27B: block size nested only, sliding layers that are explicitly not causal."""
    return _LARGE_SIZES | {
        "architectures": ["DFlash2DraftModel"],
        "is_causal": False,
        "layer_types": ["sliding_attention"] * 5,
        "sliding_window": 2048,
        "use_sliding_window": True,
        "num_target_layers": 64,
        "rope_parameters": {"rope_theta": 10000000, "rope_type": "default"},
        "dflash_config": {
            "block_size": 8,
            "conv_group_size": 16,
            "conv_kernel_size": 2,
            "mask_token_id": 248070,
            "selector_rank": 256,
            "selector_top_k": 16,
            "target_layer_ids": list(TAPS_38),
        },
    }


DFLASH2_38 = large(
    block_size=8,
    target_layer_ids=TAPS_38,
    windows=(2048,) * 5,
    proposal_rule="dflash2",
    conv_kernel_size=2,
    conv_group_size=16,
    selector_rank=256,
    selector_top_k=16,
)


def muse_dflash2() -> dict[str, Any]:
    """DFlash2 of Muse-Glimmer-30B: logits are multiplied and capped."""
    config = qwen38_dflash2() | {
        "hidden_size": 6656,
        "intermediate_size": 19968,
        "max_position_embeddings": 131072,
        "num_target_layers": 52,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
        "vocab_size": 202048,
    }
    config["dflash_config"] |= {
        "block_size": 16,
        "final_logit_softcapping": 20.0,
        "mask_token_id": 201818,
        "output_multiplier": 0.19611613513818404,
        "target_layer_ids": [1, 13, 25, 37, 49],
    }
    return config


DFLASH2_MUSE = large(
    hidden_size=6656,
    intermediate_size=19968,
    vocab_size=202048,
    rms_norm_eps=1e-5,
    rope={"rope_theta": 5e5, "rope_type": "default"},
    max_position_embeddings=131072,
    mask_token_id=201818,
    target_layer_ids=(1, 13, 25, 37, 49),
    windows=(2048,) * 5,
    output_multiplier=0.19611613513818404,
    final_logit_softcapping=20.0,
    proposal_rule="dflash2",
    conv_kernel_size=2,
    conv_group_size=16,
    selector_rank=256,
    selector_top_k=16,
)


def radixark_dspark() -> dict[str, Any]:
    """SpecForge's DSpark of Qwen3.8-27B: blocks of 7, YaRN over an original length of 8192."""
    return _LARGE_SIZES | {
        "architectures": ["DSparkDraftModel"],
        "block_size": 7,
        "layer_types": ["full_attention"] * 5,
        "num_target_layers": 64,
        "rope_theta": 10000000,
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 8192},
        "dflash_config": {
            "confidence_head_alpha": 1.0,
            "confidence_head_with_markov": True,
            "enable_confidence_head": True,
            "markov_head_type": "vanilla",
            "markov_rank": 256,
            "mask_token_id": 248070,
            "projector_type": "dspark",
            "target_layer_ids": list(TAPS_38),
        },
    }


DSPARK_38 = large(
    block_size=7,
    target_layer_ids=TAPS_38,
    rope={
        "rope_theta": 1e7,
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 8192,
    },
    row_alignment="anchor_shifted",
    proposal_rule="dspark",
    markov_rank=256,
    markov_head_type="vanilla",
    has_confidence_head=True,
    confidence_head_with_markov=True,
)


def modelopt_swa() -> dict[str, Any]:
    """Model-Optimizer's export: all layers are called full, and a switch makes them sliding."""
    return _SMALL_SIZES | {
        "architectures": ["DFlashDraftModel"],
        "block_size": 8,
        "layer_types": ["full_attention"] * 5,
        "num_target_layers": 36,
        "dflash_config": {
            "causal": False,
            "mask_token_id": 151669,
            "swa_window_size": 1024,
            "target_layer_ids": list(TAPS_8B),
            "use_swa": True,
        },
    }


def nemo_sliding() -> dict[str, Any]:
    """NeMo with a draft window: all layers sliding, stamped as not causal."""
    return _SMALL_SIZES | {
        "architectures": ["DFlashDraftModel"],
        "block_size": 16,
        "is_causal": False,
        "layer_types": ["sliding_attention"] * 5,
        "num_target_layers": 36,
        "sliding_window": 4096,
        "use_sliding_window": True,
        "dflash_config": {"mask_token_id": 151669, "target_layer_ids": list(TAPS_8B)},
    }


def jetspec() -> dict[str, Any]:
    """JetSpec: DFlash's tensors, causal in the block."""
    return _SMALL_SIZES | {
        "architectures": ["DFlashDraftModel"],
        "block_size": 16,
        "num_target_layers": 36,
        "dflash_config": {
            "causal_head": True,
            "mask_token_id": 151669,
            "target_hidden_size": 4096,
            "target_layer_ids": list(TAPS_8B),
        },
    }


def speculators(kind: str, **changes: Any) -> dict[str, Any]:
    """speculators' config of a drafter of an 8 B target; layers counted from the embedding's output."""
    return {
        "speculators_model_type": kind,
        "speculators_version": "0.4.0",
        "architectures": ["DFlashSpeculator"],
        "transformer_layer_config": {
            "model_type": "qwen3",
            "head_dim": 128,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "layer_types": ["full_attention"] * 5,
            "max_position_embeddings": 40960,
            "num_hidden_layers": 5,
            "num_key_value_heads": 8,
            "rope_theta": 1000000,
        },
        "aux_hidden_state_layer_ids": [2, 10, 18, 26, 34],
        "block_size": 16,
        "draft_vocab_size": 151936,
        "mask_token_id": 151669,
        "target_hidden_size": None,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 15}],
            "verifier": {"name_or_path": "Qwen/Qwen3-8B", "architectures": ["Qwen3ForCausalLM"]},
        },
        "transformers_version": "4.57.1",
    } | changes


def tokens_per_block(count: int) -> dict[str, Any]:
    """Return the part of a speculators config that states how many tokens a block drafts."""
    return {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": count}]}


def sliding_layers(config: dict[str, Any], window: int = 2048) -> dict[str, Any]:
    """Return a speculators config whose first four layers slide."""
    layers = {"layer_types": ["sliding_attention"] * 4 + ["full_attention"], "sliding_window": window}
    return config | {
        "transformer_layer_config": config["transformer_layer_config"] | layers | {"use_sliding_window": True}
    }


def deepspec_block7(**changes: Any) -> dict[str, Any]:
    """DeepSpec's DFlash: a DSpark model without a Markov head, in blocks of 7."""
    config = _SMALL_SIZES | {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": 7,
        "enable_confidence_head": False,
        "layer_types": ["full_attention"] * 5,
        "markov_rank": 0,
        "mask_token_id": 151669,
        "num_anchors": 512,
        "num_target_layers": 36,
        "target_layer_ids": list(TAPS_8B),
    }
    return config | changes


def torchspec(**changes: Any) -> dict[str, Any]:
    """TorchSpec: `num_target_layers` counts the layers that are read."""
    config = {
        "architectures": ["DFlashDraftModel"],
        "block_size": 16,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "mask_token_id": 151669,
        "max_position_embeddings": 40960,
        "model_type": "dflash",
        "num_attention_heads": 32,
        "num_hidden_layers": 1,
        "num_key_value_heads": 8,
        "num_target_layers": 5,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "target_hidden_size": 4096,
        "target_layer_ids": None,
        "target_num_hidden_layers": 36,
        "tie_word_embeddings": False,
        "vocab_size": 151936,
    }
    return config | changes


def verl(**changes: Any) -> dict[str, Any]:
    """verl-SpeCo: as TorchSpec, with the depth in `num_target_layers` and the layers for serving beside."""
    return (
        torchspec(
            num_context_layers=5,
            num_hidden_layers=5,
            num_target_layers=36,
            target_layer_ids=list(TAPS_8B),
            eagle_aux_hidden_state_layer_ids=[2, 10, 18, 26, 34],
        )
        | changes
    )


def read_with(
    config: Mapping[str, Any],
    meaning: DrafterSpec,
    target: ModelConfig,
    *,
    training: Mapping[str, Any] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> DrafterSpec:
    """Read a config beside the tensors of a drafter of some meaning."""
    given = expected_shapes(meaning) if shapes is None else shapes
    return read_drafter_spec(config, given, target, where="config.json", training_args=training)


def nested(config: dict[str, Any], *without: str, **changes: Any) -> dict[str, Any]:
    """Return a config with changes under dflash_config."""
    inner = {key: value for key, value in config["dflash_config"].items() if key not in without}
    return config | {"dflash_config": inner | changes}


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    """Return a config less some keys at its top."""
    return {key: value for key, value in config.items() if key not in keys}


def fails(
    kind: type[Exception],
    *named: str,
    config: dict[str, Any],
    meaning: DrafterSpec | None = None,
    target: ModelConfig = QWEN3_8B,
    training: dict[str, Any] | None = None,
    shapes: dict[str, list[int]] | None = None,
) -> None:
    """Assert that a config is refused in one line that names all of what is given."""
    with pytest.raises(kind) as error:
        read_with(config, meaning or small(), target, training=training, shapes=shapes)
    message = str(error.value)
    assert "\n" not in message
    assert [name for name in named if name not in message] == []
