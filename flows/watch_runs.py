"""Starting evaluations as runs of a Prefect deployment, once for each checkpoint and its conditions.

Prefect keeps an idempotency key for ever and gives back the run that has it, also one that failed. So a
key names checkpoint, conditions and attempt: whoever asks a second time, another watch or this one after
a restart, gets the run that is there, and a failed one is followed by the next attempt's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import ObjectNotFound
from prefect.settings import get_current_settings
from prefect.states import Crashed

from dflash_core.acceptance.walk import METRICS_VERSION
from dflash_core.checkpoints import CheckpointInspection
from dflash_core.config import Config
from dflash_core.errors import (
    CheckpointCorrupt,
    CheckpointMismatch,
    HostUnreachable,
    InputError,
    UnsupportedCheckpoint,
)
from dflash_core.evaluation import now
from dflash_core.stages import STREAMING_VERSION
from dflash_core.store import digest, file_sha256
from dflash_core.target.hidden_states import EXTRACTION_VERSION
from dflash_core.target.transcripts import TRANSCRIPTS_VERSION
from flows.notifying import WATCHED_TAG
from flows.run_names import name_for
from flows.watch_errors import is_passing_kind
from flows.watch_values import RunEnd, RunsUsedUp, StartedRun
from flows.watching import MAX_ATTEMPTS, MAX_HOST_ATTEMPTS

_VERSIONS = [METRICS_VERSION, EXTRACTION_VERSION, TRANSCRIPTS_VERSION, STREAMING_VERSION]
"""One that was raised makes other numbers, so another run."""
_FAULTS_OF_CHECKPOINTS = {kind.__name__ for kind in (CheckpointCorrupt, CheckpointMismatch, UnsupportedCheckpoint)}
"""They stay until its bytes change."""
_RAISED = re.compile(r"encountered an exception: (?:\w+\.)*(\w+):")
BEGIN_LIMIT_S = 600.0
"""A run that a worker took begins within seconds, or within minutes on a box that is very busy."""
_PAGE = 100
"""Runs asked for at once; a server gives 200 at most."""


class DeployedRuns:
    """Starts runs of one deployment and tells how they ended."""

    def __init__(self, deployment: str, *, config: Config, parameters: Mapping[str, Any]) -> None:
        """Take the deployment as `flow/name`, and its parameters but `checkpoint`; None leaves the default."""
        self.deployment = deployment
        self._parameters = {name: value for name, value in parameters.items() if value is not None}
        self._conditions = config.model_dump(mode="json", exclude={"hosts", "store", "baseline", "notify"})
        self._files = (config.prompts, config.drafter.config)

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
            RunsUsedUp: all attempts failed, or one showed that no other would do better.
            HostUnreachable: the server does not answer.
        """
        ref = inspection.ref
        failed: FlowRun | None = None
        num_faults = 0  # that do not pass by themselves
        with _server_errors(), get_client(sync_client=True) as client:
            deployment = client.read_deployment_by_name(self.deployment)
            for attempt in range(1, MAX_HOST_ATTEMPTS + 1):
                # The server answers with the run that has this key, or makes one.
                run = client.create_flow_run_from_deployment(
                    deployment.id,
                    parameters={"checkpoint": ref.url, **self._parameters},
                    name=name_for(ref.url),
                    idempotency_key=self.key(inspection, attempt),
                    tags=[WATCHED_TAG, f"run:{ref.run}", *([] if ref.step is None else [f"step:{ref.step}"])],
                )
                if not _has_failed(run):
                    return StartedRun(id=str(run.id), name=run.name)
                failed = run
                num_faults += not _may_pass(run)
                if _is_over(run) or num_faults >= MAX_ATTEMPTS:
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
                    if _never_began(run):
                        ends[str(run.id)] = RunEnd(error=_call_off(client, run))
                    elif _has_failed(run):
                        ends[str(run.id)] = RunEnd(
                            error=_state_text(run), is_final=_is_over(run), may_pass=_may_pass(run)
                        )
                    elif run.state is not None and run.state.is_completed():
                        ends[str(run.id)] = RunEnd(error=None)
        return ends

    def key(self, inspection: CheckpointInspection, attempt: int) -> str:
        """Return the idempotency key of one attempt for a checkpoint under these conditions."""
        ref = inspection.ref
        name = digest(
            "flow run", ref.run, ref.step, ref.identity, self._conditions, self._parameters, self._contents(), _VERSIONS
        )
        return f"dflash-{name}-{attempt}"

    def _contents(self) -> list[str | None]:
        """Return digests of the files that decide the numbers, as they are now; None for one that is not on this box.

        A completed run is given back for ever: it must not stand for prompts that were edited since.
        """
        paths = [Path(path) for path in self._files if path is not None]
        return [file_sha256(path) if path.is_file() else None for path in paths]


def _has_failed(run: FlowRun) -> bool:
    return run.state is not None and run.state.is_final() and not run.state.is_completed()


def _never_began(run: FlowRun) -> bool:
    """Tell whether a worker took a run so long ago that it must have been killed before the run began.

    Such a run sends no heartbeat yet, so that nobody else misses it.
    """
    state = run.state
    return state is not None and state.is_pending() and (now() - state.timestamp).total_seconds() > BEGIN_LIMIT_S


def _call_off(client: SyncPrefectClient, run: FlowRun) -> str:
    """Have a run count as crashed, should its worker come back to it after all; return why."""
    text = f"was taken by a worker and did not begin within {BEGIN_LIMIT_S:.0f} s; the worker was killed, or hangs"
    client.set_flow_run_state(run.id, Crashed(message=text))
    return text


def _is_over(run: FlowRun) -> bool:
    """Tell whether no other attempt should follow: a person cancelled it, or the checkpoint itself is at fault."""
    is_cancelled = run.state is not None and run.state.is_cancelled()
    return is_cancelled or _raised(run) in _FAULTS_OF_CHECKPOINTS


def _may_pass(run: FlowRun) -> bool:
    """Tell whether a machine was at fault, so that the checkpoint deserves more attempts."""
    return is_passing_kind(_raised(run))


def _raised(run: FlowRun) -> str:
    """Return the name of what a flow raised, which Prefect tells in the state's message; else an empty text."""
    found = _RAISED.search((run.state.message if run.state is not None else None) or "")
    return found[1] if found is not None else ""


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
