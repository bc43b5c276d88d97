"""The tasks: what they cache by, what they retry, and that a body is its stage and nothing more."""

from __future__ import annotations

import asyncio
import importlib
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect import Task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.filesystems import LocalFileSystem
from prefect.results import ResultStore
from prefect.states import Completed, exception_to_failed_state

from dflash_core import evaluation, stages
from dflash_core.config import Config, load_config
from dflash_core.drafter_reading import read_drafter
from dflash_core.errors import (
    CheckpointCorrupt,
    CheckpointNotFound,
    HostKeyUnknown,
    HostUnreachable,
)
from dflash_core.results import database
from dflash_core.store import Store
from tasks.caching import ArtifactPolicy
from tasks.extract_hidden_states import extract_hidden_states
from tasks.plan_target import plan_target
from tasks.run_drafter import run_drafter
from tasks.stream_checkpoint import is_transient, stream_checkpoint
from tasks.write_results import write_results
from tasks.write_transcripts import write_transcripts
from tests.support.direct import Evaluated, evaluate_directly
from tests.support.scene import Setup, make_setup

NAMES = sorted(path.stem for path in (Path(__file__).parents[2] / "tasks").glob("*.py"))
NAMES = [name for name in NAMES if name not in ("__init__", "caching", "naming")]
LAYERS = [1, 2, 4]


def task_of(name: str) -> Task[..., Any]:
    task = getattr(importlib.import_module(f"tasks.{name}"), name)
    assert isinstance(task, Task)
    return task


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Setup, Evaluated]:
    setup = make_setup(tmp_path_factory.mktemp("tasks") / "s")
    return setup, evaluate_directly(load_config(setup.config), setup.run / "step_1")


@pytest.fixture
def config(original: tuple[Setup, Evaluated], tmp_path: Path) -> Config:
    """Return the configuration with a store of its own, which holds what was made."""
    made = load_config(original[0].config)
    shutil.copytree(made.store, tmp_path / "store", copy_function=shutil.copy2)
    return made.model_copy(update={"store": str(tmp_path / "store"), "results": str(tmp_path / "r.duckdb")})


@pytest.fixture
def evaluated(original: tuple[Setup, Evaluated]) -> Evaluated:
    return original[1]


class TestDecorators:
    @pytest.mark.parametrize("name", NAMES)
    def test_a_task_is_named_like_its_module_and_says_how_it_caches(self, name: str) -> None:
        """The stock policies forget between runs or do not notice a change in the core."""
        task = task_of(name)
        assert task.name == name
        assert task.task_run_name is not None
        assert task.cache_policy is NO_CACHE or isinstance(task.cache_policy, ArtifactPolicy)

    @pytest.mark.parametrize("name", [name for name in NAMES if task_of(name).cache_policy is not NO_CACHE])
    def test_a_cached_task_takes_what_its_policy_reads(self, name: str) -> None:
        import inspect

        task = task_of(name)
        assert {"store", "key"} <= set(inspect.signature(task.fn).parameters)
        assert task.result_serializer == "json"

    def test_each_cached_task_has_a_kind_of_its_own(self) -> None:
        policies = [task_of(name).cache_policy for name in NAMES]
        kinds = [policy.kind for policy in policies if isinstance(policy, ArtifactPolicy)]
        assert sorted(kinds) == ["blocks", "drafter", "hidden_states", "transcripts"]

    def test_only_the_one_that_uses_the_network_is_tried_again(self) -> None:
        assert {name: task_of(name).retries for name in NAMES if task_of(name).retries} == {"stream_checkpoint": 2}


class TestPolicy:
    @pytest.fixture
    def records(self, tmp_path: Path) -> ResultStore:
        return ResultStore(result_storage=LocalFileSystem(basepath=str(tmp_path / "records")))

    def key(self, records: ResultStore, store: Store, kind: str = "kind", **policy: Any) -> str | None:
        context: Any = SimpleNamespace(result_store=records)
        return ArtifactPolicy(kind=kind, **policy).compute_key(context, {"store": str(store.root), "key": "k1"}, {})

    def test_a_record_counts_only_while_its_artifact_is_whole(self, records: ResultStore, tmp_path: Path) -> None:
        store = Store(tmp_path / "store")
        assert self.key(records, store) == "kind-k1", "no record yet: run, and keep one"
        records.write({"was_built": True, "meta": {"size": 3}}, key="kind-k1")
        assert self.key(records, store) is None, "a record of nothing: run"
        artifact = store.build("kind", "k1", lambda folder: {"size": (folder / "a").write_bytes(b"abc")})
        assert self.key(records, store) == "kind-k1"
        artifact.file("a").write_bytes(b"abd")
        assert self.key(records, store) is None, "altered: run"

    def test_a_record_of_what_was_made_otherwise_since_does_not_count(
        self, records: ResultStore, tmp_path: Path
    ) -> None:
        """An artifact vanished and was made again, and says something else: the digest of its transcripts, say."""
        store = Store(tmp_path / "store")
        records.write({"was_built": True, "meta": {"size": 3}}, key="kind-k1")
        store.build("kind", "k1", lambda folder: {"size": (folder / "a").write_bytes(b"abcd")})
        assert self.key(records, store) is None
        records.write({"another version": "wrote this"}, key="kind-k1")
        assert self.key(records, store) is None

    def test_kinds_do_not_share_records(self, records: ResultStore, tmp_path: Path) -> None:
        store = Store(tmp_path / "store")
        assert self.key(records, store, "a") != self.key(records, store, "b")

    def test_a_kind_may_say_itself_what_it_holds(self, records: ResultStore, tmp_path: Path) -> None:
        records.write({"meta": {"layers": [1]}}, key="kind-k1")
        store = Store(tmp_path / "store")
        assert self.key(records, store, find_meta=lambda _kind, _inputs: {"layers": [1]}) == "kind-k1"
        assert self.key(records, store, find_meta=lambda _kind, _inputs: {"layers": [2]}) is None
        assert self.key(records, store, find_meta=lambda _kind, _inputs: None) is None

    def test_hidden_states_are_whole_while_every_layer_is(self, config: Config, evaluated: Evaluated) -> None:
        policy = extract_hidden_states.cache_policy
        assert isinstance(policy, ArtifactPolicy)
        transcripts = evaluated.manifests["transcripts"]["meta"]["digest"]
        inputs = {"config": config, "store": config.store, "key": "k", "transcripts": transcripts, "layers": LAYERS}
        assert policy.find_meta(policy.kind, inputs) == evaluated.manifests["hidden_states"]["meta"]
        assert policy.find_meta(policy.kind, inputs | {"layers": [1, 3]}) is None
        (path,) = Store(config.store).root.glob("hidden_states/*/layer_0004.safetensors")
        path.write_bytes(path.read_bytes()[:-1])
        assert policy.find_meta(policy.kind, inputs) is None


class TestRetrying:
    @pytest.mark.parametrize(
        ("error", "answer"),
        [
            (HostUnreachable("no answer"), True),
            (HostKeyUnknown("unknown key"), False),
            (CheckpointCorrupt("cut off"), False),
            (CheckpointNotFound("nothing there"), False),
            (ConnectionResetError("reset"), False),
            (RuntimeError("bug"), False),
        ],
        ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
    )
    def test_only_what_the_network_may_have_caused_is_tried_again(self, error: Exception, answer: bool) -> None:
        async def failed() -> State[Any]:
            return await exception_to_failed_state(error)

        state = asyncio.run(failed())
        run: Any = None
        assert is_transient(stream_checkpoint, run, state) is answer

    def test_success_is_not_tried_again(self) -> None:
        run: Any = None
        assert is_transient(stream_checkpoint, run, Completed(data=1)) is False


class TestBodies:
    """Task bodies without Prefect: the manifest of the stage, found in the store."""

    def test_each_returns_its_stages_manifest(self, config: Config, evaluated: Evaluated) -> None:
        store, manifests = config.store, evaluated.manifests
        checkpoint = evaluated.record.checkpoint
        plan = stages.plan_target(config)
        drafter = read_drafter(evaluation.inspect(checkpoint.url, config), config, plan.target.config)
        keys = {name: manifest["key"] for name, manifest in manifests.items()}
        assert plan_target.fn(config) == plan
        answers = {
            "drafter": stream_checkpoint.fn(config, store, keys["drafter"], checkpoint.url, str(checkpoint.identity)),
            "transcripts": write_transcripts.fn(config, store, keys["transcripts"]),
            "hidden_states": extract_hidden_states.fn(
                config, store, keys["hidden_states"], manifests["transcripts"]["meta"]["digest"], LAYERS
            ),
            "blocks": run_drafter.fn(config, store, keys["blocks"], evaluated.spec, keys["drafter"], drafter),
        }
        assert answers == {name: manifest | {"was_built": False} for name, manifest in manifests.items()}

    def test_results_are_written_and_written_again_in_place(self, config: Config, evaluated: Evaluated) -> None:
        for _ in range(2):
            assert write_results.fn(config.results, evaluated.record) == evaluated.record.evaluation_id
        found = database.read_evaluation(config.results, evaluated.record.evaluation_id)
        assert found is not None
        emitted = sum(sum(walk) for walk in evaluated.walks().values())
        assert found["datasets"]["all"]["num_verification_steps"] == sum(map(len, evaluated.walks().values()))
        assert found["datasets"]["all"]["tau_pooled"] == pytest.approx(
            emitted / found["datasets"]["all"]["num_verification_steps"]
        )
