"""A real HTTP server on loopback that news are posted to: it may be slow, answer with errors, or hang up."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "T0KEN-b3hind-the-slash"


@dataclass
class HookServer:
    """What the server got, and what it is to answer next; after that it answers with 200."""

    port: int = 0
    received: list[dict[str, Any]] = field(default_factory=list)
    """Payloads that it took."""
    headers: list[dict[str, str]] = field(default_factory=list)
    num_requests: int = 0
    answers: list[int | str] = field(default_factory=list)
    """A status, `hang` (no answer until the server ends) or `hang up` (closes the connection)."""
    retry_after: str | None = None
    _released: threading.Event = field(default_factory=threading.Event)

    @property
    def url(self) -> str:
        """Return its address, with a token in it as chats have them."""
        return f"http://127.0.0.1:{self.port}/services/{TOKEN}"

    @property
    def events(self) -> list[tuple[str, int | None]]:
        """Return event and step of what it took."""
        return [(one["event"], one.get("step")) for one in self.received]


@contextmanager
def hook_server(port: int = 0) -> Iterator[HookServer]:
    """Serve until the block ends."""
    state = HookServer()
    guard = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            with guard:
                state.num_requests += 1
                state.headers.append(dict(self.headers))
                answer = state.answers.pop(0) if state.answers else 200
            if answer == "hang":
                state._released.wait(60)
                return
            if answer == "hang up":
                self.connection.close()
                return
            if answer == 200:
                with guard:
                    state.received.append(json.loads(body))
            assert isinstance(answer, int)
            self.send_response(answer)
            if state.retry_after is not None:
                self.send_header("Retry-After", state.retry_after)
            if 300 <= answer < 400:
                self.send_header("Location", f"http://127.0.0.1:{state.port}/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_arguments: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    state.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield state
    finally:
        state._released.set()
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)


def free_port() -> int:
    """Return a port that nobody listens on."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
