"""A store's files on an SSH host, over asyncssh's SFTP: no command is ever run there.

sshfs is not used for it: it cannot reconnect, has no limit on an answer's time, and its `mv` and `checksum` run
shell commands. What is written goes out as many small requests at once, so that a long link is filled.
"""

from __future__ import annotations

import asyncio
import os
import posixpath
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import asyncssh

from dflash_core.checkpoints.host_errors import HostMessages, ReceiverError
from dflash_core.checkpoints.sftp_session import SftpSession, quietly
from dflash_core.checkpoints.sftp_source import SftpSource
from dflash_core.checkpoints.source_base import ByteRange, RateLimit
from dflash_core.config import HostSettings
from dflash_core.errors import (
    CheckpointChanged,
    CheckpointError,
    CheckpointNotFound,
    CheckpointVanished,
    HostError,
    HostUnreachable,
)
from dflash_core.ssh import SshAddress
from dflash_core.store_files import FileMissing, Received, RemoteEntry, RemoteFiles, Sent

IDLE_S = 30.0
"""A connection that was not used for so long is closed."""
WRITE_BYTES = 255 << 10
"""Most bytes of one write; a host may say that it takes less."""
WRITES_AT_ONCE = 32
FLUSH_TIMEOUT_S = 600.0
"""A slow disk takes its time for tens of GB."""
READS_AT_ONCE = 16
FOLDERS_AT_ONCE = 64
_GONE = (asyncssh.SFTPNoSuchFile, asyncssh.SFTPNoSuchPath)


class SftpFiles(RemoteFiles):
    """Files under a folder of an SSH host; connects when first used, and again after a drop."""

    can_rename = True

    def __init__(self, url: str, address: SshAddress, settings: HostSettings) -> None:
        super().__init__()
        self.url = url
        self._address = address
        self._settings = settings
        self._base = address.path.rstrip("/")
        self._limit = RateLimit(settings.max_read_mb_s)
        self._guard = threading.Lock()
        self._session: _StoreSession | None = None
        self._num_users = 0
        self._timer: threading.Timer | None = None

    def list_folders(self, paths: Sequence[str]) -> dict[str, list[RemoteEntry]]:
        """Return what lies in folders, asked for at once; one that is not there is empty."""
        listed: dict[str, list[RemoteEntry]] = {}
        with self._using() as session:
            source = SftpSource(session, limit=self._limit)
            for first in range(0, len(paths), FOLDERS_AT_ONCE):
                some = {self._at(path): path for path in paths[first : first + FOLDERS_AT_ONCE]}
                for full, entries in source.list_dirs(list(some)).items():
                    listed[some[full]] = [
                        RemoteEntry(
                            name=one.name,
                            is_folder=one.stat.kind == "folder",
                            size=one.stat.size,
                            changed_at=one.stat.mtime_ns / 1e9,
                        )
                        for one in entries
                        if one.stat is not None
                    ]
        return listed

    def read_many(self, paths: Sequence[str]) -> dict[str, bytes | None]:
        """Return the bytes of small files, several at a time."""
        found: dict[str, bytes | None] = {}
        some: Sequence[str] = ()

        async def read_all(client: asyncssh.SFTPClient) -> list[bytes | None]:
            slots = asyncio.Semaphore(READS_AT_ONCE)

            async def read_one(path: str) -> bytes | None:
                async with slots:
                    try:
                        async with client.open(self._at(path), "rb", encoding=None) as file:
                            data = await file.read()
                            assert isinstance(data, bytes)
                            return data
                    except _GONE:
                        return None

            return await asyncio.gather(*(read_one(path) for path in some))

        with self._using() as session:
            for first in range(0, len(paths), FOLDERS_AT_ONCE):
                some = paths[first : first + FOLDERS_AT_ONCE]
                found |= zip(some, session.request(read_all, some[0]), strict=True)
        return found

    def download(self, path: str, *, start: int, size: int, receive: Received) -> None:
        """Read a file from `start` on, several blocks ahead."""
        try:
            with self._using() as session, SftpSource(session, limit=self._limit).open(self._at(path)) as file:
                if file.stat.size != size:
                    raise FileMissing(path)
                file.read_ranges([ByteRange(offset=start, size=size - start)], lambda _offset, data: receive(data))
        except (CheckpointChanged, CheckpointVanished) as error:
            raise FileMissing(path) from error

    def upload(self, local: Path, path: str, *, on_sent: Sent) -> None:
        """Write a whole file, several blocks at a time."""
        full = self._at(path)
        with self._using() as session, local.open("rb") as file:
            stat = os.fstat(file.fileno())
            session.request(lambda client: client.makedirs(posixpath.dirname(full), exist_ok=True), path)
            upload = _Upload(session, file.fileno(), full, stat.st_size, on_sent)
            session.run(session.persist(upload.attempt, path, progress=lambda: upload.num_acknowledged))
            seconds = stat.st_mtime_ns // 10**9
            session.request(lambda client: client.utime(full, (seconds, seconds)), path)
            stored = session.request(lambda client: client.stat(full), path).size
        if stored != stat.st_size:
            raise HostError(f"{self._shown(path)} has {stored} bytes after {stat.st_size} were sent; try again")

    def write(self, path: str, data: bytes) -> None:
        """Write a small file."""
        full = self._at(path)

        async def put(client: asyncssh.SFTPClient) -> None:
            await client.makedirs(posixpath.dirname(full), exist_ok=True)
            async with client.open(full, "wb", encoding=None) as file:
                await file.write(data)
                await _flush(file)

        with self._using() as session:
            session.request(put, path)

    def rename(self, path: str, to: str) -> bool:
        """Move a folder; both of SFTP's ways refuse to where a folder with something in it lies."""

        async def move(client: asyncssh.SFTPClient) -> bool:
            await client.makedirs(posixpath.dirname(self._at(to)), exist_ok=True)
            try:
                await client.posix_rename(self._at(path), self._at(to))
            except asyncssh.SFTPOpUnsupported:
                with suppress(*_GONE, asyncssh.SFTPFailure, asyncssh.SFTPFileAlreadyExists):
                    await client.rename(self._at(path), self._at(to))
                    return True
                return False
            except (*_GONE, asyncssh.SFTPFailure, asyncssh.SFTPFileAlreadyExists, asyncssh.SFTPDirNotEmpty):
                return False
            return True

        with self._using() as session:
            return session.request(move, path)

    def remove(self, path: str) -> None:
        """Remove a file or a folder with all in it."""

        async def drop(client: asyncssh.SFTPClient) -> None:
            full = self._at(path)
            with suppress(*_GONE):
                if await client.isdir(full):
                    await client.rmtree(full)
                else:
                    await client.remove(full)

        with self._using() as session:
            session.request(drop, path)

    def touch(self, path: str) -> None:
        """Set a file's time to now, where this user may."""
        now = int(time.time())
        with suppress(FileMissing, HostError), self._using() as session:
            session.request(lambda client: client.utime(self._at(path), (now, now)), path)

    def close(self) -> None:
        """End the connection, unless it is in use."""
        with self._guard:
            self._close_idle()

    def _at(self, path: str) -> str:
        return f"{self._base}/{path}".rstrip("/")

    def _shown(self, path: str) -> str:
        return f"{self._at(path)!r} on {self._address.endpoint}"

    @contextmanager
    def _using(self) -> Iterator[_StoreSession]:
        """Lend the connection, made where there is none, and tell its errors in a store's words."""
        try:
            with self._guard:
                if self._timer is not None:
                    self._timer.cancel()
                if self._session is None:
                    self._session = _StoreSession(self._address, self._settings)
                session = self._session
                self._num_users += 1
            try:
                yield session
            finally:
                with self._guard:
                    self._num_users -= 1
                    self._timer = threading.Timer(IDLE_S, self.close)
                    self._timer.daemon = True
                    self._timer.start()
        except (CheckpointChanged, CheckpointVanished):
            raise
        except CheckpointNotFound as error:
            raise FileMissing(str(error)) from error
        except CheckpointError as error:
            raise HostError(str(error)) from error

    def _close_idle(self) -> None:
        if self._num_users == 0 and self._session is not None:
            session, self._session = self._session, None
            session.close()
        if self._timer is not None and self._session is None:
            self._timer.cancel()
            self._timer = None


class _Upload:
    """One file on its way to the host; after a drop it goes on after what the host acknowledged."""

    def __init__(self, session: SftpSession, descriptor: int, path: str, size: int, on_sent: Sent) -> None:
        self._session = session
        self._descriptor = descriptor
        self._path = path
        self._size = size
        self._on_sent = on_sent
        self.num_acknowledged = 0
        """Bytes from the start that the host has."""

    async def attempt(self) -> None:
        """Send the rest of the file."""
        client, timeout_s = await self._session.client(), self._session.timeout_s
        flags = asyncssh.FXF_WRITE | asyncssh.FXF_CREAT | (0 if self.num_acknowledged else asyncssh.FXF_TRUNC)
        # block_size=0: one request per write, so that the pipeline below is the only one.
        file = await asyncio.wait_for(client.open(self._path, flags, encoding=None, block_size=0), timeout_s)
        try:
            await self._send(file, min(WRITE_BYTES, client.limits.max_write_len or 32 << 10), timeout_s)
            await asyncio.wait_for(_flush(file), max(timeout_s, FLUSH_TIMEOUT_S))
        finally:
            await quietly(file.close())

    async def _send(self, file: asyncssh.SFTPClientFile, block_bytes: int, timeout_s: float) -> None:
        queue: deque[tuple[int, asyncio.Task[int]]] = deque()
        position = self.num_acknowledged
        try:
            while queue or position < self._size:
                while position < self._size and len(queue) < WRITES_AT_ONCE:
                    self._session.require_link()
                    data = self._read(min(block_bytes, self._size - position), position)
                    queue.append((len(data), asyncio.create_task(file.write(data, position))))
                    position += len(data)
                await asyncio.wait_for(asyncio.shield(queue[0][1]), timeout_s)
                num_bytes, _ = queue.popleft()
                self.num_acknowledged += num_bytes
                self._on_sent(num_bytes)
        finally:
            for _, task in queue:
                task.cancel()
            await asyncio.gather(*(task for _, task in queue), return_exceptions=True)

    def _read(self, size: int, position: int) -> bytes:
        try:
            data = os.pread(self._descriptor, size, position)
        except OSError as error:  # of this machine's disk, not of the network
            raise ReceiverError(error) from error
        if len(data) != size:
            raise ReceiverError(HostError(f"{self._path!r} became shorter here while it was sent; try again"))
        return data


class _StoreSession(SftpSession):
    """A session whose errors speak of a store."""

    def __init__(self, address: SshAddress, settings: HostSettings) -> None:
        super().__init__(address, settings)
        self._messages = _StoreMessages(address, settings)


class _StoreMessages(HostMessages):
    def gave_up(self, error: BaseException, path: str) -> HostError:
        """Return the error for a link that kept breaking."""
        if isinstance(error, HostError):
            return error
        reason = "it gave no answer in time" if isinstance(error, TimeoutError) else str(error) or "cut off"
        return HostUnreachable(
            f"lost the store on {self._endpoint} at {path!r}, also after reconnecting: {reason}; "
            "try again when the link holds"
        )

    def not_permitted(self, path: str) -> CheckpointError:
        """Return the error for what this user may not do."""
        return CheckpointError(
            f"{self._endpoint} does not let this user read and write {path!r} of the store; check its permissions"
        )

    def failed(self, path: str, detail: str) -> CheckpointError:
        """Return the error for a request that the host could not serve."""
        return CheckpointError(f"{self._endpoint} failed at {path!r} of the store: {detail}; is its disk full?")


async def _flush(file: Any) -> None:
    """Have the host flush a file to disk, where it can."""
    with suppress(asyncssh.SFTPOpUnsupported):
        await file.fsync()
