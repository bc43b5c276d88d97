"""Starting evaluations as runs of a Prefect deployment, once for each checkpoint and its conditions.

Prefect keeps an idempotency key for ever and gives back the run that has it, also one that failed. So a
key names checkpoint, conditions and attempt: whoever asks a second time, another watch or this one after
a restart, gets the run that is there, and a failed one is followed by the next attempt's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import ObjectNotFound
from prefect.settings import get_current_settings

from dflash_core.checkpoints import CheckpointInspection
from dflash_core.config import Config
from dflash_core.errors import HostUnreachable, InputError
from dflash_core.store import digest
from flows.run_names import name_for
from flows.watch_values import RunEnd, RunsUsedUp, StartedRun

MAX_ATTEMPTS = 3
_PAGE = 100
"""Runs asked for at once; a server gives 200 at most."""


class DeployedRuns:
    """Starts runs of one deployment and tells how they ended."""

    def __init__(self, deployment: str, *, config: Config, parameters: Mapping[str, Any]) -> None:
        """Take the deployment as `flow/name`, and its parameters but `checkpoint`; None leaves the default."""
        self.deployment = deployment
        self._parameters = {name: value for name, value in parameters.items() if value is not None}
        self._conditions = config.model_dump(mode="json", exclude={"hosts", "store"})

    def require_deployment(self) -> None:
        """Refuse a deployment that the server does not have.

        Raises:
            InputError: there is none of this name, or no server is configured.
            HostUnreachable: the server does not answer.
        """
        if not get_current_settings().api.url:
            raise InputError(
                f"deployment {self.deployment!r} needs a Prefect server; set PREFECT_API_URL to its address"
            )
        with _server_errors(), get_client(sync_client=True) as client:
            try:
                client.read_deployment_by_name(self.deployment)
            except ObjectNotFound as error:
                raise InputError(
                    f"the Prefect server has no deployment {self.deployment!r}; expected flow/name of one that "
                    "`prefect deployment ls` shows, or run `prefect --no-prompt deploy --all` first"
                ) from error

    def start(self, inspection: CheckpointInspection) -> StartedRun:
        """Start the next attempt for a checkpoint, or return the one that is under way or was completed.

        Raises:
            RunsUsedUp: all attempts failed, or a person cancelled one.
            HostUnreachable: the server does not answer.
        """
        ref = inspection.ref
        failed: FlowRun | None = None
        with _server_errors(), get_client(sync_client=True) as client:
            deployment = client.read_deployment_by_name(self.deployment)
            for attempt in range(1, MAX_ATTEMPTS + 1):
                # The server answers with the run that has this key, or makes one.
                run = client.create_flow_run_from_deployment(
                    deployment.id,
                    parameters={"checkpoint": ref.url, **self._parameters},
                    name=name_for(ref.url),
                    idempotency_key=self.key(inspection, attempt),
                    tags=[f"run:{ref.run}", *([] if ref.step is None else [f"step:{ref.step}"])],
                )
                if not _has_failed(run):
                    return StartedRun(id=str(run.id), name=run.name)
                failed = run
                if _is_cancelled(run):
                    break
        raise RunsUsedUp(
            f"{ref.url}: its last flow run of {self.deployment} ended as {_state_text(failed)}; see "
            f"`prefect flow-run logs {failed.id if failed else ''}`, and start it by hand"
        )

    def ended(self, runs: Sequence[StartedRun]) -> dict[str, RunEnd]:
        """Return how those of the runs ended that have ended, by their id.

        Raises:
            HostUnreachable: the server does not answer.
        """
        ends: dict[str, RunEnd] = {}
        with _server_errors(), get_client(sync_client=True) as client:
            for start in range(0, len(runs), _PAGE):
                wanted = FlowRunFilter(id=FlowRunFilterId(any_=[UUID(run.id) for run in runs[start : start + _PAGE]]))
                for run in client.read_flow_runs(flow_run_filter=wanted):
                    if _has_failed(run):
                        ends[str(run.id)] = RunEnd(error=_state_text(run), is_final=_is_cancelled(run))
                    elif run.state is not None and run.state.is_completed():
                        ends[str(run.id)] = RunEnd(error=None)
        return ends

    def key(self, inspection: CheckpointInspection, attempt: int) -> str:
        """Return the idempotency key of one attempt for a checkpoint under these conditions."""
        ref = inspection.ref
        name = digest("flow run", ref.run, ref.step, ref.identity, self._conditions, self._parameters)
        return f"dflash-{name}-{attempt}"


def _has_failed(run: FlowRun) -> bool:
    return run.state is not None and run.state.is_final() and not run.state.is_completed()


def _is_cancelled(run: FlowRun) -> bool:
    return run.state is not None and run.state.is_cancelled()


def _state_text(run: FlowRun | None) -> str:
    state = run.state if run is not None else None
    if state is None:
        return "unknown"
    return f"{state.name}: {' '.join(state.message.split())}" if state.message else str(state.name)


@contextmanager
def _server_errors() -> Iterator[None]:
    try:
        yield
    except (httpx.HTTPError, RuntimeError) as error:
        raise HostUnreachable(f"the Prefect server does not answer: {error}; see PREFECT_API_URL") from error
