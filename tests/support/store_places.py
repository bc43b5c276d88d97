"""Places where a store may lie, each with what a test needs to look into it and to damage it."""

from __future__ import annotations

import itertools
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import fsspec
import pytest

from dflash_core.config import HostSettings
from dflash_core.store import MANIFEST_NAME, Store
from dflash_core.store_opening import close_connections, open_store
from examples.training_box import find_sshd
from tests.support.object_store import ObjectStore
from tests.support.store_server import StoreBox, StoreServer

REMOTE = ("sshd", "asyncssh", "s3", "memory")
_NUMBERS = itertools.count()


class StorePlace(ABC):
    """An empty store at one kind of place."""

    url: str
    hosts: Mapping[str, HostSettings] = {}
    environment: Mapping[str, str] = {}
    """What another process needs to reach it."""

    def open(self, mirror: Path) -> Store:
        """Open it as a machine with a mirror of its own does."""
        return open_store(self.url, self.hosts, mirror=str(mirror))

    def hosts_json(self) -> str:
        """Return the configured hosts for another process."""
        return json.dumps({name: host.model_dump() for name, host in self.hosts.items()})

    @abstractmethod
    def files(self) -> dict[str, bytes]:
        """Return every file by its path in the store."""

    @abstractmethod
    def write(self, path: str, data: bytes) -> None:
        """Write a file behind the store's back."""

    @abstractmethod
    def delete(self, path: str) -> None:
        """Delete a file behind the store's back."""

    def path_of(self, kind: str, key: str, name: str) -> str:
        """Return where a published file lies."""
        prefix = f"{kind}/{key}"
        folder = json.loads(self.files()[f"{prefix}/{MANIFEST_NAME}"]).get("folder", "")
        return "/".join(part for part in (prefix, folder, name) if part)

    def flip_a_bit(self, path: str) -> None:
        """Change one bit of a file, and nothing else."""
        data = bytearray(self.files()[path])
        data[len(data) // 2] ^= 1
        self.write(path, bytes(data))


class FolderStore(StorePlace):
    """A folder of this machine that an SSH server, or nobody, serves."""

    def __init__(self, folder: Path, url: str, hosts: Mapping[str, HostSettings]) -> None:
        self.folder = folder
        self.url = url
        self.hosts = hosts

    def files(self) -> dict[str, bytes]:
        found = {}
        for path in sorted(self.folder.rglob("*")):
            name = path.relative_to(self.folder).as_posix()
            if path.is_file() and not name.startswith("locks/"):
                found[name] = path.read_bytes()
        return found

    def write(self, path: str, data: bytes) -> None:
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / path).write_bytes(data)

    def delete(self, path: str) -> None:
        (self.folder / path).unlink()


class FsspecStore(StorePlace):
    """A prefix of a bucket, or a folder of fsspec's memory."""

    def __init__(self, url: str, environment: Mapping[str, str]) -> None:
        self.url = url
        self.environment = environment
        scheme, _, self._root = url.partition("://")
        self._fs = fsspec.filesystem(scheme, use_listings_cache=False)
        self._root = self._root if scheme == "s3" else f"/{self._root}"

    def files(self) -> dict[str, bytes]:
        return {path.removeprefix(f"{self._root}/"): self._fs.cat_file(path) for path in self._fs.find(self._root)}

    def write(self, path: str, data: bytes) -> None:
        self._fs.pipe_file(f"{self._root}/{path}", data)

    def delete(self, path: str) -> None:
        self._fs.rm_file(f"{self._root}/{path}")


class StoreServers:
    """Servers that places of one test module share; each is started when it is first needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._started: dict[str, StoreBox | StoreServer | ObjectStore] = {}

    def __enter__(self) -> StoreServers:
        return self

    def __exit__(self, *_exc: object) -> None:
        close_connections()
        self._stack.close()

    def place(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> StorePlace:
        """Return an empty store.

        Args:
            kind: `local` or one of REMOTE.
            monkeypatch: sets fsspec's configuration.
        """
        name = f"store-{os.getpid()}-{next(_NUMBERS)}"
        if kind == "local":
            return FolderStore(self._folder / name, str(self._folder / name), {})
        if kind == "memory":
            return FsspecStore(f"memory://{name}", {})
        if kind == "s3":
            bucket = self._start(kind, ObjectStore)
            monkeypatch.setitem(fsspec.config.conf, "s3", bucket.fsspec_settings)
            return FsspecStore(bucket.url(name), bucket.environment)
        served = self._folder / kind
        served.mkdir(exist_ok=True)
        if kind == "sshd":
            if find_sshd() is None:
                pytest.skip("sshd is not installed")
            box = self._start(kind, lambda: StoreBox(served, self._folder / "state"))
            return FolderStore(served / name, box.url(name), box.hosts)
        server = self._start(kind, lambda: StoreServer(served))
        return FolderStore(served / name, server.url(name), server.hosts)

    def _start(self, kind: str, make: Callable[[], Any]) -> Any:
        if kind not in self._started:
            self._started[kind] = self._stack.enter_context(make())
        return self._started[kind]
