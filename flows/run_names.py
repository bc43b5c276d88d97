"""Names of flow runs, so that a person finds a step in a list of hundreds."""

from __future__ import annotations

from prefect import runtime


def last_parts(address: str, num_parts: int) -> str:
    """Return the end of a path or URL: `a/step_100` of `ssh://me@box/runs/a/step_100/`."""
    path = address.partition("://")[2] or address
    return "/".join([part for part in path.split("/") if part][-num_parts:]) or address


def name_for(checkpoint: str) -> str:
    """Return the name of the run that scores a checkpoint: `evaluate a/step_100`."""
    return f"evaluate {last_parts(checkpoint, 2)}"


def evaluation_name() -> str:
    """Return the name of a run that scores one checkpoint, from its parameters."""
    return name_for(str(runtime.flow_run.parameters["checkpoint"]))


def watch_name() -> str:
    """Return the name of a run that watches a folder."""
    return f"watch {last_parts(str(runtime.flow_run.parameters['run_url']), 1)}"
