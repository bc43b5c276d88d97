"""The nested form: facts under `dflash_config`, or at the top level as in z-lab's first releases.

Written by z-lab, SpecForge (`projector_type`), Model-Optimizer (`use_swa`), NeMo (`is_causal`) and
JetSpec (`causal_head`). Where a fact stands in both places they must agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dflash_core.drafter.attention import read_attention
from dflash_core.drafter.dialects.base import (
    Dialect,
    Reading,
    RowAlignment,
    Shapes,
    one_architecture,
    read_alignment,
    read_depths,
    read_draft_vocabulary,
    refuse_other_models,
    refuse_unknown,
)
from dflash_core.drafter.dialects.heads import DFLASH2_KEYS, DSPARK_KEYS, Family, read_heads
from dflash_core.drafter.dialects.taps import BEFORE_NORM, TapRule, Taps, default_target_layer_ids, read_taps
from dflash_core.drafter.facts import FactReader
from dflash_core.errors import DraftConfigError, UnsupportedCheckpoint
from dflash_core.target.model_config import ModelConfig

ARCHITECTURES: dict[str, Family] = {
    "DFlashDraftModel": "dflash",
    "DFlash2DraftModel": "dflash2",
    "DSparkDraftModel": "dspark",
    "Qwen3DSparkModel": "dspark",
}
_GENERIC = "DFlashDraftModel"
_PROJECTORS: dict[str, Family] = {"dflash": "dflash", "dflash2": "dflash2", "dspark": "dspark"}
UNDERSTOOD = {
    BEFORE_NORM,
    "block_size",
    "causal",
    "causal_head",
    "draft_shift",
    "draft_vocab_size",
    "dspark_bonus_anchor",
    "dspark_markov_rank",
    "dspark_target_layer_ids",
    "eagle_aux_hidden_state_layer_ids",
    "final_logit_softcapping",
    "input_embedding_scale",
    "mask_token_id",
    "output_multiplier",
    "projector_type",
    "sample_from_anchor",
    "shift_label",
    "swa_window_size",
    "target_hidden_size",
    "target_layer_ids",
    "use_swa",
    *DFLASH2_KEYS,
    *DSPARK_KEYS,
}
# Settings of the loss and the sampling of anchors: they shaped the weights and change no proposal.
HARMLESS = {
    "ce_loss_alpha",
    "confidence_head_alpha",
    "l1_loss_alpha",
    "loss_decay_gamma",
    "loss_type",
    "max_anchors",
    "num_anchors",
    "selector_loss_alpha",
}


def read(
    config: Mapping[str, Any], where: str, shapes: Shapes, target: ModelConfig, training: Mapping[str, Any]
) -> Reading:
    """Return the reading of a config in the nested form."""
    reader = FactReader(config, where, training=training)
    family, said_by = _family(reader)
    unused = _refuse_other_forms(reader)
    num_layers = reader.need("num_hidden_layers", int)
    taps = _taps(reader, target, num_layers)
    block_size = reader.need("block_size", int, nested=True)
    attention = read_attention(reader, num_layers)
    _refuse_short_forced_window(reader, attention.windows, block_size)
    _check_width(reader, target)
    _ask_for_embedding_scale(reader, target)
    return Reading(
        facts=reader,
        backbone=reader,
        num_layers=num_layers,
        taps=taps,
        block_size=block_size,
        mask_token_id=reader.need("mask_token_id", int, nested=True),
        attention=attention,
        row_alignment=_alignment(reader, family),
        heads=read_heads(reader, family, said_by, shapes),
        draft_vocab_size=read_draft_vocabulary(reader, shapes, target.vocab_size),
        depths=read_depths(reader, len(taps.ids)),
        notes=tuple(f"without influence on proposals: dflash_config.{key}" for key in unused),
        doubts=tuple(_doubts(reader)),
    )


def read_only_taps(config: Mapping[str, Any], where: str, target: ModelConfig) -> Taps:
    """Return only the target's layers."""
    reader = FactReader(config, where)
    _family(reader)
    num_layers = reader.need("num_hidden_layers", int)
    return _taps(reader, target, num_layers)


def _family(reader: FactReader) -> tuple[Family, str]:
    """Return the kind of drafter and what names it: `projector_type` inside of a general architecture.

    Raises:
        UnsupportedCheckpoint: one that is not scored, such as Domino.
        DraftConfigError: architecture and projector name two kinds.
    """
    architecture = one_architecture(reader.top, reader.where, ARCHITECTURES)
    projector = reader.find("projector_type", str, nested=True)
    if projector is None:
        return ARCHITECTURES[architecture], f"{reader.where}: architectures = [{architecture!r}]"
    if projector not in _PROJECTORS:
        raise UnsupportedCheckpoint(
            f"{reader.where}: projector_type = {projector!r} has a head that is not scored; {sorted(_PROJECTORS)} are"
        )
    if architecture != _GENERIC and _PROJECTORS[projector] != ARCHITECTURES[architecture]:
        raise DraftConfigError(
            f"{reader.where}: projector_type = {projector!r} contradicts architectures = [{architecture!r}]; "
            f"keep the one that was trained"
        )
    return _PROJECTORS[projector], f"{reader.sources['projector_type']} = {projector!r}"


def _refuse_other_forms(reader: FactReader) -> list[str]:
    refuse_other_models(reader.top, reader.where)
    return refuse_unknown(reader.nested, "dflash_config", reader.where, UNDERSTOOD, HARMLESS)


def _taps(reader: FactReader, target: ModelConfig, num_layers: int) -> Taps:
    """Return the layers; z-lab's own loop reads the last one's state after the final norm, serving engines before."""
    rule = TapRule(
        lambda: default_target_layer_ids(target.num_layers, num_layers),
        "z-lab's rule for configs without target_layer_ids",
    )
    return read_taps(reader, target.num_layers, main_key="target_layer_ids", rule=rule, may_be_last=False)


def _alignment(reader: FactReader, family: Family) -> RowAlignment:
    if family == "dspark":
        return read_alignment(reader, "anchor_shifted", "rule of DSpark: row j predicts position anchor + j + 1")
    return read_alignment(reader, "same_position", "rule of DFlash: row j predicts position anchor + j")


def _refuse_short_forced_window(reader: FactReader, windows: tuple[int | None, ...], block_size: int) -> None:
    """Model-Optimizer trains the block without a window, vLLM serves it with one: alike unless the window is short."""
    window = windows[0] if windows else None
    if reader.stated("use_swa", nested=True) and window is not None and window < block_size:
        raise UnsupportedCheckpoint(
            f"{reader.where}: swa_window_size = {window} is shorter than block_size = {block_size}; whether it cuts "
            f"into the block is decided differently in training and in serving, so it is not scored"
        )


def _check_width(reader: FactReader, target: ModelConfig) -> None:
    width = reader.find("target_hidden_size", int, nested=True)
    if width is not None and width != target.hidden_size:
        raise DraftConfigError(
            f"{reader.where}: target_hidden_size = {width}, the target's hidden size is {target.hidden_size}; was the "
            f"drafter trained for another target?"
        )


def _ask_for_embedding_scale(reader: FactReader, target: ModelConfig) -> None:
    """Ask for the scale where the target has one: some trainers embed with its own module, others with its bare table.

    z-lab's first loop and vLLM multiply as the target does, z-lab's later one by 1 where nothing is stated.

    Raises:
        DraftConfigError: the config does not say.
    """
    scale = target.embedding_scale
    if scale in (None, 1.0) or reader.stated("input_embedding_scale", nested=True):
        return
    raise DraftConfigError(
        f"{reader.where} lacks dflash_config.input_embedding_scale, and the target multiplies its embeddings by "
        f"{scale:.6g}; add {scale:.6g} where the drafter was trained on them as the target has them, 1.0 where on the "
        f"bare table"
    )


def _doubts(reader: FactReader) -> Iterator[str]:
    if reader.find("causal_head", bool, nested=True) is not None and "draft_shift" not in reader.sources:
        yield (
            "JetSpec's run-time flag draft_shift is not stored and is taken as off, its default; where it was on, "
            "set dflash_config.draft_shift: true in drafter.config"
        )
    if {"target_layer_ids", "eagle_aux_hidden_state_layer_ids"} <= set(reader.sources):
        yield VERL_DOUBT


VERL_DOUBT = (
    "eagle_aux_hidden_state_layer_ids agrees with target_layer_ids; verl-SpeCo wrote it so even while its training "
    "captured one layer less deep, which no file tells; of such a run, give each layer less 1 in drafter.config, "
    "with corrects: [target_layer_ids]"
)
DIALECT = Dialect(name="nested (z-lab, SpecForge, Model-Optimizer, NeMo, JetSpec)", read=read, read_taps=read_only_taps)
