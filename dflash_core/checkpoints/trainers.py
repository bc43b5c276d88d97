"""Which trainer wrote a checkpoint, and what it writes last: its own sign that the rest is complete.

A structure that is whole proves that each file is whole; that all files belong to one save only the
trainer's own marker can say. Where a layout has one, it is asked for; where it has none, the
structure and two equal looks must do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from dflash_core.checkpoints.layout import Located
from dflash_core.checkpoints.paths import step_in_name
from dflash_core.checkpoints.source_base import DirEntry, Source
from dflash_core.errors import CheckpointError

Dialect = Literal[
    "z-lab",
    "speculators",
    "SpecForge",
    "SpecForge (old)",
    "Model-Optimizer",
    "NeMo",
    "TorchSpec",
    "verl-SpeCo",
    "DeepSpec",
    "HF Trainer",
    "custom",
]

_EPOCH_STEP = re.compile(r"^epoch_\d+(_step_\d+)?$")
_HF_STATE = re.compile(r"^(optimizer\.(pt|bin)|scheduler\.pt|scaler\.pt|rng_state.*\.pth|training_args\.bin)$")
_HF_LAST = "trainer_state.json"


def recognise(located: Located, config: Mapping[str, Any] | None, weights_under: str | None) -> Dialect:
    """Return the trainer whose layout a checkpoint has.

    It decides what `inspect` shows, never what a tensor means.

    Args:
        located: the checkpoint's files.
        config: the `config.json` beside the weights.
        weights_under: the key of a torch file's dict that holds the weights.
    """
    names = _names(located)
    config = config or {}
    if "speculators_model_type" in config:
        return "speculators"
    if weights_under == "draft_state_dict":
        return "SpecForge"
    if "dflash_meta.pt" in names or ".hf_metadata" in names or located.weights_folder.endswith("model/consolidated"):
        return "NeMo"
    if "train_config.py" in names or any(name.startswith("training_state.rank") for name in names):
        return "DeepSpec"
    if located.name.startswith("draft_step_") or {"metadata.json", "optimizer"} <= names:
        return "verl-SpeCo"
    if located.name.startswith("iter_") and located.candidates[0].layout == "dcp":
        return "TorchSpec"
    if "modelopt_state.pth" in names or "hf_quant_config.json" in names or _is_modelopt_export(located):
        return "Model-Optimizer"
    if _EPOCH_STEP.match(located.name) and "training_state.pt" in names:
        return "SpecForge (old)"
    if _HF_LAST in names or any(_HF_STATE.match(name) for name in names):
        return "HF Trainer"
    architectures = config.get("architectures") or []
    if any(str(name).startswith("DFlash") for name in architectures) and located.candidates[0].layout.startswith(
        "safetensors"
    ):
        return "z-lab"
    return "custom"


def missing_marker(source: Source, located: Located, facts: Mapping[str, Any]) -> str | None:
    """Return why the trainer's own marker says that a checkpoint is not complete, or None.

    Args:
        source: asked for the link to the latest step, where the trainer keeps one.
        located: the checkpoint's files.
        facts: plain values of the JSON files beside the weights.
    """
    if located.incomplete_marker is not None:
        return f"it is marked {located.incomplete_marker!r}; its writer is at work"
    if facts.get("complete") is False:
        return "its metadata.json says complete: false"
    if not located.is_folder:
        return None
    names = _names(located)
    if located.name.startswith("draft_step_") and "metadata.json" not in names:
        return "its metadata.json, which verl-SpeCo writes last, is not there yet"
    if located.name.startswith("iter_") and located.candidates[0].layout == "dcp" and "meta.json" not in names:
        return "its meta.json, which TorchSpec writes last, is not there yet"
    if _is_modelopt_export(located) and "config.json" not in names:
        return "its config.json, which Model-Optimizer writes last, is not there yet"
    if "optimizer_state_dict.pt" in names:
        return _stale_training_state(located)
    if any(_HF_STATE.match(name) for name in names) and _HF_LAST not in names:
        return f"its {_HF_LAST}, which HF Trainer writes last, is not there yet"
    if "train_config.py" in names:
        return _behind_latest(source, located)
    return None


def _names(located: Located) -> set[str]:
    return {entry.name for listing in located.listings.values() for entry in listing}


def _is_modelopt_export(located: Located) -> bool:
    return located.is_folder and located.name.startswith("exported-checkpoint-")


def _stale_training_state(located: Located) -> str | None:
    """Speculators saves into one folder again and again, its training_state.json last."""
    state, weights = located.find("training_state.json"), _newest_weights(located)
    if state is None or state.stat is None:
        return "its training_state.json, which speculators writes last, is not there yet"
    if weights is not None and weights.stat is not None and weights.stat.mtime_ns > state.stat.mtime_ns:
        return (
            "its training_state.json is older than its weights: the next save into the same folder has begun; "
            "of a folder that was copied, give the address of the weights file"
        )
    return None


def _newest_weights(located: Located) -> DirEntry | None:
    paths = {candidate.path for candidate in located.candidates}
    entries = [
        entry
        for entry in located.files
        if entry.stat is not None and (entry.path in paths or entry.name.endswith(".safetensors"))
    ]
    return max(entries, key=lambda entry: entry.stat.mtime_ns if entry.stat is not None else 0, default=None)


def _behind_latest(source: Source, located: Located) -> str | None:
    """DeepSpec points its link step_latest to a step once all ranks have written it."""
    path = located.real_path or located.path
    link = f"{path.rpartition('/')[0]}/step_latest"
    try:
        source.stat(link)
        latest = step_in_name(source.realpath(link).rpartition("/")[2])
    except CheckpointError:
        return None
    own = step_in_name(located.name)
    if own is None or latest is None or latest >= own:
        return None
    return f"DeepSpec's link step_latest still leads to step {latest}; not all ranks have written this one"
