"""Names of task runs, so that a person finds a step in a list of hundreds: `run drafter, a/step_100`."""

from __future__ import annotations

from collections.abc import Callable

from prefect import runtime


def last_parts(address: str, num_parts: int) -> str:
    """Return the end of a path or URL: `a/step_100` of `ssh://me@box/runs/a/step_100/`."""
    path = address.partition("://")[2] or address
    return "/".join([part for part in path.split("/") if part][-num_parts:]) or address


def named(step: str) -> Callable[[], str]:
    """Return what names a task's runs: the step, and the checkpoint or else the flow run that it is for."""

    def name() -> str:
        checkpoint = (runtime.flow_run.parameters or {}).get("checkpoint")
        subject = last_parts(str(checkpoint), 2) if checkpoint else runtime.flow_run.name
        return f"{step}, {subject}" if subject else step

    return name
