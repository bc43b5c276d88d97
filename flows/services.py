"""`dflash-eval up` and `down`: Prefect's server, a worker per pool and a watch on one machine.

    <state>/prefect/            Prefect's home: its database, its records
    <state>/services/<name>.json   pid, and when that process started: a pid alone may be another's by now
    <state>/services/<name>.log
    <state>/services/lock       one `up` or `down` at a time

What runs is left alone, so `up` may be run as often as one likes. `down` ends what `up` started and
nothing else, each with its children, the watch first and the server last.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from dflash_core.errors import DFlashEvalError, InputError
from flows.orchestration import is_healthy

DEFAULT_STATE = "~/.local/state/dflash-eval"
DEFAULT_PORT = 4200
HEARTBEAT_S = 30
START_LIMIT_S = 180.0
STOP_LIMIT_S = 20.0
ROOT = Path(__file__).resolve().parents[1]
EVALUATE = "evaluate-checkpoint/evaluate-checkpoint"
POOLS = ("cpu", "gpu")
_ORDER = ("watch", "worker-gpu", "worker-cpu", "server")
"""In which they are ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Running:
    """A process that `up` started; it leads a group of its own."""

    pid: int
    started: str
    """The kernel's start time of that process, so that its pid cannot be mistaken for a later one's."""

    def is_alive(self) -> bool:
        """Tell whether this very process still runs."""
        return _start_of(self.pid) == self.started


class Services:
    """The processes of one state folder."""

    def __init__(self, state: str | Path | None = None, *, port: int | None = None) -> None:
        """Take the folder of their state and the server's port; None takes the defaults."""
        self.state = Path(state or DEFAULT_STATE).expanduser().absolute()
        self.folder = self.state / "services"
        self.port = port or DEFAULT_PORT
        self.url = f"http://127.0.0.1:{self.port}/api"

    def up(
        self, *, run_url: str | None, config: str | None, watch_options: Sequence[str] = (), say: Callable[[str], None]
    ) -> dict[str, int]:
        """Start what does not run yet and return the pid of each service.

        Args:
            run_url: what to watch; None starts no watch.
            config: the configuration file for watch and evaluations.
            watch_options: further options of `dflash-eval watch`.
            say: is told each step.

        Raises:
            InputError: this is no clone, or the port belongs to another program.
            DFlashEvalError: a service did not start.
        """
        if not (ROOT / "prefect.yaml").exists():
            raise InputError(f"{ROOT} holds no prefect.yaml; run `up` from a clone of the project")
        with self._lock():
            self._start("server", _python("prefect", "server", "start", "--port", str(self.port)), say)
            self._wait_for_server()
            is_prepared = self._prepared_for() == str(self.running()["server"].pid)
            if not is_prepared:
                say("making the pools")
                self._together(_python("flows.pools", *POOLS))
            for pool in POOLS:
                limit = ["--limit", "1"] if pool == "gpu" else []
                self._start(f"worker-{pool}", _python("prefect", "worker", "start", "--pool", pool, *limit), say)
            if not is_prepared:
                say("deploying the flows")
                self._together(_python("prefect", "--no-prompt", "deploy", "--all"), _python("flows.lost_runs"))
                self._prepared.write_text(str(self.running()["server"].pid), encoding="utf-8")
            if run_url is not None:
                # Every worker and watch runs in the clone; a relative path is the person's own.
                options = ["--config", str(Path(config).absolute())] if config is not None else []
                address = run_url if "://" in run_url else str(Path(run_url).absolute())
                command = ["watch", address, "--deployment", EVALUATE, *options, *watch_options]
                self._start("watch", _python("flows.cli", *command), say)
        return {name: running.pid for name, running in self.running().items()}

    def down(self, *, say: Callable[[str], None]) -> list[str]:
        """End what runs, and return the names of what was ended."""
        ended = []
        with self._lock():
            for name, running in sorted(self.running().items(), key=lambda item: _ORDER.index(item[0])):
                say(f"ending {name} (pid {running.pid})")
                _end(running)
                ended.append(name)
            for name in _ORDER:
                self._file(name).unlink(missing_ok=True)
        return ended

    def running(self) -> dict[str, Running]:
        """Return the services that run."""
        found = {}
        for name in _ORDER:
            with suppress(FileNotFoundError, ValueError, TypeError):
                running = Running(**json.loads(self._file(name).read_text(encoding="utf-8")))
                if running.is_alive():
                    found[name] = running
        return found

    def _start(self, name: str, command: list[str], say: Callable[[str], None]) -> bool:
        """Start a service unless it runs; True where it was started."""
        if name in self.running():
            say(f"{name} runs already")
            return False
        if name == "server" and is_healthy(self.url, timeout_s=2):
            raise InputError(f"a Prefect server of somebody else answers at {self.url}; give another --port")
        say(f"starting {name}")
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                # A worker whose SIGINT is ignored, as that of a background job of a script, does not end on SIGTERM.
                preexec_fn=_default_interrupt,
            )
        started = _start_of(process.pid)
        if started is None:
            raise DFlashEvalError(f"{name} ended at once; see {self.folder / f'{name}.log'}")
        text = json.dumps(asdict(Running(pid=process.pid, started=started)))
        temporary = self._file(name).with_suffix(".tmp")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(self._file(name))
        return True

    def _wait_for_server(self) -> None:
        end = time.monotonic() + START_LIMIT_S
        while not is_healthy(self.url, timeout_s=2):
            if "server" not in self.running() or time.monotonic() > end:
                raise DFlashEvalError(f"Prefect's server did not start; see {self.folder / 'server.log'}")
            time.sleep(0.2)

    @property
    def _prepared(self) -> Path:
        """Hold the pid of the server that has pools and deployments; each new one gets those of this code."""
        return self.folder / "prepared"

    def _prepared_for(self) -> str:
        return self._prepared.read_text(encoding="utf-8") if self._prepared.exists() else ""

    def _together(self, *commands: list[str]) -> None:
        """Run commands beside each other; each may be run again at any time."""
        started = [
            subprocess.Popen(
                command,
                cwd=ROOT,
                env=self.environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for command in commands
        ]
        shown = [process.communicate()[0] for process in started]
        for command, process, text in zip(commands, started, shown, strict=True):
            if process.returncode != 0:
                raise DFlashEvalError(f"{' '.join(command[2:])!r} failed: {' '.join(text.split())[-300:]}")

    def environment(self) -> dict[str, str]:
        """Return the environment of the services; no telemetry, and everything of Prefect's in the state folder."""
        home = self.state / "prefect"
        home.mkdir(parents=True, exist_ok=True)
        path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
        own = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_SERVER_DATABASE")}
        return own | {
            "PYTHONPATH": path,
            "OMP_WAIT_POLICY": "PASSIVE",
            "DO_NOT_TRACK": "1",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_HOME": str(home),
            "PREFECT_API_URL": self.url,
            "PREFECT_SERVER_API_HOST": "127.0.0.1",
            # Else a server that is killed leaves a slot of a limit taken for ever.
            "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
            # A run that falls silent has crashed; see `flows/lost_runs.py`.
            "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_S),
        }

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    @contextmanager
    def _lock(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _python(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, *arguments]


def _default_interrupt() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _start_of(pid: int) -> str | None:
    """Return when a process started, or None where it does not run (a zombie does not)."""
    try:
        # After the name, which may hold anything: state is the first field, start time the twentieth.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] == "Z" else fields[19]
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return None
    shown = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True)
    return shown.stdout.strip() or None


def _end(running: Running) -> None:
    """End a process and what it started; it leads a group of its own."""
    with suppress(ProcessLookupError):
        os.kill(running.pid, signal.SIGTERM)
    end = time.monotonic() + STOP_LIMIT_S
    while running.is_alive() and time.monotonic() < end:
        with suppress(ChildProcessError):  # not our child where another `up` started it
            os.waitpid(running.pid, os.WNOHANG)
        time.sleep(0.1)
    # What is left of the group, the process itself among them where it did not end.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(running.pid, signal.SIGKILL)
