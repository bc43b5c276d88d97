"""Tiny random targets of every family that is supported, built and saved by transformers itself.

Nested ones are saved as the multimodal whole that people download: vision tower, prefixes and all.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from dflash_core.target.loading import Target, read_target_folder

VOCAB = 160
DEPTH = 6
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "eos_token_id": 7,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
_LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_GEMMA4: dict[str, Any] = {
    "sliding_window": 5,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCAB,
    "num_kv_shared_layers": 0,
    "final_logit_softcapping": 30.0,
}
_SIGLIP: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def _llama(tied: bool) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**TEXT, tie_word_embeddings=tied))


def _qwen3(tied: bool) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**TEXT, tie_word_embeddings=tied))


def _qwen3_moe(tied: bool) -> Any:
    """Return one whose shards hold every expert on its own, while the model holds them in one tensor."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**TEXT, **experts, tie_word_embeddings=tied))


def _qwen3_5(tied: bool) -> Any:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**TEXT, **_LINEAR, tie_word_embeddings=tied))


def _qwen3_5_nested(tied: bool) -> Any:
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
    text = TEXT | _LINEAR | {"tie_word_embeddings": tied}
    config = Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=tied)
    return Qwen3_5ForConditionalGeneration(config)


def _gemma3(tied: bool) -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3ForCausalLM(Gemma3TextConfig(**TEXT, sliding_window=5, tie_word_embeddings=tied))


def _gemma3_nested(tied: bool) -> Any:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = TEXT | {"sliding_window": 5, "tie_word_embeddings": tied}
    config = Gemma3Config(
        text_config=text,
        vision_config=_SIGLIP,
        mm_tokens_per_image=4,
        image_token_index=VOCAB - 1,
        tie_word_embeddings=tied,
    )
    return Gemma3ForConditionalGeneration(config)


def _gemma4(tied: bool) -> Any:
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    return Gemma4ForCausalLM(Gemma4TextConfig(**TEXT, **_GEMMA4, tie_word_embeddings=tied))


def _gemma4_small(tied: bool) -> Any:
    """Return one with embeddings of every layer's own and with layers that read earlier layers' keys and values."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    changes = _GEMMA4 | {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2}
    types = ["sliding_attention", "full_attention"] * (DEPTH // 2)
    return Gemma4ForCausalLM(Gemma4TextConfig(**TEXT, **changes, layer_types=types, tie_word_embeddings=tied))


def _gemma4_nested(tied: bool) -> Any:
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration

    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 16,
    }
    text = TEXT | _GEMMA4 | {"tie_word_embeddings": tied}
    config = Gemma4Config(
        text_config=text,
        vision_config=vision,
        audio_config=None,
        image_token_id=VOCAB - 1,
        video_token_id=VOCAB - 2,
        audio_token_id=VOCAB - 3,
        boi_token_id=VOCAB - 4,
        eoi_token_id=VOCAB - 5,
        tie_word_embeddings=tied,
    )
    return Gemma4ForConditionalGeneration(config)


def _gpt_oss(tied: bool) -> Any:
    from transformers import GptOssConfig, GptOssForCausalLM

    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5}
    return GptOssForCausalLM(GptOssConfig(**TEXT, **experts, tie_word_embeddings=tied))


MAKERS: dict[str, Callable[[bool], Any]] = {
    "llama": _llama,
    "qwen3": _qwen3,
    "qwen3 moe": _qwen3_moe,
    "qwen3.5": _qwen3_5,
    "qwen3.5 nested": _qwen3_5_nested,
    "gemma3": _gemma3,
    "gemma3 nested": _gemma3_nested,
    "gemma4": _gemma4,
    "gemma4 small": _gemma4_small,
    "gemma4 nested": _gemma4_nested,
    "gpt-oss": _gpt_oss,
}


def write_family(
    folder: Path, family: str, *, tied: bool, shard_size: str | None = None, dtype: torch.dtype = torch.float32
) -> Target:
    """Save a random target of a family, whole or in shards of a size such as `200KB`."""
    torch.manual_seed(0)
    model = MAKERS[family](tied)
    with torch.no_grad():
        for parameter in model.parameters():
            # Larger weights than the usual init: rounding would show, and the greedy text varies.
            if parameter.ndim >= 2:
                parameter.mul_(4.0)
            else:
                # Norms of ones and biases of zeros would hide that they were not loaded.
                parameter.add_(torch.randn_like(parameter) * 0.1)
    sizes = {} if shard_size is None else {"max_shard_size": shard_size}
    model.to(dtype).save_pretrained(folder, **sizes)
    return read_target_folder(folder, name=family)


def write_mxfp4_gpt_oss(folder: Path) -> Target:
    """Save a gpt-oss as it is published: its experts in blocks of 32 four-bit numbers with one exponent each."""
    write_family(folder, "gpt-oss", tied=False)
    path = folder / "model.safetensors"
    tensors, generator = load_file(path), torch.Generator().manual_seed(4)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, read, written = tensors.pop(name).shape
        size = (experts, written, read // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*size, 16), generator=generator, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(121, 126, size, generator=generator, dtype=torch.uint8)
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    plain = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": plain}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return read_target_folder(folder, name="gpt-oss")
