"""A store's files at any place that fsspec knows: S3 and its like, where nothing can be renamed."""

from __future__ import annotations

import posixpath
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from fsspec.callbacks import Callback

from dflash_core.checkpoints.fsspec_source import RETRY_WAITS_S, FsspecSource
from dflash_core.checkpoints.source_base import ByteRange, RateLimit
from dflash_core.checkpoints.store_errors import is_passing, translated
from dflash_core.errors import (
    CheckpointChanged,
    CheckpointError,
    CheckpointNotFound,
    CheckpointVanished,
    HostError,
)
from dflash_core.store_files import FileMissing, Received, RemoteEntry, RemoteFiles, Sent

SILENCE_S = 120.0
"""An upload that sends nothing for so long is given up."""
PART_BYTES = 16 << 20
PARTS_AT_ONCE = 4
MAX_PARTS = 9000
"""S3 takes 10,000 parts of one object."""


class FsspecFiles(RemoteFiles):
    """Files under the URL of a folder or a prefix."""

    can_rename = False

    def __init__(self, url: str, *, max_read_mb_s: float | None = None) -> None:
        """Set up the client; nothing is sent yet.

        Raises:
            InputError: the URL is malformed, or holds a secret.
        """
        super().__init__()
        self.url = url
        self._source = FsspecSource(url, RateLimit(max_read_mb_s))
        self._base = self._source.path_of(url).rstrip("/")

    def list_folders(self, paths: Sequence[str]) -> dict[str, list[RemoteEntry]]:
        """Return what lies in folders, asked for at once; one that is not there is empty."""
        with self._in_words():
            listed = self._source.list_dirs([self._at(path) for path in paths])
        return {
            path: [
                RemoteEntry(
                    name=one.name,
                    is_folder=one.stat.kind == "folder",
                    size=one.stat.size,
                    changed_at=one.stat.mtime_ns / 1e9,
                )
                for one in listed[self._at(path)]
                if one.stat is not None
            ]
            for path in paths
        }

    def read_many(self, paths: Sequence[str]) -> dict[str, bytes | None]:
        """Return the bytes of small files, several at a time."""
        found: dict[str, bytes | None] = {}
        waiting = iter(paths)
        while some := list(islice(waiting, self._source.num_at_once)):
            calls = [self._source.begin("cat_file", self._at(path)) for path in some]
            for path, call in zip(some, calls, strict=True):
                try:
                    found[path] = self._ask(path, "cat_file", self._at(path), first=call)
                except FileMissing:
                    found[path] = None
        return found

    def download(self, path: str, *, start: int, size: int, receive: Received) -> None:
        """Read a file from `start` on, several blocks ahead."""
        try:
            with self._in_words(), self._source.open(self._at(path)) as file:
                if file.stat.size != size:
                    raise FileMissing(path)
                file.read_ranges([ByteRange(offset=start, size=size - start)], lambda _offset, data: receive(data))
        except (CheckpointChanged, CheckpointVanished) as error:
            raise FileMissing(path) from error

    def upload(self, local: Path, path: str, *, on_sent: Sent) -> None:
        """Write a whole file, several blocks at a time."""
        size = local.stat().st_size
        options: dict[str, Any] = {}
        if self._source.fs.async_impl and "s3" in self._source.fs.protocol:
            options = {"chunksize": max(PART_BYTES, -(-size // MAX_PARTS)), "max_concurrency": PARTS_AT_ONCE}
        self._make_parent(path)
        counter = _Counter(on_sent)
        self._ask(path, "put_file", str(local), self._at(path), callback=counter, moved=counter, **options)
        stored = self._ask(path, "info", self._at(path)).get("size")
        if stored != size:
            raise HostError(f"{self._shown(path)!r} has {stored} bytes after {size} were sent; try again")

    def write(self, path: str, data: bytes) -> None:
        """Write a small file."""
        self._make_parent(path)
        self._ask(path, "pipe_file", self._at(path), data)

    def rename(self, path: str, to: str) -> bool:
        """Refuse: there are no folders to rename."""
        raise NotImplementedError("folders of this place cannot be renamed")

    def remove(self, path: str) -> None:
        """Remove a file or a folder with all in it."""
        try:
            self._ask(path, "rm", self._at(path), recursive=True)
        except FileMissing:
            return

    def touch(self, path: str) -> None:
        """Do nothing: the time of an object is that of its writing."""

    def close(self) -> None:
        """Do nothing: fsspec keeps its own connections."""

    def _at(self, path: str) -> str:
        return f"{self._base}/{path}".rstrip("/")

    def _shown(self, path: str) -> str:
        return self._source.url_of(self._at(path))

    def _make_parent(self, path: str) -> None:
        """Make folders where the place has such things; stores of objects, whose clients are asynchronous, do not."""
        if not self._source.fs.async_impl:
            self._ask(path, "makedirs", posixpath.dirname(self._at(path)), exist_ok=True)

    def _ask(
        self,
        path: str,
        method: str,
        *args: Any,
        first: Future[Any] | None = None,
        moved: _Counter | None = None,
        **options: Any,
    ) -> Any:
        """Call a method of the file system; a passing fault is tried again."""
        for wait_s in (*RETRY_WAITS_S, None):
            future = first or self._source.begin(method, *args, **options)
            first = None
            try:
                return future.result(self._source.timeout_s) if moved is None else _while_moving(future, moved)
            except FileNotFoundError as error:
                raise FileMissing(path) from error
            except Exception as error:
                if wait_s is None or not is_passing(error):
                    raise self._worded(error, path) from error
            finally:
                future.cancel()
            if moved is not None:
                moved.restart()
            time.sleep(wait_s)
        raise AssertionError("the last try returns or raises")

    def _worded(self, error: Exception, path: str) -> Exception:
        meant = translated(error, self._shown(path))
        if isinstance(meant, CheckpointNotFound):
            return FileMissing(path)
        return HostError(f"the store cannot be used: {meant}") if isinstance(meant, CheckpointError) else meant

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        """Turn what reading a checkpoint would say into what using a store says."""
        try:
            yield
        except (CheckpointChanged, CheckpointVanished):
            raise
        except CheckpointNotFound as error:
            raise FileMissing(str(error)) from error
        except CheckpointError as error:
            raise HostError(f"the store cannot be used: {error}") from error


class _Counter(Callback):
    """Counts the bytes of an upload; one that is tried again counts from the start."""

    def __init__(self, on_sent: Callable[[int], None]) -> None:
        super().__init__()
        self._on_sent = on_sent
        self._sent = 0
        self.moved_at = time.monotonic()

    def relative_update(self, inc: int = 1) -> None:
        self._sent += inc
        self.moved_at = time.monotonic()
        self._on_sent(inc)

    def restart(self) -> None:
        """Take back what was counted."""
        self._on_sent(-self._sent)
        self._sent, self.moved_at = 0, time.monotonic()


def _while_moving(future: Future[Any], counter: _Counter) -> Any:
    """Wait for an upload as long as bytes are sent.

    Raises:
        TimeoutError: none were for too long.
    """
    while True:
        try:
            return future.result(1.0)
        except TimeoutError:
            if future.done() or time.monotonic() - counter.moved_at > SILENCE_S:
                raise
