"""Files of an SSH host, read over SFTP: by ranges, in order, with many requests under way.

How many are under way is adapted to what the link needs: twice its rate times its round trip,
between 8 and 64 blocks. More than that only fills buffers on the host.
"""

from __future__ import annotations

import asyncio
import posixpath
import stat as stat_bits
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Literal
from urllib.parse import quote

import asyncssh

from dflash_core.checkpoints.sftp_session import ReceiverError, SftpSession, quietly
from dflash_core.checkpoints.source_base import (
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
from dflash_core.ssh import SshAddress, parse_ssh_url

# OpenSSH answers at most 255 KiB per read; asyncssh's server offers 4 MiB, far too much to have 64 of.
BLOCK_BYTES = 255 << 10
MIN_DEPTH, MAX_DEPTH = 8, 64
MAX_PARALLEL_LISTINGS = 16
GONE = (asyncssh.SFTPNoSuchFile, asyncssh.SFTPNoSuchPath, asyncssh.SFTPPermissionDenied, asyncssh.SFTPFailure)


class SftpSource(Source):
    """Files of one SSH host, read through one SFTP session."""

    def __init__(self, address: SshAddress, settings: HostSettings) -> None:
        super().__init__()
        self.limit = RateLimit(settings.max_read_mb_s)
        self.session = SftpSession(address, settings)

    def path_of(self, url: str) -> str:
        """Return the path in a URL; without one, the login's own folder."""
        path = parse_ssh_url(url).path
        return (path.rstrip("/") or "/") if path else "."

    def url_of(self, path: str) -> str:
        """Return the URL of a path on this host."""
        address = self.session.address
        user = f"{quote(address.user)}@" if address.user else ""
        port = f":{address.port}" if address.port else ""
        return f"ssh://{user}{address.host}{port}{quote(path)}"

    def stat(self, path: str) -> FileStat:
        """Return what lies at a path, links followed."""
        return _stat_of(self.session.request(lambda client: client.stat(path), path))

    def list_dir(self, path: str) -> list[DirEntry]:
        """Return the entries of a folder, sorted by name."""
        return self.session.request(lambda client: _list_dir(client, path), path)

    def list_dirs(self, paths: Sequence[str]) -> dict[str, list[DirEntry]]:
        """Return the entries of several folders, asked for at once; one that is gone has none."""

        async def list_all(client: asyncssh.SFTPClient) -> list[list[DirEntry]]:
            slots = asyncio.Semaphore(MAX_PARALLEL_LISTINGS)

            async def list_one(path: str) -> list[DirEntry]:
                async with slots:
                    try:
                        return await _list_dir(client, path)
                    except GONE:
                        return []

            return await asyncio.gather(*(list_one(path) for path in paths))

        return dict(zip(paths, self.session.request(list_all, ", ".join(paths[:3])), strict=True))

    def realpath(self, path: str) -> str:
        """Return the path with all links resolved, by the host."""
        return str(self.session.request(lambda client: client.realpath(path), path))

    def open(self, path: str) -> SourceFile:
        """Open a file for reading."""
        return SftpFile(self, path)

    def close(self) -> None:
        """End the connection."""
        self.session.close()


class SftpFile(SourceFile):
    """A file open for reading on an SSH host; it is opened again after a dropped connection."""

    def __init__(self, source: SftpSource, path: str) -> None:
        self._source = source
        self._session = source.session
        self._handle: asyncssh.SFTPClientFile | None = None
        self._generation = 0
        self._round_trip_s = 0.0
        self._delivered = 0
        self._first: FileStat | None = None
        self.path, self.display = path, source.url_of(path)
        super().__init__(path, self.display, self._session.run(self._session.persist(self._ensure_open, path)))

    def read_ranges(self, ranges: Sequence[ByteRange], sink: Sink) -> None:
        """Read ranges, many blocks at a time, and hand them to `sink` in order."""
        pending = deque(part for part in ranges if part.size)

        async def attempt() -> None:
            await self._ensure_open()
            await self._deliver(pending, sink)

        self._session.run(self._session.persist(attempt, self.path, progress=lambda: self._delivered))

    def current_stat(self) -> FileStat:
        """Return what the path holds now, asked anew."""
        return self._source.stat(self.path)

    def close(self) -> None:
        """Close the handle, unless its connection is gone."""
        handle, self._handle = self._handle, None
        if handle is not None and self._generation == self._session.generation:
            self._session.run(quietly(handle.close()))

    async def _ensure_open(self) -> FileStat:
        """Open the file unless it is open, and check that it is the one opened first."""
        client, loop, timeout_s = await self._session.client(), asyncio.get_running_loop(), self._session.timeout_s
        if self._handle is None or self._generation != self._session.generation:
            # block_size=0: one request per read, so that the pipeline below is the only one.
            opening = client.open(self.path, "rb", encoding=None, block_size=0)
            self._handle = await asyncio.wait_for(opening, timeout_s)
            self._generation = self._session.generation
            asked_at = loop.time()
            stat = _stat_of(await asyncio.wait_for(self._handle.stat(), timeout_s))
            self._round_trip_s = loop.time() - asked_at
            self._first = self._first or stat
            require_same(self._first, stat, self.display)
        assert self._first is not None
        return self._first

    async def _deliver(self, pending: deque[ByteRange], sink: Sink) -> None:
        """Send requests ahead and pass on the answers in order; `pending` keeps what is still due."""
        depth = _Depth(self._round_trip_s)
        blocks = _split(list(pending), min(BLOCK_BYTES, self._session.max_read_bytes or BLOCK_BYTES))
        queue: deque[asyncio.Task[bytes]] = deque()
        next_block = next(blocks, None)
        try:
            while queue or next_block is not None:
                while next_block is not None and len(queue) < depth.blocks:
                    if wait_s := self._source.limit.reserve(next_block.size):
                        await asyncio.sleep(wait_s)
                    queue.append(asyncio.create_task(self._read_block(next_block)))
                    next_block = next(blocks, None)
                # The answer to the oldest request is due next: a host that is silent this long is stuck.
                data = await asyncio.wait_for(queue[0], self._session.timeout_s)
                queue.popleft()
                _hand_over(pending, data, sink)
                self._delivered += len(data)
                depth.note(len(data))
        finally:
            for task in queue:
                task.cancel()
            await asyncio.gather(*queue, return_exceptions=True)

    async def _read_block(self, block: ByteRange) -> bytes:
        """Return a whole block: a server may answer a read with less than was asked for."""
        assert self._handle is not None
        parts: list[bytes] = []
        position = block.offset
        while position < block.end:
            self._session.require_link()
            data = await self._handle.read(block.end - position, position)
            assert isinstance(data, bytes)
            if not data:
                raise ended_early(self.display, position, self.stat)
            self._source.bytes_read += len(data)
            parts.append(data)
            position += len(data)
        return parts[0] if len(parts) == 1 else b"".join(parts)


class _Depth:
    """How many blocks to have under way, from the rate seen so far."""

    def __init__(self, round_trip_s: float) -> None:
        self.blocks = MIN_DEPTH
        self._round_trip_s = round_trip_s
        self._since = asyncio.get_running_loop().time()
        self._num_bytes = 0

    def note(self, num_bytes: int) -> None:
        """Take account of bytes that arrived."""
        self._num_bytes += num_bytes
        if self._num_bytes < self.blocks * BLOCK_BYTES:
            return
        now = asyncio.get_running_loop().time()
        bytes_per_s = self._num_bytes / max(now - self._since, 1e-6)
        needed = int(2 * bytes_per_s * self._round_trip_s / BLOCK_BYTES) + 1
        self.blocks = max(MIN_DEPTH, min(MAX_DEPTH, needed))
        self._since, self._num_bytes = now, 0


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
        raise ReceiverError(error) from error
    if due.size == len(data):
        pending.popleft()
    else:
        pending[0] = ByteRange(offset=due.offset + len(data), size=due.size - len(data))


async def _list_dir(client: asyncssh.SFTPClient, path: str) -> list[DirEntry]:
    named = [(_text(name), name.attrs) for name in await client.readdir(path)]
    entries = [_entry(client, path, name, attrs) for name, attrs in named if name not in (".", "..")]
    return sorted(await asyncio.gather(*entries), key=lambda entry: entry.name)


async def _entry(client: asyncssh.SFTPClient, folder: str, name: str, attrs: asyncssh.SFTPAttrs) -> DirEntry:
    path, is_link = posixpath.join(folder, name), stat_bits.S_ISLNK(attrs.permissions or 0)
    if is_link:
        try:
            attrs = await client.stat(path)
        except GONE:
            return DirEntry(name=name, path=path, stat=None, is_link=True)
    return DirEntry(name=name, path=path, stat=_stat_of(attrs), is_link=is_link)


def _text(name: asyncssh.SFTPName) -> str:
    return name.filename if isinstance(name.filename, str) else name.filename.decode(errors="surrogateescape")


def _stat_of(attrs: asyncssh.SFTPAttrs) -> FileStat:
    mode = attrs.permissions or 0
    kind: Literal["file", "folder", "other"] = "other"
    if stat_bits.S_ISDIR(mode):
        kind = "folder"
    elif stat_bits.S_ISREG(mode):
        kind = "file"
    return FileStat(size=attrs.size or 0, mtime_ns=int(attrs.mtime or 0) * 1_000_000_000, kind=kind)
