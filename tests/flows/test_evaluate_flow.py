"""The flow that scores one checkpoint: order, caching by content, and what survives damage and kills."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pytest

from dflash_core.errors import (
    CheckpointCorrupt,
    CheckpointMismatch,
    CheckpointNotFound,
    CheckpointNotReady,
    CheckpointVanished,
    DoesNotFit,
)
from dflash_core.results.report_data import read_report_data
from dflash_core.store import Store
from dflash_core.target import runtime
from tests.support.scene import Setup, make_setup

STAGES = ("stream_checkpoint", "write_transcripts", "extract_hidden_states", "run_drafter")


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return make_setup(tmp_path / "s")


def evaluate(setup: Setup, checkpoint: Path | str, **options: Any) -> dict[str, Any]:
    from flows.evaluate_checkpoint import evaluate_checkpoint

    return evaluate_checkpoint(str(checkpoint), str(setup.config), **options)


def rows_of(setup: Setup) -> dict[str, list[tuple[Any, ...]]]:
    """Return every row that states a number, in a fixed order."""
    with duckdb.connect(str(setup.results), read_only=True) as connection:
        return {
            table: connection.execute(f"SELECT * FROM {table} ORDER BY ALL").fetchall()
            for table in ("blocks", "acceptance", "survival", "prompts", "checkpoints")
        }


def outcomes(setup: Setup) -> list[tuple[Any, ...]]:
    with duckdb.connect(str(setup.results), read_only=True) as connection:
        return connection.execute("SELECT status, error FROM evaluations ORDER BY status").fetchall()


def has_tables(setup: Setup) -> bool:
    if not setup.results.exists():
        return False
    with duckdb.connect(str(setup.results), read_only=True) as connection:
        return connection.execute("SELECT count(*) FROM duckdb_tables()").fetchone() != (0,)


@pytest.mark.usefixtures("prefect_api")
class TestEvaluateFlow:
    def test_the_first_run_computes_and_the_second_finds_everything(self, setup: Setup) -> None:
        first = evaluate(setup, setup.run / "step_1")
        second = evaluate(setup, setup.run / "step_1", refresh=["results"])
        assert first["cached"] == dict.fromkeys(STAGES, False)
        assert second["cached"] == dict.fromkeys(STAGES, True)
        assert second["datasets"] == first["datasets"]
        assert first["datasets"]["all"]["num_prompts"] == 4
        assert set(first["groups"]) == {"first half", "second half"}

    def test_what_is_scored_is_answered_from_the_database_without_a_task(
        self, setup: Setup, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also in a run of a deployment, as when watch and trainer both start it."""
        first = evaluate(setup, setup.run / "step_1")
        for name in ("plan_target", "stream_checkpoint", "run_drafter", "write_results"):
            monkeypatch.setattr(f"flows.evaluate_checkpoint.{name}", None)
        shutil.rmtree(Store(setup.folder / "store").root / "blocks")
        known = evaluate(setup, setup.run / "step_1")
        assert known["datasets"] == first["datasets"]
        assert known["evaluation_id"] == first["evaluation_id"]
        assert list(known["seconds"]) == ["answer_from_store"]
        with pytest.raises(TypeError):  # other conditions are not known
            evaluate(setup, setup.run / "step_1", block_size=4)

    def test_a_new_checkpoint_does_not_touch_the_target(self, setup: Setup) -> None:
        evaluate(setup, setup.run / "step_1")
        before = runtime.num_forward_passes
        assert before > 0, "the counter counts"
        result = evaluate(setup, setup.add_step(2))
        assert runtime.num_forward_passes == before
        assert result["cached"] == {
            "stream_checkpoint": False,
            "write_transcripts": True,
            "extract_hidden_states": True,
            "run_drafter": False,
        }

    def test_rows_are_replaced_not_doubled(self, setup: Setup) -> None:
        evaluate(setup, setup.run / "step_1")
        once = rows_of(setup)
        evaluate(setup, setup.run / "step_1", refresh=["results"])
        assert rows_of(setup) == once

    def test_the_same_step_with_new_bytes_is_a_new_checkpoint(self, setup: Setup) -> None:
        first = evaluate(setup, setup.run / "step_1")
        shutil.rmtree(setup.run / "step_1")
        second = evaluate(setup, setup.add_step(1, seed=99))
        assert first["evaluation_id"] != second["evaluation_id"]
        assert len(rows_of(setup)["checkpoints"]) == 2

    @pytest.mark.parametrize("kind", ["transcripts", "hidden_states", "drafter", "blocks"])
    def test_a_vanished_artifact_is_made_again(self, setup: Setup, kind: str) -> None:
        first = evaluate(setup, setup.run / "step_1")
        shutil.rmtree(Store(setup.folder / "store").root / kind)
        again = evaluate(setup, setup.run / "step_1", refresh=["results"])
        assert again["datasets"] == first["datasets"]
        assert again["evaluation_id"] == first["evaluation_id"]
        stage_of = {"transcripts": "write_transcripts", "hidden_states": "extract_hidden_states"}
        stage_of |= {"drafter": "stream_checkpoint", "blocks": "run_drafter"}
        assert [stage for stage, cached in again["cached"].items() if not cached] == [stage_of[kind]]

    def test_a_damaged_artifact_is_not_trusted(self, setup: Setup) -> None:
        first = evaluate(setup, setup.run / "step_1")
        (weights,) = (setup.folder / "store" / "drafter").glob("*/weights.safetensors")
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(data)
        again = evaluate(setup, setup.run / "step_1")
        assert not again["cached"]["stream_checkpoint"]
        assert again["datasets"] == first["datasets"]

    def test_new_labels_regroup_the_rows_without_drafting_again(self, setup: Setup) -> None:
        first = evaluate(setup, setup.run / "step_1")
        prompts = setup.folder / "prompts.jsonl"
        prompts.write_text(prompts.read_text().replace('"odd"', '"uneven"'))
        second = evaluate(setup, setup.run / "step_1")
        assert second["cached"] == dict.fromkeys(STAGES, True)
        assert second["datasets"]["uneven"] == first["datasets"]["odd"]

    def test_shorter_blocks_are_their_own_number(self, setup: Setup) -> None:
        from flows.evaluate_checkpoint import evaluate_checkpoint

        whole = evaluate(setup, setup.run / "step_1")
        short = evaluate_checkpoint(str(setup.run / "step_1"), str(setup.config), 4)
        assert (whole["block_size"], short["block_size"]) == (8, 4)
        assert len(short["datasets"]["all"]["survival"]) == 3
        assert whole["evaluation_id"] != short["evaluation_id"]

    def test_both_ways_to_choose_anchors_give_the_same_numbers(self, setup: Setup) -> None:
        walk = evaluate(setup, setup.run / "step_1")
        setup.change_config(drafter={"anchors": "all"})
        every = evaluate(setup, setup.run / "step_1")
        for name, slice_ in walk["datasets"].items():
            for key in ("num_verification_steps", "num_accepted_drafts", "tau_pooled", "ci_low", "ci_high", "survival"):
                assert every["datasets"][name][key] == slice_[key]
        assert walk["datasets"]["all"]["tau_all_anchors"] is None
        assert every["datasets"]["all"]["tau_all_anchors"] is not None

    def test_a_truncated_file_is_named_and_leaves_no_number(self, setup: Setup) -> None:
        path = setup.run / "step_1" / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises((CheckpointNotReady, CheckpointCorrupt), match="step_1"):
            evaluate(setup, setup.run / "step_1")
        assert not setup.results.exists()

    def test_a_drafter_for_another_target_is_a_failed_row(self, setup: Setup) -> None:
        config = setup.run / "step_1" / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 999}))
        with pytest.raises(CheckpointMismatch, match="vocabulary is 999 .* the target's is 160"):
            evaluate(setup, setup.run / "step_1")
        with duckdb.connect(str(setup.results), read_only=True) as connection:
            found = connection.execute("SELECT status, error FROM evaluations").fetchall()
            assert connection.execute("SELECT count(*) FROM acceptance").fetchone() == (0,)
            (bytes_read,) = connection.execute("SELECT bytes_read FROM evaluations").fetchall()
        assert bytes_read[0] > 0, "its index was read"
        assert len(found) == 1
        assert found[0][0] == "failed"
        assert "vocabulary is 999" in found[0][1]

    def test_a_failure_after_streaming_tells_what_was_read(self, setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_arguments: Any) -> None:
            raise DoesNotFit("no room")

        monkeypatch.setattr("flows.evaluate_checkpoint.ensure_prepared", fail)
        with pytest.raises(DoesNotFit):
            evaluate(setup, setup.run / "step_1")
        monkeypatch.undo()
        shutil.rmtree(setup.folder / "store" / "drafter")
        done = evaluate(setup, setup.run / "step_1")
        with duckdb.connect(str(setup.results), read_only=True) as connection:
            read = dict(connection.execute("SELECT status, bytes_read FROM evaluations").fetchall())
        assert read["failed"] == read["done"] == done["bytes_read"] > 10_000

    @pytest.mark.parametrize("moment", ["before streaming", "while streaming"])
    def test_a_checkpoint_that_is_rotated_away_is_a_vanished_row(
        self, setup: Setup, monkeypatch: pytest.MonkeyPatch, moment: str
    ) -> None:
        step, elsewhere = setup.run / "step_1", setup.folder / "elsewhere"
        module, name = {
            "before streaming": ("flows.evaluate_checkpoint", "probe_hosts"),
            "while streaming": ("dflash_core.progress", "report"),
        }[moment]
        original = getattr(importlib.import_module(module), name)

        def rotate_and_go_on(*arguments: Any, **named: Any) -> Any:
            if step.exists() and (moment == "before streaming" or arguments[0] == "stream_checkpoint"):
                step.rename(elsewhere)
            return original(*arguments, **named)

        monkeypatch.setattr(f"{module}.{name}", rotate_and_go_on)
        with pytest.raises(CheckpointVanished, match="step_1.* while it was read|step_1 vanished before") as caught:
            evaluate(setup, step)
        assert caught.value.exit_status == 1
        assert outcomes(setup) == [("vanished", str(caught.value))]
        assert rows_of(setup)["acceptance"] == []
        assert [row["status"] for row in read_report_data(setup.results).vanished] == ["vanished"]

        # Gone before the first look: nothing is known of it, so there is no second row.
        with pytest.raises(CheckpointNotFound):
            evaluate(setup, step)
        assert len(outcomes(setup)) == 1

        monkeypatch.setattr(f"{module}.{name}", original)
        elsewhere.rename(step)
        assert evaluate(setup, step)["status"] == "done"
        assert [status for status, _ in outcomes(setup)] == ["done", "vanished"]
        assert len(rows_of(setup)["checkpoints"]) == 1
        assert read_report_data(setup.results).vanished == (), "scored since"

        # And what vanishes after it was scored leaves its numbers alone.
        numbers = rows_of(setup)
        shutil.rmtree(Store(setup.folder / "store").root / "drafter")
        monkeypatch.setattr(f"{module}.{name}", rotate_and_go_on)
        with pytest.raises(CheckpointVanished):
            evaluate(setup, step)
        assert [status for status, _ in outcomes(setup)] == ["done", "vanished"]
        assert rows_of(setup) == numbers


@pytest.mark.usefixtures("prefect_api")
@pytest.mark.parametrize("stage", ["transcripts", "hidden_states", "drafter", "blocks", "write_results"])
def test_a_run_killed_in_any_stage_finishes_with_the_same_rows(tmp_path: Path, stage: str) -> None:
    """SIGKILL while a stage is at work, then start again: the same rows as a run that was left alone."""
    setup = make_setup(tmp_path / "s")
    undisturbed = make_setup(tmp_path / "u")
    shutil.rmtree(undisturbed.run)
    shutil.copytree(setup.run, undisturbed.run, copy_function=shutil.copy2)
    killed = subprocess.run(
        [sys.executable, "-c", _KILL_IN_STAGE, stage, str(setup.run / "step_1"), str(setup.config)],
        env=os.environ | {"PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    assert not has_tables(setup) or rows_of(setup)["blocks"] == []
    result = evaluate(setup, setup.run / "step_1")
    assert result["status"] == "done"
    evaluate(undisturbed, undisturbed.run / "step_1")
    for table in ("blocks", "acceptance", "survival", "prompts"):
        assert rows_of(setup)[table] == rows_of(undisturbed)[table], table


_KILL_IN_STAGE = """
import os, signal, sys
stage, checkpoint, config = sys.argv[1:]
import dflash_core.store as store
from flows.evaluate_checkpoint import evaluate_checkpoint
import tasks.write_results as results
from dflash_core.results import connection

def die(*_args, **_kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

if stage == "write_results":
    # Killed inside the transaction: rows were inserted, nothing is committed.
    from dflash_core.results import database
    original = database._insert
    def insert_then_die(*args):
        original(*args)
        die()
    database._insert = insert_then_die
else:
    original = store.Store._publish
    def publish(self, kind, key, write):
        if kind != stage:
            return original(self, kind, key, write)
        def write_then_die(folder):
            write(folder)
            die()
        return original(self, kind, key, write_then_die)
    store.Store._publish = publish
evaluate_checkpoint(checkpoint, config)
"""


@pytest.mark.usefixtures("prefect_api")
class TestMachine:
    def test_a_target_that_does_not_fit_is_refused_before_it_is_loaded(
        self, setup: Setup, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from dflash_core.hosts import probe

        original = probe.probe_hosts

        def small_machine(config: Any) -> list[Any]:
            (report,) = original(config)
            return [replace(report, facts=replace(report.facts, ram_available_bytes=300 * 2**20))]

        monkeypatch.setattr(probe, "probe_hosts", small_machine)
        before = runtime.num_forward_passes
        with pytest.raises(DoesNotFit, match=r"the target in float32 needs 0\.5 GiB, 0\.3 GiB available on host local"):
            evaluate(setup, setup.run / "step_1")
        assert runtime.num_forward_passes == before
        monkeypatch.setattr(probe, "probe_hosts", original)
        evaluate(setup, setup.run / "step_1")
        monkeypatch.setattr(probe, "probe_hosts", small_machine)
        # What is prepared needs no target in memory.
        assert evaluate(setup, setup.add_step(2))["status"] == "done"

    def test_scoring_asks_no_other_host(self, setup: Setup) -> None:
        setup.change_config(hosts={"away": {"url": "ssh://me@203.0.113.1", "timeout_s": 60}})
        result = evaluate(setup, setup.run / "step_1")
        assert result["seconds"]["probe_hosts"] < 30
