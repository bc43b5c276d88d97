"""How reads over SSH are cut into blocks, and how many of them are under way at once.

How many is adapted to what the link needs: twice its rate times its round trip, between 8 and 64
blocks. More than that only fills buffers on the host.
"""

from __future__ import annotations

import stat as stat_bits
import time
from collections.abc import Iterator, Sequence
from typing import Literal
from urllib.parse import quote

from dflash_core.checkpoints.host_errors import ReceiverError
from dflash_core.checkpoints.source_base import ByteRange, FileStat, RateLimit, Sink
from dflash_core.ssh import SshAddress, parse_ssh_url

# OpenSSH answers at most 255 KiB per read; asyncssh's server offers 4 MiB, far too much to have 64 of.
BLOCK_BYTES = 255 << 10
MIN_BLOCK_BYTES = 4 << 10
MIN_DEPTH, MAX_DEPTH = 8, 64
FIRST_BYTES_PER_S = 50e6
"""The rate that a link is thought to have until it has shown one."""


class Depth:
    """How many blocks to have under way, from the rate seen so far."""

    def __init__(self, round_trip_s: float) -> None:
        self.blocks = _blocks_under_way(FIRST_BYTES_PER_S * round_trip_s)
        self._round_trip_s = round_trip_s
        self._since = time.monotonic()
        self._num_bytes = 0

    def note(self, num_bytes: int) -> None:
        """Take account of bytes that arrived."""
        self._num_bytes += num_bytes
        if self._num_bytes < self.blocks * BLOCK_BYTES:
            return
        now = time.monotonic()
        bytes_per_s = self._num_bytes / max(now - self._since, 1e-6)
        self.blocks = _blocks_under_way(2 * bytes_per_s * self._round_trip_s)
        self._since, self._num_bytes = now, 0


def _blocks_under_way(num_bytes: float) -> int:
    return max(MIN_DEPTH, min(MAX_DEPTH, int(num_bytes / BLOCK_BYTES) + 1))


def split_blocks(ranges: Sequence[ByteRange], *, max_read_bytes: int, limit: RateLimit) -> Iterator[ByteRange]:
    """Cut ranges into blocks for one request each.

    Args:
        ranges: what to read.
        max_read_bytes: the most that the host answers in one read; 0 where it does not say.
        limit: on the rate; a strict one makes for small blocks.
    """
    block_bytes = max(MIN_BLOCK_BYTES, min(limit.block_bytes(BLOCK_BYTES), max_read_bytes or BLOCK_BYTES))
    for part in ranges:
        for offset in range(part.offset, part.end, block_bytes):
            yield ByteRange(offset=offset, size=min(block_bytes, part.end - offset))


class Delivery:
    """What is still due to a receiver: it survives a dropped connection, and then goes on from there."""

    def __init__(self, ranges: Sequence[ByteRange], sink: Sink) -> None:
        self.num_bytes = 0
        """Bytes handed over so far."""
        self._due = [part for part in reversed(ranges) if part.size]
        self._sink = sink

    @property
    def due(self) -> list[ByteRange]:
        """The ranges that are still to come, in order."""
        return self._due[::-1]

    def hand_over(self, data: bytes) -> None:
        """Give the receiver what comes next.

        Raises:
            ReceiverError: the receiver failed.
        """
        part = self._due[-1]
        try:
            self._sink(part.offset, data)
        except Exception as error:
            raise ReceiverError(error) from error
        self.num_bytes += len(data)
        if part.size == len(data):
            self._due.pop()
        else:
            self._due[-1] = ByteRange(offset=part.offset + len(data), size=part.size - len(data))


def file_stat(size: int | None, mode: int | None, mtime_s: int | None) -> FileStat:
    """Return what SFTP's attributes say; there is no inode among them."""
    mode = mode or 0
    kind: Literal["file", "folder", "other"] = "other"
    if stat_bits.S_ISDIR(mode):
        kind = "folder"
    elif stat_bits.S_ISREG(mode):
        kind = "file"
    return FileStat(size=size or 0, mtime_ns=int(mtime_s or 0) * 1_000_000_000, kind=kind)


def path_of(url: str) -> str:
    """Return the path in an `ssh://` URL; without one, the login's own folder."""
    path = parse_ssh_url(url).path
    return (path.rstrip("/") or "/") if path else "."


def url_of(address: SshAddress, path: str) -> str:
    """Return the URL of a path on an SSH host."""
    user = f"{quote(address.user)}@" if address.user else ""
    host = f"[{address.host}]" if ":" in address.host else address.host
    port = f":{address.port}" if address.port else ""
    return f"ssh://{user}{host}{port}{quote(path, errors='surrogateescape')}"
