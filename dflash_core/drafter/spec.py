"""What a drafter is: the facts that decide its proposals, read from its config and its tensors.

Nothing is defaulted that training decided. A fact that is missing is asked for, two sources that
contradict are an error that names both, and what is not understood is refused by name.

Supported: z-lab's DFlash (`architectures: [DFlashDraftModel]`), config fields at the top level or under
`dflash_config`. Semantics follow z-lab/dflash `dflash/model.py`, as in PyPI `dflash` 0.1.0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dflash_core.drafter.facts import FactReader
from dflash_core.drafter.rope import read_rope
from dflash_core.errors import CheckpointMismatch, DraftConfigError, UnsupportedCheckpoint
from dflash_core.target.model_config import ModelConfig

ARCHITECTURE = "DFlashDraftModel"
ROW_ALIGNMENT = "same position: row j of a block predicts position anchor + j"
_KNOWN_DFLASH_KEYS = {
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
}
_SLIDING = "sliding_attention"
_FULL = "full_attention"


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
    rms_norm_eps: float
    rope: Mapping[str, Any]
    """transformers' `rope_parameters`: rope_theta, rope_type and what the type needs."""
    max_position_embeddings: int
    block_size: int
    """Slots of one draft pass, the anchor included, as trained."""
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    """0-based decoder layers of the target, in the order in which `fc` reads them."""
    is_causal: tuple[bool, ...]
    """Per layer: does a slot see only slots before it and itself?"""
    windows: tuple[int | None, ...]
    """Per layer: how many positions a slot sees back, itself included; None sees all."""
    input_embedding_scale: float
    output_multiplier: float
    final_logit_softcapping: float | None
    proposal_rule: str = "argmax"
    sources: Mapping[str, str] = field(default_factory=dict)
    """Fact to the place that decided it; shown by `inspect`, not part of the identity."""

    def identity(self) -> dict[str, Any]:
        """Return the facts as plain data, without where they came from."""
        plain = asdict(self)
        del plain["sources"]
        return plain


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
        shapes: canonical tensor name to shape.
        target: the target that the drafter is to be scored with.
        where: name of the config in messages.
        training_args: settings found in the checkpoint itself; those that name a fact must agree.

    Raises:
        UnsupportedCheckpoint: a kind of drafter that is not scored yet, by name.
        DraftConfigError: a fact is missing, malformed or contradicted.
        CheckpointMismatch: config and tensors, or drafter and target, do not belong together.
    """
    _refuse_other_kinds(config, where)
    reader = FactReader(config, where)
    _refuse_unknown(reader)
    num_layers = reader.need("num_hidden_layers", int)
    if "layers.0.self_attn.q_norm.weight" not in shapes:
        raise CheckpointMismatch("the checkpoint lacks layers.0.self_attn.q_norm.weight, whose length is the head size")
    head_dim = shapes["layers.0.self_attn.q_norm.weight"][0]
    reader.sources["head_dim"] = "tensor layers.0.self_attn.q_norm.weight"
    windows, causal = _attention_kinds(reader, num_layers)
    scale = reader.find("input_embedding_scale", float, nested=True)
    multiplier = reader.find("output_multiplier", float, nested=True)
    softcap = reader.find("final_logit_softcapping", float, nested=True)
    spec = DrafterSpec(
        hidden_size=reader.need("hidden_size", int),
        num_layers=num_layers,
        num_heads=reader.need("num_attention_heads", int),
        num_kv_heads=reader.need("num_key_value_heads", int),
        head_dim=head_dim,
        intermediate_size=reader.need("intermediate_size", int),
        vocab_size=reader.need("vocab_size", int),
        rms_norm_eps=reader.need("rms_norm_eps", float),
        rope=read_rope(reader),
        max_position_embeddings=reader.need("max_position_embeddings", int),
        block_size=reader.need("block_size", int, nested=True),
        mask_token_id=reader.need("mask_token_id", int, nested=True),
        target_layer_ids=_target_layer_ids(reader, target, num_layers),
        is_causal=causal,
        windows=windows,
        input_embedding_scale=1.0 if scale is None else scale,
        output_multiplier=1.0 if multiplier is None else multiplier,
        final_logit_softcapping=softcap if softcap is not None and softcap > 0 else None,
        sources=reader.sources,
    )
    _check_target(spec, reader, target)
    _check_tensors(spec, shapes, where, config.get("head_dim"))
    _check_biases(spec, shapes, reader.find("attention_bias", bool), where)
    _check_training_args(spec, training_args or {}, where)
    return spec


def target_layer_ids(config: Mapping[str, Any], target: ModelConfig, *, where: str) -> tuple[int, ...]:
    """Return only the target layers that a draft config reads, 0-based.

    Raises:
        DraftConfigError: the list is malformed.
        CheckpointMismatch: it names a layer that the target does not have.
        UnsupportedCheckpoint: a kind of drafter that is not scored yet.
    """
    _refuse_other_kinds(config, where)
    reader = FactReader(config, where)
    return _target_layer_ids(reader, target, reader.need("num_hidden_layers", int))


def _refuse_other_kinds(config: Mapping[str, Any], where: str) -> None:
    kind = config.get("speculators_model_type")
    if kind is not None:
        raise UnsupportedCheckpoint(f"{where} is a speculators config ({kind!r}), which is not scored yet; z-lab's is")
    architectures = config.get("architectures")
    if architectures != [ARCHITECTURE]:
        raise UnsupportedCheckpoint(
            f"{where}: architectures = {architectures!r} is not scored yet; [{ARCHITECTURE!r}] is, "
            f"where row j of a block predicts position anchor + j"
        )
    if config.get("sample_from_anchor"):
        raise UnsupportedCheckpoint(
            f"{where}: sample_from_anchor is set (row j of a block predicts position anchor + j + 1), which is not "
            f"scored yet; same-position drafters are"
        )
    act = config.get("hidden_act", "silu")
    if act != "silu":
        raise UnsupportedCheckpoint(f"{where}: hidden_act = {act!r} is not supported; 'silu' is")


def _refuse_unknown(reader: FactReader) -> None:
    unknown = sorted(set(reader.nested) - _KNOWN_DFLASH_KEYS)
    if unknown:
        raise UnsupportedCheckpoint(
            f"{reader.where}: dflash_config holds {unknown}, which may change the proposals and is not understood; "
            f"understood are {sorted(_KNOWN_DFLASH_KEYS)}"
        )


def _attention_kinds(reader: FactReader, num_layers: int) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """Return window and causality per layer: is_causal if given, else sliding layers are causal."""
    kinds = reader.find("layer_types", list) or [_FULL] * num_layers
    if len(kinds) != num_layers or not all(kind in (_SLIDING, _FULL) for kind in kinds):
        raise DraftConfigError(
            f"{reader.where}: layer_types = {kinds!r} must name {num_layers} layers as {_SLIDING!r} or {_FULL!r}"
        )
    is_causal = reader.find("is_causal", bool)
    causal = tuple(kind == _SLIDING if is_causal is None else is_causal for kind in kinds)
    if _SLIDING not in kinds:
        if reader.top.get("use_sliding_window"):
            raise DraftConfigError(
                f"{reader.where}: use_sliding_window is true, but layer_types names no sliding layer"
            )
        return (None,) * num_layers, causal
    window = reader.need("sliding_window", int)
    if reader.top.get("use_sliding_window") is not True:
        raise DraftConfigError(
            f"{reader.where}: layer_types names sliding layers, but use_sliding_window is "
            f"{reader.top.get('use_sliding_window')!r}; set it to true, or make the layers full_attention"
        )
    return tuple(window if kind == _SLIDING else None for kind in kinds), causal


def _target_layer_ids(reader: FactReader, target: ModelConfig, num_layers: int) -> tuple[int, ...]:
    ids = reader.find("target_layer_ids", list, nested=True)
    if ids is None:
        ids = default_target_layer_ids(target.num_layers, num_layers)
        reader.sources["target_layer_ids"] = "z-lab's rule for configs without target_layer_ids"
    if not ids or not all(isinstance(layer, int) and not isinstance(layer, bool) for layer in ids):
        raise DraftConfigError(f"{reader.where}: target_layer_ids = {ids!r} must be a list of layer numbers")
    outside = [layer for layer in ids if not 0 <= layer < target.num_layers]
    if outside:
        raise CheckpointMismatch(
            f"{reader.where}: target_layer_ids {list(ids)} name layer {outside[0]}, but the target has layers "
            f"0..{target.num_layers - 1}; was the drafter trained for another target?"
        )
    return tuple(ids)


def default_target_layer_ids(target_depth: int, num_draft_layers: int) -> list[int]:
    """Return the layers that a z-lab config without `target_layer_ids` means.

    One draft layer reads the middle; more are spread evenly from the second to the third-to-last.
    Source: z-lab/dflash `dflash/model.py: build_target_layer_ids`.

    >>> default_target_layer_ids(64, 5)
    [1, 16, 31, 46, 61]
    """
    if num_draft_layers == 1:
        return [target_depth // 2]
    span = target_depth - 4
    return [round(1 + layer * span / (num_draft_layers - 1)) for layer in range(num_draft_layers)]


def _check_target(spec: DrafterSpec, reader: FactReader, target: ModelConfig) -> None:
    pairs = [
        ("hidden size", "hidden_size", spec.hidden_size, target.hidden_size),
        ("vocabulary", "vocab_size", spec.vocab_size, target.vocab_size),
    ]
    depth = reader.find("num_target_layers", int)
    if depth is not None:
        pairs.append(("depth of the target", "num_target_layers", depth, target.num_layers))
    for what, key, drafter_value, target_value in pairs:
        if drafter_value != target_value:
            raise CheckpointMismatch(
                f"the drafter's {what} is {drafter_value} ({reader.where}: {key}), the target's is {target_value}; "
                f"was it trained for another target?"
            )
    if not 0 <= spec.mask_token_id < target.vocab_size:
        raise DraftConfigError(
            f"{reader.where}: mask_token_id = {spec.mask_token_id} lies outside the vocabulary of {target.vocab_size}"
        )
    if spec.block_size < 2 or spec.num_heads % spec.num_kv_heads:
        raise DraftConfigError(
            f"{reader.where}: block_size = {spec.block_size} must be at least 2, and num_attention_heads = "
            f"{spec.num_heads} a multiple of num_key_value_heads = {spec.num_kv_heads}"
        )


def expected_shapes(spec: DrafterSpec) -> dict[str, list[int]]:
    """Return canonical tensor name to shape for the weights that the facts call for (biases aside)."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes = {
        "fc.weight": [hidden, len(spec.target_layer_ids) * hidden],
        "hidden_norm.weight": [hidden],
        "norm.weight": [hidden],
    }
    for layer in range(spec.num_layers):
        prefix = f"layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": [hidden],
            f"{prefix}.post_attention_layernorm.weight": [hidden],
            f"{prefix}.self_attn.q_proj.weight": [queries, hidden],
            f"{prefix}.self_attn.k_proj.weight": [keys, hidden],
            f"{prefix}.self_attn.v_proj.weight": [keys, hidden],
            f"{prefix}.self_attn.o_proj.weight": [hidden, queries],
            f"{prefix}.self_attn.q_norm.weight": [spec.head_dim],
            f"{prefix}.self_attn.k_norm.weight": [spec.head_dim],
            f"{prefix}.mlp.gate_proj.weight": [inner, hidden],
            f"{prefix}.mlp.up_proj.weight": [inner, hidden],
            f"{prefix}.mlp.down_proj.weight": [hidden, inner],
        }
    return shapes


def _check_tensors(
    spec: DrafterSpec, shapes: Mapping[str, Sequence[int]], where: str, configured_head_dim: int | None
) -> None:
    if configured_head_dim is not None and configured_head_dim != spec.head_dim:
        raise CheckpointMismatch(
            f"{where}: head_dim = {configured_head_dim} contradicts layers.0.self_attn.q_norm.weight, "
            f"whose length is {spec.head_dim}"
        )
    expected = expected_shapes(spec)
    for name, shape in expected.items():
        if name not in shapes:
            raise CheckpointMismatch(
                f"the checkpoint lacks {name}, which {where} calls for; is it the config of this run?"
            )
        if list(shapes[name]) != shape:
            raise CheckpointMismatch(_shape_message(name, list(shapes[name]), shape, spec, where))
    biases = {name.replace(".weight", ".bias") for name in expected if ".self_attn." in name and "_proj" in name}
    extra = sorted(set(shapes) - set(expected) - biases)
    if extra:
        raise UnsupportedCheckpoint(
            f"the checkpoint holds {extra[:3]}, which {where} has no use for; refused, not dropped"
        )


def _check_biases(spec: DrafterSpec, shapes: Mapping[str, Sequence[int]], configured: bool | None, where: str) -> None:
    """Check that attention's biases are all there or none, of the right length, and as the config says."""
    expected = {
        name.replace(".weight", ".bias"): shape[:1]
        for name, shape in expected_shapes(spec).items()
        if ".self_attn." in name and name.endswith("_proj.weight")
    }
    present = [name for name in expected if name in shapes]
    wanted = bool(present) if configured is None else configured
    if wanted != bool(present) or (wanted and len(present) < len(expected)):
        missing = next((name for name in expected if name not in shapes), None)
        said = f"holds {present[0]}" if present else "holds no bias"
        raise CheckpointMismatch(
            f"{where}: attention_bias = {configured!r}, but the checkpoint {said}"
            + (f" and lacks {missing}" if wanted and missing else "")
            + "; is it the config of this run?"
        )
    for name in present:
        if list(shapes[name]) != expected[name]:
            raise CheckpointMismatch(_shape_message(name, list(shapes[name]), expected[name], spec, where))


def _shape_message(name: str, found: list[int], wanted: list[int], spec: DrafterSpec, where: str) -> str:
    if name == "fc.weight" and len(found) == 2 and found[0] == wanted[0]:
        return (
            f"fc.weight reads {found[1] / spec.hidden_size:g} target layers of width {spec.hidden_size}, but "
            f"target_layer_ids {list(spec.target_layer_ids)} ({spec.sources['target_layer_ids']}) are "
            f"{len(spec.target_layer_ids)}; compare the config with the run"
        )
    return f"{name} has shape {found}, but {where} calls for {wanted}; is it the config of this run?"


def _check_training_args(spec: DrafterSpec, training_args: Mapping[str, Any], where: str) -> None:
    """Compare facts that the checkpoint's own training arguments state with the config."""
    for key in ("block_size", "mask_token_id", "target_layer_ids"):
        stated = training_args.get(key)
        if stated is None:
            continue
        value = getattr(spec, key)
        if _numbers(value) != _numbers(stated):
            raise DraftConfigError(
                f"{where}: {key} = {value!r} contradicts the checkpoint's own training args, {key} = {stated!r}"
            )


def _numbers(value: Any) -> list[Any]:
    """Return one number or a list of them as a list; a command line's text such as "1,14,27" as what it spells."""
    if isinstance(value, str):
        return [int(number) for number in re.findall(r"-?\d+", value)]
    return list(value) if isinstance(value, list | tuple) else [value]
