"""A watch over weeks: hosts that go away, restarts, failures, two watches, signals; only time is faked."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dflash_core.config import load_config
from dflash_core.errors import HostUnreachable
from flows import watching
from flows.watch_choice import Choice
from flows.watch_command import run_watch
from flows.watch_values import WatchEvent
from flows.watching import MAX_ATTEMPTS
from tests.support.direct import evaluate_directly
from tests.support.scene import Setup, make_setup
from tests.support.sftp_server import RecordingSFTPServer
from tests.support.watching import Clock, chain, clean, kinds, make_watch, rows

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    setup = make_setup(tmp_path_factory.mktemp("weeks") / "s")
    evaluate_directly(load_config(str(setup.config)), setup.run / "step_1")
    return setup


@pytest.fixture
def setup(scene: Setup) -> Setup:
    clean(scene, (1, 2))
    return scene


@pytest.fixture
def events() -> list[WatchEvent]:
    return []


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(watching, "time", clock)
    return clock


def test_a_box_that_is_away_for_an_hour_loses_nothing(setup: Setup, events: list[WatchEvent], clock: Clock) -> None:
    with RecordingSFTPServer(setup.run.parent) as server:
        config = load_config(str(setup.config)).model_copy(update={"hosts": {"box": server.host_settings}})
        watch = make_watch(setup, events, chain(config), run_url=server.url("a"), config=config)
        clock.due[200.0] = server.stop
        clock.due[2000.0] = lambda: setup.add_step(3)
        clock.due[3800.0] = server.start
        watch.run(once=False, every_s=10, stop=lambda: len(watch.results) >= 3)
    assert clock.passed > 3800
    assert [name for kind, name in kinds(events) if kind == "scored"] == ["step_1", "step_2", "step_3"]
    assert rows(setup) == [(1, "done"), (2, "done"), (3, "done")]
    away = [event for event in events if event.kind == "unreachable"]
    assert 0 < len(away) < 25, "asked again less and less often"
    assert any(event.message == "answers again" for event in events)


def test_an_idle_look_over_sftp_opens_no_file(setup: Setup, events: list[WatchEvent], clock: Clock) -> None:
    half = setup.run / "step_2" / "model.safetensors"
    half.write_bytes(half.read_bytes()[:-10])
    with RecordingSFTPServer(setup.run.parent) as server:
        config = load_config(str(setup.config)).model_copy(update={"hosts": {"box": server.host_settings}})
        watch = make_watch(setup, events, chain(config), run_url=server.url("a"), config=config)
        watch.run(once=False, every_s=10, stop=lambda: clock.passed > 60)
        assert rows(setup) == [(1, "done")]
        server.forget()
        assert watch.look() == []
        counts = Counter(operation.name for operation in server.ops)
        assert "open" not in counts
        assert counts["scandir"] <= 3, "the run and its two folders"
        clock.now += watching.REOPEN_S
        watch.look()
        assert [operation.name for operation in server.ops].count("open") > 0, "at times it is looked into again"
        assert server.write_attempts == []


def test_a_failed_evaluation_is_tried_again_later_and_holds_up_nobody(
    setup: Setup, events: list[WatchEvent], clock: Clock
) -> None:
    config = load_config(str(setup.config))
    tried: list[float] = []

    def evaluate(checkpoint: str) -> dict[str, Any]:
        if checkpoint.endswith("step_1"):
            tried.append(clock.passed)
            raise ValueError("out of luck")
        return chain(config)(checkpoint)

    watch = make_watch(setup, events, evaluate)
    watch.run(once=False, every_s=10, stop=lambda: bool(watch.failures))
    assert kinds(events)[:2] == [("failed", "step_1"), ("scored", "step_2")]
    assert len(tried) == MAX_ATTEMPTS
    first, second, third = tried
    assert second - first >= 30
    assert third - second >= 120
    assert list(watch.failures.values()) == ["ValueError: out of luck"]
    assert "attempt 1 of 3, the next in 30 s" in events[0].message
    watch.run(once=False, every_s=10, stop=lambda: clock.passed > 5000)
    assert len(tried) == MAX_ATTEMPTS, "given up until its bytes change"
    shutil.rmtree(setup.run / "step_1")
    setup.add_step(1, seed=50)
    watch.run(once=False, every_s=10, stop=lambda: len(tried) > MAX_ATTEMPTS)


def test_a_host_that_goes_away_while_reading_is_given_an_hour(
    setup: Setup, events: list[WatchEvent], clock: Clock
) -> None:
    config = load_config(str(setup.config))

    def evaluate(checkpoint: str) -> dict[str, Any]:
        if clock.passed < 2000:
            raise HostUnreachable("box went away")
        return chain(config)(checkpoint)

    watch = make_watch(setup, events, evaluate)
    watch.run(once=False, every_s=10, stop=lambda: len(watch.results) == 2)
    assert watch.failures == {}
    assert rows(setup) == [(1, "done"), (2, "done")]


def test_what_fails_in_a_single_pass_is_a_failure(setup: Setup, events: list[WatchEvent], clock: Clock) -> None:
    def evaluate(checkpoint: str) -> dict[str, Any]:
        raise ValueError("out of luck")

    watch = make_watch(setup, events, evaluate)
    watch.run(once=True, every_s=1)
    assert len(watch.failures) == 2


def test_a_watch_that_starts_again_scores_nothing_twice_even_with_a_limit(
    setup: Setup, events: list[WatchEvent], clock: Clock
) -> None:
    make_watch(setup, events).run(once=True, every_s=1)
    for step in (3, 4):
        setup.add_step(step)
    shutil.rmtree(setup.run / "step_2")
    setup.add_step(2, seed=77)  # a step number used again for new contents
    config = load_config(str(setup.config))
    evaluated: list[str] = []

    def evaluate(checkpoint: str) -> dict[str, Any]:
        evaluated.append(Path(checkpoint).name)
        return chain(config)(checkpoint)

    events.clear()
    watch = make_watch(setup, events, evaluate, choice=Choice(max_backlog=2))
    watch.run(once=True, every_s=1)
    assert evaluated == ["step_2", "step_3"]
    assert ("known", "step_1") in kinds(events)
    assert ("skipped", "step_4") in kinds(events)
    assert rows(setup) == [(1, "done"), (2, "done"), (2, "done"), (3, "done")]


def test_a_watch_that_starts_again_looks_no_further_for_each_that_is_known(
    setup: Setup, events: list[WatchEvent], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_watch(setup, []).run(once=True, every_s=1)
    setup.add_step(3)
    looks: list[int] = []
    watch = make_watch(setup, events)
    real_look = watch.look

    def look() -> list[Any]:
        looks.append(len(watch.results))
        return real_look()

    monkeypatch.setattr(watch, "look", look)
    watch.run(once=False, every_s=10, stop=lambda: len(watch.results) == 3)
    assert kinds(events) == [("known", "step_1"), ("known", "step_2"), ("scored", "step_3")]
    assert looks == [0, 0, 3], "two looks until they have settled, and one after what took a while"


WATCH_ONCE = """
import sys
from dflash_core.config import load_config
from flows.watching import Watch
from tests.support.direct import evaluate_directly
from dflash_core.results import database

config = load_config(sys.argv[2])

def evaluate(checkpoint):
    evaluated = evaluate_directly(config, checkpoint)
    database.write_evaluation(config.results, evaluated.record)
    print("built", checkpoint.rpartition("/")[2], *evaluated.built, flush=True)
    return database.read_evaluation(config.results, evaluated.record.evaluation_id)

Watch(run_url=sys.argv[1], config=config, evaluate=evaluate, tell=lambda event: None).run(once=True, every_s=1)
"""


def test_two_watches_on_one_folder_do_the_work_once(setup: Setup) -> None:
    for step in (31, 32):  # weights that the store has not seen
        setup.add_step(step)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", WATCH_ONCE, str(setup.run), str(setup.config)]
    both = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    lines = [line for process in both for line in process.communicate(timeout=120)[0].splitlines()]
    assert [process.returncode for process in both] == [0, 0]
    for stage in ("drafter", "blocks"):
        built = Counter(line.split()[1] for line in lines if stage in line.split())
        assert all(count == 1 for count in built.values()), (stage, built)
        assert {"step_31", "step_32"} <= set(built)
    assert rows(setup) == [(step, "done") for step in (1, 2, 31, 32)]


def test_it_says_at_any_time_what_it_waits_for(
    setup: Setup, events: list[WatchEvent], clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    half = setup.run / "step_2" / "model.safetensors"
    half.write_bytes(half.read_bytes()[:-10])
    (setup.run / "step_1" / ".incomplete").touch()
    watch = make_watch(setup, events, choice=Choice(match=("step_*",)))
    setup.add_step(3).rename(setup.run / "other_3")
    watch.run(once=False, every_s=10, stop=lambda: clock.passed > 2000)
    told = [event for event in events if event.kind == "status"]
    assert 2 <= len(told) <= 4, "every ten minutes"
    assert "0 scored, 1 not chosen; waiting for step_1 (a file .incomplete lies in it); step_2 (" in told[0].message
    assert "next look in 120 s" in told[-1].message
    shutil.rmtree(setup.run)
    watch.look()
    assert "nothing lies at" in watch.status()
    setup.run.mkdir()
    watch.look()
    assert watch.status().endswith("waiting for no checkpoint yet")


def options(setup: Setup, **changes: Any) -> argparse.Namespace:
    from flows.cli import build_parser

    values = [part for name, value in changes.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    return build_parser().parse_args(["watch", str(setup.run), *values])


def test_signals_have_it_say_its_status_and_end_well(
    setup: Setup, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(str(setup.config))
    clock.due[60.0] = lambda: os.kill(os.getpid(), signal.SIGUSR1)
    clock.due[90.0] = lambda: os.kill(os.getpid(), signal.SIGTERM)
    before = signal.getsignal(signal.SIGTERM)
    watch = run_watch(config, options(setup), chain(config))
    assert len(watch.results) == 2
    printed = capsys.readouterr()
    assert printed.out == "", "standard output is for the final document"
    assert "status" in printed.err
    assert "2 scored; waiting for the next checkpoint; next look in" in printed.err
    assert "watch ended" in printed.err
    assert signal.getsignal(signal.SIGTERM) is before
