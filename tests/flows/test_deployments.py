"""`prefect.yaml` on a real server with a real worker: deploy, run one evaluation, read the rows."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
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
    """Both pools, everything deployed, and a worker of the `gpu` pool."""
    for pool in ("gpu", "cpu"):
        made = prefect("work-pool", "create", pool, "--type", "process", env=environment)
        assert made.returncode == 0, made.stderr
    deployed = prefect("--no-prompt", "deploy", "--all", env=environment)
    assert deployed.returncode == 0, deployed.stdout + deployed.stderr
    log = tmp_path_factory.mktemp("worker") / "worker.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*PREFECT, "worker", "start", "--pool", "gpu"], cwd=ROOT, env=environment, stdout=file, stderr=file
        )
        yield
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.mark.slow
@pytest.mark.usefixtures("worker")
class TestDeployments:
    def test_a_deployment_run_ends_with_the_rows(self, setup: Setup, environment: dict[str, str]) -> None:
        done = run_deployment("evaluate-checkpoint", environment, checkpoint=setup.run / "step_1", config=setup.config)
        assert done.returncode == 0, done.stdout + done.stderr
        with duckdb.connect(str(setup.results), read_only=True) as connection:
            query = "SELECT run, step, status FROM evaluations JOIN checkpoints USING (checkpoint_id)"
            assert connection.execute(query).fetchall() == [("a", 1, "done")]

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

    def test_a_parameter_of_the_wrong_type_is_refused(self, setup: Setup, environment: dict[str, str]) -> None:
        done = run_deployment("evaluate-checkpoint", environment, checkpoint=setup.run / "step_1", block_size='"many"')
        assert done.returncode == 1
        assert "block_size" in done.stdout + done.stderr or "many" in done.stdout + done.stderr


def run_deployment(name: str, env: dict[str, str], **parameters: Any) -> subprocess.CompletedProcess[str]:
    arguments = [part for key, value in parameters.items() for part in ("-p", f"{key}={value}")]
    return prefect("deployment", "run", f"{name}/{name}", *arguments, "--watch", "--watch-interval", "1", env=env)


def test_every_deployment_names_a_flow_that_exists_with_only_known_keys() -> None:
    """Prefect ignores a misspelt key in silence, so the keys are checked here."""
    data = yaml.safe_load((ROOT / "prefect.yaml").read_text())
    names = {deployment["name"] for deployment in data["deployments"]}
    assert names >= {"evaluate-checkpoint", "prepare-target", "watch-checkpoints", "report"}
    for deployment in data["deployments"]:
        assert set(deployment) <= {"name", "description", "entrypoint", "tags", "work_pool", "parameters"}
        path, function = deployment["entrypoint"].split(":")
        assert f"\ndef {function}(" in (ROOT / path).read_text()
        assert f'name="{deployment["name"]}"' in (ROOT / path).read_text()
