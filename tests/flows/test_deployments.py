"""`prefect.yaml` on a real server with a real worker: deploy, run one evaluation, read the rows."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import pytest
import yaml

from tests.support.scene import Setup, make_setup

ROOT = Path(__file__).parents[2]
PREFECT = [sys.executable, "-m", "prefect"]


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return make_setup(tmp_path_factory.mktemp("deployed") / "s")


def prefect(*arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PREFECT, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def environment(prefect_api: str) -> dict[str, str]:
    return os.environ | {"PREFECT_API_URL": prefect_api, "PREFECT_WORKER_QUERY_SECONDS": "1", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def worker(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Both pools, everything deployed, and a worker of each pool with a home of its own."""
    for pool in ("gpu", "cpu"):
        made = prefect("work-pool", "create", pool, "--type", "process", env=environment)
        assert made.returncode == 0, made.stderr
    deployed = prefect("--no-prompt", "deploy", "--all", env=environment)
    assert deployed.returncode == 0, deployed.stdout + deployed.stderr
    with ExitStack() as stack:
        processes = []
        for pool in ("gpu", "cpu"):
            home = tmp_path_factory.mktemp(pool)
            file = stack.enter_context((home / "worker.log").open("wb"))
            command = [*PREFECT, "worker", "start", "--pool", pool, "--limit", "1"]
            own = environment | {"PREFECT_HOME": str(home)}
            processes.append(subprocess.Popen(command, cwd=ROOT, env=own, stdout=file, stderr=file))
        yield
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    for pool in ("gpu", "cpu"):  # workers that have ended pass for live ones for a while
        prefect("--no-prompt", "work-pool", "delete", pool, env=environment)


@pytest.mark.slow
@pytest.mark.usefixtures("worker")
class TestDeployments:
    def test_a_deployment_run_ends_with_the_rows(self, setup: Setup, environment: dict[str, str]) -> None:
        done = run_deployment("evaluate-checkpoint", environment, checkpoint=setup.run / "step_1", config=setup.config)
        assert done.returncode == 0, done.stdout + done.stderr
        with duckdb.connect(str(setup.results), read_only=True) as connection:
            query = "SELECT run, step, status FROM evaluations JOIN checkpoints USING (checkpoint_id)"
            assert connection.execute(query).fetchall() == [("a", 1, "done")]
        assert "evaluate a/step_1" in [run.name for run in flow_runs()], "a person finds the step by its name"

    def test_a_failed_evaluation_ends_with_a_status_that_tells(self, setup: Setup, environment: dict[str, str]) -> None:
        missing = setup.run / "step_404"
        done = run_deployment("evaluate-checkpoint", environment, checkpoint=missing, config=setup.config)
        assert done.returncode == 1

    def test_a_watch_scores_what_is_ready(self, setup: Setup, environment: dict[str, str]) -> None:
        setup.add_step(2)
        done = run_deployment("watch-checkpoints", environment, run_url=setup.run, config=setup.config, once="true")
        assert done.returncode == 0, done.stdout + done.stderr
        with duckdb.connect(str(setup.results), read_only=True) as connection:
            rows = connection.execute("SELECT step FROM learning_curve WHERE slice = 'all' ORDER BY step").fetchall()
        assert rows == [(1,), (2,)]

        checkpoint = str(setup.run / "step_2")
        (run,) = [run for run in flow_runs() if run.parameters.get("checkpoint") == checkpoint]
        assert run.name == "evaluate a/step_2"
        assert {"dflash-eval", "run:a", "step:2"} <= set(run.tags), "the gpu pool scored what the cpu pool watched"

    def test_an_announced_checkpoint_is_scored_once_however_often_it_is_started(
        self, setup: Setup, environment: dict[str, str]
    ) -> None:
        """The trainer posts an event; it needs no Prefect for that."""
        checkpoint = setup.add_step(3)
        for _ in range(2):
            announce(environment["PREFECT_API_URL"], checkpoint=str(checkpoint), config=str(setup.config))
        end = time.monotonic() + 120
        runs: list[Any] = []
        while time.monotonic() < end and not (len(runs) == 2 and all(run.state.is_final() for run in runs)):
            time.sleep(0.5)
            runs = [run for run in flow_runs() if run.parameters.get("checkpoint") == str(checkpoint)]
        assert [run.state.name for run in runs] == ["Completed", "Completed"]
        assert {run.parameters["config"] for run in runs} == {str(setup.config)}
        watched = setup.json("watch", str(setup.run), "--once", "--match", "step_3")
        assert [result["cached"]["run_drafter"] for result in watched] == [True]
        with duckdb.connect(str(setup.results), read_only=True) as connection:
            query = "SELECT count(*) FROM evaluations JOIN checkpoints USING (checkpoint_id) WHERE step = 3"
            assert connection.execute(query).fetchall() == [(1,)]

    def test_a_parameter_of_the_wrong_type_is_refused(self, setup: Setup, environment: dict[str, str]) -> None:
        done = run_deployment("evaluate-checkpoint", environment, checkpoint=setup.run / "step_1", block_size='"many"')
        assert done.returncode == 1
        assert "block_size" in done.stdout + done.stderr or "many" in done.stdout + done.stderr


def announce(api_url: str, **payload: str) -> None:
    """Post what docs/watching.md shows."""
    event = {
        "id": str(uuid.uuid4()),
        "occurred": datetime.now(UTC).isoformat(),
        "event": "dflash.checkpoint.saved",
        "resource": {"prefect.resource.id": f"dflash.checkpoint.{payload['checkpoint']}"},
        "payload": payload,
    }
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{api_url}/events", json.dumps([event]).encode(), headers)
    with urllib.request.urlopen(request, timeout=20) as answer:
        assert answer.status == 204


def flow_runs() -> list[Any]:
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        return client.read_flow_runs()


def run_deployment(name: str, env: dict[str, str], **parameters: Any) -> subprocess.CompletedProcess[str]:
    arguments = [part for key, value in parameters.items() for part in ("-p", f"{key}={value}")]
    return prefect("deployment", "run", f"{name}/{name}", *arguments, "--watch", "--watch-interval", "1", env=env)


def test_every_deployment_names_a_flow_that_exists_with_only_known_keys() -> None:
    """Prefect ignores a misspelt key in silence, so the keys are checked here."""
    data = yaml.safe_load((ROOT / "prefect.yaml").read_text())
    names = {deployment["name"] for deployment in data["deployments"]}
    assert names >= {"evaluate-checkpoint", "prepare-target", "watch-checkpoints", "report"}
    for deployment in data["deployments"]:
        assert set(deployment) <= {"name", "description", "entrypoint", "tags", "work_pool", "parameters", "triggers"}
        path, function = deployment["entrypoint"].split(":")
        assert f"\ndef {function}(" in (ROOT / path).read_text()
        assert f'name="{deployment["name"]}"' in (ROOT / path).read_text()


def test_every_parameter_has_a_type_and_a_description_that_the_ui_shows() -> None:
    from prefect.utilities.callables import parameter_schema

    for deployment in yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]:
        path, function = deployment["entrypoint"].split(":")
        flow = getattr(importlib.import_module(path.removesuffix(".py").replace("/", ".")), function)
        schema = parameter_schema(flow)
        assert set(deployment.get("parameters", {})) <= set(schema.properties)
        for name, described in schema.properties.items():
            where = f"{function}({name})"
            assert len(described.get("description", "")) > 10, f"{where} has no description"
            assert {"type", "anyOf", "enum", "$ref"} & set(described), f"{where} has no type"
