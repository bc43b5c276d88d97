"""Three boxes at work: a server, a worker that holds the target, and one with only drafters, joined by an SSH store.

Each worker is a process with a home of its own, where its configuration, its mirror and its results lie. The
drafters' box has nothing of the target but what the store keeps for it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import duckdb
import pytest
import yaml

from dflash_core import stages
from dflash_core.config import load_config
from dflash_core.results.database import read_evaluation
from dflash_core.store import Store
from dflash_core.store_opening import close_connections
from examples.training_box import find_sshd
from tests.support.direct import evaluate_directly
from tests.support.scene import Setup, make_setup
from tests.support.store_server import StoreBox

ROOT = Path(__file__).parents[2]
PREFECT = [sys.executable, "-m", "prefect"]
POOLS = ("gpu", "cpu")
# Of the test's own server; a box has none of it.
NOT_OF_A_BOX = ("PREFECT_RESULTS_LOCAL_STORAGE_PATH", "PREFECT_SERVER_DATABASE_CONNECTION_URL")

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_sshd() is None, reason="sshd is not installed")]


def prefect(*arguments: str) -> None:
    done = subprocess.run([*PREFECT, *arguments], cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


class Boxes:
    """The homes of the two boxes, and what joins them."""

    def __init__(self, folder: Path, store: StoreBox) -> None:
        self.setup: Setup = make_setup(folder / "s", steps=(1, 2))
        self.store = store
        self.homes = {pool: folder / f"home-{pool}" for pool in POOLS}
        for home in self.homes.values():
            home.mkdir()
        data = yaml.safe_load(self.setup.config.read_text())
        data["hosts"] = {name: host.model_dump() for name, host in store.hosts.items()}
        self.data = data | {
            "store": store.url("store"),
            "store_mirror": "~/mirror",
            "results": "~/results/acceptance.duckdb",
        }

    def configure(self, name: str, pool: str, **target: Any) -> Path:
        """Write a configuration file of a box."""
        path = self.homes[pool] / name
        path.write_text(yaml.safe_dump(self.data | {"target": self.data["target"] | target}))
        return path

    @property
    def results(self) -> Path:
        return self.homes["gpu"] / "results" / "acceptance.duckdb"


@pytest.fixture(scope="module")
def boxes(tmp_path_factory: pytest.TempPathFactory, prefect_api: str) -> Iterator[Boxes]:
    folder = tmp_path_factory.mktemp("together")
    (folder / "served").mkdir()
    for pool in POOLS:
        prefect("work-pool", "create", pool, "--type", "process", "--overwrite")
    prefect("--no-prompt", "deploy", "--name", "evaluate-checkpoint", "--name", "prepare-target")
    with StoreBox(folder / "served", folder / "state") as store, ExitStack() as stack:
        made = Boxes(folder, store)
        processes = []
        for pool, home in made.homes.items():
            log = stack.enter_context((home / "worker.log").open("wb"))
            own = {name: value for name, value in os.environ.items() if name not in NOT_OF_A_BOX}
            own |= {"HOME": str(home), "PREFECT_HOME": str(home / "prefect"), "OMP_NUM_THREADS": "1"}
            own |= {"PREFECT_WORKER_QUERY_SECONDS": "1", "PREFECT_LOGGING_LEVEL": "INFO"}
            command = [*PREFECT, "worker", "start", "--pool", pool, "--limit", "2"]
            processes.append(subprocess.Popen(command, cwd=ROOT, env=own, stdout=log, stderr=log))
        yield made
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        close_connections()
    for pool in POOLS:  # workers that have ended pass for live ones for a while
        prefect("--no-prompt", "work-pool", "delete", pool)


def start(checkpoint: Path, config: str) -> Any:
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name("evaluate-checkpoint/evaluate-checkpoint")
        parameters = {"checkpoint": str(checkpoint), "config": config}
        return client.create_flow_run_from_deployment(deployment.id, parameters=parameters).id


def wait_for(*ids: Any, seconds: float = 240) -> list[Any]:
    from prefect.client.orchestration import get_client

    end = time.monotonic() + seconds
    with get_client(sync_client=True) as client:
        while True:
            runs = [client.read_flow_run(one) for one in ids]
            if all(run.state.is_final() for run in runs):
                return runs
            assert time.monotonic() < end, [(run.name, run.state) for run in runs]
            time.sleep(0.5)


def preparations() -> list[Any]:
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        own = client.read_deployment_by_name("prepare-target/prepare-target").id  # other tests prepare, too
        runs = [run for run in client.read_flow_runs() if run.deployment_id == own]
    return [run for run in runs if any(tag.startswith("prepare:") for tag in run.tags)]


def test_two_checkpoints_are_scored_at_once_and_the_target_runs_once_on_its_box(boxes: Boxes, tmp_path: Path) -> None:
    holder = load_config(boxes.configure("dflash.yaml", "cpu"))
    kept = stages.keep_target_tables(holder.model_copy(update={"store_mirror": str(tmp_path / "mirror")}))
    boxes.configure("dflash.yaml", "gpu", model=f"store:{kept['key']}")

    steps = [boxes.setup.run / f"step_{step}" for step in (1, 2)]
    runs = wait_for(*[start(step, "~/dflash.yaml") for step in steps])
    log = (boxes.homes["gpu"] / "worker.log").read_text()
    assert [run.state.name for run in runs] == ["Completed", "Completed"], log[-5000:]
    assert max(run.start_time for run in runs) < min(run.end_time for run in runs), "they ran beside each other"
    (prepared,) = preparations()
    assert prepared.state.name == "Completed"
    assert prepared.parameters["layers"] == [1, 2, 4]
    assert "waiting for it" in log

    # One database, on the box that scored, with the numbers of a single box.
    assert not (boxes.homes["cpu"] / "results").exists()
    with duckdb.connect(str(boxes.results), read_only=True) as connection:
        query = (
            "SELECT step, evaluation_id FROM evaluations JOIN checkpoints USING (checkpoint_id) WHERE status = 'done'"
        )
        found = dict(connection.execute(query).fetchall())
    assert sorted(found) == [1, 2]
    alone = load_config(boxes.setup.config).model_copy(update={"store": str(tmp_path / "alone")})
    for number, step in zip((1, 2), steps, strict=True):
        stored = read_evaluation(boxes.results, found[number], blocks=True)
        assert stored is not None
        assert stored["walks"] == evaluate_directly(alone, step).walks()

    # The drafters' box never had the target, and took only what it needed.
    mirrors = {pool: Store(next(iter((home / "mirror").iterdir()))).root for pool, home in boxes.homes.items()}
    assert not list(mirrors["gpu"].rglob("unfinished/hidden_states*"))
    layers = {path.name for path in mirrors["gpu"].glob("hidden_states/*/*.safetensors")}
    assert layers == {f"layer_{layer:04d}.safetensors" for layer in (1, 2, 4)} | {
        "final.safetensors",
        "choices.safetensors",
    }
    assert not (mirrors["cpu"] / "blocks").exists(), "nothing was scored where the target is"
