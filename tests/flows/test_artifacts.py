"""What a flow run leaves for a person: a table, a page and its progress; none of them is worth an evaluation."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_core import progress
from dflash_core.config import load_config
from dflash_core.errors import CheckpointMismatch
from dflash_core.results.database import read_evaluation, write_evaluation
from dflash_core.results.standing import read_standing
from flows.artifacts import key_of, leave_result, live_progress, result_markdown, table_rows
from tests.dflash_core.results.builders import make_prompts, make_record
from tests.support.artifacts import read_artifacts
from tests.support.direct import evaluate_directly
from tests.support.scene import Setup, make_setup

KEY = re.compile(r"[a-z0-9-]+")


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    """A set-up whose target is prepared."""
    made = make_setup(tmp_path_factory.mktemp("artifacts") / "s", steps=(1, 2))
    evaluate_directly(load_config(str(made.config)), made.run / "step_1")
    return made


def run_flow(setup: Setup, step: int) -> tuple[Any, str]:
    """Score a step and return the final state and the flow run's id."""
    from flows.evaluate_checkpoint import evaluate_checkpoint

    state = evaluate_checkpoint(str(setup.run / f"step_{step}"), str(setup.config), return_state=True)
    return state, str(state.state_details.flow_run_id)


@pytest.mark.usefixtures("prefect_api")
class TestOfAFlowRun:
    def test_each_leaves_a_table_and_a_page_under_the_keys_of_the_run(self, setup: Setup) -> None:
        for step in (1, 2, 2):  # the last time it is known
            state, flow_run_id = run_flow(setup, step)
            assert state.is_completed()
            left = {one.key: one for one in read_artifacts(flow_run_id)}
            assert set(left) == {"tau-a", "evaluation-a"}, "one history for the whole run"
            standing = read_standing(load_config(str(setup.config)).results, state.result()["evaluation_id"])
            assert left["tau-a"].type == "table"
            assert json.loads(left["tau-a"].data) == table_rows(standing)
            assert left["evaluation-a"].type == "markdown"
            assert left["evaluation-a"].data == result_markdown(standing, state.result())
            assert f"a:{step}" in left["tau-a"].description

    def test_a_failed_run_leaves_the_error(self, setup: Setup) -> None:
        config = setup.add_step(3) / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 999}))
        state, flow_run_id = run_flow(setup, 3)
        with pytest.raises(CheckpointMismatch):
            state.result()
        (left,) = read_artifacts(flow_run_id)
        assert left.key == "evaluation-a"
        assert "vocabulary is 999" in left.data

    def test_one_that_cannot_be_written_is_a_line_in_the_log(
        self, setup: Setup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def refuse(*_arguments: Any, **_settings: Any) -> None:
            raise RuntimeError("Service\nUnavailable")

        monkeypatch.setattr("flows.artifacts.create_table_artifact", refuse)
        with caplog.at_level(logging.WARNING, logger="flows.artifacts"):
            state, flow_run_id = run_flow(setup, 1)
        assert state.is_completed()
        assert [one.key for one in read_artifacts(flow_run_id)] == ["evaluation-a"]
        told = [record.getMessage() for record in caplog.records if "artifact" in record.getMessage()]
        assert told == ["a:1: an artifact could not be written: RuntimeError: Service Unavailable"]

    def test_what_cannot_be_compared_is_a_line_in_the_log(
        self, setup: Setup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def refuse(*_arguments: Any, **_settings: Any) -> None:
            raise ValueError("odd")

        monkeypatch.setattr("flows.conclusion.read_standing", refuse)
        with caplog.at_level(logging.WARNING, logger="flows.artifacts"):
            assert run_flow(setup, 1)[0].is_completed()
        assert "a:1: it could not be compared with others: ValueError: odd" in caplog.text


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for what another thread or process does, with a bound."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.05)


@pytest.mark.usefixtures("prefect_api")
class TestProgress:
    def run(self, work: Callable[[], None], every_s: float) -> str:
        from prefect import flow, runtime

        @flow(name="working")
        def working() -> str:
            with live_progress("a:7", every_s=every_s):
                work()
            return str(runtime.flow_run.id)

        return str(working())

    def test_it_grows_while_the_work_goes_on_and_ends_at_100(self) -> None:
        seen: list[float] = []

        def work() -> None:
            from prefect import runtime

            flow_run_id = str(runtime.flow_run.id)
            for done in (25, 50):
                progress.report("run_drafter", done, 100, f"transcript {done} of 100")
                until(lambda done=done: [float(one.data) for one in read_artifacts(flow_run_id)] == [done])  # type: ignore[misc]
                seen.append(done)
                (one,) = read_artifacts(flow_run_id)
                assert one.description == f"a:7: run drafter, transcript {done} of 100"

        flow_run_id = self.run(work, every_s=0.02)
        assert seen == [25, 50]
        (left,) = read_artifacts(flow_run_id)
        assert (left.type, left.key, float(left.data)) == ("progress", None, 100)
        assert left.description == "a:7: done"

    def test_quick_work_leaves_none(self) -> None:
        flow_run_id = self.run(lambda: progress.report("run_drafter", 1, 2), every_s=60)
        assert read_artifacts(flow_run_id) == []

    def test_work_that_fails_is_not_shown_as_done(self) -> None:
        from prefect import flow

        ids: list[str] = []

        @flow(name="failing")
        def failing() -> None:
            from prefect import runtime

            ids.append(str(runtime.flow_run.id))
            with live_progress("a:7", every_s=0.02):
                progress.report("run_drafter", 1, 4)
                until(lambda: len(read_artifacts(ids[0])) == 1)
                raise ValueError("broken")

        assert failing(return_state=True).is_failed()
        (left,) = read_artifacts(ids[0])
        assert float(left.data) == 25

    def test_a_server_that_does_not_take_it_does_not_stop_the_work(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        asked = threading.Event()

        def refuse(*_arguments: Any, **_settings: Any) -> None:
            asked.set()
            raise RuntimeError("away")

        monkeypatch.setattr("flows.artifacts.create_progress_artifact", refuse)

        def work() -> None:
            progress.report("run_drafter", 1, 2)
            assert asked.wait(60)
            progress.report("run_drafter", 2, 2)

        with caplog.at_level(logging.WARNING, logger="flows.artifacts"):
            self.run(work, every_s=0.02)
        assert "a:7: the progress could not be written: RuntimeError: away" in caplog.text


class TestText:
    def made(self, tmp_path: Path) -> Any:
        path = tmp_path / "a.duckdb"
        prompts = make_prompts(12)
        for name, step, quality in (("e1", 100, 0.3), ("e2", 200, 0.7)):
            write_evaluation(path, make_record(name, step=step, quality=quality, prompts=prompts, minutes=step))
        return read_standing(path, "e2", "100"), read_evaluation(path, "e2")

    def test_the_table_has_a_row_for_each_dataset_with_both_changes(self, tmp_path: Path) -> None:
        standing, _result = self.made(tmp_path)
        rows = table_rows(standing)
        assert [row["dataset"] for row in rows] == ["all", "chat", "code", "math"]
        for row in rows:
            assert re.fullmatch(r"\d\.\d\d to \d\.\d\d", row["95 % interval"])
            assert re.fullmatch(
                r"\+\d\.\d\d \[[+-]\d\.\d\d, \+\d\.\d\d\] against run-a:100", row["against the baseline"]
            )
            assert row["against the step before"] == row["against the baseline"]
        assert rows[0]["tau"] == pytest.approx(standing.tau.tau_pooled, abs=1e-4)

    def test_the_page_says_conditions_warnings_and_what_it_took(self, tmp_path: Path) -> None:
        standing, result = self.made(tmp_path)
        result["warnings"] = ["the head <b>differs</b> | see\nthe *log*"]
        page = result_markdown(standing, result)
        assert "**Warning:** the head &lt;b&gt;differs&lt;/b&gt; \\| see the \\*log\\*" in page
        assert "- block size: 4" in page
        assert "Read 20.5 MB of 100.0 MB from ssh://me@train-box:2222/data/run-a/step\\_200/checkpoint.pt" in page
        assert "0 of 2 stages were answered from the store" in page
        assert "| run drafter | 2.2 | no |" in page

    def test_digests_are_cut_short_and_what_is_not_recorded_is_a_dash(self, tmp_path: Path) -> None:
        standing, result = self.made(tmp_path)
        conditions = standing.conditions._replace(target_identity="5a" * 32, chat_template_digest=None)
        page = result_markdown(dataclasses.replace(standing, conditions=conditions), result)
        assert "- content of the target: 5a5a5a5a5a5a\n" in page
        assert "- transcripts: d1d1d1d1d1d1\n" in page
        assert "- chat template: -\n" in page

    def test_a_result_that_lacks_something_is_a_line_in_the_log(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("flows.artifacts.create_table_artifact", lambda *_arguments, **_settings: None)
        standing, result = self.made(tmp_path)
        with caplog.at_level(logging.WARNING, logger="flows.artifacts"):
            leave_result(standing, {name: value for name, value in result.items() if name != "cached"})
        assert "run-a:200: an artifact could not be written: KeyError: 'cached'" in caplog.text

    @pytest.mark.parametrize("run", ["a", "Run_A", "run-a", "run a", "läuft", "…", "x" * 300, "a--b", "-a"])
    def test_a_key_is_one_that_prefect_takes(self, run: str) -> None:
        assert KEY.fullmatch(key_of("tau", run))
        assert len(key_of("tau", run)) < 320

    def test_each_run_has_a_key_of_its_own(self) -> None:
        names = ["a", "A", "run-a", "run_a", "run a", "Run-a", "a-", "ä", "ö"]
        assert len({key_of("tau", name) for name in names}) == len(names)
        assert key_of("tau", "run-a") == "tau-run-a"
