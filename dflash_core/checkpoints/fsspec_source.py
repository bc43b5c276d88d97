"""Files of any store that fsspec knows, for example s3, read by ranges.

The length of each answer is checked: some file systems ignore which part was asked for and return
the whole file. Stores with an asynchronous client are asked for several blocks at once.
"""

from __future__ import annotations

import asyncio
import posixpath
import re
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from datetime import datetime
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
    require_inside,
)
from dflash_core.checkpoints.store_errors import is_passing, translated
from dflash_core.errors import CheckpointError, CheckpointNotFound, DFlashEvalError, InputError, one_line

# At most 8 blocks of 4 MiB are under way: enough for a store that gives each request 50 MB/s.
MAX_REQUESTS = 8
# The libraries repeat requests themselves; this is for those that give up at once.
RETRY_WAITS_S = (0.5, 1.5)
RETRY_WITHIN_S = 10.0
ANSWER_TIMEOUT_S = 120.0
"""How long one answer may take, all repeats inside the library included."""

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_CHAIN = re.compile(r"::[A-Za-z0-9+.-]+://")
_SIGNATURE = re.compile(r"[?&](x-amz-|x-goog-|sig=|signature=|token=|access_token=|key=)", re.IGNORECASE)
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")
# What changes whenever an object does, in the order of preference; the keys of gcsfs, s3fs, adlfs, hf and others.
_TAGS = ("generation", "ETag", "etag", "content_md5", "md5Hash", "blob_id")
_EXTRAS = {"s3": "s3", "s3a": "s3"}


class FsspecSource(Source):
    """Any store that fsspec knows, with the settings that fsspec has for it."""

    def __init__(self, url: str, limit: RateLimit, *, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        """Set up the store's client.

        Raises:
            InputError: the URL is malformed, holds a secret or a chain, or its scheme is not known here.
            HostUnreachable: the store does not answer.
        """
        super().__init__()
        self.limit = limit
        self.timeout_s = timeout_s
        self.fs = _file_system(url)
        self._prefix = _prefix(url, self.path_of(url))

    def path_of(self, url: str) -> str:
        """Return the URL without its scheme; `#`, `?` and `%` are parts of a name."""
        return str(self.fs._strip_protocol(url))

    def url_of(self, path: str) -> str:
        """Return the path with the scheme (and the host) of the URL that this source was opened with."""
        return f"{self._prefix}{path}"

    def stat(self, path: str) -> FileStat:
        """Return what lies at a path; without a time of change, 0 stands for it."""
        self.fs.invalidate_cache()
        return _stat_of(self.ask(path, "info", path))

    def list_dir(self, path: str) -> list[DirEntry]:
        """Return the entries of a folder, sorted by name; a prefix of keys is a folder."""
        self.fs.invalidate_cache()
        return self._entries(path, self.ask(path, "ls", path, detail=True))

    def list_dirs(self, paths: Sequence[str]) -> dict[str, list[DirEntry]]:
        """Return the entries of several folders, asked for at once; one that is gone by now has none."""
        self.fs.invalidate_cache()
        listed: dict[str, list[DirEntry]] = {}
        starts = [lambda path=path: self.begin("ls", path, detail=True) for path in paths]
        with closing(_ahead(starts, self.num_at_once)) as futures:
            for path, future in zip(paths, futures, strict=True):
                try:
                    listed[path] = self._entries(path, self.ask(path, "ls", path, detail=True, first=future))
                except CheckpointNotFound:
                    listed[path] = []
        return listed

    def realpath(self, path: str) -> str:
        """Return the path: object stores have no links."""
        return path

    def open(self, path: str) -> SourceFile:
        """Open a file for reading."""
        stat = self.stat(path)
        if stat.kind != "file":
            raise CheckpointNotFound(f"{self.url_of(path)!r} is a {stat.kind}, expected a file; check the path")
        return _FsspecFile(self, path, stat)

    def close(self) -> None:
        """Do nothing: fsspec keeps its own connections."""

    @property
    def num_at_once(self) -> int:
        """How many requests may be under way."""
        return MAX_REQUESTS if self.fs.async_impl else 1

    def begin(self, method: str, *args: Any, **options: Any) -> Future[Any]:
        """Call a method of the file system; where its client is asynchronous, without waiting for it."""
        if self.fs.async_impl:
            coroutine = getattr(self.fs, f"_{method}")(*args, **options)
            return asyncio.run_coroutine_threadsafe(coroutine, self.fs.loop)
        done: Future[Any] = Future()
        try:
            done.set_result(getattr(self.fs, method)(*args, **options))
        except Exception as error:
            done.set_exception(error)
        return done

    def ask(self, path: str, method: str, *args: Any, first: Future[Any] | None = None, **options: Any) -> Any:
        """Call a method of the file system and return its answer; a passing failure is tried again.

        Args:
            path: what it is about, for messages.
            method: name of the method.
            args: its arguments.
            first: the call, if it is under way already.
            options: its keyword arguments.
        """
        began = time.monotonic()
        for wait_s in (*RETRY_WAITS_S, None):
            future = first or self.begin(method, *args, **options)
            first = None
            try:
                return future.result(self.timeout_s)
            except Exception as error:
                if wait_s is None or not is_passing(error) or time.monotonic() - began > RETRY_WITHIN_S:
                    raise translated(error, self.url_of(path)) from error
            finally:
                future.cancel()
            time.sleep(wait_s)
        raise AssertionError("the last try returns or raises")

    def _entries(self, path: str, found: Sequence[Mapping[str, Any]]) -> list[DirEntry]:
        if [(str(info["name"]), info["type"]) for info in found] == [(path, "file")]:
            raise CheckpointNotFound(f"{self.url_of(path)!r} is a file, expected a folder; check the path")
        # A folder may be kept alive by an empty object whose key ends in a slash: that is the folder itself.
        paths = {str(info["name"]).rstrip("/"): info for info in found}
        entries = [
            DirEntry(
                name=posixpath.basename(name),
                path=name,
                stat=_stat_of(info),
                is_link=bool(info.get("islink")) or info["type"] == "link",
            )
            for name, info in paths.items()
            if name != path.rstrip("/")
        ]
        return sorted(entries, key=lambda entry: entry.name)


class _FsspecFile(SourceFile):
    def __init__(self, source: FsspecSource, path: str, stat: FileStat) -> None:
        super().__init__(path, source.url_of(path), stat)
        self._source = source

    def read_ranges(self, ranges: Sequence[ByteRange], sink: Sink) -> None:
        require_inside(ranges, self.stat, self.display)
        block_bytes = self._source.limit.block_bytes(BLOCK_BYTES)
        blocks = [
            ByteRange(offset=offset, size=min(block_bytes, part.end - offset))
            for part in ranges
            for offset in range(part.offset, part.end, block_bytes)
        ]
        starts = [lambda block=block: self._begin(block) for block in blocks]
        with closing(_ahead(starts, self._source.num_at_once)) as futures:
            for block, future in zip(blocks, futures, strict=True):
                sink(block.offset, self._finish(block, future))

    def current_stat(self) -> FileStat:
        return self._source.stat(self.path)

    def close(self) -> None:
        """Do nothing: each read stands alone."""

    def _begin(self, block: ByteRange) -> Future[Any]:
        time.sleep(self._source.limit.reserve(block.size))
        return self._source.begin("cat_file", self.path, start=block.offset, end=block.end)

    def _finish(self, block: ByteRange, future: Future[Any]) -> bytes:
        """Return a block, asked for again after a passing failure while the file is still the same.

        Raises:
            CheckpointChanged, CheckpointVanished: it is not: whatever failed, that is why.
        """
        began = time.monotonic()
        for wait_s in (*RETRY_WAITS_S, None):
            try:
                return self._received(block, future)
            except DFlashEvalError:
                raise
            except Exception as error:
                self.check_unchanged()
                if wait_s is None or not is_passing(error) or time.monotonic() - began > RETRY_WITHIN_S:
                    raise translated(error, self.display) from error
            finally:
                future.cancel()
            time.sleep(wait_s)
            future = self._begin(block)
        raise AssertionError("the last try returns or raises")

    def _received(self, block: ByteRange, future: Future[Any]) -> bytes:
        data = future.result(self._source.timeout_s)
        assert isinstance(data, bytes)
        self._source.bytes_read += len(data)
        if len(data) > block.size:
            raise CheckpointError(
                f"{self.display}: {len(data)} bytes came where {block.size} were asked for, so this store's library "
                "does not read parts of files; copy the checkpoint to a disk, or read it by ssh://"
            )
        if len(data) < block.size:
            raise ConnectionError(f"{len(data)} of {block.size} bytes came")
        return data


def _ahead(starts: Iterable[Callable[[], Future[Any]]], num_at_once: int) -> Generator[Future[Any], None, None]:
    """Start calls in order and yield them in order, with so many under way; the end cancels what is left."""
    queue: deque[Future[Any]] = deque()
    try:
        for start in starts:
            queue.append(start())
            if len(queue) == num_at_once:
                yield queue.popleft()
        while queue:
            yield queue.popleft()
    finally:
        for future in queue:
            future.cancel()


def _file_system(url: str) -> Any:
    """Return fsspec's file system for a URL, without a cache of listings: new objects must be seen.

    No message repeats the URL before it is known to hold no secret.
    """
    scheme, _, rest = url.partition("://")
    if "::" in scheme or _CHAIN.search(url):
        raise InputError("a URL that chains stores with '::' cannot be read in parts; give the URL of the files")
    if not _SCHEME.fullmatch(scheme):
        raise InputError("a URL must begin with a scheme such as s3://; use a path, ssh:// or a scheme of fsspec")
    user = rest.partition("/")[0].rpartition("@")[0]
    if ":" in user or (scheme in ("http", "https") and _SIGNATURE.search(rest)):
        raise InputError(
            f"a password or key in a {scheme}:// URL would end up in logs; leave it out and give it to fsspec by its "
            f"configuration or by FSSPEC_{scheme.upper()}_... in the environment"
        )
    if scheme in ("ssh", "sftp", "scp", "file", "local"):
        raise InputError(f"{scheme}:// is not read through fsspec; write ssh://user@host/path, file:///path or a path")
    try:
        kind = fsspec.get_filesystem_class(scheme)
    except ValueError as error:
        raise InputError(
            f"no store is known by the scheme {scheme!r}; use a path, ssh://, s3:// or another scheme of fsspec"
        ) from error
    except ImportError as error:
        extra = _EXTRAS.get(scheme)
        advice = f"pip install 'dflash-eval[{extra}]'" if extra else one_line(error)
        raise InputError(f"{scheme}:// needs a package that is not installed: {advice}") from error
    try:
        return kind(**kind._get_kwargs_from_urls(url), use_listings_cache=False)
    except (ImportError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"cannot set up {scheme}://: {one_line(error)}; check fsspec's configuration of it") from error
    except Exception as error:
        raise translated(error, f"{scheme}://") from error


def _prefix(url: str, path: str) -> str:
    """Return what to put before a path to get its URL: the scheme, and the host where a path has none."""
    if not path:
        return url
    trimmed, stem = url.rstrip("/"), path.rstrip("/")
    return trimmed.removesuffix(stem) if trimmed.endswith(stem) else url.partition("://")[0] + "://"


def _stat_of(info: Mapping[str, Any]) -> FileStat:
    kinds: dict[str, Literal["file", "folder"]] = {"directory": "folder", "file": "file"}
    tag = next((str(info[key]) for key in _TAGS if info.get(key)), None)
    changed = next((info[key] for key in _TIMES if info.get(key)), None)
    return FileStat(
        size=int(info.get("size") or 0),
        mtime_ns=_nanoseconds(changed),
        kind=kinds.get(str(info["type"]), "other"),
        tag=tag,
    )


def _nanoseconds(moment: object) -> int:
    """Return a time as file systems tell it (a datetime, seconds, or ISO text) in nanoseconds; 0 is unknown."""
    if isinstance(moment, str):
        try:
            moment = datetime.fromisoformat(moment)
        except ValueError:
            return 0
    if isinstance(moment, datetime):
        moment = moment.timestamp()
    return int(moment * 1e9) if isinstance(moment, int | float) else 0
