"""What turns a block's hidden states into drafts: the head alone, DFlash2's selector, or DSpark's Markov head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dflash_core.drafter.facts import FactReader
from dflash_core.errors import DraftConfigError, UnsupportedCheckpoint

Family = Literal["dflash", "dflash2", "dspark"]
ProposalRule = Literal["argmax", "dflash2", "dspark"]
MarkovHeadType = Literal["vanilla", "gated", "rnn"]

DFLASH2_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
DSPARK_KEYS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
# TorchSpec calls the plain kind classical.
_HEAD_TYPES: dict[str, MarkovHeadType] = {
    "vanilla": "vanilla",
    "classical": "vanilla",
    "gated": "gated",
    "rnn": "rnn",
}
W1 = "markov_head.markov_w1.weight"
CONFIDENCE = "confidence_head.proj.weight"
# How the parts of one family are seen in a config of another.
_SWITCHED_OFF: tuple[Any, ...] = (0, False, None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """The facts of the proposal rule."""

    proposal_rule: ProposalRule
    input_embedding_scale: float
    output_multiplier: float
    final_logit_softcapping: float | None
    conv_kernel_size: int | None = None
    conv_group_size: int | None = None
    selector_rank: int | None = None
    selector_top_k: int | None = None
    markov_rank: int = 0
    markov_head_type: MarkovHeadType | None = None
    has_confidence_head: bool = False
    confidence_head_with_markov: bool = False


def read_heads(reader: FactReader, family: Family, said_by: str, shapes: Mapping[str, Sequence[int]]) -> Heads:
    """Return the proposal rule and what it needs.

    Args:
        reader: the config.
        family: kind of drafter.
        said_by: the key and value that name the family.
        shapes: the tensors; they tell a Markov or confidence head that a DSpark config is silent about.

    Raises:
        DraftConfigError: a fact is missing or malformed, or the config speaks of two families.
        UnsupportedCheckpoint: a kind of Markov head that is not known.
    """
    _refuse_parts_of_others(reader, family, said_by)
    reader.sources["proposal_rule"] = said_by
    common: dict[str, Any] = {
        "input_embedding_scale": _factor(reader, "input_embedding_scale"),
        "output_multiplier": _factor(reader, "output_multiplier"),
        "final_logit_softcapping": _soft_cap(reader),
    }
    if family == "dflash2":
        sizes = {key: reader.need(key, int, nested=True) for key in DFLASH2_KEYS}
        return Heads(proposal_rule="dflash2", **common, **sizes)
    if family == "dspark":
        return _dspark(reader, common, shapes)
    return Heads(proposal_rule="argmax", **common)


def _refuse_parts_of_others(reader: FactReader, family: Family, said_by: str) -> None:
    of_others = (() if family == "dflash2" else DFLASH2_KEYS) + (() if family == "dspark" else DSPARK_KEYS)
    switches = {"markov_rank", "enable_confidence_head", *DFLASH2_KEYS}
    for key in of_others:
        for place, value in reader.stated(key, nested=True).items():
            if key in switches and value not in _SWITCHED_OFF:
                raise DraftConfigError(
                    f"{reader.where}: {place} = {value!r} contradicts {said_by}, a drafter without it; name the "
                    f"kind of drafter that was trained (architectures or dflash_config.projector_type), or remove it"
                )


def _factor(reader: FactReader, key: str) -> float:
    value: float | None = reader.find(key, float, nested=True)
    if value is None:
        reader.sources[key] = "default: not stated, so nothing is scaled"
        return 1.0
    return value


def _soft_cap(reader: FactReader) -> float | None:
    value: float | None = reader.find("final_logit_softcapping", float, nested=True)
    if value is None:
        reader.sources["final_logit_softcapping"] = "default: not stated, so nothing is capped"
    return value if value is not None and value > 0 else None


def _dspark(reader: FactReader, common: dict[str, Any], shapes: Mapping[str, Sequence[int]]) -> Heads:
    rank = _markov_rank(reader, shapes)
    kind = _markov_head_type(reader, shapes) if rank else None
    width = shapes.get(CONFIDENCE, ())
    confident = reader.find("enable_confidence_head", bool, nested=True)
    if confident is None:
        confident = bool(width)
        reader.sources["enable_confidence_head"] = f"tensor {CONFIDENCE}" if confident else f"no tensor {CONFIDENCE}"
    with_markov = reader.find("confidence_head_with_markov", bool, nested=True) if confident else False
    if with_markov is None:
        # The head reads the hidden state alone or with the rank beside it: its width tells.
        with_markov = len(width) == 2 and rank > 0 and width[1] != shapes.get("norm.weight", (0,))[0]
        reader.sources["confidence_head_with_markov"] = f"width of the tensor {CONFIDENCE}"
    if with_markov and not rank:
        raise DraftConfigError(
            f"{reader.where}: confidence_head_with_markov is true, but markov_rank is 0; correct one of them"
        )
    reader.sources["has_confidence_head"] = reader.sources["enable_confidence_head"]
    return Heads(
        proposal_rule="dspark" if rank else "argmax",
        **common,
        markov_rank=rank,
        markov_head_type=kind,
        has_confidence_head=confident,
        confidence_head_with_markov=with_markov,
    )


def _markov_rank(reader: FactReader, shapes: Mapping[str, Sequence[int]]) -> int:
    """Return the rank of the Markov head; 0 is DeepSpec's DFlash, which has none."""
    places = {**reader.stated("markov_rank", nested=True), **reader.stated("dspark_markov_rank", nested=True)}
    if len(set(map(repr, places.values()))) > 1:
        raise DraftConfigError(f"{reader.where}: markov_rank and dspark_markov_rank contradict in {places!r}")
    if places:
        key = next(iter(places)).rpartition(".")[2]
        rank: int = reader.find(key, int, nested=True)
        if rank < 0:
            raise DraftConfigError(f"{reader.where}: {key} = {rank!r}, expected 0 or a number above")
        reader.sources["markov_rank"] = reader.sources[key]
        return rank
    found = len(shapes.get(W1, ())) == 2
    reader.sources["markov_rank"] = f"tensor {W1}" if found else f"no tensor {W1}"
    return int(shapes[W1][1]) if found else 0


def _markov_head_type(reader: FactReader, shapes: Mapping[str, Sequence[int]]) -> MarkovHeadType:
    stated = reader.find("markov_head_type", str, nested=True)
    if stated is not None:
        if stated.lower() not in _HEAD_TYPES:
            raise UnsupportedCheckpoint(
                f"{reader.where}: markov_head_type = {stated!r} is not known; {sorted(_HEAD_TYPES)} are"
            )
        return _HEAD_TYPES[stated.lower()]
    for tensor, kind in (("joint_proj", "rnn"), ("gate_proj", "gated")):
        if f"markov_head.{tensor}.weight" in shapes:
            reader.sources["markov_head_type"] = f"tensor markov_head.{tensor}.weight"
            return _HEAD_TYPES[kind]
    reader.sources["markov_head_type"] = "no tensor markov_head.joint_proj.weight or gate_proj.weight"
    return "vanilla"
