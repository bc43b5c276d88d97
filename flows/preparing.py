"""The target's part of the work, handed to a worker of another pool and waited for.

    evaluate-checkpoint (pool gpu)                      prepare-target (pool cpu)
      store lacks hidden states ── starts or joins ──►    transcripts, hidden states ─► store
      scores from the store     ◄── waits, says for what ──

Evaluations that want the same share one run: its idempotency key is made from what is wanted and from the last
run for it, so that a failed one is followed by a new one and two that start it in the same moment get one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterDeploymentId,
    FlowRunFilterTags,
    WorkerFilter,
    WorkerFilterStatus,
)
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.sorting import FlowRunSort
from prefect.exceptions import ObjectNotFound
from prefect.states import Crashed

from dflash_core import progress
from dflash_core.errors import HostUnreachable, InputError, PreparationFailed
from dflash_core.store import digest
from flows.run_names import preparation_name_for

DEPLOYMENT = "prepare-target/prepare-target"
HERE = "here"
_STAGE = "prepare elsewhere"


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How long an evaluation waits for what it handed over, in seconds."""

    no_worker_s: float = 600.0
    """While no worker of the deployment's pool is up, or one took the run and does not begin it."""
    queue_s: float = 12 * 3600.0
    """While workers are up and busy with other runs."""
    poll_s: float = 2.0
    longest_poll_s: float = 15.0
    tell_s: float = 60.0
    """Between two lines that say what is waited for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preparation:
    """What an evaluation wants of the target."""

    config: str | None
    """The configuration file, as the evaluation was given it; each box reads its own."""
    facts: Mapping[str, str]
    """What the store's keys are made of; a box that would make something else refuses."""
    layers: tuple[int, ...]
    refresh: tuple[str, ...] = ()
    asked_by: str = ""
    """Makes a refresh the evaluation's own; equal ones without a refresh are shared."""

    @property
    def parameters(self) -> dict[str, Any]:
        """Return those of the flow `prepare-target`."""
        optional = {"config": self.config, "refresh": list(self.refresh)}
        given = {name: value for name, value in optional.items() if value}
        return given | {"layers": sorted(set(self.layers)), "expected": dict(self.facts)}

    @property
    def tag(self) -> str:
        """Return what all runs for the same have in common."""
        wanted = [dict(self.facts), sorted(set(self.layers)), list(self.refresh), self.asked_by if self.refresh else ""]
        return f"prepare:{digest('preparation', wanted)[:16]}"


def is_served(deployment: str = DEPLOYMENT) -> bool:
    """Tell whether the Prefect server in use has a deployment, and its pool a worker that is up."""
    with _server_errors(), get_client(sync_client=True) as client:
        try:
            found = client.read_deployment_by_name(deployment)
        except ObjectNotFound:
            return False
        return _num_workers(client, found.work_pool_name) > 0


def hand_over(
    wanted: Preparation, deployment: str = DEPLOYMENT, *, say: Callable[[str], None], patience: Patience | None = None
) -> str:
    """Have a deployment prepare the target, wait for it, and return the run's name with its id.

    Args:
        wanted: transcripts and layers.
        deployment: as `flow/name`.
        say: is told what is waited for.
        patience: how long.

    Raises:
        InputError: there is no such deployment.
        PreparationFailed: its run failed, was cancelled, or no worker takes it.
        HostUnreachable: the server does not answer.
    """
    patience = patience or Patience()
    with _server_errors(), get_client(sync_client=True) as client:
        try:
            found = client.read_deployment_by_name(deployment)
        except ObjectNotFound as error:
            raise InputError(
                f"prepare = {deployment!r}: the Prefect server has no such deployment; expected {HERE!r} or flow/name "
                "of one that `prefect deployment ls` shows"
            ) from error
        run = _start_or_join(client, found.id, wanted)
        pool = found.work_pool_name
    waiting = _Waiting(deployment, run, pool, say, patience)
    say(f"handed to {deployment}: {waiting.run_text}; waiting for it")
    ended = waiting.wait()
    if ended.state is None or not ended.state.is_completed():
        raise PreparationFailed(
            f"{waiting.run_text} of {deployment} ended as {_state_text(ended)}; see `prefect flow-run logs {run.id}`"
        )
    return waiting.run_text


def _start_or_join(client: SyncPrefectClient, deployment_id: Any, wanted: Preparation) -> FlowRun:
    """Return the run for this that is under way, or a new one."""
    alike = FlowRunFilter(
        tags=FlowRunFilterTags(all_=[wanted.tag]), deployment_id=FlowRunFilterDeploymentId(any_=[deployment_id])
    )
    last = client.read_flow_runs(flow_run_filter=alike, sort=FlowRunSort.EXPECTED_START_TIME_DESC, limit=1)
    if last and not _has_ended(last[0]):
        return last[0]
    # Such a key belongs to the flow: another deployment's run would be given back.
    after = str(last[0].id) if last else str(deployment_id)
    return client.create_flow_run_from_deployment(
        deployment_id,
        parameters=wanted.parameters,
        name=preparation_name_for(sorted(set(wanted.layers))),
        idempotency_key=f"dflash-{wanted.tag}-after-{after}",
        tags=[wanted.tag],
    )


@dataclass(kw_only=False, slots=True)
class _Waiting:
    """Waiting for one run; a server that is away for a while is waited for too."""

    deployment: str
    run: FlowRun
    pool: str | None
    say: Callable[[str], None]
    patience: Patience
    _begin: float = field(default_factory=time.monotonic)
    _served_at: float = field(default_factory=time.monotonic)
    """When a worker of the pool, or the server's answer, was last seen."""

    @property
    def run_text(self) -> str:
        return f"the run {self.run.name!r} ({self.run.id})"

    def wait(self) -> FlowRun:
        """Return the run when it has ended."""
        pause, told_at = self.patience.poll_s, self._begin
        while True:
            what = self._look()
            if _has_ended(self.run):
                progress.report(_STAGE, 1, 1)
                return self.run
            self._check(what)
            now = time.monotonic()
            progress.report(_STAGE, 0, 1, what)
            if now - told_at >= self.patience.tell_s:
                told_at = now
                self.say(f"waiting for {self.run_text} of {self.deployment} since {now - self._begin:.0f} s: {what}")
            time.sleep(pause)
            pause = min(pause * 1.5, self.patience.longest_poll_s)

    def _look(self) -> str:
        """Ask the server for the run, and say how it stands."""
        try:
            with get_client(sync_client=True) as client:
                self.run = client.read_flow_run(self.run.id)
                if self.run.state is not None and self.run.state.is_running():
                    self._served_at = time.monotonic()
                    return "it is running"
                if _num_workers(client, self.pool):
                    self._served_at = time.monotonic()
                    return f"it is {_state_name(self.run)}; a worker of the pool {self.pool!r} is up"
                return f"it is {_state_name(self.run)}; no worker of the pool {self.pool!r} is up"
        except (httpx.HTTPError, RuntimeError) as error:
            return f"the Prefect server does not answer ({type(error).__name__})"

    def _check(self, what: str) -> None:
        """Give up what has no chance, in one line.

        Raises:
            PreparationFailed: no worker takes the run, or begins it.
        """
        state, now = self.run.state, time.monotonic()
        if now - self._served_at > self.patience.no_worker_s:
            raise PreparationFailed(
                f"{self.run_text} of {self.deployment} was waited for for {now - self._begin:.0f} s: {what}; start one "
                f"with `prefect worker start --pool {self.pool}`, or evaluate with prepare={HERE} on a box that holds "
                "the target"
            )
        if state is not None and state.is_running():
            return
        if state is not None and state.is_pending() and _age_s(state) > self.patience.no_worker_s:
            text = f"was taken by a worker and did not begin within {_age_s(state):.0f} s; the worker died, or hangs"
            with _server_errors(), get_client(sync_client=True) as client:
                # Else everybody who wants the same would join it, for ever; such a run sends no heartbeat yet.
                client.set_flow_run_state(self.run.id, Crashed(message=text))
            raise PreparationFailed(
                f"{self.run_text} of {self.deployment} {text}; it counts as crashed now: look at the workers of the "
                f"pool {self.pool!r}, and evaluate again"
            )
        if now - self._begin > self.patience.queue_s:
            raise PreparationFailed(
                f"{self.run_text} of {self.deployment} was not begun within {now - self._begin:.0f} s: {what}; give "
                f"the pool {self.pool!r} more workers, or evaluate again later"
            )


def _has_ended(run: FlowRun) -> bool:
    """Tell whether a run ended; one that is being cancelled counts, for with its worker dead it would be for ever."""
    return run.state is not None and (run.state.is_final() or run.state.is_cancelling())


def _age_s(state: Any) -> float:
    return time.time() - float(state.timestamp.timestamp())


def _num_workers(client: SyncPrefectClient, pool: str | None) -> int:
    if pool is None:
        return 0
    online = WorkerFilter(status=WorkerFilterStatus(any_=["ONLINE"]))
    return len(client.read_workers_for_work_pool(pool, worker_filter=online))


def _state_name(run: FlowRun) -> str:
    return "unknown" if run.state is None else str(run.state.name)


def _state_text(run: FlowRun) -> str:
    message = run.state.message if run.state is not None else None
    return f"{_state_name(run)}: {' '.join(message.split())}" if message else _state_name(run)


@contextmanager
def _server_errors() -> Iterator[None]:
    try:
        yield
    except httpx.HTTPError as error:
        raise HostUnreachable(f"the Prefect server does not answer: {error}; see PREFECT_API_URL") from error


def differing(expected: Mapping[str, str], facts: Mapping[str, str]) -> Sequence[str]:
    """Return a text for each fact in which this box differs from the one that asks; empty where none does."""
    return [
        f"{name} is {facts.get(name)!r} here and {value!r} there"
        for name, value in expected.items()
        if facts.get(name) != value
    ]
