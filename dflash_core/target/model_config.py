"""One reading of a model's `config.json`: its sizes, wherever the file keeps them.

A multimodal model nests the sizes of its text part (`text_config`), a flat one has them at the top;
where both levels state a fact and disagree, the nested one holds, because it is what the text part is
built from, and the disagreement is reported. Vision and multi-token-prediction parts are never looked
into. A fact that the file does not state is None: libraries fill such gaps with defaults that differ
from one family to the next, so a guess here would be a wrong size elsewhere.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_core.errors import TargetError

NESTED_SECTIONS = (
    "text_config",
    "thinker_config.text_config",
    "language_config",
    "llm_config",
    "transformer_layer_config",
)
"""Where the text model may be nested; the last one is how the `speculators` library nests a drafter."""

# Key paths of each fact inside one level, the usual name first.
_KEYS: dict[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "vocab_size": ("vocab_size", "padded_vocab_size"),
    "num_attention_heads": ("num_attention_heads", "n_head", "num_heads"),
    "num_key_value_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim"),
    "tie_word_embeddings": ("tie_word_embeddings",),
    "dtype": ("dtype", "torch_dtype"),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "max_sequence_length"),
    "rope_theta": ("rope_parameters.rope_theta", "rope_parameters.full_attention.rope_theta", "rope_theta"),
    "embedding_scale": ("embedding_scale", "embedding_multiplier", "scale_emb"),
    "final_logit_softcapping": ("final_logit_softcapping",),
}
_LARGEST_COUNT = 2**48
_LARGEST_NUMBER = 1e30


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
    num_attention_heads: int | None
    num_key_value_heads: int | None
    head_dim: int | None
    intermediate_size: int | None
    tie_word_embeddings: bool | None
    dtype: str | None
    """Stored dtype by its torch name, for example `bfloat16`."""
    max_position_embeddings: int | None
    rope_theta: float | None
    """Base of the rotary embedding; the full-attention layers' where kinds of layers differ."""
    embedding_scale: float | None
    """What token embeddings are multiplied with; None when nothing says that they are."""
    final_logit_softcapping: float | None
    """c of `c * tanh(logits / c)`; None without soft-capping."""
    sources: dict[str, str]
    """For each fact that was found, the key path it was read from."""
    conflicts: tuple[str, ...]
    """One line for each value that contradicts the one taken or cannot be used."""


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
    reader = _Reader(data, where)
    hidden_size = reader.require_count("hidden_size")
    model_type = _first_text(reader.levels, "model_type", reader.sources)
    scale = reader.find("embedding_scale", _as_number)
    if scale is None and model_type is not None and model_type.startswith("gemma"):
        # The Gemma family multiplies by the root of the width in code; no key of its files says so.
        scale = math.sqrt(hidden_size)
        reader.sources["embedding_scale"] = f"{reader.sources['model_type']} = {model_type}"
    return ModelConfig(
        architecture=_first_text(reader.levels[::-1], "architectures", reader.sources, field="architecture"),
        model_type=model_type,
        hidden_size=hidden_size,
        num_layers=reader.require_count("num_layers"),
        vocab_size=reader.require_count("vocab_size"),
        num_attention_heads=reader.find("num_attention_heads", _as_count),
        num_key_value_heads=reader.find("num_key_value_heads", _as_count),
        head_dim=reader.find("head_dim", _as_count),
        intermediate_size=reader.find("intermediate_size", _as_count),
        tie_word_embeddings=reader.find("tie_word_embeddings", _as_truth),
        dtype=reader.find("dtype", _as_dtype),
        max_position_embeddings=reader.find("max_position_embeddings", _as_count),
        rope_theta=reader.find("rope_theta", _as_number),
        embedding_scale=scale,
        final_logit_softcapping=reader.find("final_logit_softcapping", _as_number),
        sources=reader.sources,
        conflicts=tuple(reader.conflicts),
    )


class _Reader:
    """Looks facts up level by level and remembers where they came from."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.where = where
        self.levels = [(f"{name}.", part) for name in NESTED_SECTIONS if isinstance(part := _at(data, name), Mapping)]
        self.levels.append(("", data))
        self.sources: dict[str, str] = {}
        self.conflicts: list[str] = []

    def find(self, field: str, convert: Callable[[Any], Any]) -> Any:
        """Return the first usable value of a field, innermost level first, or None."""
        taken = None
        for path, raw in self._stated(field):
            value = convert(raw)
            if value is None:
                self.conflicts.append(f"{path} = {_short(raw)} cannot be used as {field}")
            elif taken is None:
                taken, self.sources[field] = value, path
            elif value != taken:
                self.conflicts.append(
                    f"{path} = {_short(raw)} contradicts {self.sources[field]} = {_short(taken)}, which holds"
                )
        return taken

    def require_count(self, field: str) -> int:
        """Return a count that no model is without."""
        value = self.find(field, _as_count)
        if isinstance(value, int):
            return value
        unusable = [f"{path} = {_short(raw)}" for path, raw in self._stated(field)]
        if unusable:
            raise TargetError(f"{self.where}: {', '.join(unusable)}, expected a whole number above 0")
        looked_for = [prefix + key for prefix, _ in self.levels for key in _KEYS[field]]
        raise TargetError(
            f"{self.where} does not state {_KEYS[field][0]}: looked for {', '.join(looked_for)}; "
            "add it where the library's default was meant"
        )

    def _stated(self, field: str) -> Iterator[tuple[str, Any]]:
        """Yield key path and value of every place that states the field; null states nothing."""
        for prefix, values in self.levels:
            for key in _KEYS[field]:
                raw = _at(values, key)
                if raw is not None:
                    yield prefix + key, raw


def _at(values: Mapping[str, Any], dotted: str) -> Any:
    """Return the value at a dotted key path, or None."""
    found: Any = values
    for key in dotted.split("."):
        if not isinstance(found, Mapping):
            return None
        found = found.get(key)
    return found


def _first_text(
    levels: Sequence[tuple[str, Mapping[str, Any]]], key: str, sources: dict[str, str], *, field: str | None = None
) -> str | None:
    """Return the first level's text under a key (of a list, its first entry) and note its source."""
    for prefix, values in levels:
        value = values.get(key)
        if isinstance(value, list) and value:
            value = value[0]
        if isinstance(value, str) and value:
            sources[field or key] = prefix + key
            return value
    return None


def _as_count(value: Any) -> int | None:
    """Return a whole number above 0; a list with one value per layer counts when all are equal."""
    if isinstance(value, list) and value and isinstance(value[0], int) and all(item == value[0] for item in value):
        value = value[0]
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 < value < _LARGEST_COUNT
    return value if is_count else None


def _as_number(value: Any) -> float | None:
    """Return a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _LARGEST_NUMBER:
        return None
    return float(value)


def _as_truth(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _as_dtype(value: Any) -> str | None:
    """Return a dtype's name without a leading `torch.`."""
    return value.removeprefix("torch.") if isinstance(value, str) and value else None


def _short(value: Any) -> str:
    """Return a value as it may stand in a one-line message, however long or deep it is."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= _LARGEST_COUNT:
        return "a number beyond all sizes"
    return " ".join(reprlib.repr(value).split())
