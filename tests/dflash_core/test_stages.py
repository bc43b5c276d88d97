"""The stages without Prefect: each finds what it made before, and says so."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import polars
import pytest

from dflash_core import evaluation, progress, stages
from dflash_core.config import Config, load_config, parse_config
from dflash_core.errors import (
    ArtifactDamaged,
    CheckpointChanged,
    CheckpointMismatch,
    ConfigError,
    HostUnreachable,
    PromptError,
    TargetError,
)
from dflash_core.results.records import BLOCK_SCHEMA
from dflash_core.store import Store
from dflash_core.target import loading, runtime
from dflash_core.target import transcripts as written
from tests.support.direct import Evaluated, evaluate_directly
from tests.support.scene import Setup, make_setup

LAYERS = (1, 2, 4)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Setup, Evaluated]:
    setup = make_setup(tmp_path_factory.mktemp("stages") / "s")
    return setup, evaluate_directly(load_config(setup.config), setup.run / "step_1")


@pytest.fixture
def evaluated(original: tuple[Setup, Evaluated]) -> Evaluated:
    return original[1]


@pytest.fixture
def config(original: tuple[Setup, Evaluated], tmp_path: Path) -> Config:
    """Return the configuration with a store of its own, which holds what was made."""
    made = load_config(original[0].config)
    shutil.copytree(made.store, tmp_path / "store", copy_function=shutil.copy2)
    return made.model_copy(update={"store": str(tmp_path / "store")})


@pytest.fixture
def checkpoint(original: tuple[Setup, Evaluated]) -> str:
    return str(original[0].run / "step_1")


def changed(config: Config, **sections: dict[str, Any]) -> Config:
    data = config.model_dump()
    for name, values in sections.items():
        data[name] |= values
    return parse_config(data, where="test")


def run_drafter(config: Config, evaluated: Evaluated, **spec: Any) -> stages.Manifest:
    drafter = evaluation.read_spec(
        evaluation.inspect(evaluated.record.checkpoint.url, config), config, stages.plan_target(config).target.config
    )
    return stages.run_drafter(config, evaluated.spec | spec, evaluated.manifests["drafter"]["key"], drafter)


class TestPlan:
    @pytest.mark.parametrize(
        ("compute", "store", "expected"),
        [
            ("float32", "auto", ("float32", "float32")),
            ("bfloat16", "auto", ("bfloat16", "float32")),
            ("float32", "bfloat16", ("float32", "bfloat16")),
            ("bfloat16", "bfloat16", ("bfloat16", "bfloat16")),
        ],
    )
    def test_dtypes_are_settled_before_anything_runs(
        self, config: Config, compute: str, store: str, expected: tuple[str, str]
    ) -> None:
        """The tiny target is stored in float32, which is also its states' unless they are told otherwise."""
        before = runtime.num_forward_passes
        plan = stages.plan_target(changed(config, target={"compute_dtype": compute, "store_dtype": store}))
        assert (plan.compute_dtype, plan.store_dtype) == expected
        assert runtime.num_forward_passes == before

    def test_states_are_float32_where_float32_was_asked_for_whatever_the_target_is_stored_in(
        self, config: Config, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A target on disk in bfloat16 computed in float32 on request: rounding its states would lose the request."""
        resolve = loading.resolve_target

        def resolved(*arguments: Any) -> Any:
            target = resolve(*arguments)
            return dataclasses.replace(target, config=dataclasses.replace(target.config, dtype="bfloat16"))

        monkeypatch.setattr(stages, "resolve_target", resolved)
        monkeypatch.setattr(runtime, "cpu_flags", frozenset)
        assert stages.plan_target(changed(config, target={"compute_dtype": "float32"})).store_dtype == "float32"
        auto = stages.plan_target(changed(config, target={"compute_dtype": "auto"}))
        assert (auto.compute_dtype, auto.store_dtype) == ("float32", "bfloat16")

    def test_prompts_and_rendering_go_together(self, config: Config) -> None:
        plan = stages.plan_target(config)
        assert [prompt.id for prompt in plan.prompts] == [prompt.id for prompt in plan.rendering.prompts]

    @pytest.mark.parametrize(
        ("sections", "error"),
        [
            ({"target": {"model": None}}, TargetError),
            ({"completions": {"max_new_tokens": 600}}, PromptError),
            ({"completions": {"source": "server"}}, ConfigError),
            ({"completions": {"source": "file"}}, PromptError),
        ],
        ids=["no target", "too long", "served nowhere", "answers that are not given"],
    )
    def test_what_cannot_work_is_said_before_anything_runs(
        self, config: Config, sections: dict[str, Any], error: type[Exception]
    ) -> None:
        before = runtime.num_forward_passes
        with pytest.raises(error):
            stages.plan_target(changed(config, **sections))
        assert runtime.num_forward_passes == before

    def test_a_missing_prompt_file_is_a_prompt_error(self, config: Config) -> None:
        with pytest.raises(PromptError):
            stages.plan_target(config.model_copy(update={"prompts": "/no/such/file"}))


class TestStages:
    def test_every_stage_finds_what_it_made(self, config: Config, evaluated: Evaluated, checkpoint: str) -> None:
        before = runtime.num_forward_passes
        again = evaluate_directly(config, checkpoint)
        assert evaluated.built == ["drafter", "transcripts", "hidden_states", "blocks"]
        assert again.built == []
        assert {name: manifest["key"] for name, manifest in again.manifests.items()} == {
            name: manifest["key"] for name, manifest in evaluated.manifests.items()
        }
        assert runtime.num_forward_passes == before

    def test_a_manifest_is_small_and_plain(self, evaluated: Evaluated) -> None:
        import json

        for name, manifest in evaluated.manifests.items():
            assert set(manifest) == {"kind", "key", "was_built", "meta"}, name
            assert len(json.dumps(manifest, allow_nan=False)) < 2000, name
            assert json.loads(json.dumps(manifest)) == manifest, "no tuple that would come back as a list"

    def test_streaming_says_what_it_read(self, evaluated: Evaluated) -> None:
        meta = evaluated.manifests["drafter"]["meta"]
        assert 0 < meta["bytes_wanted"] <= meta["bytes_total"]
        assert meta["bytes_wanted"] <= meta["bytes_read"]

    def test_a_checkpoint_that_changed_since_it_was_looked_at_is_refused(self, config: Config, checkpoint: str) -> None:
        with pytest.raises(CheckpointChanged):
            stages.stream_drafter(checkpoint, config, "another identity", "a-key")
        store = Store(config.store)
        assert store.find(stages.DRAFTER_KIND, "a-key") is None

    def test_the_keys_of_the_flow_are_those_of_the_artifacts(self, config: Config, evaluated: Evaluated) -> None:
        plan = stages.plan_target(config)
        digest = evaluated.manifests["transcripts"]["meta"]["digest"]
        assert evaluated.manifests["transcripts"]["key"] == plan.transcripts_key
        assert evaluated.manifests["hidden_states"]["key"] == stages.hidden_states_key(plan, digest, LAYERS)
        assert evaluated.manifests["blocks"]["key"] == stages.blocks_key(evaluated.spec)

    def test_the_blocks_have_the_columns_of_the_database(self, config: Config, evaluated: Evaluated) -> None:
        artifact = Store(config.store).find(stages.BLOCKS_KIND, evaluated.manifests["blocks"]["key"])
        assert artifact is not None
        frame = polars.read_parquet(artifact.file(stages.BLOCKS_NAME))
        assert dict(frame.schema) == BLOCK_SCHEMA
        assert frame.height == artifact.meta["num_blocks"] > 0

    def test_progress_is_told_by_every_stage(self, config: Config, checkpoint: str, tmp_path: Path) -> None:
        told: list[tuple[str, float, float]] = []
        fresh = config.model_copy(update={"store": str(tmp_path / "fresh")})
        with progress.listening(lambda *report: told.append(report)):
            evaluate_directly(fresh, checkpoint)
        last = {stage: (done, total) for stage, done, total in told}
        assert set(last) == {"stream_checkpoint", "transcripts", "hidden_states", "run_drafter"}
        assert all(done == total > 0 for done, total in last.values())
        told.clear()
        evaluate_directly(fresh, checkpoint)
        assert told == [], "after the block nobody listens"


class TestHiddenStatesKey:
    def test_it_depends_on_the_set_of_layers_the_transcripts_and_the_dtypes(self, config: Config) -> None:
        plan = stages.plan_target(config)
        key = stages.hidden_states_key(plan, "t", (1, 2))
        assert stages.hidden_states_key(plan, "t", (1, 2, 2)) == key
        others = [
            stages.hidden_states_key(plan, "t", (1, 3)),
            stages.hidden_states_key(plan, "u", (1, 2)),
            stages.hidden_states_key(dataclasses.replace(plan, compute_dtype="bfloat16"), "t", (1, 2)),
            stages.hidden_states_key(dataclasses.replace(plan, store_dtype="bfloat16"), "t", (1, 2)),
        ]
        assert len({key, *others}) == 5

    def test_states_are_found_when_every_part_that_the_layers_need_is_there(
        self, config: Config, evaluated: Evaluated
    ) -> None:
        plan = stages.plan_target(config)
        digest = evaluated.manifests["transcripts"]["meta"]["digest"]
        found = stages.find_states(config, plan, digest, LAYERS)
        assert found is not None
        assert set(found.layers) == set(LAYERS)
        assert stages.find_states(config, plan, digest, (1, 5)) is None
        (path,) = Store(config.store).root.glob("hidden_states/*/layer_0002.safetensors")
        path.unlink()
        assert stages.find_states(config, plan, digest, LAYERS) is None
        assert stages.find_states(config, plan, digest, (1, 4)) is not None

    def test_more_layers_touch_the_target_once_and_keep_the_rest(self, config: Config) -> None:
        before = runtime.num_forward_passes
        manifest = stages.extract_hidden_states(config, (1, 2, 3, 4))
        assert manifest["was_built"]
        assert runtime.num_forward_passes == before + 4, "one pass for each of the four transcripts"
        assert len(list(Store(config.store).root.glob("hidden_states/*/layer_*.safetensors"))) == 4

    def test_a_layer_that_the_target_lacks_is_refused(self, config: Config) -> None:
        with pytest.raises(CheckpointMismatch, match="layers 0..5"):
            stages.extract_hidden_states(config, (1, 6))


class TestRunDrafter:
    def test_labels_and_names_do_not_draft_again(self, config: Config, evaluated: Evaluated) -> None:
        assert not run_drafter(config, evaluated, transcripts_digest="other labels", target="other name")["was_built"]

    def test_any_other_condition_drafts_again(self, evaluated: Evaluated) -> None:
        keys = {stages.blocks_key(evaluated.spec | {name: "x"}) for name in evaluated.spec}
        assert len(keys) == len(evaluated.spec) - 2 + 1, "each its own key, and two that do not count"

    def test_shorter_blocks_and_all_anchors_are_scored_as_asked(self, config: Config, evaluated: Evaluated) -> None:
        manifest = run_drafter(config, evaluated, block_size=3, anchors="all")
        artifact = Store(config.store).find(stages.BLOCKS_KIND, manifest["key"])
        assert artifact is not None
        frame = polars.read_parquet(artifact.file(stages.BLOCKS_NAME))
        assert frame["num_drafted"].max() == 2
        assert frame.height == sum(prompt.num_response_tokens - 1 for prompt in evaluated.record.prompts)

    @pytest.mark.parametrize("kind", ["drafter", "hidden_states", "transcripts"])
    def test_a_product_that_vanished_in_between_is_said_and_publishes_nothing(
        self, config: Config, evaluated: Evaluated, kind: str
    ) -> None:
        root = Store(config.store).root
        shutil.rmtree(root / "blocks")
        shutil.rmtree(root / kind)
        with pytest.raises(ArtifactDamaged, match="vanished from the store.*evaluate again"):
            run_drafter(config, evaluated)
        assert list((root / "blocks").iterdir()) == []

    def test_transcripts_that_vanished_are_said(self, config: Config) -> None:
        shutil.rmtree(Store(config.store).root / written.KIND)
        with pytest.raises(ArtifactDamaged, match="the transcripts vanished"):
            stages.read_transcripts(config, stages.plan_target(config))


def test_a_drafter_whose_link_broke_is_gone_on_with_by_the_next_attempt(
    tmp_path: Path, config: Config, checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dflash_core.checkpoints import partial_file
    from tests.support.sftp_server import RecordingSFTPServer

    monkeypatch.setattr(partial_file, "SYNC_BYTES", 1)
    with RecordingSFTPServer(Path(checkpoint).parent) as server:
        host = server.host_settings.model_dump(mode="json") | {"timeout_s": 1.0}
        store = str(tmp_path / "store")
        remote = parse_config(config.model_dump() | {"hosts": {"box": host}, "store": store}, where="test")
        url = server.url(Path(checkpoint).name)
        inspection = evaluation.inspect(url, remote)
        key, identity = stages.drafter_key(inspection, remote), inspection.ref.identity
        server.faults.cut_after_bytes, server.faults.cuts_left = inspection.bytes_wanted // 3, 100
        with pytest.raises(HostUnreachable):
            stages.stream_drafter(url, remote, identity, key)
        assert [path.name for path in (tmp_path / "store" / "unfinished").iterdir()] == [f"drafter-{key}"]
        server.faults.cuts_left = 0
        assert stages.stream_drafter(url, remote, identity, key)["was_built"]
        assert list((tmp_path / "store" / "unfinished").iterdir()) == []
        assert (server.write_attempts, server.execs) == ([], [])
