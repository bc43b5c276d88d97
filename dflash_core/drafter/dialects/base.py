"""What every dialect yields, and the refusals that all share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dflash_core.drafter.attention import Attention
from dflash_core.drafter.dialects.heads import Heads
from dflash_core.drafter.dialects.taps import Taps
from dflash_core.drafter.facts import FactReader, agreed
from dflash_core.errors import DraftConfigError, UnsupportedCheckpoint
from dflash_core.target.model_config import ModelConfig

RowAlignment = Literal["same_position", "anchor_shifted", "shifted_short"]
Shapes = Mapping[str, Sequence[int]]

# Keys at the top level that change the proposals and are computed by nobody here, with the value
# that changes nothing. Models' configs hold many other keys, which are not looked at: what changes a
# tensor's name or shape is found there.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_sink_bias": (False,),
    "add_swa_attention_sink_bias": (False,),
    "add_full_attention_sink_bias": (False,),
    "attention_value_scale": (1, 1.0),
    "attn_logit_softcapping": (0, 0.0),
    "query_pre_attn_scalar": (),
    "attention_multiplier": (),
    "residual_multiplier": (1, 1.0),
    "embedding_multiplier": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "rope_is_neox_style": (True,),
    "is_neox_style": (True,),
    "partial_rotary_factor": (1, 1.0),
    "attention_mode": ("gqa", "mha"),
    "mask_embedding": (False,),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """One draft config, in common terms; sizes and RoPE are still to be looked up in `backbone`."""

    facts: FactReader
    """Where block size, mask token and the like stand."""
    backbone: FactReader
    """Where the sizes of the layers stand; the same as `facts` in most dialects."""
    num_layers: int
    taps: Taps
    block_size: int
    mask_token_id: int
    attention: Attention
    row_alignment: RowAlignment
    heads: Heads
    draft_vocab_size: int | None
    depths: Mapping[str, int]
    """Key to what it says the target's depth is."""
    notes: tuple[str, ...] = ()
    """What a person may want to know: keys without influence, how serving is set."""
    doubts: tuple[str, ...] = ()
    """Facts that no file of this form tells and that are taken as usual: where they are not, the numbers are wrong."""

    @property
    def sources(self) -> dict[str, str]:
        """Return fact to the place that decided it."""
        return {**self.backbone.sources, **self.facts.sources}


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialect:
    """One form of draft configs."""

    name: str
    read: Callable[[Mapping[str, Any], str, Shapes, ModelConfig, Mapping[str, Any]], Reading]
    """Takes config, its name, the tensors' shapes, the target and the training settings."""
    read_taps: Callable[[Mapping[str, Any], str, ModelConfig], Taps]
    """Reads the target's layers alone, for which no tensor is needed."""


def refuse_other_models(config: Mapping[str, Any], where: str) -> None:
    """Refuse a model that is not a stack of Qwen3 layers, by the key that says so.

    Raises:
        UnsupportedCheckpoint: with key and value.
    """
    for key, neutral in _NEUTRAL.items():
        value = config.get(key)
        if value is None or any(type(value) is type(one) and value == one for one in neutral):
            continue
        known = f"; {neutral[0]!r} is" if neutral else ""
        raise UnsupportedCheckpoint(
            f"{where}: {key} = {value!r} is not supported, for nothing here computes it{known}; "
            f"if it was copied from the target and the drafter does without it, remove it"
        )


def refuse_unknown(keys: Mapping[str, Any], at: str, where: str, understood: set[str], harmless: set[str]) -> list[str]:
    """Refuse keys that may change the proposals and are not understood; return those without influence.

    Null says nothing, whatever the key.

    Raises:
        UnsupportedCheckpoint: naming all of them.
    """
    refuse_other_models(keys, f"{where}: {at}")
    known = understood | harmless | set(_NEUTRAL)
    unknown = sorted(str(key) for key in set(keys) - known if keys[key] is not None)
    if unknown:
        raise UnsupportedCheckpoint(
            f"{where}: {at} holds {unknown}, which may change the proposals and is not understood; "
            f"understood are {sorted(understood)}"
        )
    return sorted(set(keys) & harmless)


def one_architecture(config: Mapping[str, Any], where: str, known: Mapping[str, str]) -> str:
    """Return the one name under `architectures`, which must be a known one.

    Raises:
        UnsupportedCheckpoint: it is another, or there are none or two.
    """
    stated = config.get("architectures")
    if not isinstance(stated, list) or len(stated) != 1 or str(stated[0]) not in known:
        raise UnsupportedCheckpoint(
            f"{where}: architectures = {stated!r} is not scored; {sorted(known)} are, each alone in its list; "
            f"where this is the target's own config, set drafter.config to the run's draft config"
        )
    return str(stated[0])


def read_alignment(reader: FactReader, default: RowAlignment | None, reason: str) -> RowAlignment:
    """Return which position a row of a block predicts.

    Args:
        reader: the config.
        default: what the dialect documents where no key says; None asks.
        reason: why that is the default.

    Raises:
        DraftConfigError: two keys contradict, or none says and there is no default.
    """
    statements: dict[str, RowAlignment] = {}
    for key, when_true, when_false in (
        ("sample_from_anchor", "anchor_shifted", "same_position"),
        ("dspark_bonus_anchor", "same_position", "anchor_shifted"),
    ):
        value = reader.find(key, bool, nested=True)
        if value is not None:
            statements[f"{key} = {value}"] = when_true if value else when_false  # type: ignore[assignment]
    shift = reader.find("draft_shift", bool, nested=True)
    if shift:
        statements["draft_shift = True"] = "shifted_short"
    label = reader.find("shift_label", bool, nested=True)
    if label and default != "anchor_shifted" and "sample_from_anchor = True" not in statements:
        raise DraftConfigError(
            f"{reader.where}: shift_label is true, so a row predicts the position after its own, but nothing says "
            f"whether the anchor's row drafts; add sample_from_anchor: true or false"
        )
    found: RowAlignment | None = agreed(reader, statements, "the alignment of rows")
    if found is not None:
        key = next(iter(statements)).partition(" ")[0]
        reader.sources["row_alignment"] = reader.sources[key]
        return found
    if default is None:
        raise DraftConfigError(
            f"{reader.where} lacks sample_from_anchor, and {reason}, so which position a row predicts cannot be told; "
            f"add sample_from_anchor: true (row j predicts anchor + j + 1) or false (anchor + j)"
        )
    reader.sources["row_alignment"] = reason
    return default


def read_draft_vocabulary(reader: FactReader, shapes: Shapes, vocab_size: int) -> int | None:
    """Return the number of tokens that the drafter can propose, None where it is the target's vocabulary.

    Raises:
        DraftConfigError: config and the map between the vocabularies contradict.
    """
    stated = reader.find("draft_vocab_size", int, nested=True)
    mapped = int(shapes["d2t"][0]) if len(shapes.get("d2t", ())) == 1 else None
    if stated is None:
        reader.sources["draft_vocab_size"] = "no draft_vocab_size and no d2t" if mapped is None else "tensor d2t"
        return mapped
    if mapped is not None and mapped != stated:
        raise DraftConfigError(
            f"{reader.where}: draft_vocab_size = {stated} contradicts the tensor d2t, which maps {mapped} tokens"
        )
    if not 0 < stated <= vocab_size:
        raise DraftConfigError(
            f"{reader.where}: draft_vocab_size = {stated} must lie between 1 and the vocabulary of {vocab_size}"
        )
    return None if stated == vocab_size and mapped is None else stated


def read_depths(reader: FactReader, num_taps: int) -> dict[str, int]:
    """Return what the config says of the target's depth.

    Beside `target_num_hidden_layers`, `num_target_layers` counts the tapped layers (TorchSpec) or the
    target's (verl-SpeCo); alone it is the target's depth.

    Raises:
        DraftConfigError: it is neither of the two.
    """
    depth = reader.find("target_num_hidden_layers", int)
    stated = reader.find("num_target_layers", int)
    if depth is None:
        return {} if stated is None else {"num_target_layers": stated}
    if stated is not None and stated not in (depth, num_taps):
        raise DraftConfigError(
            f"{reader.where}: num_target_layers = {stated} is neither the {num_taps} layers that target_layer_ids "
            f"names nor target_num_hidden_layers = {depth}; correct it"
        )
    return {"target_num_hidden_layers": depth}
