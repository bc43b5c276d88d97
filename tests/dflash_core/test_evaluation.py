"""What an evaluation is: its identity, its record, what is known beforehand, and numbers that do not drift."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_core import evaluation, stages
from dflash_core.acceptance import walk
from dflash_core.config import Config, load_config, with_overrides
from dflash_core.drafter_reading import read_drafter
from dflash_core.errors import (
    ArtifactDamaged,
    CheckpointMismatch,
    CheckpointNotReady,
    DraftConfigError,
    UnsupportedCheckpoint,
)
from dflash_core.store import Store
from dflash_core.target import hidden_states, runtime, transcripts
from tests.support import tiny
from tests.support.direct import Evaluated, evaluate_directly
from tests.support.scene import Setup, make_setup


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Setup, Evaluated]:
    """Return a tiny set-up whose one checkpoint was scored; tests copy it."""
    setup = make_setup(tmp_path_factory.mktemp("evaluation") / "s")
    return setup, evaluate_directly(load_config(setup.config), setup.run / "step_1")


@pytest.fixture
def setup(original: tuple[Setup, Evaluated], tmp_path: Path) -> Setup:
    """Return a copy with all that was stored, which a test may change."""
    folder = tmp_path / "s"
    shutil.copytree(original[0].folder, folder, copy_function=shutil.copy2)
    copy = Setup(folder, folder / "dflash.yaml", folder / "runs" / "a")
    text = copy.config.read_text().replace(str(original[0].folder), str(folder))
    copy.config.write_text(text)
    return copy


@pytest.fixture
def evaluated(original: tuple[Setup, Evaluated]) -> Evaluated:
    return original[1]


def config_of(setup: Setup) -> Config:
    return load_config(setup.config)


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rewrite_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def edit_prompts(setup: Setup, old: str, new: str) -> None:
    path = setup.folder / "prompts.jsonl"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


class TestIdentity:
    def same(self, setup: Setup, evaluated: Evaluated) -> Evaluated:
        again = evaluate_directly(config_of(setup), setup.run / "step_1")
        assert again.record.evaluation_id == evaluated.record.evaluation_id
        assert again.record.checkpoint.checkpoint_id == evaluated.record.checkpoint.checkpoint_id
        return again

    def test_the_same_files_elsewhere_are_the_same_evaluation(self, setup: Setup, evaluated: Evaluated) -> None:
        again = self.same(setup, evaluated)
        assert again.built == []
        assert again.record.checkpoint.url != evaluated.record.checkpoint.url

    def test_another_store_gives_the_same_evaluation_and_numbers(self, setup: Setup, evaluated: Evaluated) -> None:
        setup.change_config(store=str(setup.folder / "store 2"), results=str(setup.folder / "r2.duckdb"))
        again = self.same(setup, evaluated)
        assert again.built == ["drafter", "transcripts", "hidden_states", "blocks"]
        assert again.record.blocks is not None
        assert evaluated.record.blocks is not None
        assert again.record.blocks.equals(evaluated.record.blocks)

    def test_the_name_of_the_targets_folder_does_not_matter(self, setup: Setup, evaluated: Evaluated) -> None:
        (setup.folder / "target").rename(setup.folder / "renamed")
        setup.change_config(target={"model": str(setup.folder / "renamed"), "compute_dtype": "float32"})
        again = self.same(setup, evaluated)
        assert again.built == []
        assert (again.record.target, evaluated.record.target) == ("renamed", "target")

    @pytest.mark.parametrize(
        "changes",
        [
            {"completions": {"max_new_tokens": 23}},
            {"completions": {"max_new_tokens": 24, "thinking": True}},
            {"drafter": {"block_size": 4}},
            {"drafter": {"anchors": "all"}},
            {"target": {"compute_dtype": "bfloat16"}},
            {"target": {"compute_dtype": "float32", "store_dtype": "bfloat16"}},
            {"run": "b"},
        ],
        ids=["limit", "thinking", "block size", "anchors", "dtype of the target", "dtype of the states", "run"],
    )
    def test_each_condition_of_the_config_makes_another_evaluation(
        self, setup: Setup, evaluated: Evaluated, changes: dict[str, Any]
    ) -> None:
        if "target" in changes:
            changes["target"]["model"] = str(setup.folder / "target")
        setup.change_config(**changes)
        again = evaluate_directly(config_of(setup), setup.run / "step_1")
        assert again.record.evaluation_id != evaluated.record.evaluation_id

    def test_a_flag_that_changed_no_token_is_still_recorded(self, setup: Setup, evaluated: Evaluated) -> None:
        """The tiny template ignores the flag, so transcripts and states are found; the record says what was asked."""
        setup.change_config(completions={"max_new_tokens": 24, "thinking": True})
        again = evaluate_directly(config_of(setup), setup.run / "step_1")
        assert "transcripts" not in again.built
        assert (again.record.spec["thinking"], evaluated.record.spec["thinking"]) == (True, False)

    def test_a_template_that_changed_no_token_is_still_recorded(self, setup: Setup, evaluated: Evaluated) -> None:
        template = setup.folder / "target" / "chat_template.jinja"
        template.write_text("{# a remark #}" + template.read_text())
        again = evaluate_directly(config_of(setup), setup.run / "step_1")
        assert "transcripts" not in again.built
        assert again.record.spec["chat_template_digest"] != evaluated.record.spec["chat_template_digest"]
        assert again.record.evaluation_id != evaluated.record.evaluation_id

    @pytest.mark.parametrize(
        ("old", "new", "rebuilt"),
        [
            ('"w20 ', '"w21 ', ["transcripts", "hidden_states", "blocks"]),
            ('"p0"', '"q0"', ["transcripts", "hidden_states", "blocks"]),
            ('"odd"', '"uneven"', []),
            ('"first half"', '"1st half"', []),
        ],
        ids=["text", "id", "dataset", "group"],
    )
    def test_other_prompts_make_another_evaluation_and_other_labels_no_work(
        self, setup: Setup, evaluated: Evaluated, old: str, new: str, rebuilt: list[str]
    ) -> None:
        edit_prompts(setup, old, new)
        again = evaluate_directly(config_of(setup), setup.run / "step_1")
        assert again.record.evaluation_id != evaluated.record.evaluation_id
        assert again.built == rebuilt

    def test_new_bytes_are_a_new_checkpoint(self, setup: Setup, evaluated: Evaluated) -> None:
        rewrite_weights(setup.run / "step_1", lambda tensors: tensors["norm.weight"].mul_(1.5))
        again = evaluate_directly(config_of(setup), setup.run / "step_1")
        assert again.record.checkpoint.checkpoint_id != evaluated.record.checkpoint.checkpoint_id
        assert again.record.checkpoint.step == evaluated.record.checkpoint.step == 1
        assert again.built == ["drafter", "blocks"]

    def test_a_fact_of_the_draft_config_makes_another_evaluation(self, setup: Setup, evaluated: Evaluated) -> None:
        change_json(setup.run / "step_1" / "config.json", rope_theta=5000.0)
        again = evaluate_directly(config_of(setup), setup.run / "step_1")
        assert again.record.evaluation_id != evaluated.record.evaluation_id
        assert again.built == ["blocks"]

    @pytest.mark.parametrize(
        ("module", "name"),
        [(walk, "METRICS_VERSION"), (hidden_states, "EXTRACTION_VERSION"), (transcripts, "TRANSCRIPTS_VERSION")],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_new_code_makes_another_evaluation_and_new_blocks(
        self, setup: Setup, evaluated: Evaluated, monkeypatch: pytest.MonkeyPatch, module: Any, name: str
    ) -> None:
        monkeypatch.setattr(module, name, getattr(module, name) + 1)
        again = evaluate_directly(config_of(setup), setup.run / "step_1")
        assert again.record.evaluation_id != evaluated.record.evaluation_id
        assert "blocks" in again.built

    def test_every_entry_but_the_targets_name_counts(self, evaluated: Evaluated) -> None:
        before = evaluation.evaluation_id(evaluated.spec, "c")
        for name in evaluated.spec:
            changed = evaluation.evaluation_id(evaluated.spec | {name: "something else"}, "c")
            assert (changed == before) == (name == "target"), name
        assert evaluation.evaluation_id(evaluated.spec, "d") != before

    def test_the_conditions_are_all_there(self, evaluated: Evaluated) -> None:
        """No number without its conditions: these and the drafter's own facts decide tau."""
        spec = evaluated.record.spec
        assert spec["block_size"] == 8
        assert spec["anchors"] == "walk"
        assert spec["sampling"] == "greedy"
        assert spec["device"] == "cpu"
        assert spec["drafter_dtype"] == spec["target_dtype"] == spec["store_dtype"] == "float32"
        assert spec["max_new_tokens"] == 24
        assert spec["drafter"]["mask_token_id"] == tiny.MASK_TOKEN_ID
        assert "same position" in spec["row_alignment"]
        assert spec["verification_rule"] == walk.VERIFICATION_RULE
        assert spec["counting_rule"] == walk.COUNTING_RULE
        assert {"torch", "transformers", "python"} <= set(spec["packages"])
        json.dumps(spec, allow_nan=False)


class TestKnownBeforehand:
    def known(self, setup: Setup) -> str | None:
        config = config_of(setup)
        return evaluation.known_evaluation_id(config, evaluation.inspect(str(setup.run / "step_1"), config))

    def test_it_is_the_id_that_the_evaluation_had(self, setup: Setup, evaluated: Evaluated) -> None:
        before = runtime.num_forward_passes
        assert self.known(setup) == evaluated.record.evaluation_id
        assert runtime.num_forward_passes == before

    @pytest.mark.parametrize("kind", ["drafter", "transcripts"])
    def test_without_what_names_it_nothing_is_known_and_nothing_is_made(self, setup: Setup, kind: str) -> None:
        folder = setup.folder / "store" / kind
        shutil.rmtree(folder)
        before = runtime.num_forward_passes
        assert self.known(setup) is None
        assert runtime.num_forward_passes == before
        assert not folder.exists()

    def test_a_new_checkpoint_is_not_known(self, setup: Setup) -> None:
        setup.add_step(2)
        config = config_of(setup)
        assert evaluation.known_evaluation_id(config, evaluation.inspect(str(setup.run / "step_2"), config)) is None

    def test_under_other_conditions_another_id_is_known(self, setup: Setup, evaluated: Evaluated) -> None:
        setup.change_config(drafter={"block_size": 4})
        known = self.known(setup)
        assert known not in (None, evaluated.record.evaluation_id)
        assert known == evaluate_directly(config_of(setup), setup.run / "step_1").record.evaluation_id


class TestDraftConfig:
    def inspect(self, setup: Setup, config: Config) -> Any:
        return evaluation.inspect(str(setup.run / "step_1"), config)

    def read(self, setup: Setup, **drafter: Any) -> Any:
        setup.change_config(drafter=drafter)
        config = config_of(setup)
        plan = stages.plan_target(config)
        return read_drafter(self.inspect(setup, config), config, plan.target.config)

    def write_config(self, setup: Setup, **changes: Any) -> str:
        own = json.loads((setup.run / "step_1" / "config.json").read_text())
        (setup.folder / "draft.json").write_text(json.dumps(own | changes))
        return str(setup.folder / "draft.json")

    def test_a_checkpoint_without_config_takes_the_configured_one(self, setup: Setup) -> None:
        path = self.write_config(setup)
        own = self.read(setup)
        (setup.run / "step_1" / "config.json").unlink()
        spec = self.read(setup, config=path)
        assert spec == dataclasses.replace(own, sources=spec.sources)
        assert spec.sources["rope"] == f"{path}: rope_theta"

    def test_without_any_config_the_key_to_set_is_named(self, setup: Setup) -> None:
        (setup.run / "step_1" / "config.json").unlink()
        with pytest.raises(DraftConfigError, match=r"step_1 carries no config\.json.*set drafter\.config"):
            self.read(setup)

    @pytest.mark.parametrize("content", [None, "{", "[1]", '"x"'], ids=["missing", "no json", "list", "text"])
    def test_a_configured_file_that_is_none_is_named(self, setup: Setup, content: str | None) -> None:
        path = setup.folder / "draft.json"
        if content is not None:
            path.write_text(content)
        with pytest.raises(DraftConfigError, match=f"drafter.config = '{path}'"):
            self.read(setup, config=str(path))

    def test_two_configs_that_agree_are_one(self, setup: Setup) -> None:
        assert self.read(setup, config=self.write_config(setup, transformers_version="0")).block_size == 8

    def test_two_configs_that_differ_are_an_error_that_names_both_values(self, setup: Setup) -> None:
        path = self.write_config(setup, rope_theta=1e6)
        with pytest.raises(
            DraftConfigError, match=r"rope_theta': 1000000\.0.*contradicts the checkpoint's own.*10000\.0"
        ):
            self.read(setup, config=path)

    def test_a_config_completes_one_that_lacks_a_fact(self, setup: Setup) -> None:
        path = self.write_config(setup)
        own = setup.run / "step_1" / "config.json"
        own.write_text(json.dumps({"architectures": ["DFlashDraftModel"]}))
        assert self.read(setup, config=path).block_size == 8

    def test_longer_blocks_than_trained_are_refused_and_equal_ones_are_not(self, setup: Setup) -> None:
        assert self.read(setup, block_size=8).block_size == 8
        with pytest.raises(DraftConfigError, match="drafter.block_size = 9 is longer than the 8"):
            self.read(setup, block_size=9)

    def test_the_configured_layers_are_known_without_a_checkpoint(self, setup: Setup) -> None:
        path = self.write_config(setup)
        config = config_of(setup)
        plan = stages.plan_target(config)
        assert evaluation.configured_layers(config, plan) == ()
        setup.change_config(drafter={"config": path})
        assert evaluation.configured_layers(config_of(setup), plan) == (1, 2, 4)

    def test_what_a_torch_checkpoint_says_of_itself_must_agree(self, setup: Setup) -> None:
        import argparse

        weights = load_file(setup.run / "step_1" / "model.safetensors")
        path = self.write_config(setup)
        setup.change_config(drafter={"config": path})
        config = config_of(setup)
        plan = stages.plan_target(config)

        def read(**args: Any) -> Any:
            torch.save({"model_state_dict": weights, "step": 7, "args": argparse.Namespace(**args)}, setup.run / "c.pt")
            inspection = evaluation.inspect(str(setup.run / "c.pt"), config)
            return read_drafter(inspection, config, plan.target.config)

        assert read(block_size=8, lr=1e-4).block_size == 8
        assert read(target_layer_ids="1,2,4").target_layer_ids == (1, 2, 4)
        with pytest.raises(DraftConfigError, match="block_size = 8 contradicts the checkpoint's own training args.*16"):
            read(block_size=16)


class TestRecords:
    def test_a_done_record_holds_prompts_texts_and_one_row_per_block(self, evaluated: Evaluated) -> None:
        record = evaluated.record
        assert (record.status, record.error, record.block_size) == ("done", None, 8)
        assert (record.device, record.dtype) == ("cpu", "float32")
        assert record.blocks is not None
        assert (
            set(record.blocks["prompt_id"])
            == {prompt.prompt_id for prompt in record.prompts}
            == {"p0", "p1", "p2", "p3"}
        )
        first = record.prompts[0]
        assert (first.dataset, first.group) == ("even", "first half")
        assert first.prompt_text.startswith("w20 w21")
        assert first.num_prompt_tokens == len(first.prompt_text.split()) + 2, "the template adds two"
        for prompt in record.prompts:
            emitted = sum(evaluated.walks()[prompt.prompt_id])
            assert emitted == prompt.num_response_tokens - 1, "all tokens but the prefill's"

    def test_a_failed_record_holds_no_number(self, setup: Setup) -> None:
        config = config_of(setup)
        inspection = evaluation.inspect(str(setup.run / "step_1"), config)
        checkpoint = evaluation.checkpoint_record(inspection, None)
        why = CheckpointMismatch("why")
        record = evaluation.failed_record(
            config, checkpoint, why, started_at=evaluation.now(), seconds={"inspect": 1.0}
        )
        assert (record.status, record.error, record.blocks, record.prompts) == ("failed", "why", None, ())
        again = evaluation.failed_record(config, checkpoint, OSError("else"), started_at=evaluation.now(), seconds={})
        assert again.evaluation_id == record.evaluation_id, "a second failure replaces the first"
        assert (again.status, again.error) == ("failed", "OSError: else")
        gone = evaluation.vanished(inspection)
        last = evaluation.failed_record(config, checkpoint, gone, started_at=evaluation.now(), seconds={})
        assert (last.status, last.evaluation_id) == ("vanished", record.evaluation_id)
        assert last.error is not None
        assert f"{inspection.ref.url} vanished before it was read whole" in last.error
        other = with_overrides(config, block_size=4)
        third = evaluation.failed_record(other, checkpoint, why, started_at=evaluation.now(), seconds={})
        assert third.evaluation_id != record.evaluation_id

    def test_times_are_in_utc(self) -> None:
        assert evaluation.now().utcoffset() is not None
        assert evaluation.now().utcoffset().total_seconds() == 0  # type: ignore[union-attr]


class TestRefusals:
    def test_weights_of_a_run_that_diverged_are_no_bad_drafter(self, setup: Setup) -> None:
        """NaN weights would choose token 0 everywhere and score as a drafter with tau 1."""
        rewrite_weights(setup.run / "step_1", lambda tensors: tensors["fc.weight"][3, 5].fill_(float("nan")))
        with pytest.raises(UnsupportedCheckpoint, match=r"1 of the 12288 numbers in fc\.weight are NaN or infinite"):
            evaluate_directly(config_of(setup), setup.run / "step_1")
        assert len(list((setup.folder / "store" / "blocks").iterdir())) == 1, "only those of the whole checkpoint"

    def test_a_drafter_of_another_width_is_refused_before_anything_is_streamed(self, setup: Setup) -> None:
        change_json(setup.run / "step_1" / "config.json", hidden_size=128)
        before = len(list((setup.folder / "store" / "drafter").iterdir()))
        with pytest.raises(CheckpointMismatch, match="hidden size is 128"):
            evaluate_directly(config_of(setup), setup.run / "step_1")
        assert len(list((setup.folder / "store" / "drafter").iterdir())) == before

    def test_a_checkpoint_that_is_still_written_is_not_scored(self, setup: Setup) -> None:
        path = setup.run / "step_1" / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1000])
        with pytest.raises(CheckpointNotReady, match="step_1 is not ready: "):
            evaluate_directly(config_of(setup), setup.run / "step_1")

    def test_blocks_that_vanish_before_they_are_recorded_are_named(self, setup: Setup, evaluated: Evaluated) -> None:
        shutil.rmtree(Store(config_of(setup).store).root / "blocks")
        with pytest.raises(ArtifactDamaged, match="the scored blocks vanished"):
            evaluation.done_record(
                config_of(setup),
                evaluated.record.checkpoint,
                evaluated.spec,
                evaluated.manifests["blocks"],
                started_at=evaluation.now(),
                seconds={},
                cached={},
                bytes_read=0,
            )
