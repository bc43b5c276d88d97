"""What a watch takes for a fault that may pass, and what it does about servers and runs that are lost."""

from __future__ import annotations

import argparse
import errno
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from dflash_core.config import load_config
from dflash_core.errors import (
    CheckpointCorrupt,
    CheckpointNotFound,
    DoesNotFit,
    HostUnreachable,
    ResultsError,
    TargetError,
)
from flows import watch_command, watching
from flows.commands import _Scorer
from flows.watch_errors import is_passing, is_passing_kind
from flows.watch_values import WatchEvent
from flows.watching import MAX_ATTEMPTS, MAX_HOST_ATTEMPTS
from tests.support.scene import Setup, make_setup
from tests.support.soak_processes import kill, parent_of
from tests.support.watching import Clock, chain, make_watch

REQUEST = httpx.Request("POST", "http://127.0.0.1/api")


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return make_setup(tmp_path / "s")


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        DoesNotFit("0.05 GB are needed, 0.00 GB are free"),
        ResultsError("the results database answered: IO Error: No space left on device"),
        HostUnreachable("box is away"),
        httpx.ConnectError("refused"),
        httpx.HTTPStatusError("busy", request=REQUEST, response=httpx.Response(503, request=REQUEST)),
        RuntimeError("Failed to reach API at http://127.0.0.1:4200/api/"),
    ],
)
def test_faults_of_machines_may_pass(error: Exception) -> None:
    assert is_passing(error)


@pytest.mark.parametrize(
    "error",
    [
        CheckpointCorrupt("the bytes of record 'data/0' have another CRC-32"),
        CheckpointNotFound("nothing lies there"),
        TargetError("no such target"),
        ValueError("out of luck"),
        RuntimeError("CUDA error"),
        httpx.HTTPStatusError("no", request=REQUEST, response=httpx.Response(404, request=REQUEST)),
    ],
)
def test_other_faults_stay_until_somebody_acts(error: Exception) -> None:
    assert not is_passing(error)


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("OSError", True),
        ("HostUnreachable", True),
        ("DoesNotFit", True),
        ("PreparationFailed", True),
        ("CheckpointNotFound", False),
        ("TargetError", False),
        ("ValueError", False),
        ("print", False),
        ("", False),
    ],
)
def test_of_a_run_elsewhere_the_name_of_the_error_tells(name: str, is_one: bool) -> None:
    assert is_passing_kind(name) == is_one


def test_a_disk_that_is_full_for_half_an_hour_loses_nothing(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, events = Clock(), list[WatchEvent]()
    monkeypatch.setattr(watching, "time", clock)
    score = chain(load_config(str(setup.config)))

    def evaluate(checkpoint: str) -> dict[str, object]:
        if clock.passed < 1800:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return score(checkpoint)

    watch = make_watch(setup, events, evaluate)
    watch.run(once=False, every_s=10, stop=lambda: bool(watch.results or watch.failures))
    assert watch.failures == {}
    assert len(watch.results) == 1
    failed = [event.message for event in events if event.kind == "failed"]
    assert MAX_ATTEMPTS < len(failed) < MAX_HOST_ATTEMPTS
    assert "No space left on device; attempt 1 of 14" in failed[0]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for a child process in /proc")
def test_a_server_of_its_own_that_was_killed_is_replaced(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a process of its own it would be the same: what scores keeps the server, and asks it before each run."""
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PREFECT_SERVER_DATABASE_CONNECTION_URL", raising=False)
    options = argparse.Namespace(
        config=str(setup.config), block_size=None, device=None, json=True, debug=False, refresh=[]
    )
    from prefect.settings import PREFECT_API_URL, temporary_settings

    others = own_servers()  # the one of the tests, which other tests still need
    no_server = temporary_settings(restore_defaults={PREFECT_API_URL})
    with no_server, _Scorer(load_config(str(setup.config)), options) as score:
        assert score.run_flow(str(setup.run / "step_1"))["status"] == "done"
        (first,) = own_servers() - others
        kill(first)
        os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
        assert score.run_flow(str(setup.add_step(2)))["status"] == "done"
        (second,) = own_servers() - others
        assert second != first
    assert own_servers() == others


def own_servers() -> set[int]:
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            is_server = b"flows.local_server" in (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if is_server and parent_of(int(folder.name)) == os.getpid():
            found.add(int(folder.name))
    return found


def test_a_watch_that_starts_while_prefects_server_is_away_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    monkeypatch.setattr(watch_command, "time", clock)
    monkeypatch.setattr(clock, "strftime", lambda form: "12:00:00", raising=False)

    class Away:
        deployment = "evaluate-checkpoint/evaluate-checkpoint"

        def require_deployment(self) -> None:
            if clock.passed < 1000:
                raise HostUnreachable("the Prefect server does not answer: refused; see PREFECT_API_URL")

    runs: Any = Away()
    watch_command._require_deployment(runs, must_answer=False)
    assert clock.passed >= 1000
    assert max(clock.pauses) == watching.LONGEST_PAUSE_S
    assert "asking again in 2 s" in capsys.readouterr().err
    clock.now = 1000.0
    with pytest.raises(HostUnreachable):
        watch_command._require_deployment(runs, must_answer=True)
