"""Files of this machine, read by ranges."""

from __future__ import annotations

import os
import stat as stat_bits
import time
from collections.abc import Sequence
from urllib.parse import unquote, urlsplit

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
)
from dflash_core.errors import CheckpointError, CheckpointNotFound


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

    def close(self) -> None:
        """Do nothing: there is no connection."""


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
                size = min(BLOCK_BYTES, part.end - position)
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
