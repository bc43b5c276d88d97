"""Reading the drafter of a checkpoint: its config, wherever that lies, against its tensors and the target."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_core.checkpoints import CheckpointInspection
from dflash_core.checkpoints.quantised import refuse_quantised
from dflash_core.checkpoints.tables import CANONICAL
from dflash_core.config import Config
from dflash_core.drafter.shapes import check_tables
from dflash_core.drafter.spec import DrafterSpec, read_drafter_spec
from dflash_core.errors import CheckpointError, DraftConfigError
from dflash_core.target.model_config import ModelConfig

CORRECTS = "corrects"
"""Key in a configured draft config: facts in which it differs from the checkpoint's own config on purpose."""


def read_drafter(inspection: CheckpointInspection, config: Config, target: ModelConfig) -> DrafterSpec:
    """Read the drafter's facts from its own config or the configured one, against tensors and target.

    Raises:
        DraftConfigError: there is no config, or two sources contradict, the checkpoint's own config among them.
        CheckpointMismatch: the drafter does not belong to the target.
        UnsupportedCheckpoint: a kind of drafter that is not known, or its tensors are quantised.
    """
    data, where = draft_config(inspection, config)
    own = [entry for entry in inspection.tensors if entry.role == "drafter" and entry.canonical_name is not None]
    shapes = {str(entry.canonical_name): entry.shape for entry in own}
    refuse_quantised(own, where=inspection.ref.url)
    args = _training_args(inspection.facts)
    spec = read_drafter_spec(data, shapes, target, where=where, training_args=args)
    tables = {CANONICAL[entry.role]: entry.shape for entry in inspection.tensors if entry.role in CANONICAL}
    check_tables(spec, tables, inspection.ref.url)
    if inspection.config is not None and data is not inspection.config:
        _check_agreement(spec, data, inspection.config, shapes, target)
    if config.drafter.block_size is not None and config.drafter.block_size > spec.block_size:
        raise DraftConfigError(
            f"drafter.block_size = {config.drafter.block_size} is longer than the {spec.block_size} the drafter was "
            f"trained with; shorter is allowed"
        )
    return spec


def _check_agreement(
    spec: DrafterSpec, data: Mapping[str, Any], own: Mapping[str, Any], shapes: Mapping[str, Any], target: ModelConfig
) -> None:
    """Compare configured facts with what the checkpoint's own config states, where that one can be read.

    What the own config leaves to a rule of its dialect may be said otherwise; what it states only
    where the configured one says that it corrects it.

    Raises:
        DraftConfigError: they contradict, or a fact that is corrected is none.
    """
    where = "drafter.config"
    corrects = data.get(CORRECTS, [])
    facts = spec.facts()
    if not isinstance(corrects, list) or not all(isinstance(fact, str) and fact in facts for fact in corrects):
        raise DraftConfigError(f"{where}: {CORRECTS} = {corrects!r} must list facts, some of {sorted(facts)}")
    try:
        other = read_drafter_spec(own, shapes, target, where="config.json")
    except (CheckpointError, DraftConfigError):
        return
    theirs = other.facts()
    for name, value in facts.items():
        is_stated = other.sources[name].startswith(("config.json: ", "tensor "))
        if theirs[name] != value and is_stated and name not in corrects:
            raise DraftConfigError(
                f"{spec.sources[name]}: {name} = {value!r} contradicts the checkpoint's own config.json, {name} = "
                f"{theirs[name]!r}; remove drafter.config, correct it, or let it list {name!r} under {CORRECTS!r}"
            )


def draft_config(inspection: CheckpointInspection, config: Config) -> tuple[Mapping[str, Any], str]:
    """Return the draft config as plain data and the name of where it was found.

    The configured one comes first, then the `config.json` beside the weights, then one that was saved
    in the checkpoint itself.

    Raises:
        DraftConfigError: there is none, or it cannot be read.
    """
    configured = config.drafter.config
    if configured is None:
        if inspection.config is None:
            found = config_in_facts(inspection.facts)
            if found is not None:
                return found
            raise DraftConfigError(
                f"{inspection.ref.url} carries no config.json, and block size, mask token and target layers cannot be "
                f"told from tensors; set drafter.config to the run's draft config"
            )
        return inspection.config, "config.json"
    return read_json(configured), configured


def config_in_facts(facts: Mapping[str, Any]) -> tuple[dict[str, Any], str] | None:
    """Return a draft config that a trainer saved in one dict with the weights, and its key, or None.

    Only what names its architecture and its layers is one: settings of a run are no config of a model.

    Args:
        facts: plain values of the checkpoint by dotted name.
    """
    prefixes = {name[: -len("architectures")] for name in facts if name.endswith(".architectures")}
    for prefix in sorted(prefixes, key=len):
        if f"{prefix}num_hidden_layers" not in facts and f"{prefix}transformer_layer_config.hidden_size" not in facts:
            continue
        config: dict[str, Any] = {}
        for name, value in facts.items():
            if name.startswith(prefix):
                *path, last = name.removeprefix(prefix).split(".")
                part = config
                for key in path:
                    part = part.setdefault(key, {})
                part[last] = value
        return config, f"{prefix.removesuffix('.')} in the checkpoint"
    return None


def read_json(path: str) -> dict[str, Any]:
    """Return the draft config in a file named by `drafter.config`.

    Raises:
        DraftConfigError: it cannot be read, or holds no JSON object.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DraftConfigError(f"drafter.config = {path!r} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise DraftConfigError(f"drafter.config = {path!r} must hold a JSON object")
    return data


def _training_args(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the checkpoint itself states about the drafter: at its top level, else in its `args`."""
    of_args = {name.removeprefix("args."): value for name, value in facts.items() if name.startswith("args.")}
    return of_args | {name: value for name, value in facts.items() if "." not in name}
