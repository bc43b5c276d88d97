"""What lies in a remote store, and removing it: read from manifests and folder listings, many at once.

Nothing is downloaded. What other machines are at work on cannot be told by a lock; so an upload under way is left
alone until nothing of it changed for a day.
"""

from __future__ import annotations

import posixpath
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash_core.store import MANIFEST_NAME
from dflash_core.store_files import RemoteEntry
from dflash_core.store_listing import KEY, NOT_KINDS, TEMPORARY, LeftOver, StoredArtifact, described, manifest_of
from dflash_core.store_remote import RemoteStore

ABANDONED_S = 86400.0
"""What an upload left is nobody's any more after so long without a change."""

Found = tuple[StoredArtifact, Mapping[str, Any]]


def list_remote(store: RemoteStore) -> tuple[list[Found], list[LeftOver]]:
    """Return the artifacts of a remote store with their manifests, and what uploads left.

    Raises:
        HostError: the store cannot be reached.
    """
    tree = _Tree(store)
    (kinds,) = tree.list([""]).values()
    names = [one.name for one in kinds if one.is_folder and one.name not in NOT_KINDS and not one.name.startswith(".")]
    children = tree.list(names)
    places = [f"{kind}/{one.name}" for kind in names for one in children[kind] if one.is_folder]
    tree.list(places)
    artifacts = [place for place in places if _is_artifact(place, tree)]
    left = [place for place in places if TEMPORARY.fullmatch(posixpath.basename(place))]
    tree.list_below([*artifacts, *left])
    texts = store.files.read_many([f"{place}/{MANIFEST_NAME}" for place in artifacts])
    found, left_overs = [], [_left_over(store, place, tree) for place in left]
    for place in artifacts:
        manifest = manifest_of(texts[f"{place}/{MANIFEST_NAME}"])
        found.append((_artifact(store, place, manifest, tree), manifest))
        left_overs += _old_generations(store, place, manifest, tree)
    now = time.time()
    return found, [one for one in left_overs if now - one.last_used > ABANDONED_S]


def is_used_since(store: RemoteStore, item: StoredArtifact) -> bool:
    """Tell whether a remote artifact was found or built after it was listed."""
    (entries,) = store.files.list_folders([f"{item.kind}/{item.key}"]).values()
    return any(one.name == MANIFEST_NAME and one.changed_at > item.last_used for one in entries)


def remove_remote(store: RemoteStore, item: StoredArtifact | LeftOver) -> bool:
    """Remove an artifact, or what an upload left, so that readers see a whole one or none; False where it is gone.

    Its folder is renamed first; where that cannot be, the manifest goes first.
    """
    files, place = store.files, _place_of(item)
    if isinstance(item, LeftOver):
        files.remove(place)
        return True
    (entries,) = files.list_folders([place]).values()
    if not entries:
        return False
    store.files.looked_at.pop((item.kind, item.key), None)
    if files.can_rename:
        hidden = f"{item.kind}/.{item.key}.{uuid.uuid4().hex[:8]}.tmp"
        if not files.rename(place, hidden):
            return False
        place = hidden
    else:
        files.remove(f"{place}/{MANIFEST_NAME}")
    files.remove(place)
    return True


def _place_of(item: StoredArtifact | LeftOver) -> str:
    return item.place if isinstance(item, LeftOver) and item.place else f"{item.kind}/{item.key}"


class _Tree:
    """Listings of folders, each asked for once, those of one level together."""

    def __init__(self, store: RemoteStore) -> None:
        self._files = store.files
        self._listed: dict[str, list[RemoteEntry]] = {}

    def list(self, folders: Sequence[str]) -> dict[str, list[RemoteEntry]]:
        """Return what lies in folders."""
        new = [folder for folder in folders if folder not in self._listed]
        if new:
            self._listed |= self._files.list_folders(new)
        return {folder: self._listed[folder] for folder in folders}

    def list_below(self, folders: Sequence[str]) -> None:
        """List folders and all that is in them, level by level."""
        while folders:
            listed = self.list(folders)
            folders = [f"{folder}/{one.name}" for folder in folders for one in listed[folder] if one.is_folder]

    def below(self, folder: str) -> Iterator[tuple[str, RemoteEntry]]:
        """Yield every file in a folder with its path in it."""
        for one in self._listed.get(folder, []):
            if one.is_folder:
                for path, entry in self.below(f"{folder}/{one.name}"):
                    yield f"{one.name}/{path}", entry
            else:
                yield one.name, one

    def entry(self, folder: str, name: str) -> RemoteEntry | None:
        """Return one name of a folder."""
        return next((one for one in self._listed.get(folder, []) if one.name == name), None)

    def size(self, folder: str) -> int:
        """Return the bytes of all files in a folder."""
        return sum(entry.size for _, entry in self.below(folder))


def _is_artifact(place: str, tree: _Tree) -> bool:
    name = posixpath.basename(place)
    return not name.startswith(".") and (
        tree.entry(place, MANIFEST_NAME) is not None or KEY.fullmatch(name) is not None
    )


def _artifact(store: RemoteStore, place: str, manifest: Mapping[str, Any], tree: _Tree) -> StoredArtifact:
    kind, _, key = place.partition("/")
    sizes = {path: entry.size for path, entry in tree.below(place)}
    marker = tree.entry(place, MANIFEST_NAME)
    changed = [entry.changed_at for _, entry in tree.below(place)]
    last_used = marker.changed_at if marker is not None else max(changed, default=0.0)
    folder = manifest.get("folder") or ""
    try:
        fits = all(sizes.get(posixpath.join(folder, one["name"])) == one["size_bytes"] for one in manifest["files"])
    except (KeyError, TypeError):
        fits = False
    # Generations that do not count are listed as left-overs.
    own = f"{folder}/" if folder else ""
    size = sum(size for path, size in sizes.items() if path == MANIFEST_NAME or path.startswith(own))
    local = store.folder(kind, key)
    one = described(kind, key, local, manifest, size=size, last_used=last_used, sizes_fit=fits)
    return replace(one, is_mirrored=(local / MANIFEST_NAME).exists())


def _old_generations(store: RemoteStore, place: str, manifest: Mapping[str, Any], tree: _Tree) -> list[LeftOver]:
    """Return uploads of one artifact that its manifest does not name; a damaged manifest names none, and all stay."""
    current = manifest.get("folder")
    if not current:
        return []
    (entries,) = tree.list([place]).values()
    return [_left_over(store, f"{place}/{one.name}", tree) for one in entries if one.is_folder and one.name != current]


def _left_over(store: RemoteStore, place: str, tree: _Tree) -> LeftOver:
    kind, _, rest = place.partition("/")
    named = TEMPORARY.fullmatch(rest)
    changed = [entry.changed_at for _, entry in tree.below(place)]
    own = tree.entry(kind, rest)
    return LeftOver(
        what="temporary",
        kind=kind,
        key=named["key"] if named is not None else rest.partition("/")[0],
        path=Path(store.folder(kind, rest)),
        size_bytes=tree.size(place),
        last_used=max([*changed, own.changed_at if own is not None else 0.0]),
        place=place,
    )
