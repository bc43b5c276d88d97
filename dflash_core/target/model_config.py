"""One reading of a model's `config.json`: its sizes, wherever the file keeps them.

A multimodal model nests the sizes of its text part (`text_config`), a flat one has them at the top;
where both levels state a fact and disagree, the nested one holds, because it is what the text part is
built from, and the disagreement is reported. Vision and multi-token-prediction parts are never looked
into. A size that the file does not state is None: libraries fill such gaps with defaults that differ
from one family to the next, so a guess here would be a wrong size elsewhere. What a named family does
means when its file is silent (tying, scales, soft-capping) is in `families`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dflash_core.errors import TargetError
from dflash_core.target import families
from dflash_core.target.config_levels import (
    LevelReader,
    as_count,
    as_dtype,
    as_names,
    as_number,
    as_token_ids,
    as_truth,
)
from dflash_core.target.rope_forms import RopeForm, read_rope

# Key paths of each fact inside one level, the usual name first.
_KEYS: dict[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "vocab_size": ("vocab_size", "padded_vocab_size"),
    "unpadded_vocab_size": ("unpadded_vocab_size",),
    "num_attention_heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "num_key_value_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim"),
    "layer_types": ("layer_types",),
    "tie_word_embeddings": ("tie_word_embeddings",),
    "dtype": ("dtype", "torch_dtype"),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "max_sequence_length"),
    "rope_theta": ("rope_parameters.rope_theta", "rope_parameters.full_attention.rope_theta", "rope_theta"),
    "rope_parameters": ("rope_parameters",),
    "rope_scaling": ("rope_scaling",),
    "rope_theta_beside": ("rope_theta",),
    "rope_local_base_freq": ("rope_local_base_freq",),
    "embedding_scale": ("embedding_scale", "embedding_multiplier", "scale_emb"),
    "mup_enabled": ("mup_enabled",),
    "final_logit_softcapping": ("final_logit_softcapping", "logits_soft_cap"),
    "logit_multiplier": ("output_multiplier", "logit_scale", "lm_head_multiplier"),
    "logits_scaling": ("logits_scaling", "logits_mup_width_multiplier"),
    "dim_model_base": ("dim_model_base",),
    "eos_token_ids": ("eos_token_id",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The sizes of one model; None where its file does not say."""

    architecture: str | None
    """First name under `architectures`, the top level's before the nested one's."""
    model_type: str | None
    """`model_type` of the text part, else of the whole."""
    hidden_size: int
    num_layers: int
    """Decoder layers: a target's depth. Extra prediction layers (MTP) are not counted."""
    vocab_size: int
    """Rows of embedding and head; some may be padding beyond the tokenizer's tokens."""
    unpadded_vocab_size: int | None
    """Rows of the head that the model reads, where its file says that the rest is padding."""
    num_attention_heads: int | None
    num_key_value_heads: int | None
    head_dim: int | None
    intermediate_size: int | None
    layer_types: tuple[str, ...] | None
    """Kind of each layer (`full_attention`, `sliding_attention`, `linear_attention`, ...), where stated."""
    tie_word_embeddings: bool | None
    """Is the head the embedding? The family's default where the file does not say.

    None for an unknown family, and where two levels disagree: which of them holds depends on the class
    that the model is loaded as, so that a head in the shards decides.
    """
    dtype: str | None
    """Stored dtype by its torch name, for example `bfloat16`."""
    max_position_embeddings: int | None
    rope_theta: float | None
    """Base of the rotary embedding; the full-attention layers' where kinds of layers differ."""
    rope: tuple[RopeForm, ...]
    """The rotary embedding of each kind of layer; empty where the file states nothing of it."""
    embedding_scale: float | None
    """What token embeddings are multiplied with; None when nothing says that they are."""
    final_logit_softcapping: float | None
    """c of `c * tanh(logits / c)`; None without soft-capping."""
    logit_multiplier: float | None
    """What the head's output is multiplied with before soft-capping; None when nothing says that it is.

    Families that divide (`logits_scaling` of Granite) are given as the factor that does the same.
    """
    eos_token_ids: tuple[int, ...]
    """Stop tokens that this file names; `stop_tokens` looks into generation_config.json first."""
    sources: dict[str, str]
    """For each fact that was found, the key path it was read from."""
    conflicts: tuple[str, ...]
    """One line for each value that contradicts the one taken or cannot be used."""

    def embedding_scale_in(self, dtype: str) -> float | None:
        """Return the embedding scale as the model applies it when it is loaded in a dtype.

        Gemma rounds it to the weights' dtype: the root of 5376 is 73.32 in float32, and 73.5 in bfloat16.

        Args:
            dtype: torch name of the dtype.
        """
        if self.embedding_scale is None:
            return None
        return families.rounded_scale(self.model_type, self.embedding_scale, dtype)


def read_model_config(data: Mapping[str, Any], *, where: str = "config.json") -> ModelConfig:
    """Read the sizes of a model.

    Args:
        data: what `config.json` holds, parsed.
        where: the file's name to use in error messages.

    Returns:
        The sizes, the key path of each, and what contradicted.

    Raises:
        TargetError: `data` is no object, or hidden size, depth or vocabulary is missing or no count.
    """
    if not isinstance(data, Mapping):
        raise TargetError(f"{where} must hold a JSON object with the model's sizes, found {type(data).__name__}")
    reader = LevelReader(data, where, _KEYS)
    hidden_size = reader.require_count("hidden_size")
    num_layers = reader.require_count("num_layers")
    model_type = reader.first_text("model_type")
    return ModelConfig(
        architecture=reader.first_text("architectures", field="architecture", outer_first=True),
        model_type=model_type,
        hidden_size=hidden_size,
        num_layers=num_layers,
        vocab_size=reader.require_count("vocab_size"),
        unpadded_vocab_size=reader.find("unpadded_vocab_size", as_count),
        num_attention_heads=reader.find("num_attention_heads", as_count),
        num_key_value_heads=reader.find("num_key_value_heads", as_count),
        head_dim=reader.find("head_dim", as_count),
        intermediate_size=reader.find("intermediate_size", as_count),
        layer_types=_layer_types(reader, num_layers),
        tie_word_embeddings=_tying(reader, model_type),
        dtype=reader.find("dtype", as_dtype),
        max_position_embeddings=reader.find("max_position_embeddings", as_count),
        rope_theta=reader.find("rope_theta", as_number),
        rope=read_rope(reader),
        embedding_scale=_embedding_scale(reader, model_type, hidden_size),
        final_logit_softcapping=_or_default(
            reader, "final_logit_softcapping", as_number, families.SOFTCAPPING.get(model_type or ""), model_type
        ),
        logit_multiplier=_logit_multiplier(reader, model_type, hidden_size),
        eos_token_ids=_eos_token_ids(reader),
        sources=reader.sources,
        conflicts=tuple(reader.conflicts),
    )


def _or_default(
    reader: LevelReader, field: str, convert: Callable[[Any], Any], default: Any, model_type: str | None
) -> Any:
    """Return what the file states, else the family's default; null or an unusable value is a statement too."""
    value = reader.find(field, convert)
    if value is not None or default is None or reader.is_null(field) or any(True for _ in reader.stated(field)):
        return value
    reader.sources[field] = f"default of {reader.sources['model_type']} = {model_type}"
    return default


def _tying(reader: LevelReader, model_type: str | None) -> bool | None:
    stated = [(path, raw) for path, raw in reader.stated("tie_word_embeddings") if as_truth(raw) is not None]
    if len({raw for _, raw in stated}) > 1:
        said = " contradicts ".join(f"{path} = {raw}" for path, raw in stated)
        reader.conflicts.append(f"{said}; whether the shards hold a head decides")
        return None
    default = families.tied_by_default(model_type)
    tied: bool | None = _or_default(reader, "tie_word_embeddings", as_truth, default, model_type)
    return tied


def _layer_types(reader: LevelReader, num_layers: int) -> tuple[str, ...] | None:
    """Return the kinds of layers; a list of another length than the depth is told and not used."""
    kinds: tuple[str, ...] | None = reader.find("layer_types", as_names)
    if kinds is None or len(kinds) == num_layers:
        return kinds
    path = reader.sources.pop("layer_types")
    reader.conflicts.append(f"{path} names {len(kinds)} layers, {reader.sources['num_layers']} = {num_layers}")
    return None


def _eos_token_ids(reader: LevelReader) -> tuple[int, ...]:
    """Return the first level's stop tokens; what contradicts is for `stop_tokens` to tell, which knows all places."""
    for path, raw in reader.stated("eos_token_ids", outer_first=True):
        token_ids = as_token_ids(raw)
        if token_ids is not None:
            reader.sources["eos_token_ids"] = path
            return token_ids
    return ()


def _embedding_scale(reader: LevelReader, model_type: str | None, hidden_size: int) -> float | None:
    is_mup = reader.find("mup_enabled", as_truth) is True
    scale: float | None = reader.find("embedding_scale", as_number)
    built_in = families.built_in_embedding_scale(model_type, hidden_size, is_mup=is_mup)
    if built_in is None:
        return scale
    # The code of the family multiplies by it whatever its files say.
    reader.sources["embedding_scale"] = f"{reader.sources['model_type']} = {model_type}"
    return built_in


def _logit_multiplier(reader: LevelReader, model_type: str | None, hidden_size: int) -> float | None:
    default = families.LOGIT_MULTIPLIER.get(model_type or "")
    factor: float | None = _or_default(reader, "logit_multiplier", as_number, default, model_type)
    scaling: float | None = reader.find("logits_scaling", as_number)
    if scaling is not None:
        if families.logits_scaling_divides(model_type):
            scaling = 1.0 / scaling
        reader.sources["logit_multiplier"] = reader.sources["logits_scaling"]
        return scaling if factor is None else factor * scaling
    base: float | None = reader.find("dim_model_base", as_number)
    if base is not None and factor is None:
        # MiniCPM: the head reads hidden states divided by hidden size / dim_model_base.
        reader.sources["logit_multiplier"] = reader.sources["dim_model_base"]
        return base / hidden_size
    return factor
