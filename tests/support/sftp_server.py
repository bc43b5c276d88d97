"""A real SFTP server on loopback that records what clients do and can misbehave on demand.

    with RecordingSFTPServer(root) as server:
        inspect_checkpoint(server.url("step_1/checkpoint.pt"), hosts={"box": server.host_settings})
        assert server.write_attempts == []

It serves one folder as the root of its file system, lets any user in without a key, refuses every
write, runs no command, and lives in an event loop of its own thread until the `with` block ends.
Both sides share one Python process: fine for correctness, useless for measuring speed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import asyncssh

from dflash_core.config import HostSettings

Value = TypeVar("Value")

READ_ONLY_OPEN = asyncssh.FXF_READ


@dataclass(frozen=True)
class SFTPOperation:
    """One request of a client: its name, the path it is about, and the flags of an open."""

    name: str
    path: str
    flags: int | None = None
    offset: int | None = None
    size: int | None = None


@dataclass
class Faults:
    """What goes wrong; all may be changed while the server runs."""

    cut_after_bytes: int | None = None
    """Abort the connection once it has been sent this many bytes of file data."""
    cuts_left: int = 0
    """How many connections `cut_after_bytes` still applies to."""
    max_answer_bytes: int | None = None
    """Answer a read with at most this many bytes, as a server is free to do."""
    read_delay_s: float = 0.0
    """Wait before each answer to a read."""
    hang_reads: bool = False
    """Never answer a read."""
    refuse_login: bool = False
    deny_paths: frozenset[str] = frozenset()
    """Paths that may be neither opened, listed nor looked at."""
    before_read: Callable[[SFTPOperation], None] | None = None
    """Called before each read is answered, in the server's thread."""


@dataclass
class Record:
    """What clients did."""

    ops: list[SFTPOperation] = field(default_factory=list)
    bytes_sent: int = 0
    """Bytes of file data in answers to reads."""
    write_attempts: list[SFTPOperation] = field(default_factory=list)
    execs: list[str] = field(default_factory=list)
    """Commands and shells asked for."""
    num_connections: int = 0
    num_open_now: int = 0
    most_open_at_once: int = 0
    """The most connections that were open at the same time."""


class _ReadOnlyFiles(asyncssh.SFTPServer):
    def __init__(self, chan: asyncssh.SSHServerChannel, root: Path, record: Record, faults: Faults) -> None:
        super().__init__(chan, chroot=os.fsencode(root))
        self._root = os.path.realpath(root)
        self._record = record
        self._faults = faults
        self._sent_on_connection = 0
        self._is_cut = False

    def _is_due_to_be_cut(self) -> bool:
        limit = self._faults.cut_after_bytes
        return (
            not self._is_cut and limit is not None and self._faults.cuts_left > 0 and self._sent_on_connection > limit
        )

    def _note(self, name: str, path: bytes | str, **details: int) -> SFTPOperation:
        operation = SFTPOperation(name, os.fsdecode(path), **details)
        self._record.ops.append(operation)
        if operation.path in self._faults.deny_paths:
            raise asyncssh.SFTPPermissionDenied("denied")
        return operation

    def _path_of(self, file_obj: Any) -> str:
        return "/" + os.path.relpath(os.fsdecode(file_obj.name), self._root)

    def _refuse(self, name: str, path: bytes | str, **details: int) -> asyncssh.SFTPPermissionDenied:
        self._record.write_attempts.append(self._note(name, path, **details))
        return asyncssh.SFTPPermissionDenied("this server is read-only")

    # What a reader does.

    def open(self, path: bytes, pflags: int, attrs: asyncssh.SFTPAttrs) -> Any:
        if pflags != READ_ONLY_OPEN:
            raise self._refuse("open", path, flags=pflags)
        self._note("open", path, flags=pflags)
        return super().open(path, pflags, attrs)

    async def read(self, file_obj: Any, offset: int, size: int) -> bytes:
        operation = self._note("read", self._path_of(file_obj), offset=offset, size=size)
        faults = self._faults
        if faults.before_read is not None:
            faults.before_read(operation)
        if faults.read_delay_s:
            await asyncio.sleep(faults.read_delay_s)
        while faults.hang_reads:
            await asyncio.sleep(0.05)
        if faults.max_answer_bytes is not None:
            size = min(size, faults.max_answer_bytes)
        data = super().read(file_obj, offset, size)
        assert isinstance(data, bytes)
        self._sent_on_connection += len(data)
        if self._is_due_to_be_cut():
            faults.cuts_left -= 1
            self._is_cut = True
            self.connection.abort()
        if self._is_cut:
            await asyncio.sleep(3600)  # until the session's tasks are cancelled: an answer would only make noise
        self._record.bytes_sent += len(data)
        return data

    def close(self, file_obj: Any) -> Any:
        self._note("close", self._path_of(file_obj))
        return super().close(file_obj)

    def stat(self, path: bytes) -> Any:
        self._note("stat", path)
        return super().stat(path)

    def lstat(self, path: bytes) -> Any:
        self._note("lstat", path)
        return super().lstat(path)

    def fstat(self, file_obj: Any) -> Any:
        self._note("fstat", self._path_of(file_obj))
        return super().fstat(file_obj)

    async def scandir(self, path: bytes) -> AsyncIterator[asyncssh.SFTPName]:
        self._note("scandir", path)
        async for name in super().scandir(path):
            yield name

    def realpath(self, path: bytes) -> Any:
        self._note("realpath", path)
        return super().realpath(path)

    def readlink(self, path: bytes) -> Any:
        self._note("readlink", path)
        return super().readlink(path)

    def statvfs(self, path: bytes) -> Any:
        self._note("statvfs", path)
        return super().statvfs(path)

    # What a reader must never do.

    def open56(self, path: bytes, desired_access: int, flags: int, attrs: asyncssh.SFTPAttrs) -> Any:
        raise self._refuse("open56", path, flags=flags)

    def write(self, file_obj: Any, offset: int, data: bytes) -> Any:
        raise self._refuse("write", self._path_of(file_obj))

    def setstat(self, path: bytes, attrs: asyncssh.SFTPAttrs) -> Any:
        raise self._refuse("setstat", path)

    def lsetstat(self, path: bytes, attrs: asyncssh.SFTPAttrs) -> Any:
        raise self._refuse("lsetstat", path)

    def fsetstat(self, file_obj: Any, attrs: asyncssh.SFTPAttrs) -> Any:
        raise self._refuse("fsetstat", self._path_of(file_obj))

    def remove(self, path: bytes) -> Any:
        raise self._refuse("remove", path)

    def mkdir(self, path: bytes, attrs: asyncssh.SFTPAttrs) -> Any:
        raise self._refuse("mkdir", path)

    def rmdir(self, path: bytes) -> Any:
        raise self._refuse("rmdir", path)

    def rename(self, oldpath: bytes, newpath: bytes) -> Any:
        raise self._refuse("rename", oldpath)

    def posix_rename(self, oldpath: bytes, newpath: bytes) -> Any:
        raise self._refuse("posix_rename", oldpath)

    def symlink(self, oldpath: bytes, newpath: bytes) -> Any:
        raise self._refuse("symlink", newpath)

    def link(self, oldpath: bytes, newpath: bytes) -> Any:
        raise self._refuse("link", newpath)

    def lock(self, file_obj: Any, offset: int, length: int, flags: int) -> Any:
        raise self._refuse("lock", self._path_of(file_obj))

    def fsync(self, file_obj: Any) -> Any:
        raise self._refuse("fsync", self._path_of(file_obj))


class _Login(asyncssh.SSHServer):
    def __init__(self, record: Record, faults: Faults, *, is_jump_host: bool, accept_key: str | None) -> None:
        self._record = record
        self._faults = faults
        self._is_jump_host = is_jump_host
        self._accept_key = accept_key

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        record = self._record
        record.num_connections += 1
        record.num_open_now += 1
        record.most_open_at_once = max(record.most_open_at_once, record.num_open_now)

    def connection_lost(self, exc: Exception | None) -> None:
        self._record.num_open_now -= 1

    def connection_requested(self, dest_host: str, dest_port: int, orig_host: str, orig_port: int) -> bool:
        return self._is_jump_host

    def begin_auth(self, username: str) -> bool:
        return self._faults.refuse_login

    def public_key_auth_supported(self) -> bool:
        return self._accept_key is not None

    def validate_public_key(self, username: str, key: asyncssh.SSHKey) -> bool:
        return self._accept_key is not None and key == asyncssh.import_public_key(self._accept_key)


class RecordingSFTPServer:
    """Serves `root` over SFTP on 127.0.0.1, any free port, while the `with` block lasts."""

    def __init__(self, root: Path, *, is_jump_host: bool = False) -> None:
        self.root = root
        self._is_jump_host = is_jump_host
        self.accept_key: str | None = None
        """A public key that is let in even while logins are refused."""
        self.faults = Faults()
        self.port = 0
        self._record = Record()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sftp-server", daemon=True)
        self._folder = tempfile.TemporaryDirectory(prefix="sftp-server-")
        self.known_hosts = Path(self._folder.name) / "known_hosts"
        """File that holds this server's host key, in the format of OpenSSH."""

    @property
    def ops(self) -> list[SFTPOperation]:
        """Every request so far, in the order of arrival."""
        return self._record.ops

    @property
    def bytes_sent(self) -> int:
        """Bytes of file data sent so far."""
        return self._record.bytes_sent

    @property
    def write_attempts(self) -> list[SFTPOperation]:
        """Requests that would have changed something; all were refused."""
        return self._record.write_attempts

    @property
    def execs(self) -> list[str]:
        """Commands and shells that were asked for; none was run."""
        return self._record.execs

    @property
    def num_connections(self) -> int:
        """Connections accepted so far."""
        return self._record.num_connections

    @property
    def num_open_now(self) -> int:
        """Connections that are open at this moment."""
        return self._record.num_open_now

    @property
    def most_open_at_once(self) -> int:
        """The most connections that were ever open at the same time."""
        return self._record.most_open_at_once

    @property
    def host_settings(self) -> HostSettings:
        """Settings with which this server can be read."""
        return HostSettings(url=self.url(""), read_only=True, known_hosts=str(self.known_hosts), timeout_s=10.0)

    def url(self, path: str = "") -> str:
        """Return the URL of a path below the served folder."""
        return f"ssh://reader@127.0.0.1:{self.port}/{path.lstrip('/')}"

    def forget(self) -> None:
        """Empty the record, so that a test can look at what comes next."""
        self._record.ops.clear()
        self._record.write_attempts.clear()
        self._record.execs.clear()
        self._record.bytes_sent = 0
        self._record.num_connections = 0

    def stop(self) -> None:
        """Close the port and all connections; `start` opens the same port again."""
        self._run(self._close())

    def start(self) -> None:
        """Listen, on the same port as before if there was one."""
        self._run(self._listen())

    def __enter__(self) -> RecordingSFTPServer:
        # Clients that are cut off on purpose make asyncssh log what the tests expect anyway.
        logging.getLogger("asyncssh").setLevel(logging.CRITICAL)
        self._key = asyncssh.generate_private_key("ssh-ed25519")
        self._acceptor: asyncssh.SSHAcceptor | None = None
        self._connections: list[asyncssh.SSHServerConnection] = []
        self._thread.start()
        self.start()
        public_key = self._key.export_public_key().decode().strip()
        self.known_hosts.write_text(f"[127.0.0.1]:{self.port} {public_key}\n")
        return self

    def __exit__(self, *_exc: object) -> None:
        self.faults.hang_reads = False
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        assert not self._thread.is_alive(), "the SFTP server's thread did not end"
        self._loop.close()
        self._folder.cleanup()

    def _run(self, coroutine: Coroutine[Any, Any, Value]) -> Value:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=10)

    async def _listen(self) -> None:
        self._acceptor = await asyncssh.listen(
            "127.0.0.1",
            self.port,
            server_host_keys=[self._key],
            server_factory=self._login,
            sftp_factory=lambda chan: _ReadOnlyFiles(chan, self.root, self._record, self.faults),
            process_factory=self._refuse_process,
            acceptor=self._connections.append,
        )
        self.port = self._acceptor.get_port()

    async def _close(self) -> None:
        if self._acceptor is not None:
            self._acceptor.close()
            await self._acceptor.wait_closed()
            self._acceptor = None
        for connection in self._connections:
            connection.abort()
        await asyncio.gather(*(c.wait_closed() for c in self._connections), return_exceptions=True)
        self._connections.clear()
        pending = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)

    def _login(self) -> _Login:
        return _Login(self._record, self.faults, is_jump_host=self._is_jump_host, accept_key=self.accept_key)

    def _refuse_process(self, process: asyncssh.SSHServerProcess[str]) -> None:
        self._record.execs.append(process.command or "(shell)")
        process.exit(1)
