"""The drafter's rotary embedding, from the old form of draft configs (`rope_theta`) or the new."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_core.drafter.facts import FactReader
from dflash_core.errors import DraftConfigError, UnsupportedCheckpoint

# Those whose frequencies do not depend on the length of the text, and what each cannot do without.
_ROPE_TYPES = {
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}

# Of multimodal targets: on text all axes have one position, so they change nothing.
_ON_TEXT_WITHOUT_EFFECT = ("mrope_section", "mrope_interleaved")


def read_rope(reader: FactReader) -> dict[str, Any]:
    """Return the RoPE settings from either form; what is stated twice must agree.

    Raises:
        DraftConfigError: theta is missing or malformed, or two places contradict.
        UnsupportedCheckpoint: a kind of RoPE that is not supported.
    """
    parameters = _with_rope_type(reader.find("rope_parameters", dict) or {}, reader)
    scaling = _with_rope_type(reader.find("rope_scaling", dict) or {}, reader)
    if scaling and parameters and any(parameters.get(key, value) != value for key, value in scaling.items()):
        raise DraftConfigError(f"{reader.where}: rope_scaling {scaling!r} contradicts rope_parameters {parameters!r}")
    parameters = {**scaling, **parameters}
    for key in _ON_TEXT_WITHOUT_EFFECT:
        parameters.pop(key, None)
    if any(isinstance(value, dict) for value in parameters.values()):
        raise UnsupportedCheckpoint(f"{reader.where}: rope parameters per layer type are not supported yet")
    for key, value in parameters.items():
        if isinstance(value, float):
            reader.as_kind(f"rope_parameters.{key}", value, float)
    theta: Any = reader.find("rope_theta", float)
    inner: Any = parameters.get("rope_theta")
    if inner is not None:
        inner = reader.as_kind("rope_parameters.rope_theta", inner, float)
    if theta is not None and inner is not None and theta != inner:
        raise DraftConfigError(
            f"{reader.where}: rope_theta = {theta!r} contradicts rope_parameters.rope_theta = {inner!r}; remove one"
        )
    if theta is None and inner is None:
        raise DraftConfigError(f"{reader.where} lacks {reader.prefix}rope_theta, which the weights do not tell; add it")
    share = parameters.get("partial_rotary_factor", 1.0)
    if share != 1.0:
        raise UnsupportedCheckpoint(
            f"{reader.where}: partial_rotary_factor = {share!r} is not supported, drafters rotate whole heads; "
            f"if it was copied from the target and the drafter does without it, remove it"
        )
    theta = inner if theta is None else theta
    if theta <= 0:
        raise DraftConfigError(f"{reader.where}: rope_theta = {theta!r}, expected a number above 0")
    parameters["rope_theta"] = theta
    parameters.setdefault("rope_type", "default")
    _agree_on_original_length(reader, parameters)
    if parameters["rope_type"] not in _ROPE_TYPES:
        raise UnsupportedCheckpoint(
            f"{reader.where}: rope_type = {parameters['rope_type']!r} is not supported; {sorted(_ROPE_TYPES)} are"
        )
    for key in _ROPE_TYPES[parameters["rope_type"]]:
        if key not in parameters:
            raise DraftConfigError(f"{reader.where}: rope_type {parameters['rope_type']!r} needs {key}; add it")
        reader.as_kind(f"rope_parameters.{key}", parameters[key], float)
    by = "rope_theta" if inner is None else "rope_parameters" if "rope_parameters" in reader.sources else "rope_scaling"
    reader.sources["rope"] = reader.sources[by]
    return parameters


def _agree_on_original_length(reader: FactReader, parameters: dict[str, Any]) -> None:
    """Take the length before scaling from the top level where it stands there, as Phi's configs have it.

    Raises:
        DraftConfigError: it stands inside the scaling too, as another number.
    """
    key = "original_max_position_embeddings"
    beside = reader.find(key, int) if key in _ROPE_TYPES.get(parameters["rope_type"], ()) else None
    if beside is None:
        return
    if parameters.setdefault(key, beside) != beside:
        raise DraftConfigError(
            f"{reader.where}: {reader.prefix}{key} = {beside!r} contradicts {parameters[key]!r} in the RoPE settings; "
            f"remove one"
        )


def _with_rope_type(parameters: Mapping[str, Any], reader: FactReader) -> dict[str, Any]:
    """Return RoPE settings with the old key `type` in its new place."""
    renamed = dict(parameters)
    old = renamed.pop("type", None)
    if old is not None and renamed.setdefault("rope_type", old) != old:
        raise DraftConfigError(f"{reader.where}: type and rope_type contradict in {dict(parameters)!r}; remove one")
    return renamed
