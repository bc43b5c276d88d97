"""The speculators form: flat facts, the sizes of the layers under `transformer_layer_config`.

The sizes are written as differences from transformers' `Qwen3Config`, so what is not there has that
class's default. Layers of the target are counted from the embedding's output, and windows are
measured from the anchor for all rows of a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_core.drafter.attention import SLIDING, Attention, layer_kinds, read_window, stated_causality
from dflash_core.drafter.dialects.base import (
    Dialect,
    Reading,
    RowAlignment,
    Shapes,
    read_alignment,
    read_depths,
    read_draft_vocabulary,
    refuse_other_models,
    refuse_unknown,
)
from dflash_core.drafter.dialects.heads import DFLASH2_KEYS, DSPARK_KEYS, Family, read_heads
from dflash_core.drafter.dialects.taps import TapRule, Taps, read_taps
from dflash_core.drafter.facts import FactReader
from dflash_core.errors import CheckpointMismatch, DraftConfigError, UnsupportedCheckpoint
from dflash_core.target.model_config import ModelConfig

FAMILIES: dict[str, Family] = {"dflash": "dflash", "dflash2": "dflash2", "dspark": "dspark"}
QWEN3_DEFAULTS: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "vocab_size": 151936,
    "attention_bias": False,
}
"""transformers' `Qwen3Config`, as far as it decides proposals; the same in its versions 4 and 5."""
_QWEN3_THETA = 10000.0
UNDERSTOOD = {
    "architectures",
    "aux_hidden_state_layer_ids",
    "block_size",
    "corrects",
    "draft_vocab_size",
    "eagle_aux_hidden_state_layer_ids",
    "final_logit_softcapping",
    "input_embedding_scale",
    "is_causal",
    "mask_token_id",
    "output_multiplier",
    "projector_type",
    "sample_from_anchor",
    "shift_label",
    "sliding_window_non_causal",
    "speculators_config",
    "speculators_model_type",
    "target_hidden_size",
    "transformer_layer_config",
    *DFLASH2_KEYS,
    *DSPARK_KEYS,
}
# Settings of the loss, and of Domino, which `projector_type` switches on.
HARMLESS = {
    "auf",
    "ce_loss_alpha",
    "confidence_head_alpha",
    "emb_dim",
    "gru_hidden_dim",
    "has_no_defaults_at_init",
    "l1_loss_alpha",
    "lambda_base_decay_ratio",
    "lambda_base_start",
    "loss_decay_gamma",
    "max_anchors",
    "num_anchors",
    "pure_draft_prefix_len",
    "selector_loss_alpha",
}
# What transformers writes into every model's config; none of it is worth a note.
RECORDS = {
    "_name_or_path",
    "architectures",
    "auto_map",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "id2label",
    "is_decoder",
    "is_encoder_decoder",
    "label2id",
    "model_type",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "problem_type",
    "return_dict",
    "speculators_version",
    "tie_word_embeddings",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}


def read(
    config: Mapping[str, Any], where: str, shapes: Shapes, target: ModelConfig, training: Mapping[str, Any]
) -> Reading:
    """Return the reading of a speculators config."""
    reader = FactReader(config, where, training=training)
    family, said_by = _family(reader)
    unused = refuse_unknown(config, "the top level", where, UNDERSTOOD | RECORDS, HARMLESS)
    backbone = _backbone(reader)
    num_layers = backbone.need("num_hidden_layers", int)
    taps = _taps(reader, target)
    block_size = reader.need("block_size", int)
    alignment = _alignment(reader, family)
    _check_width(reader, target)
    reader.need("draft_vocab_size", int)
    notes = [f"without influence on proposals: {key}" for key in unused]
    return Reading(
        facts=reader,
        backbone=backbone,
        num_layers=num_layers,
        taps=taps,
        block_size=block_size,
        mask_token_id=reader.need("mask_token_id", int),
        attention=_attention(reader, backbone, num_layers, family),
        row_alignment=alignment,
        heads=read_heads(reader, family, said_by, shapes),
        draft_vocab_size=read_draft_vocabulary(reader, shapes, target.vocab_size),
        depths=read_depths(reader, len(taps.ids)),
        notes=(*notes, *_speculative_tokens(reader, block_size, alignment)),
    )


def read_only_taps(config: Mapping[str, Any], where: str, target: ModelConfig) -> Taps:
    """Return only the target's layers."""
    reader = FactReader(config, where)
    _family(reader)
    return _taps(reader, target)


def _family(reader: FactReader) -> tuple[Family, str]:
    kind = reader.top.get("speculators_model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise UnsupportedCheckpoint(
            f"{reader.where}: speculators_model_type = {kind!r} is not scored; {sorted(FAMILIES)} are"
        )
    projector = reader.find("projector_type", str)
    if projector not in (None, kind):
        raise UnsupportedCheckpoint(
            f"{reader.where}: projector_type = {projector!r} has a head that is not scored; without it {kind!r} is"
        )
    return FAMILIES[kind], f"{reader.where}: speculators_model_type = {kind!r}"


def _backbone(reader: FactReader) -> FactReader:
    layers = reader.find("transformer_layer_config", dict)
    if layers is None:
        raise DraftConfigError(
            f"{reader.where} lacks transformer_layer_config, the sizes of the layers; add it to the draft config"
        )
    at = f"{reader.where}: transformer_layer_config"
    if layers.get("model_type", "qwen3") != "qwen3":
        raise UnsupportedCheckpoint(
            f"{at}: model_type = {layers['model_type']!r} has other defaults for what the file leaves out; "
            f"'qwen3' is read"
        )
    refuse_other_models(layers, at)
    defaults = dict(QWEN3_DEFAULTS)
    scaling = layers.get("rope_parameters")
    if isinstance(scaling, dict) and isinstance(scaling.get(SLIDING), dict):
        # One entry per kind of layer: speculators builds all layers from the sliding one.
        layers = {**layers, "rope_parameters": scaling[SLIDING]}
    elif layers.get("rope_theta") is None and not (isinstance(scaling, dict) and "rope_theta" in scaling):
        defaults["rope_theta"] = _QWEN3_THETA
    return FactReader(
        layers, reader.where, prefix="transformer_layer_config.", defaults=defaults, defaults_of="Qwen3Config"
    )


def _taps(reader: FactReader, target: ModelConfig) -> Taps:
    depth = target.num_layers
    rule = TapRule(
        lambda: [1, depth // 2 - 1, depth - 4],
        "speculators' rule for configs without aux_hidden_state_layer_ids: hidden states 2, depth / 2 and depth - 3",
    )
    return read_taps(reader, depth, main_key="aux_hidden_state_layer_ids", rule=rule)


def _alignment(reader: FactReader, family: Family) -> RowAlignment:
    if family == "dspark":
        return read_alignment(reader, "anchor_shifted", "default of speculators for dspark: sample_from_anchor = true")
    return read_alignment(reader, "same_position", f"default of speculators for {family}: sample_from_anchor = false")


def _attention(reader: FactReader, backbone: FactReader, num_layers: int, family: Family) -> Attention:
    """Return kinds of attention: full layers are bidirectional, sliding ones as `sliding_window_non_causal` says."""
    kinds = layer_kinds(backbone, num_layers)
    window = read_window(backbone, kinds)
    if SLIDING not in kinds:
        windows: tuple[int | None, ...] = (None,) * num_layers
        causal = (False,) * num_layers
        reader.sources["windows"] = "default: no layer is sliding"
        reader.sources["is_causal"] = "rule of speculators: full layers are bidirectional in the block"
    else:
        free = _sliding_is_free(reader, family)
        windows = tuple(window if kind == SLIDING else None for kind in kinds)
        causal = tuple(kind == SLIDING and not free for kind in kinds)
        reader.sources["windows"] = backbone.sources["sliding_window"]
        reader.sources["window_rule"] = "rule of speculators: measured from the anchor for all rows of a block"
    for one in (reader, backbone):
        source = reader.sources["is_causal"]
        stated = stated_causality(one)
        if stated is not None and causal != (stated,) * num_layers:
            raise DraftConfigError(
                f"{reader.where}: {one.prefix}is_causal = {stated} contradicts the layers' own causality {causal!r} "
                f"({source}); keep the one that the drafter was trained with"
            )
        reader.sources["is_causal"] = source
    return Attention(windows, causal, "anchor" if SLIDING in kinds else "row")


def _sliding_is_free(reader: FactReader, family: Family) -> bool:
    free: bool | None = reader.find("sliding_window_non_causal", bool)
    if free is None and family == "dflash2":
        reader.sources["is_causal"] = "default of speculators for dflash2: sliding_window_non_causal = true"
        return True
    if free is None:
        raise DraftConfigError(
            f"{reader.where} has sliding layers but lacks sliding_window_non_causal: speculators takes false and vLLM "
            f"true where it is missing; add the one that the drafter was trained with"
        )
    reader.sources["is_causal"] = reader.sources["sliding_window_non_causal"]
    return free


def _check_width(reader: FactReader, target: ModelConfig) -> None:
    width = reader.find("target_hidden_size", int)
    if width is not None and width != target.hidden_size:
        raise CheckpointMismatch(
            f"{reader.where}: target_hidden_size = {width}, the target's hidden size is {target.hidden_size}; "
            f"was the drafter trained for another target?"
        )


def _speculative_tokens(reader: FactReader, block_size: int, alignment: RowAlignment) -> list[str]:
    """Compare the number of drafts that the config proposes with what a block of its length can hold.

    Raises:
        DraftConfigError: it says that rows are aligned otherwise.
    """
    num_drafts = block_size if alignment == "anchor_shifted" else block_size - 1
    methods = (reader.find("speculators_config", dict) or {}).get("proposal_methods")
    listed = methods if isinstance(methods, list) else []
    counts = [one.get("speculative_tokens") for one in listed if isinstance(one, dict)]
    said = [count for count in counts if type(count) is int]
    is_stated = "sample_from_anchor" in reader.sources
    for count in said:
        if count > num_drafts or (not is_stated and count == block_size - 1 != num_drafts):
            raise DraftConfigError(
                f"{reader.where}: speculative_tokens = {count} contradicts the {num_drafts} drafts of block_size = "
                f"{block_size} by {reader.sources['row_alignment']}; say how rows are aligned by sample_from_anchor"
            )
    return [f"serving is set to {count} of the {num_drafts} drafts" for count in said if count != num_drafts]


DIALECT = Dialect(name="speculators", read=read, read_taps=read_only_taps)
