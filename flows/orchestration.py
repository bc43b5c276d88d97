"""Prefect for one process: its settings, and a server of our own where none is configured.

Nothing here imports Prefect; `prepare_environment` must run before the first import of it. A server
that we start ends with us, also after SIGKILL: it watches its parent (see `flows/local_server.py`).
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_core.errors import HostError, HostUnreachable
from dflash_core.store import Store

STARTUP_LIMIT_S = 180.0
"""The first start migrates a new database, which took 31 s on a loaded machine."""
START_ATTEMPTS = 3
OWN_SERVER_RETRIES = 4
"""Of each request to a server of our own, half a minute in all: one that does not answer for so long was killed."""


def prepare_environment(store: str, *, debug: bool = False) -> Path:
    """Set Prefect's environment for this process, where the user has not.

    Args:
        store: the artifact store; Prefect's own state lies in it under `prefect/`.
        debug: leave Prefect's log on the screen.

    Returns:
        The folder of Prefect's state.
    """
    state = Store(store).root / "prefect"
    state.mkdir(parents=True, exist_ok=True)
    defaults = {
        # Two senders of telemetry, both off.
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": str(int(STARTUP_LIMIT_S)),
        "PREFECT_RESULTS_LOCAL_STORAGE_PATH": str(state / "records"),
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        "PREFECT_LOGGING_LEVEL": "INFO" if debug else "CRITICAL",
        # Of its own threads: one traceback for each event that a server which was killed does not take.
        "PREFECT_LOGGING_INTERNAL_LEVEL": "ERROR" if debug else "CRITICAL",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    home = os.environ.get("PREFECT_HOME")
    if home:  # Prefect makes only the last level of it
        Path(home).expanduser().mkdir(parents=True, exist_ok=True)
    return state


@contextmanager
def prefect_server(store: str, *, debug: bool = False) -> Iterator[str]:
    """Give a Prefect API for the block: the configured one, else a server of our own on loopback.

    Yields:
        The API's URL.

    Raises:
        HostUnreachable: the configured server does not answer.
        HostError: ours did not start.
    """
    state = prepare_environment(store, debug=debug)
    from prefect.settings import get_current_settings

    if not debug:
        # At exit it counts the events that it still sends; they are sent before we leave.
        logging.getLogger("EventsWorker").setLevel(logging.ERROR)
    configured = get_current_settings().api.url
    if configured:
        if not is_healthy(configured, timeout_s=10):
            raise HostUnreachable(
                f"the Prefect server at {configured} (PREFECT_API_URL) does not answer; start it, or unset the variable"
            )
        yield configured
        return
    with _own_server(state) as url:
        from prefect.settings import (
            PREFECT_API_URL,
            PREFECT_CLIENT_MAX_RETRIES,
            PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
            temporary_settings,
        )

        most = min(PREFECT_CLIENT_MAX_RETRIES.value(), OWN_SERVER_RETRIES)
        own = {PREFECT_API_URL: url, PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None, PREFECT_CLIENT_MAX_RETRIES: most}
        with temporary_settings(own):
            try:
                yield url
            finally:
                _send_remaining_events()


def _send_remaining_events() -> None:
    from prefect.events.worker import EventsWorker

    EventsWorker.drain_all(timeout=10, at_exit=False)


@contextmanager
def _own_server(state: Path) -> Iterator[str]:
    log = state / "server.log"
    for _attempt in range(START_ATTEMPTS):
        port = _free_port()
        url = f"http://127.0.0.1:{port}/api"
        environment = os.environ | {
            "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{state / 'prefect.db'}",
            "PREFECT_UI_ENABLED": "0",
            "PREFECT_LOGGING_LEVEL": "WARNING",
        }
        with log.open("ab") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "flows.local_server", str(port), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=environment,
                # Ctrl-C reaches the whole group; ours must not lose its server before it has said goodbye.
                start_new_session=True,
            )
        try:
            if _wait_until_healthy(process, url):
                yield url
                return
        finally:
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    raise HostError(f"Prefect's server did not start in {START_ATTEMPTS} attempts; see the end of {log}")


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str) -> bool:
    end = time.monotonic() + STARTUP_LIMIT_S
    while time.monotonic() < end:
        if process.poll() is not None:
            return False
        if is_healthy(url, timeout_s=2):
            return True
        time.sleep(0.2)
    return False


def is_healthy(url: str, *, timeout_s: float) -> bool:
    """Tell whether a Prefect server answers at an API's URL."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=timeout_s) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
