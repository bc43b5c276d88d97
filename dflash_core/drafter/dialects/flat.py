"""The flat form of TorchSpec, verl-SpeCo and DeepSpec: all facts at the top level.

TorchSpec and verl-SpeCo state the target's depth as `target_num_hidden_layers`; TorchSpec's
`num_target_layers` then counts the tapped layers. DeepSpec's architectures are anchor-shifted, its
DFlash of blocks of 7 too: that is a DSpark model with `markov_rank` 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_core.drafter.attention import read_attention
from dflash_core.drafter.dialects.base import (
    Dialect,
    Reading,
    Shapes,
    one_architecture,
    read_alignment,
    read_depths,
    read_draft_vocabulary,
    refuse_other_models,
)
from dflash_core.drafter.dialects.heads import Family, read_heads
from dflash_core.drafter.dialects.nested import VERL_DOUBT
from dflash_core.drafter.dialects.taps import TapRule, Taps, default_target_layer_ids, read_taps
from dflash_core.drafter.facts import FactReader
from dflash_core.errors import CheckpointMismatch, UnsupportedCheckpoint
from dflash_core.target.model_config import ModelConfig

DEEPSPEC = ("Qwen3DSparkModel",)
ARCHITECTURES: dict[str, Family] = {
    "DFlashDraftModel": "dflash",
    "DFlash2DraftModel": "dflash2",
    "DSparkDraftModel": "dspark",
    **dict.fromkeys(DEEPSPEC, "dspark"),
}


def read(
    config: Mapping[str, Any], where: str, shapes: Shapes, target: ModelConfig, training: Mapping[str, Any]
) -> Reading:
    """Return the reading of a config in the flat form."""
    reader = FactReader(config, where, training=training)
    architecture = _architecture(reader)
    family = ARCHITECTURES[architecture]
    taps = _taps(reader, target)
    num_layers = reader.need("num_hidden_layers", int)
    _check_width(reader, target)
    shifted = family == "dspark"
    reason = "rule of DSpark: row j predicts position anchor + j + 1"
    if not shifted:
        reason = "rule of DFlash: row j predicts position anchor + j"
    doubts = (VERL_DOUBT,) if {"target_layer_ids", "eagle_aux_hidden_state_layer_ids"} <= set(reader.sources) else ()
    return Reading(
        facts=reader,
        backbone=reader,
        num_layers=num_layers,
        taps=taps,
        block_size=reader.need("block_size", int),
        mask_token_id=reader.need("mask_token_id", int),
        attention=read_attention(reader, num_layers, sliding_is_causal=False),
        row_alignment=read_alignment(reader, "anchor_shifted" if shifted else "same_position", reason),
        heads=read_heads(reader, family, f"{where}: architectures = [{architecture!r}]", shapes),
        draft_vocab_size=read_draft_vocabulary(reader, shapes, target.vocab_size),
        depths=read_depths(reader, len(taps.ids)),
        doubts=doubts,
    )


def read_only_taps(config: Mapping[str, Any], where: str, target: ModelConfig) -> Taps:
    """Return only the target's layers."""
    reader = FactReader(config, where)
    _architecture(reader)
    return _taps(reader, target)


def _architecture(reader: FactReader) -> str:
    refuse_other_models(reader.top, reader.where)
    projector = reader.find("projector_type", str)
    if projector not in (None, "dflash", "dflash2", "dspark"):
        raise UnsupportedCheckpoint(f"{reader.where}: projector_type = {projector!r} has a head that is not scored")
    return one_architecture(reader.top, reader.where, ARCHITECTURES)


def _taps(reader: FactReader, target: ModelConfig) -> Taps:
    """Return the layers; TorchSpec writes null and counts them, DeepSpec always lists them."""
    rule = None
    if reader.top.get("target_num_hidden_layers") is not None:
        key = "num_context_layers" if reader.top.get("num_context_layers") is not None else "num_target_layers"
        if reader.top.get(key) is not None:
            count = reader.need(key, int)
            name = f"TorchSpec's rule for configs without target_layer_ids, for {key} = {count} layers"
            rule = TapRule(lambda: default_target_layer_ids(target.num_layers, count), name)
    return read_taps(reader, target.num_layers, main_key="target_layer_ids", rule=rule, may_be_last=False)


def _check_width(reader: FactReader, target: ModelConfig) -> None:
    width = reader.find("target_hidden_size", int)
    if width is not None and width != target.hidden_size:
        raise CheckpointMismatch(
            f"{reader.where}: target_hidden_size = {width}, the target's hidden size is {target.hidden_size}; "
            f"was the drafter trained for another target?"
        )


DIALECT = Dialect(name="flat (TorchSpec, verl-SpeCo, DeepSpec)", read=read, read_taps=read_only_taps)
