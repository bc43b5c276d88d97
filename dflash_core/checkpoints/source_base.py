"""What a place to read from is: paths that can be listed, stat-ed and read by ranges, nothing else.

Nothing here can write. Reads are counted in `bytes_read` and paced before each request.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from dflash_core.errors import CheckpointChanged, CheckpointNotFound, CheckpointVanished

BLOCK_BYTES = 4 << 20
"""How much is read at once where requests cost nothing."""
MIN_BLOCK_BYTES = 16 << 10
"""How much is read at once under the strictest limit."""

Sink = Callable[[int, bytes], None]
"""Takes (offset in the file, data) of each block, in the order of the ranges asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileStat:
    """What a host says about one path, links followed."""

    size: int
    mtime_ns: int
    """Time of the last change; SFTP tells it in whole seconds."""
    kind: Literal["file", "folder", "other"]
    inode: int | None = None
    """Number of the file on its disk; None where it cannot be known."""
    tag: str | None = None
    """What an object store changes whenever it stores other bytes (ETag, generation); None where there is none."""

    @property
    def version(self) -> str:
        """Return all that a host says of which bytes these are: part of an identity where no checksum is."""
        return f"{self.size} {self.mtime_ns}{self.tag or ''}"


@dataclass(frozen=True, kw_only=True, slots=True)
class DirEntry:
    """One name in a folder."""

    name: str
    path: str
    stat: FileStat | None
    """None for a link that leads nowhere."""
    is_link: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ByteRange:
    """Part of a file."""

    offset: int
    size: int

    @property
    def end(self) -> int:
        """Offset of the first byte after it."""
        return self.offset + self.size


class RateLimit:
    """Says how long to wait before asking for more bytes; a limit of None never waits."""

    def __init__(self, max_read_mb_s: float | None) -> None:
        self._seconds_per_byte = 0.0 if max_read_mb_s is None else 1e-6 / max_read_mb_s
        self._free_at = 0.0
        self._lock = threading.Lock()

    def reserve(self, num_bytes: int) -> float:
        """Book a request of `num_bytes` and return the seconds to wait before sending it."""
        if not self._seconds_per_byte:
            return 0.0
        with self._lock:
            now = time.monotonic()
            start = max(now, self._free_at)
            self._free_at = start + num_bytes * self._seconds_per_byte
            return start - now

    def block_bytes(self, most: int) -> int:
        """Return how many bytes to ask for at once: at most `most`, and a twentieth of a second's worth.

        What is asked for first is never waited for, so that large blocks would exceed the limit.
        """
        if not self._seconds_per_byte:
            return most
        return max(MIN_BLOCK_BYTES, min(most, int(0.05 / self._seconds_per_byte)))


class SourceFile(ABC):
    """An open file; use it in a `with` block."""

    def __init__(self, path: str, display: str, stat: FileStat) -> None:
        self.path = path
        self.display = display
        """The address to show in messages."""
        self.stat = stat
        """As it was when the file was opened."""

    @abstractmethod
    def read_ranges(self, ranges: Sequence[ByteRange], sink: Sink) -> None:
        """Read ranges and hand each block to `sink`, in order and without gaps inside a range.

        Raises:
            CheckpointChanged: the file is shorter than it was, or another one after a reconnect.
            CheckpointVanished: it is gone.
        """

    @abstractmethod
    def current_stat(self) -> FileStat:
        """Return what the path holds now, asked anew."""

    def read_at(self, offset: int, size: int) -> bytes:
        """Return exactly `size` bytes from `offset` on."""
        parts: list[bytes] = []
        self.read_ranges([ByteRange(offset=offset, size=size)], lambda _, data: parts.append(data))
        return b"".join(parts)

    def check_unchanged(self) -> None:
        """Check that the path still holds what was opened.

        Raises:
            CheckpointChanged: size, time or (where known) file or tag differ.
            CheckpointVanished: nothing lies at the path any more.
        """
        try:
            now = self.current_stat()
        except CheckpointNotFound as error:
            raise vanished(self.display) from error
        require_same(self.stat, now, self.display)

    @abstractmethod
    def close(self) -> None:
        """Close the file; harmless when done twice."""

    def __enter__(self) -> SourceFile:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


class Source(ABC):
    """A place whose files can be listed and read; use it in a `with` block."""

    def __init__(self) -> None:
        self.bytes_read = 0
        """Bytes of file data received so far."""

    @abstractmethod
    def path_of(self, url: str) -> str:
        """Return the path on this source that a URL of it names."""

    @abstractmethod
    def url_of(self, path: str) -> str:
        """Return the URL of a path on this source."""

    @abstractmethod
    def stat(self, path: str) -> FileStat:
        """Return what lies at a path, links followed.

        Raises:
            CheckpointNotFound: nothing does.
        """

    @abstractmethod
    def list_dir(self, path: str) -> list[DirEntry]:
        """Return the entries of a folder, sorted by name.

        Raises:
            CheckpointNotFound: there is no such folder.
        """

    @abstractmethod
    def realpath(self, path: str) -> str:
        """Return the path with all links resolved."""

    @abstractmethod
    def open(self, path: str) -> SourceFile:
        """Open a file for reading.

        Raises:
            CheckpointNotFound: there is no such file.
        """

    def list_dirs(self, paths: Sequence[str]) -> dict[str, list[DirEntry]]:
        """Return the entries of several folders; one that is gone by now has none."""
        listed: dict[str, list[DirEntry]] = {}
        for path in paths:
            try:
                listed[path] = self.list_dir(path)
            except CheckpointNotFound:
                listed[path] = []
        return listed

    def read_at(self, path: str, offset: int, size: int) -> bytes:
        """Return exactly `size` bytes of a file from `offset` on."""
        with self.open(path) as file:
            return file.read_at(offset, size)

    @abstractmethod
    def close(self) -> None:
        """End the connection, if there is one; harmless when done twice."""

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def require_same(before: FileStat, now: FileStat, display: str) -> None:
    """Check that two looks at a file saw the same one.

    Raises:
        CheckpointChanged: they did not.
    """
    same_inode = before.inode is None or now.inode is None or before.inode == now.inode
    same_tag = before.tag is None or now.tag is None or before.tag == now.tag
    if (before.size, before.mtime_ns) == (now.size, now.mtime_ns) and same_inode and same_tag:
        return
    raise CheckpointChanged(
        f"{display} changed while it was read: {before.size} bytes of {_time_text(before)} became "
        f"{now.size} bytes of {_time_text(now)}; score it again once its writer has finished"
    )


def ended_early(display: str, position: int, stat: FileStat) -> CheckpointChanged:
    """Return the error for a file that ends before the size it had when it was opened."""
    return CheckpointChanged(
        f"{display} ended at byte {position} while it was read, but had {stat.size} bytes when it was opened; "
        "score it again once its writer has finished"
    )


def vanished(display: str) -> CheckpointVanished:
    """Return the error for a file that was found and is gone."""
    return CheckpointVanished(f"{display} was deleted or renamed while it was read; nothing of it was kept")


def require_inside(ranges: Sequence[ByteRange], stat: FileStat, display: str) -> None:
    """Check that ranges lie in the file as it was when it was opened, before any of them is asked for.

    Raises:
        CheckpointChanged: one does not, so whatever told of it belongs to another file.
    """
    if any(part.size and part.end > stat.size for part in ranges):
        raise ended_early(display, stat.size, stat)


def _time_text(stat: FileStat) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(stat.mtime_ns / 1e9))
