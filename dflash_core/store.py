"""Where artifacts live: each found by what it depends on, published whole or not at all.

    <root>/<kind>/<key>/manifest.json     sizes, digests and what later stages need to know
    <root>/<kind>/<key>/<files>
    <root>/unfinished/<kind>-<key>/       what a killed or cut off builder had, for the next one to go on with
    <root>/locks/<kind>-<key>.lock        one builder at a time; the kernel frees it when a process dies

A builder writes into a temporary folder beside the final one; files are flushed to disk, the manifest
is written last and the folder renamed. A crash leaves nothing or a whole artifact. An artifact whose
files are gone or altered is built again, never trusted.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_core.errors import ConfigError

MANIFEST_NAME = "manifest.json"
UNFINISHED_KEPT_S = 3 * 86400
_HASH_CHUNK_BYTES = 4 << 20


def digest(*parts: Any) -> str:
    """Return a 32-digit hex digest of plain data (finite numbers, strings, None, lists, dicts with text keys).

    Raises:
        TypeError: a part is not plain data, so its digest would depend on memory addresses.
        ValueError: a number is not finite.
    """
    _check_keys(parts)
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _check_keys(value: Any) -> None:
    """Refuse keys that JSON would turn into texts: 1 and "1" must not have one digest."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} of data to digest is not a text")
            _check_keys(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_keys(item)


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file's bytes as hex."""
    running = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_HASH_CHUNK_BYTES):
            running.update(chunk)
    return running.hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class Artifact:
    """A whole product of one stage, lying in a folder of the store."""

    kind: str
    key: str
    path: Path
    meta: Mapping[str, Any]
    """What later stages need to know without opening the files."""
    was_built: bool
    """False when it was found, True when this call made it."""

    def file(self, name: str) -> Path:
        """Return the path of one of the artifact's files."""
        return self.path / name


class Store:
    """A folder of artifacts. Cheap to make; holds no handle open."""

    def __init__(self, root: str | Path) -> None:
        text = str(root)
        scheme, separator, rest = text.partition("://")
        if separator and scheme != "file":
            raise ConfigError(f"store = {text!r}: only a local folder works so far; mount it, or give a local path")
        self.root = Path(rest if separator else text).expanduser().absolute()

    def folder(self, kind: str, key: str) -> Path:
        """Return where an artifact lies, whether or not it exists."""
        return self.root / kind / key

    def find(self, kind: str, key: str) -> Artifact | None:
        """Return a whole artifact, or None where it is missing or damaged.

        A file whose size and modification time are as published is taken as it is; one that was
        touched since is compared by its digest.
        """
        folder = self.folder(kind, key)
        try:
            manifest = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
            entries = manifest["files"]
            meta: Mapping[str, Any] = manifest["meta"]
            whole = manifest["key"] == key and all(_is_whole(folder / entry["name"], entry) for entry in entries)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if not whole:
            return None
        return Artifact(kind=kind, key=key, path=folder, meta=meta, was_built=False)

    def build(self, kind: str, key: str, write: Callable[[Path], Mapping[str, Any]]) -> Artifact:
        """Return an artifact, making it if it is missing or damaged.

        Args:
            kind: the stage that makes it.
            key: digest of everything it depends on.
            write: puts the files into the folder it is given and returns the meta data (plain data).

        Returns:
            The artifact; `was_built` tells whether `write` was called.
        """
        found = self.find(kind, key)
        if found is not None:
            return found
        with self._lock(f"{kind}-{key}"):
            found = self.find(kind, key)
            if found is not None:
                return found
            return self._publish(kind, key, write)

    @contextmanager
    def unfinished(self, kind: str, key: str) -> Iterator[Path]:
        """Yield a folder that outlives a killed or failed builder of this artifact, for what it has so far.

        It is removed when the block ends well; what builders never came back to goes after some days.
        Only a builder inside `build` or `exclusive` may use it: the lock is what keeps others out.
        """
        root = self.root / "unfinished"
        folder = root / f"{kind}-{key}"
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)
        for other in root.iterdir():
            with suppress(OSError):
                if time.time() - other.stat().st_mtime > UNFINISHED_KEPT_S and other != folder:
                    shutil.rmtree(other)
        yield folder
        shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def exclusive(self, kind: str, key: str) -> Iterator[None]:
        """Let one process at a time into the block, of those that want to make the artifacts that a key stands for."""
        with self._lock(f"{kind}-{key}"):
            yield

    def _publish(self, kind: str, key: str, write: Callable[[Path], Mapping[str, Any]]) -> Artifact:
        final = self.folder(kind, key)
        final.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(final)
        temporary = final.with_name(f".{key}.{uuid.uuid4().hex[:8]}.tmp")
        temporary.mkdir()
        try:
            meta = dict(write(temporary))
            entries = [_entry(temporary, path) for path in sorted(temporary.rglob("*")) if path.is_file()]
            manifest = {"kind": kind, "key": key, "files": entries, "meta": meta}
            _write_durably(temporary / MANIFEST_NAME, json.dumps(manifest, indent=1, allow_nan=False))
            if final.exists():
                shutil.rmtree(final)
            temporary.rename(final)
            sync_folder(final.parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        return Artifact(kind=kind, key=key, path=final, meta=meta, was_built=True)

    @contextmanager
    def _lock(self, name: str) -> Iterator[None]:
        folder = self.root / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{name}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _is_whole(path: Path, entry: Mapping[str, Any]) -> bool:
    stat = path.stat()
    if stat.st_size != entry["size_bytes"]:
        return False
    return stat.st_mtime_ns == entry["mtime_ns"] or file_sha256(path) == entry["sha256"]


def _entry(folder: Path, path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    stat = path.stat()
    return {
        "name": path.relative_to(folder).as_posix(),
        "size_bytes": stat.st_size,
        "mtime_ns": stat.st_mtime_ns,
        "sha256": file_sha256(path),
    }


def _write_durably(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk, so that a rename in it survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_abandoned(final: Path) -> None:
    """Remove temporary folders of builders of this artifact that were killed; the lock is ours."""
    for left_over in final.parent.glob(f".{final.name}.*.tmp"):
        shutil.rmtree(left_over, ignore_errors=True)
