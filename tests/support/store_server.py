"""SSH servers on loopback that a store may be written to: OpenSSH's, and one of asyncssh that can misbehave.

with StoreBox(folder, state) as box:          a real sshd
    open_store(box.url("store"), box.hosts, mirror=...)

with StoreServer(folder) as server:           asyncssh, in a thread, with faults
    server.faults.cut_after_bytes = 100_000
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import asyncssh

from dflash_core.config import HostSettings
from examples import training_box
from examples.training_box import TrainingBox


class StoreBox(TrainingBox):
    """A training box that lets its one user write."""

    def __init__(self, root: Path, state: Path) -> None:
        super().__init__(root, state, kind="sshd")

    @property
    def hosts(self) -> dict[str, HostSettings]:
        """Return the configuration of this host."""
        settings = HostSettings(
            url=self.url(), known_hosts=str(self.known_hosts), identity_file=str(self.identity_file), timeout_s=10
        )
        return {"box": settings}

    def _launch(self, kind: Literal["sshd", "asyncssh"], sshd: str | None) -> None:
        writable = training_box.SSHD_CONFIG.replace("internal-sftp -R", "internal-sftp")
        with patch.object(training_box, "SSHD_CONFIG", writable):
            super()._launch(kind, sshd)


@dataclass(kw_only=True)
class WriteFaults:
    """What goes wrong; all may be changed while the server runs."""

    cut_after_bytes: int | None = None
    """Cut every connection once so many bytes were written since this was set; then behave."""
    full_after_bytes: int | None = None
    """Refuse every write as a full disk does once so many bytes were written since this was set."""
    refuse: bool = False
    """Permit nothing that changes a file."""
    lose_rename_answers: int = 0
    """Carry out so many renames and cut the connection instead of saying so."""
    before_rename: Callable[[str], None] | None = None
    """Called with the new path before each rename, in the server's thread."""


class StoreServer:
    """An SFTP server with one folder as its root, on any free port, while the `with` block lasts."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.faults = WriteFaults()
        self.num_connections = 0
        self.execs: list[str] = []
        """Commands that clients asked for; there must be none."""
        self.port = 0
        self._key = asyncssh.generate_private_key("ssh-ed25519")
        self._connections: list[asyncssh.SSHServerConnection] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="store-server", daemon=True)
        self._folder = tempfile.TemporaryDirectory(prefix="store-server-")
        self.known_hosts = Path(self._folder.name) / "known_hosts"

    @property
    def hosts(self) -> dict[str, HostSettings]:
        """Return the configuration of this host."""
        return {"box": HostSettings(url=self.url(), known_hosts=str(self.known_hosts), timeout_s=5)}

    def url(self, path: str = "") -> str:
        """Return the URL of a path."""
        return f"ssh://tester@127.0.0.1:{self.port}/{path}"

    def cut(self) -> None:
        """Cut every connection."""
        for connection in self._connections:
            connection.abort()

    def stop(self) -> None:
        """Stop listening and cut every connection."""
        self._run(self._close())

    def start(self) -> None:
        """Listen, again on the same port."""
        self._run(self._listen())

    def __enter__(self) -> StoreServer:
        self.root.mkdir(parents=True, exist_ok=True)
        self._thread.start()
        self.start()
        public = self._key.export_public_key().decode().strip()
        self.known_hosts.write_text(f"[127.0.0.1]:{self.port} {public}\n", encoding="utf-8")
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()
        self._folder.cleanup()
        assert self.execs == []

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=10)

    async def _listen(self) -> None:
        self._acceptor = await asyncssh.listen(
            "127.0.0.1",
            self.port,
            server_host_keys=[self._key],
            server_factory=_AnybodyMayEnter,
            sftp_factory=lambda channel: _Files(channel, self),
            process_factory=self._refuse_process,
            acceptor=self._accept,
        )
        self.port = self._acceptor.get_port()

    async def _close(self) -> None:
        self._acceptor.close()
        await self._acceptor.wait_closed()
        self.cut()
        await asyncio.gather(*(one.wait_closed() for one in self._connections), return_exceptions=True)
        self._connections.clear()
        pending = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)

    def _accept(self, connection: asyncssh.SSHServerConnection) -> None:
        self.num_connections += 1
        self._connections.append(connection)

    def _refuse_process(self, process: asyncssh.SSHServerProcess[str]) -> None:
        self.execs.append(process.command or "(shell)")
        process.exit(1)


class _AnybodyMayEnter(asyncssh.SSHServer):
    def begin_auth(self, username: str) -> bool:
        return False


class _Files(asyncssh.SFTPServer):
    def __init__(self, channel: asyncssh.SSHServerChannel[bytes], server: StoreServer) -> None:
        super().__init__(channel, chroot=str(server.root).encode())
        self._server = server

    def open(self, path: bytes, pflags: int, attrs: asyncssh.SFTPAttrs) -> Any:
        if self._server.faults.refuse and pflags != asyncssh.FXF_READ:
            raise asyncssh.SFTPPermissionDenied("not for you")
        return super().open(path, pflags, attrs)

    def mkdir(self, path: bytes, attrs: asyncssh.SFTPAttrs) -> Any:
        if self._server.faults.refuse:
            raise asyncssh.SFTPPermissionDenied("not for you")
        return super().mkdir(path, attrs)

    def write(self, file_obj: object, offset: int, data: bytes) -> Any:
        faults = self._server.faults
        if faults.cut_after_bytes is not None:
            faults.cut_after_bytes -= len(data)
            if faults.cut_after_bytes < 0:
                faults.cut_after_bytes = None
                self._server.cut()
                raise asyncssh.SFTPFailure("cut")
        if faults.full_after_bytes is not None:
            faults.full_after_bytes -= len(data)
            if faults.full_after_bytes < 0:
                raise asyncssh.SFTPFailure("No space left on device")
        return super().write(file_obj, offset, data)

    def posix_rename(self, oldpath: bytes, newpath: bytes) -> Any:
        faults = self._server.faults
        if faults.before_rename is not None:
            faults.before_rename(newpath.decode())
        done = super().posix_rename(oldpath, newpath)
        if faults.lose_rename_answers:
            faults.lose_rename_answers -= 1
            self._server.cut()
        return done
