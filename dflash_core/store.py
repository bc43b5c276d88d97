"""Where artifacts live: each found by what it depends on, published whole or not at all.

    <root>/<kind>/<key>/manifest.json     sizes, digests and what later stages need to know; its time is the last use
    <root>/<kind>/<key>/<files>
    <root>/unfinished/<kind>-<key>/       what a killed or cut off builder had, for the next one to go on with
    <root>/locks/<kind>-<key>.lock        one builder at a time, or many readers; freed when a process dies
    <root>/renderings/                    prompts as token ids, a few small files that renew themselves

A builder writes into a temporary folder beside the final one; files are flushed to disk, the manifest
is written last and the folder renamed. A crash leaves nothing or a whole artifact. An artifact whose
files are gone or altered is built again, never trusted. `store_remote` shares one among machines.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_core import refreshing
from dflash_core.errors import ArtifactDamaged, ConfigError

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
            raise ConfigError(f"store = {text!r}: only a local folder can be opened this way; use open_store")
        self.root = Path(rest if separator else text).expanduser().absolute()
        """Where artifacts lie on this machine."""

    def __str__(self) -> str:
        return str(self.root)

    def folder(self, kind: str, key: str) -> Path:
        """Return where an artifact lies, whether or not it exists."""
        return self.root / kind / key

    def find(self, kind: str, key: str) -> Artifact | None:
        """Return a whole artifact, or None where it is missing or damaged.

        A file whose size and modification time are as published is taken as it is; one that was
        touched since is compared by its digest. To find an artifact is to use it: the manifest's own
        time says when that was last (access times are switched off on many disks). What is to be made
        again (see `refreshing`) is not found before it was.
        """
        if refreshing.is_due(kind, key):
            return None
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
        with suppress(OSError):  # a store that may only be read is still one
            os.utime(folder / MANIFEST_NAME)
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
        with self.lock(kind, key):
            found = self.find(kind, key)
            if found is not None:
                return found
            return self._publish(kind, key, write)

    @contextmanager
    def reading(self, *artifacts: Artifact) -> Iterator[None]:
        """Keep artifacts from being pruned while the block reads them.

        Raises:
            ArtifactDamaged: one was removed after it was found.
        """
        with ExitStack() as held:
            for artifact in artifacts:
                held.enter_context(self.lock(artifact.kind, artifact.key, shared=True))
                if not (artifact.path / MANIFEST_NAME).exists():
                    raise ArtifactDamaged(f"{artifact.path} was removed from the store; run the command again")
            yield

    @contextmanager
    def unfinished(self, kind: str, key: str) -> Iterator[Path]:
        """Yield a folder that outlives a killed or failed builder of this artifact, for what it has so far.

        It is removed when the block ends well; what builders never came back to goes after some days.
        Only a builder inside `build`, or one that holds `lock`, may use it: that is what keeps others out.
        """
        root = self.root / "unfinished"
        folder = root / f"{kind}-{key}"
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)
        for other in root.iterdir():
            with suppress(OSError):  # in use, or gone meanwhile
                if time.time() - other.stat().st_mtime > UNFINISHED_KEPT_S and other != folder:
                    with self.lock(*lock_of_unfinished(other.name), wait=False):
                        shutil.rmtree(other)
        yield folder
        shutil.rmtree(folder, ignore_errors=True)

    def _publish(self, kind: str, key: str, write: Callable[[Path], Mapping[str, Any]]) -> Artifact:
        final = self.folder(kind, key)
        final.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(final)
        temporary = final.with_name(f".{key}.{uuid.uuid4().hex[:8]}.tmp")
        temporary.mkdir()
        try:
            started = time.monotonic()
            meta = dict(write(temporary))
            seconds = round(time.monotonic() - started, 3)
            entries = [_entry(temporary, path) for path in sorted(temporary.rglob("*")) if path.is_file()]
            manifest = {"kind": kind, "key": key, "seconds": seconds, "files": entries, "meta": meta}
            write_durably(temporary / MANIFEST_NAME, json.dumps(manifest, indent=1, allow_nan=False))
            before = self._digests_of(kind, key) if refreshing.is_due(kind, key) else {}
            replace_folder(temporary, final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        refreshing.note(kind, key, before, {entry["name"]: entry["sha256"] for entry in entries})
        return Artifact(kind=kind, key=key, path=final, meta=meta, was_built=True)

    def _digests_of(self, kind: str, key: str) -> dict[str, str]:
        """Return the digest of each file of an artifact, as its manifest has them; empty where there is none."""
        try:
            manifest = json.loads((self.folder(kind, key) / MANIFEST_NAME).read_text(encoding="utf-8"))
            return {entry["name"]: entry["sha256"] for entry in manifest["files"]}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def lock_path(self, kind: str, key: str) -> Path:
        """Return the file whose lock an artifact's builders and readers hold."""
        return self.root / "locks" / f"{kind}-{key}.lock"

    @contextmanager
    def lock(self, kind: str, key: str, *, shared: bool = False, wait: bool = True) -> Iterator[None]:
        """Hold an artifact's lock while the block runs.

        Args:
            kind: the stage that makes it.
            key: its key.
            shared: for readers, of which there may be many at a time; a builder is alone.
            wait: False raises where others hold it.

        Raises:
            BlockingIOError: others hold it, and `wait` is False.
        """
        path = self.lock_path(kind, key)
        operation = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
        while True:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                fcntl.flock(file, operation)
                # Whoever removed the file while we waited left us a lock that nobody else will see.
                if _is_same_file(path, file.fileno()):
                    yield
                    return


def lock_of_unfinished(name: str) -> tuple[str, str]:
    """Return kind and key of an unfinished folder or a lock, from its name; kinds may hold a dash, keys do not."""
    kind, _, key = name.rpartition("-")
    return kind, key


def _is_same_file(path: Path, descriptor: int) -> bool:
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(descriptor))


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


def write_durably(path: Path, text: str) -> None:
    """Write a text and flush it to disk."""
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


def replace_folder(temporary: Path, final: Path) -> None:
    """Rename a whole artifact into place; one that is there goes, and one that came there meanwhile.

    The old one is renamed first: to remove its files takes longer than that, and nobody should find half of it.
    """
    aside = final.with_name(f".{final.name}.{uuid.uuid4().hex[:8]}.tmp")
    while True:
        try:
            temporary.rename(final)
            break
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        with suppress(FileNotFoundError):
            final.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
    sync_folder(final.parent)


def _remove_abandoned(final: Path) -> None:
    """Remove temporary folders of builders of this artifact that were killed; the lock is ours."""
    for left_over in final.parent.glob(f".{final.name}.*.tmp"):
        shutil.rmtree(left_over, ignore_errors=True)
