"""One checkpoint, found by the watch and announced by the trainer at the same moment, is scored once."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from json import dumps
from pathlib import Path
from typing import Any

import pytest

from dflash_core.checkpoints import CheckpointInspection
from dflash_core.config import load_config
from dflash_core.store_opening import store_of
from flows.watch_choice import Choice
from flows.watch_values import RunEnd, StartedRun, WatchEvent
from tests.support.direct import evaluate_directly
from tests.support.scene import Setup, make_setup
from tests.support.watching import kinds, make_watch, rows

ROOT = Path(__file__).parents[2]
PREFECT = [sys.executable, "-m", "prefect"]
DEPLOYMENT = "evaluate-checkpoint/evaluate-checkpoint"
STEPS = (2, 3, 4)
LIMIT_S = 240.0


@pytest.fixture(scope="module")
def environment(prefect_api: str) -> dict[str, str]:
    own = {"PREFECT_API_URL": prefect_api, "PREFECT_WORKER_QUERY_SECONDS": "1", "OMP_NUM_THREADS": "1"}
    return os.environ | own | {"PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def worker(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A worker that does several runs at once, with the deployment and the automation of prefect.yaml."""
    for arguments in (
        ["work-pool", "create", "gpu", "--type", "process", "--overwrite"],
        ["--no-prompt", "deploy", "--name", "evaluate-checkpoint"],
    ):
        done = subprocess.run([*PREFECT, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    home = tmp_path_factory.mktemp("worker")
    command = [*PREFECT, "worker", "start", "--pool", "gpu"]
    own = environment | {"PREFECT_HOME": str(home)}
    with (home / "worker.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=own, stdout=log, stderr=log)
        yield
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    # A worker that has ended passes for a live one for a while.
    command = [*PREFECT, "--no-prompt", "work-pool", "delete", "gpu"]
    subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True)


class AtTheSameMoment:
    """Starts runs as the watch would, at the very moment at which the trainer announces the checkpoint."""

    def __init__(self, setup: Setup, api_url: str) -> None:
        from flows.watch_runs import DeployedRuns

        config = load_config(str(setup.config))
        self._runs = DeployedRuns(DEPLOYMENT, config=config, parameters={"config": str(setup.config)})
        self._setup, self._api_url = setup, api_url

    def start(self, inspection: CheckpointInspection) -> StartedRun:
        together = threading.Barrier(2)

        def announce() -> None:
            together.wait()
            post_event(self._api_url, checkpoint=inspection.ref.url, config=str(self._setup.config))

        trainer = threading.Thread(target=announce)
        trainer.start()
        together.wait()
        started = self._runs.start(inspection)
        trainer.join()
        return started

    def ended(self, runs: Sequence[StartedRun]) -> dict[str, RunEnd]:
        return self._runs.ended(runs)


@pytest.mark.slow
@pytest.mark.usefixtures("worker")
def test_announced_and_found_at_once_it_is_scored_once(tmp_path: Path, environment: dict[str, str]) -> None:
    setup = make_setup(tmp_path / "s")
    config = load_config(str(setup.config))
    evaluate_directly(config, setup.run / "step_1")  # the target's part
    for step in STEPS:
        setup.add_step(step)
    events: list[WatchEvent] = []

    def never(checkpoint: str) -> dict[str, Any]:
        raise AssertionError(checkpoint)

    runs = AtTheSameMoment(setup, environment["PREFECT_API_URL"])
    choice = Choice(from_step=STEPS[0])
    watch = make_watch(setup, events, never, runs=runs, choice=choice)
    end = time.monotonic() + LIMIT_S
    with Published(store_of(config).root) as published:
        watch.run(
            once=False,
            every_s=2.0,
            idle_s=2.0,
            stop=lambda: time.monotonic() > end or (len(watch.results) == len(STEPS) and all_ended(setup)),
        )
    assert sorted(kinds(events)) == sorted(
        (kind, f"step_{step}") for step in STEPS for kind in ("started", "scored")
    ), events
    ended = flow_runs(setup)
    assert sorted(len(states) for states in ended.values()) == [2] * len(STEPS), "both of them really ran"
    assert {state for states in ended.values() for state in states} == {"Completed"}
    assert rows(setup) == [(step, "done") for step in STEPS]
    assert published.built == dict.fromkeys(("drafter", "blocks"), 1 + len(STEPS)), "each was made once"


class Published:
    """Watches a store and counts what is published in it, also in place of what was there."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._seen: set[tuple[str, str, int, int]] = set()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    @property
    def built(self) -> dict[str, int]:
        """Return how many artifacts of each kind were published."""
        return {kind: sum(one[0] == kind for one in self._seen) for kind in ("drafter", "blocks")}

    def __enter__(self) -> Published:
        self._thread.start()
        return self

    def __exit__(self, *_details: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._is_over.wait(0.02):
            for kind in ("drafter", "blocks"):
                for folder in self._root.glob(f"{kind}/[0-9a-f]*"):
                    stat = folder.stat()
                    self._seen.add((kind, folder.name, stat.st_ino, stat.st_mtime_ns))


def flow_runs(setup: Setup) -> dict[str, list[str]]:
    """Return checkpoint to the states of its runs."""
    from prefect.client.orchestration import get_client

    states: dict[str, list[str]] = {}
    with get_client(sync_client=True) as client:
        for run in client.read_flow_runs():
            if run.parameters.get("config") == str(setup.config):
                states.setdefault(run.parameters["checkpoint"], []).append(run.state.name if run.state else "unknown")
    return states


def all_ended(setup: Setup) -> bool:
    ended = {"Completed", "Failed", "Crashed", "Cancelled"}
    states = flow_runs(setup)
    return len(states) == len(STEPS) and all(len(own) == 2 and set(own) <= ended for own in states.values())


def post_event(api_url: str, **payload: str) -> None:
    """Announce a checkpoint as docs/watching.md shows."""
    event = {
        "id": str(uuid.uuid4()),
        "occurred": datetime.now(UTC).isoformat(),
        "event": "dflash.checkpoint.saved",
        "resource": {"prefect.resource.id": f"dflash.checkpoint.{payload['checkpoint']}"},
        "payload": payload,
    }
    data = dumps([event]).encode()
    request = urllib.request.Request(f"{api_url}/events", data=data, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status in (200, 204)
