"""A watch over a run in memory and in an object store: what it sees, and what another process sees."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save

from dflash_core.checkpoints import stream_checkpoint
from dflash_core.config import Config
from flows import watching
from flows.watch_values import WatchEvent
from flows.watching import Watch
from tests.dflash_core.checkpoints.checkpoint_files import drafter_tensors
from tests.support.object_store import ObjectStore
from tests.support.places import Place, empty_place

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def object_store() -> Iterator[ObjectStore]:
    with ObjectStore() as running:
        yield running


@pytest.fixture(params=["memory", "s3"])
def place(
    request: pytest.FixtureRequest, tmp_path: Path, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    with empty_place(request.param, tmp_path, object_store, monkeypatch) as ready:
        yield ready


def watch_over(place: Place, tmp_path: Path) -> tuple[Watch, list[WatchEvent]]:
    """Return a watch whose scoring fetches the drafter, and the list of what it tells."""
    events: list[WatchEvent] = []
    config = Config(store=str(tmp_path / "store"), results=str(tmp_path / "results.duckdb"))

    def fetch(url: str) -> dict[str, Any]:
        result = stream_checkpoint(url, tmp_path / "out.safetensors", hosts=config.hosts)
        return {"checkpoint": url, "step": result.ref.step, "sha256": result.weights_sha256}

    return Watch(run_url=place.url("run"), config=config, evaluate=fetch, tell=events.append), events


def put_step(place: Place, step: int, *, seed: int = 0) -> None:
    place.put(f"run/step_{step}/model.safetensors", save(drafter_tensors(seed=seed)))


def test_one_pass_scores_what_is_ready(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "SETTLE_S", 0.01)
    for step in (10, 9):
        put_step(place, step, seed=step)
    place.put("run/step_11/model.safetensors", save(drafter_tensors())[:-1])
    watch, events = watch_over(place, tmp_path)
    watch.run(once=True, every_s=0.01)
    assert [result["step"] for result in watch.results] == [9, 10]
    assert len({result["sha256"] for result in watch.results}) == 2
    assert watch.failures == {}
    assert [(event.kind, event.name) for event in events] == [
        ("waiting", "step_11"),
        ("scored", "step_9"),
        ("scored", "step_10"),
    ]


def test_a_watch_sees_objects_that_come_change_and_go(place: Place, tmp_path: Path) -> None:
    watch, _ = watch_over(place, tmp_path)

    def ready() -> list[str]:
        return [found.name for found in watch.look()]

    assert ready() == []
    put_step(place, 1)
    assert (ready(), ready()) == ([], ["step_1"])
    put_step(place, 2)
    assert (ready(), ready()) == (["step_1"], ["step_1", "step_2"])
    place.put("run/step_1/model.safetensors", save(drafter_tensors(num_layers=1)))
    assert (ready(), ready()) == (["step_2"], ["step_1", "step_2"])
    place.delete("run/step_2")
    assert ready() == ["step_1"]
    place.delete("run")
    assert ready() == []


def test_another_process_reaches_the_store_by_its_environment(
    object_store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    object_store.put("run/step_7/model.safetensors", save(drafter_tensors()))
    environment = os.environ | object_store.environment | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "flows.cli", "inspect", object_store.url("run/step_7"), "--json"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    answer = json.dumps(json.loads(done.stdout))
    assert object_store.url("run/step_7") in answer
    assert "safetensors" in answer
    object_store.delete("run")
