"""The rotary embedding of a target in one form, however its `config.json` writes it.

flat, 5.x      rope_parameters: {rope_theta, rope_type, ...}
per kind, 5.x  rope_parameters: {full_attention: {...}, sliding_attention: {...}}
older          rope_theta, rope_scaling: {rope_type or type, ...}; Gemma 3 adds rope_local_base_freq
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from dflash_core.target.config_levels import LevelReader, as_number, short

ALL_LAYERS = "all layers"


class RopeForm(NamedTuple):
    """The rotary embedding of one kind of layer."""

    layers: str
    """A name of `layer_types`, or `all layers`."""
    theta: float | None
    """Its base; None where the file leaves it to the family."""
    kind: str
    """`default`, `yarn`, `llama3`, `linear`, `proportional`, ..."""


def read_rope(reader: LevelReader) -> tuple[RopeForm, ...]:
    """Return one form per kind of layer, or none where the file states nothing of it.

    An old and a new form that disagree are noted as a conflict; what transformers would take holds.
    """
    nested = list(_parameters(reader))
    theta = next((as_number(raw) for _, raw in reader.stated("rope_theta_beside")), None)
    local = reader.find("rope_local_base_freq", as_number)
    scaling = next((raw for _, raw in reader.stated("rope_scaling") if isinstance(raw, Mapping)), None)
    if not nested:
        if theta is None and scaling is None:
            return ()
        return _old_forms(theta, local, scaling)
    forms = []
    for layers, parameters in nested:
        # A base in the form itself goes before one beside it.
        own = as_number(parameters.get("rope_theta"))
        beside = local if layers == "sliding_attention" and local is not None else theta
        forms.append(RopeForm(layers, beside if own is None else own, _kind(parameters)))
    _note_other_scaling(reader, forms, scaling)
    return tuple(forms)


def _parameters(reader: LevelReader) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield kind of layer and parameters of the innermost `rope_parameters`."""
    for _, raw in reader.stated("rope_parameters"):
        if not isinstance(raw, Mapping) or not raw:
            continue
        kinds = {name: part for name, part in raw.items() if isinstance(part, Mapping)}
        if kinds:
            yield from kinds.items()
        else:
            yield ALL_LAYERS, raw
        return


def _old_forms(theta: float | None, local: float | None, scaling: Mapping[str, Any] | None) -> tuple[RopeForm, ...]:
    kind = _kind(scaling or {})
    if local is None:
        return (RopeForm(ALL_LAYERS, theta, kind),)
    # Gemma 3: the scaling is for full attention alone.
    return (RopeForm("full_attention", theta, kind), RopeForm("sliding_attention", local, "default"))


def _note_other_scaling(reader: LevelReader, forms: list[RopeForm], scaling: Mapping[str, Any] | None) -> None:
    """Note an older `rope_scaling` beside `rope_parameters` that is of another kind."""
    if scaling is not None and _kind(scaling) not in {form.kind for form in forms}:
        reader.conflicts.append(
            f"rope_scaling = {short(dict(scaling))} contradicts rope_parameters, whose kind is "
            f"{' and '.join(sorted({form.kind for form in forms}))}; libraries differ in which holds"
        )


def _kind(parameters: Mapping[str, Any]) -> str:
    kind = parameters.get("rope_type", parameters.get("type"))
    return kind if isinstance(kind, str) and kind else "default"
