"""Reading over SFTP with asyncssh: ranges, in order, many requests under way, reconnecting.

asyncssh is used directly, in one event loop of an own thread, and not through sshfs: sshfs ignores
the range of `cat_file`, cannot reconnect, checks no host key unless told to, and a file of it that
is left open hangs the interpreter at exit. Only the SFTP subsystem is ever asked for.

How many requests are under way is adapted to what the link needs: twice its rate times its round
trip, between 8 and 64 blocks. More than that only fills buffers on the host.
"""

from __future__ import annotations

import asyncio
import posixpath
import socket
import stat as stat_bits
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import quote

import asyncssh

from dflash_core.checkpoints.sources import (
    ByteRange,
    DirEntry,
    FileStat,
    RateLimit,
    Sink,
    Source,
    SourceFile,
    ended_early,
    require_same,
)
from dflash_core.config import HostSettings
from dflash_core.errors import CheckpointError, CheckpointNotFound, HostError, HostKeyUnknown, HostUnreachable
from dflash_core.ssh import DEFAULT_PORT, SshAddress, connect_options

# OpenSSH answers at most 255 KiB per read; asyncssh's server offers 4 MiB, far too much to have 64 of.
BLOCK_BYTES = 255 << 10
MIN_DEPTH, MAX_DEPTH = 8, 64
# Room for MAX_DEPTH blocks; the default of 2 MiB caps a link of 80 ms at 25 MB/s.
WINDOW_BYTES = 32 << 20
RECONNECT_WAITS_S = (0.2, 1.0, 3.0)
# A drop after this much progress counts as a new one, with all its tries.
PROGRESS_BYTES = 256 << 20
CLOSE_TIMEOUT_S = 2.0
MAX_PARALLEL_LISTINGS = 16

Value = TypeVar("Value")

TRANSIENT_ERRORS = (
    asyncssh.SFTPConnectionLost,
    asyncssh.SFTPNoConnection,
    asyncssh.DisconnectError,
    asyncssh.ChannelOpenError,
    TimeoutError,
    ConnectionError,
)


class _SinkError(Exception):
    """Carries an error of the receiver past the handling of network errors."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__()
        self.cause = cause


class SftpSource(Source):
    """Files of one SSH host, read through one SFTP session."""

    def __init__(self, address: SshAddress, settings: HostSettings) -> None:
        super().__init__()
        self.address = address
        self.settings = settings
        self.limit = RateLimit(settings.max_read_mb_s)
        self.generation = 0
        """Counts connections; a handle of an earlier one is dead."""
        self._connection: asyncssh.SSHClientConnection | None = None
        self._client: asyncssh.SFTPClient | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"sftp {address.host}", daemon=True)
        self._thread.start()
        try:
            self.run(self.client())
        except BaseException:
            self.close()
            raise

    def path_of(self, url: str) -> str:
        """Return the path in a URL; without one, the login's own folder."""
        from dflash_core.ssh import parse_ssh_url

        return parse_ssh_url(url).path.rstrip("/") or ("/" if parse_ssh_url(url).path else ".")

    def url_of(self, path: str) -> str:
        """Return the URL of a path on this host."""
        user = f"{quote(self.address.user)}@" if self.address.user else ""
        port = f":{self.address.port}" if self.address.port else ""
        return f"ssh://{user}{self.address.host}{port}{quote(path)}"

    def stat(self, path: str) -> FileStat:
        """Return what lies at a path, links followed."""
        return _stat_of(self.request(lambda client: client.stat(path), path))

    def list_dir(self, path: str) -> list[DirEntry]:
        """Return the entries of a folder, sorted by name."""
        return self.request(lambda client: _list_dir(client, path), path)

    def list_dirs(self, paths: Sequence[str]) -> dict[str, list[DirEntry]]:
        """Return the entries of several folders, asked for at once; one that is gone has none."""

        async def list_all(client: asyncssh.SFTPClient) -> list[list[DirEntry]]:
            slots = asyncio.Semaphore(MAX_PARALLEL_LISTINGS)

            async def list_one(path: str) -> list[DirEntry]:
                async with slots:
                    try:
                        return await _list_dir(client, path)
                    except (asyncssh.SFTPNoSuchFile, asyncssh.SFTPNoSuchPath, asyncssh.SFTPPermissionDenied):
                        return []

            return await asyncio.gather(*(list_one(path) for path in paths))

        return dict(zip(paths, self.request(list_all, ", ".join(paths[:3])), strict=True))

    def realpath(self, path: str) -> str:
        """Return the path with all links resolved, by the host."""
        return str(self.request(lambda client: client.realpath(path), path))

    def open(self, path: str) -> SourceFile:
        """Open a file for reading."""
        return SftpFile(self, path)

    def close(self) -> None:
        """End the session and its thread; harmless when done twice."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # Used by SftpFile, in or around the event loop.

    def run(self, coroutine: Coroutine[Any, Any, Value]) -> Value:
        """Run a coroutine in the source's thread and return its result."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def request(self, ask: Callable[[asyncssh.SFTPClient], Awaitable[Value]], path: str) -> Value:
        """Send one request, again after a dropped connection, and return its answer."""

        async def attempt() -> Value:
            client = await self.client()
            return await asyncio.wait_for(_awaited(ask(client)), self.settings.timeout_s)

        return self.run(self.persist(attempt, path))

    async def persist(
        self, attempt: Callable[[], Awaitable[Value]], path: str, *, progress: Callable[[], int] = lambda: 0
    ) -> Value:
        """Repeat `attempt` after dropped connections: a few times, each after a longer wait."""
        tries, progress_at_drop = 0, progress()
        while True:
            try:
                return await attempt()
            except _SinkError as error:
                raise error.cause from None
            except TRANSIENT_ERRORS as error:
                if isinstance(error, CheckpointError | HostKeyUnknown):
                    raise
                if progress() - progress_at_drop >= PROGRESS_BYTES:
                    tries = 0
                if tries == len(RECONNECT_WAITS_S):
                    raise self._gave_up(error, path) from error
                progress_at_drop = progress()
                await self._drop()
                await asyncio.sleep(RECONNECT_WAITS_S[tries])
                tries += 1
            except (asyncssh.Error, OSError) as error:
                raise self._translate(error, path) from error

    async def client(self) -> asyncssh.SFTPClient:
        """Return the SFTP session, connecting first where there is none."""
        if self._client is None:
            options = connect_options(self.address, self.settings)
            known_hosts = options["known_hosts"]
            if known_hosts is not None and not Path(known_hosts).exists():
                raise HostKeyUnknown(f"there is no known_hosts file at {known_hosts!r}; {self._key_advice()}")
            try:
                self._connection = await asyncssh.connect(
                    self.address.host, **options, window=WINDOW_BYTES, keepalive_interval=15
                )
                self._client = await asyncio.wait_for(
                    self._connection.start_sftp_client(), timeout=self.settings.timeout_s
                )
            except (OSError, asyncssh.Error, ValueError) as error:
                await self._drop()
                raise self._connect_error(error) from error
            self.generation += 1
        return self._client

    async def _drop(self) -> None:
        connection, self._connection, self._client = self._connection, None, None
        if connection is not None:
            connection.abort()
            await _quietly(connection.wait_closed(), CLOSE_TIMEOUT_S)

    async def _shut_down(self) -> None:
        connection, client = self._connection, self._client
        if client is not None:
            client.exit()
            await _quietly(client.wait_closed(), CLOSE_TIMEOUT_S)
        if connection is not None:
            connection.close()
            await _quietly(connection.wait_closed(), CLOSE_TIMEOUT_S)
        await self._drop()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _key_advice(self) -> str:
        port = self.address.port or DEFAULT_PORT
        return (
            f"add the key with `ssh-keyscan -p {port} {self.address.host}` after comparing its fingerprint, "
            "or log in once with ssh, or set known_hosts of that host"
        )

    def _connect_error(self, error: Exception) -> HostError:
        endpoint = self.address.endpoint
        if isinstance(error, asyncssh.HostKeyNotVerifiable):
            where = self.settings.known_hosts
            return HostKeyUnknown(f"the host key of {endpoint} is not in {where!r}; {self._key_advice()}")
        if isinstance(error, asyncssh.PermissionDenied):
            return HostUnreachable(
                f"{endpoint} refused the login: {error.reason}; check the user name and identity_file"
            )
        if isinstance(error, socket.gaierror):
            return HostUnreachable(f"no host is called {self.address.host!r}; check the URL and ~/.ssh/config")
        if isinstance(error, TimeoutError):
            return HostUnreachable(f"{endpoint} gave no answer within {self.settings.timeout_s:g} s; is it up?")
        detail = " ".join(str(getattr(error, "strerror", None) or error).split())
        return HostUnreachable(f"cannot connect to {endpoint}: {detail}; check that it is up and offers SFTP")

    def _gave_up(self, error: BaseException, path: str) -> HostError:
        if isinstance(error, HostError):
            return error
        reason = f"no answer within {self.settings.timeout_s:g} s" if isinstance(error, TimeoutError) else str(error)
        tries = len(RECONNECT_WAITS_S)
        return HostUnreachable(
            f"lost {self.address.endpoint} while reading {path!r}, also after {tries} reconnects: {reason or 'cut off'}; "
            "try again when the link holds"
        )

    def _translate(self, error: Exception, path: str) -> CheckpointError:
        if isinstance(error, asyncssh.SFTPNoSuchFile | asyncssh.SFTPNoSuchPath | asyncssh.SFTPNotADirectory):
            return CheckpointNotFound(f"nothing lies at {path!r} on {self.address.endpoint}; check the path")
        if isinstance(error, asyncssh.SFTPPermissionDenied):
            return CheckpointError(f"{self.address.endpoint} does not let this user read {path!r}; check permissions")
        return CheckpointError(f"{self.address.endpoint} failed to read {path!r}: {str(error) or type(error).__name__}")


class SftpFile(SourceFile):
    """A file open for reading on an SSH host; it is opened again after a dropped connection."""

    def __init__(self, source: SftpSource, path: str) -> None:
        self._source = source
        self._handle: asyncssh.SFTPClientFile[bytes] | None = None
        self._generation = 0
        self._round_trip_s = 0.0
        self._delivered = 0
        self.path, self.display = path, source.url_of(path)
        super().__init__(path, self.display, source.run(source.persist(self._first_stat, path)))

    def read_ranges(self, ranges: Sequence[ByteRange], sink: Sink) -> None:
        """Read ranges, many blocks at a time, and hand them to `sink` in order."""
        pending = deque(part for part in ranges if part.size)

        async def attempt() -> None:
            await self._open()
            await self._deliver(pending, sink)

        self._source.run(self._source.persist(attempt, self.path, progress=lambda: self._delivered))

    def current_stat(self) -> FileStat:
        """Return what the path holds now, asked anew."""
        return self._source.stat(self.path)

    def close(self) -> None:
        """Close the handle, unless its connection is gone."""
        handle, self._handle = self._handle, None
        if handle is not None and self._generation == self._source.generation:
            self._source.run(_quietly(handle.close(), CLOSE_TIMEOUT_S))

    async def _first_stat(self) -> FileStat:
        self.stat = None  # type: ignore[assignment]
        return await self._open()

    async def _open(self) -> FileStat:
        """Open the file unless it is open, and check that it is the one opened first."""
        source, loop = self._source, asyncio.get_running_loop()
        client = await source.client()
        if self._handle is None or self._generation != source.generation:
            timeout_s = source.settings.timeout_s
            self._handle = await asyncio.wait_for(client.open(self.path, "rb", encoding=None, block_size=0), timeout_s)
            self._generation = source.generation
            asked_at = loop.time()
            stat = _stat_of(await asyncio.wait_for(self._handle.stat(), timeout_s))
            self._round_trip_s = loop.time() - asked_at
            if self.stat is None:
                self.stat = stat
            require_same(self.stat, stat, self.display)
        return self.stat

    async def _deliver(self, pending: deque[ByteRange], sink: Sink) -> None:
        """Send requests ahead and pass on the answers in order; `pending` keeps what is still due."""
        loop, limit = asyncio.get_running_loop(), self._source.limit
        blocks = _split(list(pending), self._block_bytes())
        queue: deque[asyncio.Task[bytes]] = deque()
        depth, window_start, window_bytes = MIN_DEPTH, loop.time(), 0
        next_block = next(blocks, None)
        try:
            while queue or next_block is not None:
                while next_block is not None and len(queue) < depth:
                    wait_s = limit.reserve(next_block.size)
                    if wait_s:
                        await asyncio.sleep(wait_s)
                    queue.append(loop.create_task(self._read_block(next_block)))
                    next_block = next(blocks, None)
                data = await asyncio.wait_for(asyncio.shield(queue[0]), self._source.settings.timeout_s)
                queue.popleft()
                _hand_over(pending, data, sink)
                self._delivered += len(data)
                window_bytes += len(data)
                if window_bytes >= depth * BLOCK_BYTES:
                    now = loop.time()
                    needed = 2 * window_bytes / max(now - window_start, 1e-6) * self._round_trip_s / BLOCK_BYTES
                    depth = max(MIN_DEPTH, min(MAX_DEPTH, int(needed) + 1))
                    window_start, window_bytes = now, 0
        finally:
            for task in queue:
                task.cancel()
            await asyncio.gather(*queue, return_exceptions=True)

    def _block_bytes(self) -> int:
        client = self._source._client
        offered = client.limits.max_read_len if client is not None else 0
        return min(BLOCK_BYTES, offered) if offered else BLOCK_BYTES

    async def _read_block(self, block: ByteRange) -> bytes:
        """Return a whole block: a server may answer a read with less than was asked for."""
        assert self._handle is not None
        parts: list[bytes] = []
        position = block.offset
        while position < block.end:
            data = await self._handle.read(block.end - position, position)
            if not data:
                raise ended_early(self.display, position, self.stat)
            self._source.bytes_read += len(data)
            parts.append(data)
            position += len(data)
        return parts[0] if len(parts) == 1 else b"".join(parts)


def _split(ranges: Sequence[ByteRange], block_bytes: int) -> Iterator[ByteRange]:
    for part in ranges:
        for offset in range(part.offset, part.end, block_bytes):
            yield ByteRange(offset=offset, size=min(block_bytes, part.end - offset))


def _hand_over(pending: deque[ByteRange], data: bytes, sink: Sink) -> None:
    """Give the next block to its receiver and take it off what is still due."""
    due = pending[0]
    try:
        sink(due.offset, data)
    except Exception as error:
        raise _SinkError(error) from error
    if due.size == len(data):
        pending.popleft()
    else:
        pending[0] = ByteRange(offset=due.offset + len(data), size=due.size - len(data))


async def _list_dir(client: asyncssh.SFTPClient, path: str) -> list[DirEntry]:
    names = [name for name in await client.readdir(path) if name.filename not in (".", "..", b".", b"..")]
    return sorted(await asyncio.gather(*(_entry(client, path, name) for name in names)), key=lambda entry: entry.name)


async def _entry(client: asyncssh.SFTPClient, folder: str, name: asyncssh.SFTPName) -> DirEntry:
    text = name.filename if isinstance(name.filename, str) else name.filename.decode(errors="surrogateescape")
    path = posixpath.join(folder, text)
    attrs, is_link = name.attrs, stat_bits.S_ISLNK(name.attrs.permissions or 0)
    if is_link:
        try:
            attrs = await client.stat(path)
        except (asyncssh.SFTPNoSuchFile, asyncssh.SFTPNoSuchPath, asyncssh.SFTPFailure, asyncssh.SFTPPermissionDenied):
            return DirEntry(name=text, path=path, stat=None, is_link=True)
    return DirEntry(name=text, path=path, stat=_stat_of(attrs), is_link=is_link)


def _stat_of(attrs: asyncssh.SFTPAttrs) -> FileStat:
    mode = attrs.permissions or 0
    kind: Literal["file", "folder", "other"] = "other"
    if stat_bits.S_ISDIR(mode) or attrs.type == asyncssh.FILEXFER_TYPE_DIRECTORY:
        kind = "folder"
    elif stat_bits.S_ISREG(mode) or attrs.type == asyncssh.FILEXFER_TYPE_REGULAR:
        kind = "file"
    return FileStat(size=attrs.size or 0, mtime_ns=int(attrs.mtime or 0) * 1_000_000_000, kind=kind)


async def _awaited(result: Awaitable[Value]) -> Value:
    return await result


async def _quietly(result: Awaitable[Any], timeout_s: float) -> None:
    """Wait for a closing step without minding how it ends."""
    try:
        await asyncio.wait_for(_awaited(result), timeout_s)
    except (TimeoutError, OSError, asyncssh.Error, ValueError):
        return
