"""What a family of models means where its file is silent: the defaults and the code of transformers' own classes.

A model's `config.json` leaves out what equals its class's default, and some facts stand in no file at
all, because the model's code has them. Named here by `model_type` of the text part; tests compare every
entry with the installed transformers. A family that is not named here has no default: it stays unknown.
"""

from __future__ import annotations

import math


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


TIED = _names(
    "cohere cohere2 cohere2_moe cohere_compass_text ernie4_5 ernie4_5_moe falcon falcon_mamba gemma gemma2 gemma3 "
    "gemma3_text gemma3n gemma3n_text gemma4 gemma4_text gemma4_unified gemma4_unified_text gpt2 gpt_bigcode gpt_neo "
    "granite_swa jetmoe lfm2 lfm2_moe mamba minicpm3 mpt opt recurrent_gemma smollm3 starcoder2 vaultgemma "
    "zamba zamba2"
)
"""Families whose head is the embedding unless the file says otherwise."""

UNTIED = _names(
    "afmoe apertus arcee bamba bitnet cwm dbrx deepseek_v2 deepseek_v3 diffllama dots1 exaone4 falcon_h1 flex_olmo glm "
    "glm4 glm4_moe glm4_moe_lite gpt_neox gpt_oss gptj granite granitemoe granitemoehybrid granitemoeshared helium "
    "hunyuan_v1_dense hunyuan_v1_moe hyperclovax jamba kimi_linear llama llama4 llama4_text mamba2 minimax minimax_m2 "
    "ministral ministral3 mistral mixtral muse_glimmer_text muse_spark_text nanochat nemotron nemotron_h olmo "
    "olmo2 olmo3 olmoe persimmon phi phi3 phimoe qwen2 "
    "qwen2_moe qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next "
    "seed_oss solar_open stablelm"
)
"""Families whose head is a matrix of its own unless the file says otherwise."""

SOFTCAPPING = {
    "gemma2": 30.0,
    "gemma3n_text": 30.0,
    "muse_glimmer_text": 20.0,
    "muse_spark_text": 20.0,
    "nanochat": 15.0,
    "recurrent_gemma": 30.0,
    "vaultgemma": 30.0,
}
"""Soft-capping of the logits that holds where the file does not state it (null switches it off)."""

LOGIT_MULTIPLIER = {
    "cohere": 0.0625,
    "cohere2": 0.0625,
    "cohere2_moe": 0.0625,
    "muse_glimmer_text": 0.19611613513818404,
    "muse_spark_text": 0.1767766952966369,
}
"""What logits are multiplied with where the file does not state it."""

_MULTIPLYING_LOGITS_SCALING = frozenset(["hyperclovax"])
_SCALED_BY_ROOT = _names(
    "gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text gemma4 gemma4_text gemma4_unified gemma4_unified_text "
    "recurrent_gemma vaultgemma"
)
# Their scale is a tensor, which is cast to the dtype of the embedding before it multiplies.
_ROUNDED_TO_WEIGHTS = (_SCALED_BY_ROOT | {"minicpm3"}) - {"recurrent_gemma"}


def tied_by_default(model_type: str | None) -> bool | None:
    """Return whether head and embedding are one where the file does not say; None for an unknown family."""
    if model_type in TIED:
        return True
    return False if model_type in UNTIED else None


def logits_scaling_divides(model_type: str | None) -> bool:
    """Return whether `logits_scaling` divides the logits, as it does but in one family."""
    return model_type not in _MULTIPLYING_LOGITS_SCALING


def built_in_embedding_scale(model_type: str | None, hidden_size: int, *, is_mup: bool) -> float | None:
    """Return the scale that the family's code multiplies embeddings with; no key of its files gives it.

    Args:
        model_type: of the text part.
        hidden_size: its width.
        is_mup: the file's `mup_enabled`, which only `afmoe` reads.
    """
    if model_type in _SCALED_BY_ROOT or (model_type == "afmoe" and is_mup):
        return math.sqrt(hidden_size)
    return None


def rounded_scale(model_type: str | None, scale: float, dtype: str) -> float:
    """Return an embedding scale as the family's code has it when its weights are of a dtype.

    Args:
        model_type: of the text part.
        scale: the exact number.
        dtype: torch name of the dtype that the model is loaded in.
    """
    import torch

    if model_type in _ROUNDED_TO_WEIGHTS:
        kept = getattr(torch, dtype)
    elif model_type == "recurrent_gemma":
        kept = torch.bfloat16  # whatever the weights are
    else:
        return scale  # a Python number: products with it are rounded, it is not
    # By way of float32: the model keeps the scale in it.
    return float(torch.tensor(scale, dtype=torch.float32).to(kept))
