"""Names of flow runs, so that a person finds a step in a list of hundreds."""

from __future__ import annotations

from collections.abc import Sequence

from prefect import runtime

from tasks.naming import last_parts


def name_for(checkpoint: str) -> str:
    """Return the name of the run that scores a checkpoint: `evaluate a/step_100`."""
    return f"evaluate {last_parts(checkpoint, 2)}"


def evaluation_name() -> str:
    """Return the name of a run that scores one checkpoint, from its parameters."""
    return name_for(str(runtime.flow_run.parameters["checkpoint"]))


def watch_name() -> str:
    """Return the name of a run that watches a folder."""
    return f"watch {last_parts(str(runtime.flow_run.parameters['run_url']), 1)}"


def preparation_name_for(layers: Sequence[int]) -> str:
    """Return the name of a run that prepares the target: with the layers, where some are asked for."""
    return f"prepare target, layers {', '.join(map(str, layers))}" if layers else "prepare target"


def preparation_name() -> str:
    """Return the name of a run that prepares the target, from its parameters."""
    return preparation_name_for(runtime.flow_run.parameters.get("layers") or [])
