"""What a webhook hears of flows and watches: once, after the last try, and never its own address."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from dflash_core import webhook
from dflash_core.config import Config, load_config, parse_config
from dflash_core.errors import CheckpointMismatch, ConfigError, InputError, NotDelivered
from dflash_core.evaluation import now
from dflash_core.results.database import read_evaluation, write_evaluation
from dflash_core.results.news import News
from dflash_core.results.standing import read_standing
from flows import notifying, watching
from flows.scoring import score_checkpoint
from flows.watch_values import RunEnd, StartedRun, WatchEvent
from flows.watching import MAX_ATTEMPTS
from tests.dflash_core.results.builders import make_prompts, make_record
from tests.support.artifacts import read_artifacts
from tests.support.direct import evaluate_directly
from tests.support.hook_server import TOKEN, HookServer, free_port, hook_server
from tests.support.scene import Setup, make_setup
from tests.support.watching import Clock, chain, clean, make_watch, rotating

PROMPTS = make_prompts(16)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(webhook, "PAUSES_S", (0.01, 0.01))
    monkeypatch.setattr("dflash_core.notices.PAUSES_S", (0.01, 0.01))


@pytest.fixture
def server() -> Iterator[HookServer]:
    with hook_server() as state:
        yield state


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    """A set-up whose target is prepared."""
    made = make_setup(tmp_path_factory.mktemp("notify") / "s")
    evaluate_directly(load_config(str(made.config)), made.run / "step_1")
    return made


@pytest.fixture
def setup(scene: Setup, server: HookServer, monkeypatch: pytest.MonkeyPatch) -> Setup:
    """The same with two steps, a new database, nothing delivered, and the webhook in the environment."""
    clean(scene, (1, 2))
    for name in ("news", "unsent"):
        shutil.rmtree(scene.folder / "store" / name, ignore_errors=True)
    monkeypatch.setenv("HOOK", server.url)
    scene.change_config(notify={"url_env": "HOOK"})
    return scene


def config_of(tmp_path: Path, **notify: Any) -> Config:
    data = {"store": str(tmp_path / "store"), "results": str(tmp_path / "a.duckdb"), "notify": notify}
    return parse_config(data, where="x")


def record(config: Config, step: int, quality: float, **changes: Any) -> str:
    """Store an evaluation of just now and return its id."""
    made = make_record(f"e{step}", step=step, quality=quality, seed=4, prompts=PROMPTS, walk_only=True, **changes)
    age = changes.get("minutes", 0)
    write_evaluation(config.results, dataclasses.replace(made, started_at=now() - timedelta(minutes=age)))
    return made.evaluation_id


def tell(config: Config, evaluation_id: str, say: Any = None) -> None:
    notifying.tell_done(config, read_standing(config.results, evaluation_id, config.baseline), say=say)


def payload(text: str) -> dict[str, Any]:
    return {"event": "best", "text": text, "run": "run-a", "step": 1}


class TestDone:
    def test_best_and_regressed_are_told_once_each(self, tmp_path: Path, server: HookServer) -> None:
        config = config_of(tmp_path, url=server.url)
        for step, quality in ((1, 0.4), (2, 0.8), (3, 0.3)):
            evaluation_id = record(config, step, quality)
            tell(config, evaluation_id)
            tell(config, evaluation_id)  # a restart
            notifying.tell_known(config, read_evaluation(config.results, evaluation_id) or {})
        assert server.events == [("best", 2), ("regressed", 3)]
        assert server.received[0]["certain"] is True
        assert server.received[1]["text"].startswith("regressed: run-a:3, tau ")

    def test_only_what_is_wanted_is_told(self, tmp_path: Path, server: HookServer) -> None:
        config = config_of(tmp_path, url=server.url, events=["regressed"])
        for step, quality in ((1, 0.4), (2, 0.8), (3, 0.3)):
            tell(config, record(config, step, quality))
        assert server.events == [("regressed", 3)]

    def test_an_evaluation_found_known_tells_what_its_killed_maker_could_not(
        self, tmp_path: Path, server: HookServer
    ) -> None:
        config = config_of(tmp_path, url=server.url)
        record(config, 1, 0.4)
        known = read_evaluation(config.results, record(config, 2, 0.8))
        assert known is not None
        notifying.tell_known(config, known)
        assert server.events == [("best", 2)]

    def test_old_evaluations_are_no_news(self, tmp_path: Path, server: HookServer) -> None:
        """A webhook that is added to a run of months is not told all of it."""
        config = config_of(tmp_path, url=server.url)
        record(config, 1, 0.4, minutes=3000)
        old = record(config, 2, 0.8, minutes=2000)
        tell(config, old)
        notifying.tell_known(config, read_evaluation(config.results, old) or {})
        assert server.num_requests == 0

    def test_without_a_webhook_nothing_is_sent_or_stored(self, tmp_path: Path, server: HookServer) -> None:
        config = config_of(tmp_path)
        record(config, 1, 0.4)
        tell(config, record(config, 2, 0.8))
        assert server.num_requests == 0
        assert not (tmp_path / "store").exists()

    def test_of_two_news_that_could_not_be_sent_none_is_lost(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The best of its run may be the first that is told to be below the baseline."""
        news = [News(event="best", key=2 * letter, payload=payload(letter)) for letter in "ab"]
        monkeypatch.setattr(notifying, "news_of", lambda _standing: news)
        port = free_port()
        config = config_of(tmp_path, url=f"http://127.0.0.1:{port}/{TOKEN}")
        told: list[str] = []
        evaluation_id = record(config, 1, 0.3)
        tell(config, evaluation_id, told.append)
        assert len(told) == 2
        monkeypatch.setattr(notifying, "news_of", lambda _standing: [])
        with hook_server(port) as server:
            tell(config, evaluation_id, told.append)
            assert sorted(one["text"] for one in server.received) == ["a", "b"]

    def test_down_then_slow_then_failing_then_working(self, tmp_path: Path) -> None:
        port = free_port()
        config = config_of(tmp_path, url=f"http://127.0.0.1:{port}/{TOKEN}", timeout_s=0.2)
        told: list[str] = []
        record(config, 1, 0.3)
        best = record(config, 2, 0.5)
        tell(config, best, told.append)
        with hook_server(port) as server:
            server.answers = ["hang", "hang", "hang", "hang"]
            tell(config, best, told.append)
            server.answers = [500, 500, 500, 500]
            tell(config, best, told.append)
            assert server.received == []
            tell(config, best, told.append)
            tell(config, record(config, 3, 0.8), told.append)
            assert server.events == [("best", 2), ("best", 3)]
        reasons = ["the server refused the connection", "no answer within 0.2 s", "the server answered with status 500"]
        assert told == [
            f"run-a:2: the notification was not delivered in 3 tries: {reason}; see `notify`" for reason in reasons
        ]


class TestProblems:
    def test_none_of_them_shows_the_address_or_ends_the_evaluation(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        told: list[str] = []
        monkeypatch.setenv("AUTH", f"{TOKEN}\nX: y")
        record(config_of(tmp_path), 1, 0.4)
        standing = read_standing(str(tmp_path / "a.duckdb"), record(config_of(tmp_path), 2, 0.8))
        for notify in (
            {"url": f"http://127.0.0.1:{free_port()}/{TOKEN}"},
            {"url": f"http://127.0.0.1:9/{TOKEN} x"},
            {"url": f"http://127.0.0.1:9/{TOKEN}", "headers_env": {"Authorization": "AUTH"}},
            {"url": f"http://127.0.0.1:9/{TOKEN}", "headers_env": {"A": "NOT_SET"}},
            {"url_env": "NOT_SET"},
        ):
            config = config_of(tmp_path, **notify)
            notifying.tell_done(config, standing, say=told.append)
            notifying.tell_done(config, standing)
        assert len(told) == 5
        assert len(caplog.records) == 5
        assert TOKEN not in "".join(told) + caplog.text
        assert "NOT_SET, which is not set here" in told[-1]

    def test_what_nobody_expected_is_told_by_its_kind_alone(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def break_down(*_arguments: Any, **_settings: Any) -> None:
            raise RuntimeError(f"http://h/{TOKEN}")

        monkeypatch.setattr(notifying, "deliver", break_down)
        config = config_of(tmp_path, url=f"http://h/{TOKEN}")
        told: list[str] = []
        record(config, 1, 0.4)
        tell(config, record(config, 2, 0.8), told.append)
        assert told == ["run-a:2: the notification could not be sent (RuntimeError)"]

    def test_the_test_message_arrives_or_says_why_not(self, tmp_path: Path, server: HookServer) -> None:
        notifying.send_test(config_of(tmp_path, url=server.url))
        assert server.received[0]["event"] == "test"
        with pytest.raises(InputError, match="no webhook is configured"):
            notifying.send_test(config_of(tmp_path))
        with pytest.raises(ConfigError, match="NOT_SET"):
            notifying.send_test(config_of(tmp_path, url_env="NOT_SET"))
        server.answers = [404]
        with pytest.raises(NotDelivered, match="status 404") as caught:
            notifying.send_test(config_of(tmp_path, url=server.url))
        assert TOKEN not in "".join(traceback.format_exception(caught.value))


class TestWatch:
    @pytest.fixture(autouse=True)
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> Clock:
        clock = Clock()
        monkeypatch.setattr(watching, "time", clock)
        return clock

    def test_a_failure_is_told_after_the_last_try_and_once(
        self, setup: Setup, server: HookServer, clock: Clock
    ) -> None:
        tries: list[tuple[str, int]] = []

        def fail(checkpoint: str) -> dict[str, Any]:
            tries.append((checkpoint[-6:], server.num_requests))
            assert notifying.is_watched()
            raise ValueError("out of luck")

        for _ in range(2):  # the second is a restart: all is tried again, and known to have been told
            events: list[WatchEvent] = []
            watch = make_watch(setup, events, fail)
            watch.run(once=False, every_s=1, stop=lambda watch=watch: len(watch.failures) == 2)  # type: ignore[misc]
        assert sorted(server.events) == [("failed", 1), ("failed", 2)]
        first = [sent for name, sent in tries if name == "step_1"][:MAX_ATTEMPTS]
        assert first == [0, 0, 0], "nothing before the last try"
        assert server.received[0]["error"] == "ValueError: out of luck"
        assert not notifying.is_watched()

    def test_two_watches_tell_it_once(self, setup: Setup, server: HookServer) -> None:
        def fail(_checkpoint: str) -> dict[str, Any]:
            raise CheckpointMismatch("made for another target")

        for _ in range(2):
            make_watch(setup, [], fail).run(once=True, every_s=1)
        assert sorted(server.events) == [("failed", 1), ("failed", 2)]

    def test_new_bytes_that_fail_are_told_again(self, setup: Setup, server: HookServer) -> None:
        def fail(_checkpoint: str) -> dict[str, Any]:
            raise CheckpointMismatch("made for another target")

        make_watch(setup, [], fail).run(once=True, every_s=1)
        shutil.rmtree(setup.run / "step_1")
        setup.add_step(1, seed=99)
        make_watch(setup, [], fail).run(once=True, every_s=1)
        assert sorted(server.events) == [("failed", 1), ("failed", 1), ("failed", 2)]

    def test_runs_elsewhere_that_are_used_up_are_told(self, setup: Setup, server: HookServer) -> None:
        class Failing:
            def start(self, inspection: Any) -> StartedRun:
                return StartedRun(id=inspection.ref.url, name="evaluate")

            def ended(self, runs: Any) -> dict[str, RunEnd]:
                return {run.id: RunEnd(error="Failed: no GPU", is_final=True) for run in runs}

        make_watch(setup, [], runs=Failing()).run(once=True, every_s=1)
        assert sorted(server.events) == [("failed", 1), ("failed", 2)]
        assert "Failed: no GPU" in server.received[0]["text"]

    def test_what_is_rotated_away_is_no_failure(self, setup: Setup, server: HookServer) -> None:
        config = load_config(str(setup.config))
        make_watch(setup, [], rotating(setup, "step_1", chain(config))).run(once=True, every_s=1)
        assert [event for event, _ in server.events] in ([], ["best"])

    def test_a_webhook_that_is_down_does_not_stop_the_watch(
        self, setup: Setup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv("HOOK", f"http://127.0.0.1:{free_port()}/{TOKEN}")

        def fail(_checkpoint: str) -> dict[str, Any]:
            raise ValueError("out of luck")

        watch = make_watch(setup, [], fail)
        watch.run(once=True, every_s=1)
        assert len(watch.failures) == 2
        assert caplog.text.count("the server refused the connection") == 2
        assert TOKEN not in caplog.text


@pytest.mark.usefixtures("prefect_api")
class TestFlow:
    def break_step(self, setup: Setup, step: int) -> str:
        config = setup.run / f"step_{step}" / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 999}))
        return str(setup.run / f"step_{step}")

    def test_a_flow_that_nobody_watches_tells_its_failure_once(self, setup: Setup, server: HookServer) -> None:
        from flows.evaluate_checkpoint import evaluate_checkpoint

        checkpoint = self.break_step(setup, 1)
        for _ in range(2):
            with pytest.raises(CheckpointMismatch):
                evaluate_checkpoint(checkpoint, str(setup.config))
        assert server.events == [("failed", 1)]
        assert "vocabulary is 999" in server.received[0]["text"]

    def test_a_watched_flow_leaves_it_to_the_watch(self, setup: Setup, server: HookServer) -> None:
        from prefect import tags

        from flows.evaluate_checkpoint import evaluate_checkpoint

        checkpoint = self.break_step(setup, 1)
        with notifying.watched(), pytest.raises(CheckpointMismatch):
            evaluate_checkpoint(checkpoint, str(setup.config))
        with tags(notifying.WATCHED_TAG), pytest.raises(CheckpointMismatch):
            evaluate_checkpoint(checkpoint, str(setup.config))
        assert server.num_requests == 0

    def test_no_log_row_artifact_or_file_holds_the_address(
        self, setup: Setup, server: HookServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        from flows.evaluate_checkpoint import evaluate_checkpoint

        setup.change_config(notify={"url": server.url})
        server.answers = [500] * 4
        with caplog.at_level(logging.DEBUG), pytest.raises(CheckpointMismatch):
            evaluate_checkpoint(self.break_step(setup, 2), str(setup.config))
        evaluate_checkpoint(str(setup.run / "step_1"), str(setup.config))
        assert server.num_requests >= 4
        assert "the notification was not delivered" in caplog.text
        # What Prefect's client logs of its own requests at DEBUG are its own addresses.
        assert TOKEN not in caplog.text
        assert not any(TOKEN in json.dumps(one.data, default=str) for one in read_artifacts())
        files = [path for path in setup.folder.rglob("*") if path.is_file() and path != setup.config]
        assert setup.results in files
        assert not [path for path in files if TOKEN.encode() in path.read_bytes()]


def test_an_answer_from_the_database_costs_nothing_where_no_webhook_is_set(
    scene: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    clean(scene, (1,))
    scene.change_config(notify={})
    config = load_config(str(scene.config))
    checkpoint = str(scene.run / "step_1")
    score_checkpoint(config, checkpoint, chain(config))

    def never(*_arguments: Any, **_settings: Any) -> None:
        raise AssertionError("nobody asked for it")

    monkeypatch.setattr(notifying, "read_standing", never)
    assert score_checkpoint(config, checkpoint, never).is_known  # type: ignore[arg-type]
