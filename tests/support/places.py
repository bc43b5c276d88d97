"""The places that a checkpoint may lie in, each with a small writer, for tests that must hold in all of them."""

from __future__ import annotations

import itertools
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import fsspec
import pytest

from dflash_core.checkpoints import open_source
from dflash_core.checkpoints.source_base import Source
from dflash_core.config import HostSettings
from tests.support.object_store import ObjectStore
from tests.support.sftp_server import RecordingSFTPServer

PLACES = ("path", "file", "ssh", "memory", "s3")
_FOLDERS = itertools.count()


class Place(ABC):
    """A place with an empty folder of its own."""

    @abstractmethod
    def url(self, path: str = "") -> str:
        """Return the address of a path in the folder."""

    @abstractmethod
    def put(self, path: str, data: bytes) -> None:
        """Write a file with its folders; one that exists is replaced as a whole."""

    @abstractmethod
    def delete(self, path: str) -> None:
        """Delete a file, or a folder with all in it."""

    @property
    @abstractmethod
    def bytes_sent(self) -> int | None:
        """Bytes of file data that its server has sent; None where there is no server."""

    def hosts(self, max_read_mb_s: float | None = None) -> dict[str, HostSettings]:
        """Return the configured hosts, with a limit on the read rate in MB/s."""
        return {"here": HostSettings(url="local", max_read_mb_s=max_read_mb_s)}

    def put_tree(self, folder: Path, name: str) -> None:
        """Write all files of a local folder."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.put(f"{name}/{path.relative_to(folder).as_posix()}", path.read_bytes())

    def open(self, max_read_mb_s: float | None = None) -> Source:
        """Open the source of this place."""
        return open_source(self.url(), self.hosts(max_read_mb_s))


class FolderPlace(Place):
    """A folder of this machine, by its path or by a `file://` URL."""

    bytes_sent = None

    def __init__(self, folder: Path, *, by_url: bool) -> None:
        self.folder = folder
        """Where it lies on this machine."""
        self._by_url = by_url
        folder.mkdir(parents=True, exist_ok=True)

    def url(self, path: str = "") -> str:
        whole = self.folder / path
        return whole.as_uri() if self._by_url else str(whole)

    def put(self, path: str, data: bytes) -> None:
        whole = self.folder / path
        whole.parent.mkdir(parents=True, exist_ok=True)
        temporary = whole.with_name("being-written.tmp")
        temporary.write_bytes(data)
        temporary.replace(whole)

    def delete(self, path: str) -> None:
        whole = self.folder / path
        if whole.is_dir():
            shutil.rmtree(whole)
        else:
            whole.unlink()


class SftpPlace(FolderPlace):
    """A folder on an SSH host.

    SFTP tells times in whole seconds and no inode, so a file that is replaced within one second by one of the same
    size is not seen to have changed. Here each file is a second younger than the one written before it.
    """

    bytes_sent = property(lambda self: self._server.bytes_sent)

    def __init__(self, server: RecordingSFTPServer) -> None:
        super().__init__(server.root, by_url=False)
        self._server = server
        self._seconds = itertools.count(1_700_000_000)

    def url(self, path: str = "") -> str:
        return self._server.url(quote(f"/{path}"))

    def put(self, path: str, data: bytes) -> None:
        super().put(path, data)
        second = next(self._seconds)
        os.utime(self.folder / path, (second, second))

    def hosts(self, max_read_mb_s: float | None = None) -> dict[str, HostSettings]:
        return {"box": self._server.host_settings.model_copy(update={"max_read_mb_s": max_read_mb_s})}


class MemoryPlace(Place):
    """A folder in fsspec's memory."""

    bytes_sent = None

    def __init__(self, name: str) -> None:
        self._name = name
        self._memory = fsspec.filesystem("memory")

    def url(self, path: str = "") -> str:
        return f"memory://{self._name}/{path}".rstrip("/")

    def put(self, path: str, data: bytes) -> None:
        self._memory.pipe(f"/{self._name}/{path}", data)

    def delete(self, path: str) -> None:
        self._memory.rm(f"/{self._name}/{path}", recursive=True)


class StorePlace(Place):
    """A prefix in a bucket."""

    bytes_sent = property(lambda self: self._store.bytes_sent)

    def __init__(self, store: ObjectStore, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def url(self, path: str = "") -> str:
        return self._store.url(f"{self._prefix}/{path}")

    def put(self, path: str, data: bytes) -> None:
        self._store.put(f"{self._prefix}/{path}", data)

    def delete(self, path: str) -> None:
        self._store.delete(f"{self._prefix}/{path}")


@contextmanager
def empty_place(kind: str, folder: Path, store: ObjectStore | None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """Yield a place with an empty folder, and check at the end that nobody but the test wrote there.

    Args:
        kind: one of PLACES.
        folder: an empty folder of this machine, for the places that lie on it.
        store: a running object store, for `s3`.
        monkeypatch: sets fsspec's configuration.
    """
    name = f"place-{next(_FOLDERS)}"
    if kind == "ssh":
        with RecordingSFTPServer(folder) as server:
            yield SftpPlace(server)
            assert (server.write_attempts, server.execs) == ([], [])
    elif kind == "memory":
        try:
            yield MemoryPlace(name)
        finally:
            memory = fsspec.filesystem("memory")
            if memory.exists(f"/{name}"):
                memory.rm(f"/{name}", recursive=True)
    elif kind == "s3":
        assert store is not None
        monkeypatch.setitem(fsspec.config.conf, "s3", store.fsspec_settings)
        store.forget()
        yield StorePlace(store, name)
        assert store.written == []
    else:
        yield FolderPlace(folder / "runs", by_url=kind == "file")
