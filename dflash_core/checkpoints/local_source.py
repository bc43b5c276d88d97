"""Files of this machine, read by ranges."""

from __future__ import annotations

import errno
import os
import stat as stat_bits
import time
from collections.abc import Sequence
from urllib.parse import unquote_to_bytes

from dflash_core.checkpoints.source_base import (
    BLOCK_BYTES,
    ByteRange,
    DirEntry,
    FileStat,
    RateLimit,
    Sink,
    Source,
    SourceFile,
    ended_early,
    require_inside,
    vanished,
)
from dflash_core.checkpoints.store_errors import translated
from dflash_core.errors import CheckpointNotFound, InputError


class LocalSource(Source):
    """Files of this machine."""

    def __init__(self, limit: RateLimit) -> None:
        super().__init__()
        self.limit = limit

    def path_of(self, url: str) -> str:
        """Return the absolute path of a path or `file://` URL.

        In a URL `%20` and the like are decoded; a `?` or `#` belongs to the path, as it may to the name of a folder.

        Raises:
            InputError: the URL names a host, as it does with two slashes too few or too many.
        """
        if not url.startswith("file://"):
            return os.path.abspath(os.path.expanduser(url))
        host, slash, rest = url.removeprefix("file://").partition("/")
        if host not in ("", "localhost"):
            name = host.rpartition("@")[2]
            raise InputError(f"file://{name}/... names a host, {name!r}; write file:/// and the path on this machine")
        return os.path.abspath(os.fsdecode(unquote_to_bytes(slash + rest)))

    def url_of(self, path: str) -> str:
        """Return the path itself."""
        return path

    def stat(self, path: str) -> FileStat:
        """Return what lies at a path, links followed."""
        try:
            return _stat_of(os.stat(path))
        except (OSError, ValueError) as error:
            raise translated(error, path) from error

    def list_dir(self, path: str) -> list[DirEntry]:
        """Return the entries of a folder, sorted by name."""
        try:
            with os.scandir(path) as found:
                entries = sorted(found, key=lambda entry: entry.name)
        except (OSError, ValueError) as error:
            raise translated(error, path) from error
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

    def close(self) -> None:
        """Do nothing: there is no connection."""


class _LocalFile(SourceFile):
    def __init__(self, source: LocalSource, path: str) -> None:
        try:
            # O_NONBLOCK: opening a pipe would wait for a writer. It means nothing to files.
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError) as error:
            raise translated(error, path) from error
        super().__init__(path, path, _stat_of(os.fstat(self._fd)))
        self._source = source
        if self.stat.kind != "file":
            self.close()
            kind = "no file" if self.stat.kind == "other" else f"a {self.stat.kind}"
            raise CheckpointNotFound(f"{path!r} is {kind}, expected a file; check the path")

    def read_ranges(self, ranges: Sequence[ByteRange], sink: Sink) -> None:
        require_inside(ranges, self.stat, self.display)
        block_bytes = self._source.limit.block_bytes(BLOCK_BYTES)
        for part in ranges:
            position = part.offset
            while position < part.end:
                size = min(block_bytes, part.end - position)
                time.sleep(self._source.limit.reserve(size))
                data = self._read(size, position)
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

    def _read(self, size: int, position: int) -> bytes:
        try:
            return os.pread(self._fd, size, position)
        except OSError as error:
            # A network disk forgets files that were deleted on another machine.
            if error.errno == errno.ESTALE:
                raise vanished(self.display) from error
            raise translated(error, self.path) from error


def _stat_of(result: os.stat_result) -> FileStat:
    is_file, is_folder = stat_bits.S_ISREG(result.st_mode), stat_bits.S_ISDIR(result.st_mode)
    return FileStat(
        size=result.st_size,
        mtime_ns=result.st_mtime_ns,
        kind="file" if is_file else "folder" if is_folder else "other",
        inode=result.st_ino,
    )
