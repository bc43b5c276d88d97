"""Reading the artifacts that flow runs left on the Prefect server."""

from __future__ import annotations

from typing import Any


def read_artifacts(flow_run_id: object = None) -> list[Any]:
    """Return the artifacts of a flow run that people see, the oldest first."""
    from prefect.client.orchestration import get_client  # what starts the server sets its environment first

    with get_client(sync_client=True) as client:
        found = [one for one in client.read_artifacts(limit=200) if one.type in ("table", "markdown", "progress")]
    ours = [one for one in found if flow_run_id is None or str(one.flow_run_id) == str(flow_run_id)]
    return sorted(ours, key=lambda one: one.created)
