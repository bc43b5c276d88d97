"""What lies in a store: every artifact with its size, its last use and what it belongs to, and what builders left.

Nothing is read but manifests and file sizes, and nothing is used: listing does not count as a use.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from stat import S_ISREG
from typing import Any, NamedTuple

from dflash_core.store import MANIFEST_NAME, Store, lock_of_unfinished
from dflash_core.store_remote import RemoteStore

NOT_KINDS = frozenset({"unfinished", "locks", "due", "unsent", "renderings"})
"""Folders of a store that hold no artifacts."""
KEY = re.compile(r"[0-9a-f]{32}")
TEMPORARY = re.compile(r"\.(?P<key>.+)\.[0-9a-f]{8}\.tmp")


class CheckpointName(NamedTuple):
    """How people know a checkpoint."""

    run: str | None
    step: int | None
    url: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredArtifact:
    """One artifact as it lies in the store."""

    kind: str
    key: str
    path: Path
    size_bytes: int
    """Bytes of all its files."""
    last_used: float
    """When it was last found or made, in seconds since 1970; of a damaged one, when it was last written."""
    seconds: float | None
    """How long it took to make; None where an older version made it and did not say."""
    bytes_read: int | None
    """Bytes that were read from the checkpoint's host for it; None for what is not streamed."""
    is_damaged: bool
    """Its manifest cannot be read, or a file is missing or of another size: it will be made again."""
    target: str | None
    transcripts: str | None
    """Digest of the transcripts that it is, or was made for."""
    detail: str | None
    """Which part of a whole it is: a layer, the file that was converted, ..."""
    checkpoint: CheckpointName | None = None
    is_mirrored: bool | None = None
    """Is there a copy in this machine's mirror? None in a store that is local."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOver:
    """What a builder left that did not come to its end, or is still at work on."""

    what: str
    """`unfinished` (the next builder goes on with it) or `temporary` (of no use to anybody)."""
    kind: str
    key: str
    path: Path
    size_bytes: int
    last_used: float
    place: str | None = None
    """Where it lies in a remote store; None in one that is local."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """A store's content."""

    root: Path
    artifacts: tuple[StoredArtifact, ...] = ()
    """By kind, the least recently used first."""
    left_overs: tuple[LeftOver, ...] = ()
    url: str | None = None
    """Of a store that is not local; `root` is its mirror."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all artifacts and left-overs."""
        return sum(one.size_bytes for one in self.artifacts) + sum(one.size_bytes for one in self.left_overs)


def list_store(store: Store, names: Mapping[str, CheckpointName] | None = None) -> Listing:
    """Return what lies in a store; one that does not exist is empty.

    Args:
        store: to look into; of a remote one, what lies there and not in its mirror.
        names: of checkpoints, by their drafter's `weights_sha256` or `identity`, as the results know them.

    Raises:
        HostError: a remote store cannot be reached.
    """
    names = names or {}
    if isinstance(store, RemoteStore):
        from dflash_core.store_remote_listing import list_remote

        found, left_overs = list_remote(store)
    else:
        found, left_overs = list(_artifacts(store)), list(_left_overs(store))
    # Parts of hidden states may name no target; their transcripts do.
    targets: dict[str | None, str] = {one.transcripts: one.target for one, _ in found if one.transcripts and one.target}
    artifacts = []
    for one, manifest in found:
        meta = manifest.get("meta")
        meta = meta if isinstance(meta, Mapping) else {}
        name = names.get(str(meta.get("weights_sha256"))) or names.get(str(meta.get("identity"))) or _own_name(meta)
        target = one.target or targets.get(one.transcripts)
        artifacts.append(replace(one, target=target, checkpoint=name))
    artifacts.sort(key=lambda one: (one.kind, one.last_used, one.key))
    url = store.url if isinstance(store, RemoteStore) else None
    return Listing(root=store.root, artifacts=tuple(artifacts), left_overs=tuple(left_overs), url=url)


def _own_name(meta: Mapping[str, Any]) -> CheckpointName | None:
    url = meta.get("checkpoint")
    return CheckpointName(None, None, url) if isinstance(url, str) else None


def _kinds(store: Store) -> Iterator[Path]:
    with suppress(OSError):
        for folder in sorted(store.root.iterdir()):
            if folder.is_dir() and folder.name not in NOT_KINDS and not folder.name.startswith("."):
                yield folder


def _artifacts(store: Store) -> Iterator[tuple[StoredArtifact, Mapping[str, Any]]]:
    for kind in _kinds(store):
        for folder in sorted(kind.iterdir()):
            # Other programs may keep folders beside ours; without a manifest only a key's name tells.
            is_ours = (folder / MANIFEST_NAME).exists() or KEY.fullmatch(folder.name)
            if folder.is_dir() and is_ours and not folder.name.startswith("."):
                manifest = _manifest(folder)
                with suppress(FileNotFoundError):  # it was just removed
                    yield _artifact(kind.name, folder, manifest), manifest


def _manifest(folder: Path) -> Mapping[str, Any]:
    try:
        return manifest_of((folder / MANIFEST_NAME).read_bytes())
    except OSError:
        return {}


def manifest_of(text: bytes | None) -> Mapping[str, Any]:
    """Return what a manifest says, or nothing where it is none."""
    try:
        manifest = json.loads(text or b"")
    except ValueError:
        return {}
    return manifest if isinstance(manifest, dict) else {}


def _artifact(kind: str, folder: Path, manifest: Mapping[str, Any]) -> StoredArtifact:
    used = folder / MANIFEST_NAME
    return described(
        kind,
        folder.name,
        folder,
        manifest,
        size=folder_bytes(folder),
        last_used=(used if used.exists() else folder).stat().st_mtime,
        sizes_fit=_sizes_fit(folder, manifest),
    )


def described(
    kind: str, key: str, path: Path, manifest: Mapping[str, Any], *, size: int, last_used: float, sizes_fit: bool
) -> StoredArtifact:
    """Return an artifact as its manifest describes it.

    Args:
        kind: the stage that made it.
        key: its key.
        path: where it lies on this machine.
        manifest: empty where it cannot be read.
        size: bytes of all its files.
        last_used: seconds since 1970.
        sizes_fit: do the files have the sizes of the manifest?
    """
    meta = manifest.get("meta")
    is_damaged = not isinstance(meta, Mapping) or not sizes_fit
    meta = meta if isinstance(meta, Mapping) else {}
    return StoredArtifact(
        kind=kind,
        key=key,
        path=path,
        size_bytes=size,
        last_used=last_used,
        # A stage that knows better what it costs to make this one part of a whole says so in its meta.
        seconds=_number(meta.get("seconds", manifest.get("seconds"))),
        bytes_read=meta["bytes_read"] if isinstance(meta.get("bytes_read"), int) else None,
        is_damaged=is_damaged,
        target=_text(meta.get("target")),
        transcripts=_text(meta.get("digest") if kind == "transcripts" else meta.get("transcripts")),
        detail=_detail(kind, meta),
    )


def _sizes_fit(folder: Path, manifest: Mapping[str, Any]) -> bool:
    try:
        return all((folder / entry["name"]).stat().st_size == entry["size_bytes"] for entry in manifest["files"])
    except (OSError, KeyError, TypeError):
        return False


def _detail(kind: str, meta: Mapping[str, Any]) -> str | None:
    part = meta.get("part")
    if part is not None:
        return f"layer {part}" if isinstance(part, int) else str(part)
    if kind == "transcripts" and isinstance(meta.get("num_transcripts"), int):
        return f"{meta['num_transcripts']} transcripts"
    if isinstance(meta.get("num_blocks"), int):
        return f"{meta['num_blocks']} blocks"
    return _text(meta.get("source"))


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _left_overs(store: Store) -> Iterator[LeftOver]:
    with suppress(OSError):
        for folder in sorted((store.root / "unfinished").iterdir()):
            kind, key = lock_of_unfinished(folder.name)
            if folder.is_dir() and kind:
                yield _left_over("unfinished", kind, key, folder)
    for kind_folder in _kinds(store):
        for folder in sorted(kind_folder.glob(".*.tmp")):
            named = TEMPORARY.fullmatch(folder.name)
            if named is not None and folder.is_dir():
                yield _left_over("temporary", kind_folder.name, named["key"], folder)


def _left_over(what: str, kind: str, key: str, folder: Path) -> LeftOver:
    last_used = max((stat.st_mtime for stat in _stats(folder)), default=0.0)
    return LeftOver(what=what, kind=kind, key=key, path=folder, size_bytes=folder_bytes(folder), last_used=last_used)


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files in a folder; what goes meanwhile does not count."""
    return sum(stat.st_size for stat in _stats(folder) if S_ISREG(stat.st_mode))


def _stats(folder: Path) -> Iterator[os.stat_result]:
    """Yield the facts of a folder and of everything in it, as far as it is still there."""
    paths = [str(folder)]
    for parent, folders, files in os.walk(folder):
        paths += [os.path.join(parent, name) for name in (*folders, *files)]
    for path in paths:
        with suppress(OSError):
            yield os.lstat(path)
