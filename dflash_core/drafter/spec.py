"""What a drafter is: the facts that decide its proposals, whichever trainer wrote them down.

Every dialect of draft configs (`dialects`) becomes one `DrafterSpec`. Nothing is defaulted that
training decided. A fact that is missing is asked for, two sources that contradict are an error that
names both, and what is not understood is refused by name.

Semantics follow z-lab/dflash `dflash/model.py`, as in PyPI `dflash` 0.1.0; the other dialects'
differences from it are facts: `row_alignment`, `window_rule`, `proposal_rule`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from dflash_core.drafter.attention import WindowRule
from dflash_core.drafter.dialects import choose_dialect
from dflash_core.drafter.dialects.base import Reading, RowAlignment
from dflash_core.drafter.dialects.heads import MarkovHeadType, ProposalRule
from dflash_core.drafter.dialects.taps import Taps, default_target_layer_ids
from dflash_core.drafter.facts import OF_TRAINING, numbers
from dflash_core.drafter.rope import read_rope
from dflash_core.drafter.shapes import (
    backbone_shapes,
    check_biases,
    check_tensors,
    expected_shapes,
    has_biases,
)
from dflash_core.errors import CheckpointMismatch, DraftConfigError
from dflash_core.target.model_config import ModelConfig

__all__ = [
    "ROW_ALIGNMENT",
    "ROW_ALIGNMENTS",
    "DrafterSpec",
    "backbone_shapes",
    "default_target_layer_ids",
    "expected_shapes",
    "read_drafter_spec",
    "target_layer_ids",
]

ROW_ALIGNMENTS: dict[RowAlignment, str] = {
    "same_position": "same position: row j of a block predicts position anchor + j",
    "anchor_shifted": "anchor-shifted: row j of a block predicts position anchor + j + 1, row 0 included",
    "shifted_short": "shifted: row j of a block predicts position anchor + j + 1, the last row unused",
}
ROW_ALIGNMENT = ROW_ALIGNMENTS["same_position"]
_PLAIN: dict[str, Any] = {
    "window_rule": "row",
    "row_alignment": "same_position",
    "draft_vocab_size": None,
    "conv_kernel_size": None,
    "conv_group_size": None,
    "selector_rank": None,
    "selector_top_k": None,
    "markov_rank": 0,
    "markov_head_type": None,
    "has_confidence_head": False,
    "confidence_head_with_markov": False,
}
"""Facts that an identity leaves out where they are z-lab's DFlash: identities from before they existed stay."""
_OF_READING = ("dialect", "notes", "doubts", "sources")
_NO_IDENTITY = ("attention_bias", *_OF_READING)
# Key in a config to the fact's name here, where they differ.
_SOURCES = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterSpec:
    """The canonical reading of one drafter. Its plain form is part of every evaluation's identity."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    """Of the target: what the mask token, the embedding and a Markov head's previous token are numbered in."""
    rms_norm_eps: float
    rope: Mapping[str, Any]
    """transformers' `rope_parameters`: rope_theta, rope_type and what the type needs."""
    max_position_embeddings: int
    block_size: int
    """Slots of one draft pass, the anchor included, as trained; 1 is a block without drafts."""
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    """0-based decoder layers of the target, in the order in which `fc` reads them: `hidden_states[id + 1]`."""
    is_causal: tuple[bool, ...]
    """Per layer: does a slot see only slots before it and itself?"""
    windows: tuple[int | None, ...]
    """Per layer: how many positions a slot sees back, itself included; None sees all."""
    input_embedding_scale: float
    output_multiplier: float
    final_logit_softcapping: float | None
    proposal_rule: ProposalRule = "argmax"
    """`argmax` of the head; `dflash2`: a selector walks over candidates; `dspark`: a Markov head's bias is added."""
    window_rule: WindowRule = "row"
    """`row`: W - 1 positions before each row; `anchor`: context from anchor - W on for all rows, the block whole."""
    row_alignment: RowAlignment = "same_position"
    """Which position a row predicts; see `ROW_ALIGNMENTS`."""
    draft_vocab_size: int | None = None
    """Tokens that can be proposed; None is the target's vocabulary. `d2t` holds target id - own id for each."""
    conv_kernel_size: int | None = None
    """DFlash2: taps of the convolutions inside the block."""
    conv_group_size: int | None = None
    """DFlash2: channels that share one dynamic kernel."""
    selector_rank: int | None = None
    """DFlash2: width of the selector's codebooks."""
    selector_top_k: int | None = None
    """DFlash2: candidates per row."""
    markov_rank: int = 0
    """DSpark: width of the Markov head's embedding of the token before; 0 is none."""
    markov_head_type: MarkovHeadType | None = None
    has_confidence_head: bool = False
    """DSpark: is there a head that predicts acceptance? It prunes drafts at serving and changes none."""
    confidence_head_with_markov: bool = False
    """Does that head read the embedding of the token before as well?"""
    attention_bias: bool = False
    """Do the projections of attention have biases? The tensors tell, so it is no part of the identity."""
    dialect: str = field(default="", compare=False)
    """Form of the config it was read from."""
    notes: tuple[str, ...] = field(default=(), compare=False)
    """What a person may want to know of the reading, the doubts included."""
    doubts: tuple[str, ...] = field(default=(), compare=False)
    """Facts that no file tells and that were taken as usual: they belong beside every number."""
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Fact to the place that decided it; shown by `inspect`, not part of the identity."""

    @property
    def num_drafts(self) -> int:
        """Return how many tokens a whole block proposes."""
        return self.block_size if self.row_alignment == "anchor_shifted" else self.block_size - 1

    def facts(self) -> dict[str, Any]:
        """Return all facts as plain data, those at z-lab's plain value too."""
        plain = asdict(self)
        return {name: value for name, value in plain.items() if name not in _OF_READING}

    def identity(self) -> dict[str, Any]:
        """Return the facts that decide numbers as plain data, without where they came from."""
        return {
            name: value
            for name, value in asdict(self).items()
            if name not in _NO_IDENTITY and not (name in _PLAIN and value == _PLAIN[name])
        }


def read_drafter_spec(
    config: Mapping[str, Any],
    shapes: Mapping[str, Sequence[int]],
    target: ModelConfig,
    *,
    where: str,
    training_args: Mapping[str, Any] | None = None,
) -> DrafterSpec:
    """Read a draft config, and check it against the tensors and the target.

    Args:
        config: the draft config as plain data.
        shapes: canonical tensor name to shape, embedding and head aside.
        target: the target that the drafter is to be scored with.
        where: name of the config in messages.
        training_args: settings found in the checkpoint itself; those that name a fact must agree, and
            block size, mask token and layers are taken from them where the config is silent.

    Raises:
        UnsupportedCheckpoint: a kind of drafter that is not known, by name.
        DraftConfigError: a fact is missing, malformed or contradicted.
        CheckpointMismatch: config and tensors, or drafter and target, do not belong together.
    """
    dialect, evidence = choose_dialect(config)
    reading = dialect.read(config, where, shapes, target, training_args or {})
    spec = _build(reading, shapes, f"{dialect.name}, by {evidence}")
    _check_target(spec, reading, target, where)
    stated = reading.backbone.find("head_dim", int)
    if stated is not None and stated != spec.head_dim:
        raise CheckpointMismatch(
            f"{where}: head_dim = {stated} contradicts layers.0.self_attn.q_norm.weight, "
            f"whose length is {spec.head_dim}"
        )
    check_biases(spec, shapes, reading.backbone.find("attention_bias", bool), where)
    check_tensors(spec, shapes, where)
    _check_training_args(spec, reading, training_args or {}, where)
    return spec


def target_layer_ids(config: Mapping[str, Any], target: ModelConfig, *, where: str) -> tuple[int, ...]:
    """Return only the target layers that a draft config reads, 0-based.

    Raises:
        DraftConfigError: the list is malformed.
        CheckpointMismatch: it names a layer that the target does not have.
        UnsupportedCheckpoint: a kind of drafter that is not known.
    """
    dialect, _ = choose_dialect(config)
    taps: Taps = dialect.read_taps(config, where, target)
    return taps.ids


def _build(reading: Reading, shapes: Mapping[str, Sequence[int]], dialect: str) -> DrafterSpec:
    """Put the canonical value together, with a source for each fact."""
    q_norm = "layers.0.self_attn.q_norm.weight"
    if len(shapes.get(q_norm, ())) != 1:
        raise CheckpointMismatch(f"the checkpoint lacks {q_norm}, whose length is the head size")
    sizes = reading.backbone
    heads = reading.heads
    spec = DrafterSpec(
        hidden_size=sizes.need("hidden_size", int),
        num_layers=reading.num_layers,
        num_heads=sizes.need("num_attention_heads", int),
        num_kv_heads=sizes.need("num_key_value_heads", int),
        head_dim=shapes[q_norm][0],
        intermediate_size=sizes.need("intermediate_size", int),
        vocab_size=sizes.need("vocab_size", int),
        rms_norm_eps=sizes.need("rms_norm_eps", float),
        rope=read_rope(sizes),
        max_position_embeddings=sizes.need("max_position_embeddings", int),
        block_size=reading.block_size,
        mask_token_id=reading.mask_token_id,
        target_layer_ids=reading.taps.ids,
        is_causal=reading.attention.is_causal,
        windows=reading.attention.windows,
        window_rule=reading.attention.window_rule,
        row_alignment=reading.row_alignment,
        draft_vocab_size=reading.draft_vocab_size,
        attention_bias=has_biases(shapes),
        dialect=dialect,
        notes=(*reading.notes, *reading.doubts),
        doubts=reading.doubts,
        **asdict(heads),
    )
    sources = reading.sources | {"head_dim": f"tensor {q_norm}", "attention_bias": "the tensors"}
    sources |= {fact: sources[key] for fact, key in _SOURCES.items()}
    for fact, value in _PLAIN.items():
        if fact not in sources:
            sources[fact] = f"default: nothing says otherwise, so {value!r}"
    return replace(spec, sources=sources)


def _check_target(spec: DrafterSpec, reading: Reading, target: ModelConfig, where: str) -> None:
    prefix = reading.backbone.prefix
    pairs = [
        ("hidden size", f"{prefix}hidden_size", spec.hidden_size, target.hidden_size),
        ("vocabulary", f"{prefix}vocab_size", spec.vocab_size, target.vocab_size),
    ]
    pairs += [("depth of the target", key, depth, target.num_layers) for key, depth in reading.depths.items()]
    for what, key, drafter_value, target_value in pairs:
        if drafter_value != target_value:
            raise CheckpointMismatch(
                f"the drafter's {what} is {drafter_value} ({where}: {key}), the target's is {target_value}; "
                f"was it trained for another target?"
            )
    if not 0 <= spec.mask_token_id < target.vocab_size:
        raise DraftConfigError(
            f"{where}: mask_token_id = {spec.mask_token_id} lies outside the vocabulary of {target.vocab_size}"
        )
    if spec.num_heads % spec.num_kv_heads:
        raise DraftConfigError(
            f"{where}: num_attention_heads = {spec.num_heads} must be a multiple of num_key_value_heads = "
            f"{spec.num_kv_heads}"
        )
    if spec.conv_group_size is not None and spec.hidden_size % spec.conv_group_size:
        raise DraftConfigError(
            f"{where}: hidden_size = {spec.hidden_size} must be a multiple of conv_group_size = {spec.conv_group_size}"
        )
    if spec.selector_top_k is not None and spec.selector_top_k > spec.vocab_size:
        raise DraftConfigError(
            f"{where}: selector_top_k = {spec.selector_top_k} is more than the vocabulary of {spec.vocab_size}"
        )
    if spec.proposal_rule == "dflash2" and spec.draft_vocab_size is not None:
        raise DraftConfigError(
            f"{where}: draft_vocab_size = {spec.draft_vocab_size}, but DFlash2's selector needs the whole vocabulary "
            f"of {spec.vocab_size}"
        )


def _check_training_args(spec: DrafterSpec, reading: Reading, training_args: Mapping[str, Any], where: str) -> None:
    """Compare facts that the checkpoint's own training arguments state with the config; layers as the trainer counts.

    Raises:
        DraftConfigError: naming both.
    """
    values = {
        "block_size": [spec.block_size],
        "mask_token_id": [spec.mask_token_id],
        "target_layer_ids": list(reading.taps.as_written),
    }
    for key, value in values.items():
        stated = training_args.get(key)
        if stated is not None and numbers(stated) != value:
            shown = tuple(value) if key == "target_layer_ids" else value[0]
            raise DraftConfigError(f"{where}: {key} = {shown!r} contradicts {OF_TRAINING}, {key} = {stated!r}")
