"""Files of any store that fsspec knows, read by ranges with the length of each answer checked."""

from __future__ import annotations

import posixpath
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import fsspec

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
from dflash_core.errors import CheckpointNotFound, InputError


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

    def close(self) -> None:
        """Do nothing: fsspec keeps its own connections."""

    def _stat_of(self, info: Mapping[str, Any]) -> FileStat:
        changed = next((info[key] for key in ("mtime", "LastModified", "last_modified", "created") if info.get(key)), 0)
        seconds = changed.timestamp() if hasattr(changed, "timestamp") else changed
        kind: Literal["file", "folder"] = "folder" if info["type"] == "directory" else "file"
        return FileStat(size=int(info.get("size") or 0), mtime_ns=int(float(seconds) * 1e9), kind=kind)


class _FsspecFile(SourceFile):
    def __init__(self, source: FsspecSource, path: str) -> None:
        super().__init__(path, source.url_of(path), source.stat(path))
        self._source = source

    def read_ranges(self, ranges: Sequence[ByteRange], sink: Sink) -> None:
        for part in ranges:
            for position in range(part.offset, part.end, BLOCK_BYTES):
                size = min(BLOCK_BYTES, part.end - position)
                time.sleep(self._source.limit.reserve(size))
                data = self._source.fs.cat_file(self.path, start=position, end=position + size)
                self._source.bytes_read += len(data)
                if len(data) != size:
                    raise ended_early(self.display, position + len(data), self.stat)
                sink(position, data)

    def current_stat(self) -> FileStat:
        self._source.fs.invalidate_cache()
        return self._source.stat(self.path)

    def close(self) -> None:
        """Do nothing: each read stands alone."""
