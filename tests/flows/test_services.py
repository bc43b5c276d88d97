"""`up` and `down` for real: server, workers and watch start, score a run, and nothing of them is left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dflash_core.errors import InputError, NoResults
from dflash_core.results.connection import reading
from flows.services import Running, Services
from tests.support.network import attempts, deny_network
from tests.support.scene import Setup, make_setup


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def processes_of(state: Path) -> dict[int, str]:
    """Return the processes whose environment names this state folder."""
    mark = f"PREFECT_HOME={state / 'prefect'}".encode()
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
    return found


def wait_until_gone(process: Running) -> None:
    """A signal is sent, not delivered, when `kill` returns: on a busy machine its receiver runs on for a while."""
    end = time.monotonic() + 30
    while process.is_alive():
        assert time.monotonic() < end, f"{process} outlived SIGKILL"
        time.sleep(0.01)


def statuses(setup: Setup) -> list[str]:
    """Return how the evaluations ended that are in the database by now."""
    try:
        with reading(setup.results) as connection:
            return [status for (status,) in connection.execute("SELECT status FROM evaluations").fetchall()]
    except NoResults:
        return []


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc")
def test_up_scores_a_run_and_down_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup: Setup = make_setup(tmp_path / "s")
    state = tmp_path / "state"
    arguments = ("--state", str(state), "--port", str(free_port()), "--json")
    monkeypatch.setenv("PREFECT_WORKER_QUERY_SECONDS", "1")
    for name, value in deny_network(tmp_path / "attempts").items():
        monkeypatch.setenv(name, value)
    try:
        first = setup.cli("up", str(setup.run), *arguments)
        assert first.returncode == 0, first.stderr
        pids = json.loads(first.stdout)["services"]
        assert set(pids) == {"server", "worker-cpu", "worker-gpu", "watch"}
        again = setup.cli("up", str(setup.run), *arguments)
        assert json.loads(again.stdout)["services"] == pids, "what runs is left alone"
        # One worker is killed: the next `up` starts that one alone.
        killed = Services(state).running()["worker-cpu"]
        os.killpg(killed.pid, signal.SIGKILL)
        wait_until_gone(killed)
        third = setup.cli("up", str(setup.run), *arguments)
        now = json.loads(third.stdout)["services"]
        assert {name for name in pids if now[name] != pids[name]} == {"worker-cpu"}
        end = time.monotonic() + 120
        while (found := statuses(setup)) == [] and time.monotonic() < end:
            time.sleep(0.5)
        assert found == ["done"], (state / "services" / "watch.log").read_text()[-2000:]
    finally:
        last = setup.cli("down", "--state", str(state), "--json")
    assert last.returncode == 0, last.stderr
    assert json.loads(last.stdout)["ended"] == ["watch", "worker-gpu", "worker-cpu", "server"]
    assert attempts(tmp_path / "attempts") == [], "nothing is asked of the internet"
    assert processes_of(state) == {}
    assert json.loads(setup.cli("down", "--state", str(state), "--json").stdout) == {"ended": []}


def test_down_ends_nobody_else(tmp_path: Path) -> None:
    """The pid in the file is another process's by now: it started at another time."""
    services = Services(tmp_path)
    services.folder.mkdir(parents=True)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        (services.folder / "server.json").write_text(json.dumps({"pid": other.pid, "started": "1"}))
        assert not Running(pid=other.pid, started="1").is_alive()
        assert services.running() == {}
        assert services.down(say=lambda text: None) == []
        assert other.poll() is None
        assert not (services.folder / "server.json").exists()


def test_a_server_of_somebody_else_is_not_used(tmp_path: Path, prefect_api: str) -> None:
    port = int(prefect_api.removesuffix("/api").rpartition(":")[2])
    with pytest.raises(InputError, match="somebody else"):
        Services(tmp_path, port=port).up(run_url=None, config=None, say=lambda text: None)


def test_the_automation_for_lost_runs_is_made_once(prefect_api: str) -> None:
    from prefect.client.orchestration import get_client

    from flows.lost_runs import NAME, ensure_automation

    assert [ensure_automation(), ensure_automation()] == [True, False]
    with get_client(sync_client=True) as client:
        (automation,) = client.read_automations_by_name(NAME)
        assert automation.enabled
        client.delete_automation(automation.id)
