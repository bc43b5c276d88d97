"""Nothing leaves the machine: the whole job with every way out refused, and nothing even tries.

`up` with its server, workers and watch runs under the same refusal in `test_services.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.network import VARIABLES, attempts, deny_network, why_no_own_network, without_network
from tests.support.scene import Setup, make_setup

_TRY = """
import socket, urllib.request
for ask in (
    lambda: socket.getaddrinfo("example.invalid", 80),
    lambda: socket.create_connection(("192.0.2.1", 80), timeout=1),
    lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(("192.0.2.1", 53)),
    lambda: socket.gethostbyname("example.invalid"),
    lambda: urllib.request.urlopen("http://example.invalid/", timeout=1),
):
    try:
        ask()
    except OSError as error:
        assert "refused by a test" in str(error), error
    else:
        raise SystemExit("it was let through")
server = socket.create_server(("127.0.0.1", 0))
socket.create_connection(("localhost", server.getsockname()[1]), timeout=5)
"""


def environment(tmp_path: Path, log: Path) -> dict[str, str]:
    """Return that of a user who has set nothing, with a home of their own."""
    own = {
        name: value for name, value in os.environ.items() if not name.startswith("PREFECT_") and name not in VARIABLES
    }
    (tmp_path / "home").mkdir(exist_ok=True)
    return own | {"HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"} | deny_network(log)


def run(command: list[str], setup: Setup, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=setup.folder, env=env, capture_output=True, text=True, timeout=300)


def test_the_refusal_notices_every_way_out_and_lets_loopback_pass(tmp_path: Path) -> None:
    """The test below can fail."""
    log = tmp_path / "attempts"
    done = subprocess.run(
        [sys.executable, "-c", _TRY], env=environment(tmp_path, log), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert [line.split()[1:3] for line in attempts(log)] == [
        ["socket.getaddrinfo", "'example.invalid'"],
        ["socket.connect", "'192.0.2.1'"],
        ["socket.connect", "'192.0.2.1'"],
        ["socket.gethostbyname", "'example.invalid'"],
        ["socket.getaddrinfo", "'example.invalid'"],
    ]


def test_the_whole_job_asks_nothing_of_the_internet(tmp_path: Path) -> None:
    """With Prefect's own server, which it starts for itself; in a network of its own where the user may have one."""
    why_not = why_no_own_network()
    if why_not is not None and os.environ.get("CI"):
        pytest.fail(f"CI must run this in a network of its own: {why_not}")
    setup = make_setup(tmp_path / "s")
    log = tmp_path / "attempts"
    env = environment(tmp_path, log)
    dflash_eval = [sys.executable, "-m", "flows.cli"]
    checkpoint = str(setup.run / "step_1")
    commands = [
        ["evaluate", checkpoint, "--json"],
        ["report"],
    ]
    for arguments in commands:
        command = [*dflash_eval, *arguments, "--config", str(setup.config)]
        done = run(command if why_not is not None else without_network(command), setup, env)
        assert done.returncode == 0, done.stderr
        if arguments[0] == "evaluate":
            (result,) = json.loads(done.stdout)
            assert result["status"] == "done"
            assert not any(result["cached"].values()), "everything was computed"
    assert attempts(log) == []
    if why_not is not None:
        pytest.skip(f"passed with the hook alone; no network of its own: {why_not}")
