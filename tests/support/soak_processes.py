"""The processes of a soak: found by a mark in their environment, ended by their own pids."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from flows.orchestration import is_healthy

ROOT = Path(__file__).parents[2]
MARK = "DFLASH_SOAK"
END_LIMIT_S = 60.0


def marked(mark: str) -> dict[int, str]:
    """Return the processes of a soak, this one left out, with their commands."""
    wanted = f"{MARK}={mark}".encode()
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            is_ours = wanted in (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue
        if is_ours and command and int(folder.name) != os.getpid():  # a zombie has no command
            found[int(folder.name)] = command
    return found


def parent_of(pid: int) -> int | None:
    """Return the parent of a process; None where it is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return None


def kill(pid: int) -> None:
    """Send SIGKILL to one process."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def kill_group(pid: int) -> None:
    """Send SIGKILL to the group that a process leads."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


class Watch:
    """A watch that computes by itself, with a Prefect server of its own; started again when it was killed."""

    def __init__(
        self,
        mark: str,
        run_url: str,
        config: Path,
        logs: Path,
        environment: Mapping[str, str],
        options: Sequence[str] = (),
    ) -> None:
        self._command = [
            *(sys.executable, "-m", "tests.support.soak_watch", "watch", run_url, "--config", str(config)),
            *("--every", "2", "--every-idle", "4", "--json", *options),
        ]
        self._mark, self._logs, self._environment = mark, logs, environment
        self._process: subprocess.Popen[bytes] | None = None
        self._is_killed = False
        self._start_at = 0.0
        self.num_started = 0
        self.ended_by_itself: list[int] = []
        """Exit statuses of watches that ended though nobody had asked for it."""

    @property
    def log(self) -> Path:
        """Return the file of what all of them said."""
        return self._logs / "watch.log"

    @property
    def num_scored(self) -> int:
        """Return how often one of them scored a checkpoint."""
        return self.log.read_bytes().count(b" scored ") if self.log.exists() else 0

    @property
    def pid(self) -> int | None:
        """Return the watch's process, where it runs."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    @property
    def server(self) -> tuple[int, int] | None:
        """Return process and port of its Prefect server, where it has one."""
        for pid, command in marked(self._mark).items():
            if "flows.local_server" in command and self.pid is not None and parent_of(pid) == self.pid:
                return pid, int(command.split()[-2])
        return None

    def revive(self) -> None:
        """Start it where it does not run and its time has come."""
        if self._process is not None and (status := self._process.poll()) is not None:
            if not self._is_killed:
                self.ended_by_itself.append(status)
            self._process = None
        if self._process is None and time.monotonic() >= self._start_at:
            self._is_killed = False
            self.num_started += 1
            with self.log.open("ab") as err, (self._logs / f"watch-{self.num_started}.json").open("wb") as out:
                self._process = subprocess.Popen(
                    self._command, cwd=ROOT, env=self._environment, stdout=out, stderr=err, start_new_session=True
                )

    def kill(self, *, start_again_after_s: float) -> bool:
        """Kill it; False where it does not run."""
        pid = self.pid
        if pid is None or self._process is None:
            return False
        self._is_killed = True
        kill(pid)
        self._process.wait(timeout=30)
        self._process = None
        self._start_at = time.monotonic() + start_again_after_s
        return True

    def kill_server(self, *, must_answer: bool) -> bool:
        """Kill its Prefect server; False where it has none yet, or none that answers."""
        server = self.server
        if server is None or (must_answer and not is_healthy(f"http://127.0.0.1:{server[1]}/api", timeout_s=1)):
            return False
        kill(server[0])
        return True

    def end(self) -> int | None:
        """Ask it to end and return its exit status; None where it had to be killed."""
        if self._process is None:
            return None
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(timeout=END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.kill(start_again_after_s=0)
            return None


def wait_until_none(mark: str, *, limit_s: float = 30.0) -> dict[int, str]:
    """Wait until no process of a soak is left, and return those that are, which are then killed."""
    end = time.monotonic() + limit_s
    while (left := marked(mark)) and time.monotonic() < end:
        time.sleep(0.2)
    for pid in left:
        kill(pid)
    return left
