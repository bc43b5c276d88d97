"""The stages without Prefect: each finds what it made before, and says so."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import polars
import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_core import evaluation, progress, stages
from dflash_core.config import Config, load_config, parse_config
from dflash_core.drafter_reading import read_drafter
from dflash_core.drafter_workload import counted_workload, expected_workload
from dflash_core.errors import (
    ArtifactDamaged,
    CheckpointChanged,
    CheckpointMismatch,
    ConfigError,
    DoesNotFit,
    HostUnreachable,
    PromptError,
    TargetError,
)
from dflash_core.results.records import BLOCK_SCHEMA
from dflash_core.store import Store
from dflash_core.target import cpu, loading, rendering, runtime
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
    drafter = read_drafter(
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
        monkeypatch.setattr(cpu, "cpu_flags", frozenset)
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


def test_the_configured_mask_token_is_compared_and_part_of_the_key(
    tmp_path: Path, config: Config, checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether an embedding is the target's hangs on that row, and a checkpoint may leave it to `drafter.config`."""
    weights = load_file(Path(checkpoint) / "model.safetensors")
    mixed = tmp_path / "run" / "step_7"
    shutil.copytree(checkpoint, mixed)
    save_file(weights | {"embed_tokens.weight": torch.zeros(40, 8)}, mixed / "model.safetensors")
    keys, compared = {}, []

    def stream(*_: Any, mask_ids: set[int], **__: Any) -> None:
        compared.append(mask_ids)
        raise CheckpointChanged("far enough")

    monkeypatch.setattr(stages, "stream_checkpoint", stream)
    for mask in (30, 31):
        (tmp_path / "draft.json").write_text(json.dumps({"dflash_config": {"mask_token_id": mask}}))
        asked = config.model_copy(
            update={"drafter": config.drafter.model_copy(update={"config": str(tmp_path / "draft.json")})}
        )
        for folder in (mixed, Path(checkpoint)):
            inspection = evaluation.inspect(str(folder), asked)
            keys[folder.name, mask] = stages.drafter_key(inspection, asked)
        with pytest.raises(CheckpointChanged):
            stages.stream_drafter(str(mixed), asked, "", keys["step_7", mask])
    assert compared == [{30}, {31}]
    assert keys["step_7", 30] != keys["step_7", 31]
    assert keys["step_1", 30] == keys["step_1", 31], "without tables nothing hangs on it"


def test_steps_of_one_size_and_one_time_are_scored_with_their_own_weights(tmp_path: Path) -> None:
    setup = make_setup(tmp_path / "s", steps=(1, 2))
    config, found = load_config(setup.config), []
    for step in (1, 2):
        for path in (setup.run / f"step_{step}").iterdir():
            os.utime(path, (1_000_000_000, 1_000_000_000))
        found.append(evaluate_directly(config, setup.run / f"step_{step}").record.checkpoint)
    assert [one.step for one in found] == [1, 2]
    assert found[0].weights_sha256 != found[1].weights_sha256
    assert found[0].bytes_total == found[1].bytes_total, "or this tells nothing"


class TestMemory:
    """The plan of a drafter's memory: made of what is free, kept with the blocks, and no part of what names them."""

    def free(self, monkeypatch: pytest.MonkeyPatch, num_bytes: int | None) -> None:
        monkeypatch.setattr("dflash_core.drafter.device.own_free_bytes", lambda: num_bytes)

    def again(self, config: Config, evaluated: Evaluated) -> stages.Manifest:
        shutil.rmtree(Path(config.store) / stages.BLOCKS_KIND)
        return run_drafter(config, evaluated)

    def test_little_room_gives_smaller_slices_and_the_same_blocks_under_the_same_key(
        self, config: Config, evaluated: Evaluated, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        usual = evaluated.manifests["blocks"]["meta"]["memory"]
        assert sum(usual["parts"].values()) == usual["needed_bytes"]
        self.free(monkeypatch, usual["needed_bytes"] - usual["needed_bytes"] // 200)
        told: list[tuple[str, float, str]] = []
        with progress.listening(lambda stage, done, _: told.append((stage, done, progress.detail(stage)))):
            manifest = self.again(config, evaluated)
        assert told[0][:2] == ("run_drafter", 0)
        assert told[0][2].startswith("on cpu in float32, 0.")
        assert manifest["was_built"]
        assert manifest["key"] == evaluated.manifests["blocks"]["key"]
        assert manifest["meta"]["memory"]["at_once"] != usual["at_once"]
        assert manifest["meta"]["memory"]["needed_bytes"] < usual["needed_bytes"]
        artifact = Store(config.store).find(stages.BLOCKS_KIND, manifest["key"])
        assert artifact is not None
        found = polars.read_parquet(artifact.file(stages.BLOCKS_NAME))
        assert evaluated.record.blocks is not None
        assert found.drop("miss_rank").equals(evaluated.record.blocks.drop("miss_rank"))

    def test_a_machine_without_room_for_one_block_refuses_before_it_loads_anything(
        self, config: Config, evaluated: Evaluated, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.free(monkeypatch, 1 << 20)
        monkeypatch.setattr("dflash_core.drafter_run.load_drafter", None)
        with pytest.raises(
            DoesNotFit, match=r"even one block at a time: \d+ MiB needed \(.*\), 1 MiB free on this machine"
        ):
            self.again(config, evaluated)

    def test_blocks_that_are_there_need_no_room(
        self, config: Config, evaluated: Evaluated, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.free(monkeypatch, 1)
        assert not run_drafter(config, evaluated)["was_built"]
        known = evaluation.known_evaluation(config, evaluation.inspect(evaluated.record.checkpoint.url, config))
        assert known is not None
        assert known.evaluation_id == evaluated.record.evaluation_id

    def test_what_is_expected_before_the_transcripts_are_read_is_no_less_than_what_they_hold(
        self, config: Config, evaluated: Evaluated
    ) -> None:
        plan = stages.plan_target(config)
        facts: dict[str, Any] = {
            "block_size": 8,
            "extras": {"temperatures": [1.0]},
            "has_own_head": True,
            "store_dtype": plan.store_dtype,
        }
        expected = expected_workload(plan.rendering, evaluated.manifests["transcripts"]["meta"], **facts)
        counted = counted_workload(stages.read_transcripts(config, plan), **facts)
        for name in ("longest_tokens", "num_tokens", "num_transcripts", "most_anchors"):
            assert getattr(expected, name) >= getattr(counted, name) > 0, name
        assert expected.num_tokens == counted.num_tokens
        assert expected.is_target_head_held
        assert expected.stored_itemsize == counted.stored_itemsize == 4


class TestRendering:
    def test_the_tokenizer_is_read_once_until_a_file_of_it_changes(
        self, config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        folder = tmp_path / "target"
        shutil.copytree(str(config.target.model), folder, copy_function=shutil.copy2)
        # A store that is not there: nothing is found that other processes left.
        own = changed(config, target={"model": str(folder)}).model_copy(update={"store": str(tmp_path / "none")})
        read: list[int] = []
        load = rendering.load_tokenizer
        monkeypatch.setattr(rendering, "load_tokenizer", lambda target: read.append(1) or load(target))
        first = stages.plan_target(own)
        assert stages.plan_target(own) == first
        assert len(read) == 1
        shorter = stages.plan_target(changed(own, completions={"max_new_tokens": 3}))
        assert shorter.transcripts_key != first.transcripts_key
        assert len(read) == 2
        template = next(
            path for path in (folder / "chat_template.jinja", folder / "tokenizer_config.json") if path.exists()
        )
        template.write_text(template.read_text(encoding="utf-8").replace("w11", "w12"), encoding="utf-8")
        later = stages.plan_target(own)
        assert len(read) == 3
        assert later.rendering.template_digest != first.rendering.template_digest
        assert later.rendering.prompts != first.rendering.prompts
