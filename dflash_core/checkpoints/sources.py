"""One way to read files where they lie: this machine, an SSH host (SFTP only), any fsspec URL.

A source is opened for one place (`open_source`) and can then list, stat and read every path there.
Nothing in here can write: local files are opened for reading, SFTP handles with the read flag alone.
Reads are by range, counted in `bytes_read`, and paced by `max_read_mb_s` before each request.

fsspec URLs are read by `cat_file(path, start, end)` with the length of each answer checked. `ssh://`
never goes through fsspec: the range reads of sshfs return whole files.
"""

from __future__ import annotations

import os
import posixpath
import stat as stat_bits
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

import fsspec

from dflash_core.config import HostSettings
from dflash_core.errors import CheckpointChanged, CheckpointError, CheckpointNotFound, InputError
from dflash_core.ssh import is_ssh_url, parse_ssh_url, settings_for

LOCAL_BLOCK_BYTES = 4 << 20

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
            CheckpointChanged: size, time or (where known) file differ, or the path is gone.
        """
        try:
            now = self.current_stat()
        except CheckpointNotFound as error:
            raise CheckpointChanged(f"{self.display} was deleted while it was read; score it again") from error
        require_same(self.stat, now, self.display)

    def close(self) -> None:
        """Close the file."""

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

    def close(self) -> None:
        """End the connection, if there is one."""

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def open_source(url: str, hosts: Mapping[str, HostSettings]) -> Source:
    """Open the place that a path or URL lies on, with the settings of the configured host.

    Raises:
        HostKeyUnknown: an SSH host's key is not in its known_hosts file.
        HostUnreachable: it does not answer, or refuses the login.
        InputError: the URL is malformed, or its scheme is not known here.
    """
    if is_ssh_url(url):
        from dflash_core.checkpoints.sftp_source import SftpSource

        return SftpSource(parse_ssh_url(url), settings_for(url, hosts))
    limits = [host.max_read_mb_s for host in hosts.values() if host.url == "local"]
    limit = RateLimit(limits[0] if limits else None)
    if "://" not in url or url.startswith("file://"):
        return LocalSource(limit)
    return FsspecSource(url, limit)


def require_same(before: FileStat, now: FileStat, display: str) -> None:
    """Check that two looks at a file saw the same one.

    Raises:
        CheckpointChanged: they did not.
    """
    same_inode = before.inode is None or now.inode is None or before.inode == now.inode
    if (before.size, before.mtime_ns) == (now.size, now.mtime_ns) and same_inode:
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


def _time_text(stat: FileStat) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(stat.mtime_ns / 1e9))


def _stat_of(result: os.stat_result) -> FileStat:
    is_file, is_folder = stat_bits.S_ISREG(result.st_mode), stat_bits.S_ISDIR(result.st_mode)
    return FileStat(
        size=result.st_size,
        mtime_ns=result.st_mtime_ns,
        kind="file" if is_file else "folder" if is_folder else "other",
        inode=result.st_ino,
    )


def _local_error(error: OSError, path: str) -> CheckpointError:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return CheckpointNotFound(f"nothing lies at {path!r}; check the path")
    return CheckpointError(f"cannot read {path!r}: {error.strerror or error}; check its permissions and its disk")


class _LocalFile(SourceFile):
    def __init__(self, source: LocalSource, path: str) -> None:
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise _local_error(error, path) from error
        super().__init__(path, path, _stat_of(os.fstat(self._fd)))
        self._source = source

    def read_ranges(self, ranges: Sequence[ByteRange], sink: Sink) -> None:
        for part in ranges:
            position = part.offset
            while position < part.end:
                size = min(LOCAL_BLOCK_BYTES, part.end - position)
                time.sleep(self._source.limit.reserve(size))
                try:
                    data = os.pread(self._fd, size, position)
                except OSError as error:
                    raise _local_error(error, self.path) from error
                if not data:
                    raise ended_early(self.display, position, self.stat)
                self._source.bytes_read += len(data)
                sink(position, data)
                position += len(data)

    def current_stat(self) -> FileStat:
        return self._source.stat(self.path)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class LocalSource(Source):
    """Files of this machine."""

    def __init__(self, limit: RateLimit) -> None:
        super().__init__()
        self.limit = limit

    def path_of(self, url: str) -> str:
        """Return the absolute path of a path or `file://` URL."""
        path = unquote(urlsplit(url).path) if url.startswith("file://") else url
        return os.path.abspath(os.path.expanduser(path))

    def url_of(self, path: str) -> str:
        """Return the path itself."""
        return path

    def stat(self, path: str) -> FileStat:
        """Return what lies at a path, links followed."""
        try:
            return _stat_of(os.stat(path))
        except OSError as error:
            raise _local_error(error, path) from error

    def list_dir(self, path: str) -> list[DirEntry]:
        """Return the entries of a folder, sorted by name."""
        try:
            entries = sorted(os.scandir(path), key=lambda entry: entry.name)
        except OSError as error:
            raise _local_error(error, path) from error
        return [self._entry(entry) for entry in entries]

    def realpath(self, path: str) -> str:
        """Return the path with all links resolved."""
        return os.path.realpath(path)

    def open(self, path: str) -> SourceFile:
        """Open a file for reading."""
        return _LocalFile(self, path)

    def _entry(self, entry: os.DirEntry[str]) -> DirEntry:
        try:
            stat = _stat_of(entry.stat())
        except OSError:
            stat = None
        return DirEntry(name=entry.name, path=entry.path, stat=stat, is_link=entry.is_symlink())


class _FsspecFile(SourceFile):
    def __init__(self, source: FsspecSource, path: str) -> None:
        super().__init__(path, source.url_of(path), source.stat(path))
        self._source = source

    def read_ranges(self, ranges: Sequence[ByteRange], sink: Sink) -> None:
        for part in ranges:
            for position in range(part.offset, part.end, LOCAL_BLOCK_BYTES):
                size = min(LOCAL_BLOCK_BYTES, part.end - position)
                time.sleep(self._source.limit.reserve(size))
                data = self._source.fs.cat_file(self.path, start=position, end=position + size)
                self._source.bytes_read += len(data)
                if len(data) != size:
                    raise ended_early(self.display, position + len(data), self.stat)
                sink(position, data)

    def current_stat(self) -> FileStat:
        self._source.fs.invalidate_cache()
        return self._source.stat(self.path)


class FsspecSource(Source):
    """Any store that fsspec knows, for example s3."""

    def __init__(self, url: str, limit: RateLimit) -> None:
        super().__init__()
        self.limit = limit
        try:
            self.fs, _ = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise InputError(f"cannot open {url!r}: {error}; use a path, ssh:// or a scheme of fsspec") from error

    def path_of(self, url: str) -> str:
        """Return the URL without its scheme."""
        return str(self.fs._strip_protocol(url))

    def url_of(self, path: str) -> str:
        """Return the path with its scheme."""
        return str(self.fs.unstrip_protocol(path))

    def stat(self, path: str) -> FileStat:
        """Return what lies at a path; without a time of change, its tag or 0 stands for it."""
        try:
            return self._stat_of(self.fs.info(path))
        except FileNotFoundError as error:
            raise CheckpointNotFound(f"nothing lies at {self.url_of(path)!r}; check the URL") from error

    def list_dir(self, path: str) -> list[DirEntry]:
        """Return the entries of a folder, sorted by name."""
        self.fs.invalidate_cache()
        try:
            found = self.fs.ls(path, detail=True)
        except FileNotFoundError as error:
            raise CheckpointNotFound(f"nothing lies at {self.url_of(path)!r}; check the URL") from error
        paths = {str(info["name"]).rstrip("/"): info for info in found}
        return [
            DirEntry(name=posixpath.basename(name), path=name, stat=self._stat_of(info))
            for name, info in sorted(paths.items())
            if name != path.rstrip("/")
        ]

    def realpath(self, path: str) -> str:
        """Return the path: object stores have no links."""
        return path

    def open(self, path: str) -> SourceFile:
        """Open a file for reading."""
        return _FsspecFile(self, path)

    def _stat_of(self, info: Mapping[str, Any]) -> FileStat:
        changed = next((info[key] for key in ("mtime", "LastModified", "last_modified", "created") if info.get(key)), 0)
        seconds = changed.timestamp() if hasattr(changed, "timestamp") else changed
        kind: Literal["file", "folder"] = "folder" if info["type"] == "directory" else "file"
        return FileStat(size=int(info.get("size") or 0), mtime_ns=int(float(seconds) * 1e9), kind=kind)
