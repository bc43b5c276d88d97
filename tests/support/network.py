"""Programs that can reach this machine alone: by a hook in each Python process, and by the kernel where it may be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).parents[2]
HOOK = Path(__file__).parent / "no_network"
VARIABLES = ("HF_HUB_OFFLINE", "DO_NOT_TRACK", "PREFECT_SERVER_ANALYTICS_ENABLED", "PREFECT_API_URL")
"""What the tests set for themselves; a user has none of them."""
# A loopback interface of one's own is down at first; SIOCSIFFLAGS with IFF_UP and IFF_RUNNING.
_LOOPBACK_UP = """
import fcntl, os, socket, struct, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
    fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh14x", b"lo", 0x1 | 0x40))
os.execv(sys.argv[1], sys.argv[1:])
"""


def deny_network(log: Path) -> dict[str, str]:
    """Return variables under which Python processes, and those that they start, are refused the network.

    Args:
        log: where what they ask for is recorded.
    """
    log.touch()
    path = os.pathsep.join([str(HOOK), str(PROJECT)])
    return {"PYTHONPATH": path, "NETWORK_ATTEMPTS": str(log)}


def attempts(log: Path) -> list[str]:
    """Return what was asked for."""
    return log.read_text(encoding="utf-8").splitlines()


def without_network(command: list[str]) -> list[str]:
    """Return a command that runs in a network of its own, in which there is nothing but itself."""
    return ["unshare", "--net", sys.executable, "-c", _LOOPBACK_UP, *command]


def why_no_own_network() -> str | None:
    """Return why this user cannot give a program a network of its own; None where it can."""
    if not sys.platform.startswith("linux"):
        return "networks of one's own are Linux'"
    try:
        done = subprocess.run(
            without_network(["/bin/true"]), capture_output=True, text=True, timeout=60, env=os.environ | {"LC_ALL": "C"}
        )
    except OSError as error:
        return f"unshare cannot be run: {error}"
    return None if done.returncode == 0 else f"unshare: {done.stderr.strip()[-200:]}"
