"""How an artifact lies in a remote store, and how it gets there so that readers see a whole one or none.

    <kind>/<key>/manifest.json          sizes and digests; "published" tells one publication from another
    <kind>/<key>/<files>                where folders can be renamed (SFTP): as in a local store, which it may be
    <kind>/<key>/<generation>/<files>   where they cannot (S3): the manifest's "folder" says which generation counts
    <kind>/.<key>.<author>.tmp/         an upload under way, or what a killed one left

Where folders can be renamed, an upload lies beside its place until its last byte, the manifest, is there, and is
then renamed. Elsewhere every upload has a generation of its own, and one write of the manifest, which is atomic,
makes it count. So no reader can see files of two publications under one manifest. Of two boxes that publish the
same artifact the first wins, and the second takes the first's; without renames the check and the write are two
steps, and of two in the same instant the last wins: whole, as well.
"""

from __future__ import annotations

import json
import posixpath
import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dflash_core.errors import HostError
from dflash_core.store import MANIFEST_NAME
from dflash_core.store_files import FileMissing, RemoteFiles, Sent

Outcome = Literal["ours", "theirs"]
_SHA256 = re.compile(r"[0-9a-f]{64}")
_ATTEMPTS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedFile:
    """One file of an artifact, as its manifest has it."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """An artifact that a remote manifest tells of; its files may still be gone or altered."""

    kind: str
    key: str
    text: bytes
    """The manifest, as it was read: two that are equal are one publication."""
    manifest: Mapping[str, Any]
    folder: str
    """Where its files lie, relative to the store's root."""
    files: tuple[PublishedFile, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


def parse_published(text: bytes | None, kind: str, key: str) -> Published | None:
    """Return what a remote manifest says, or None where it is none, or not of this artifact.

    Names that lead out of the artifact's folder are refused: they will name files on this machine.
    """
    try:
        manifest = json.loads(text or b"")
        files = tuple(
            PublishedFile(name=entry["name"], size=entry["size_bytes"], sha256=entry["sha256"])
            for entry in manifest["files"]
        )
        generation = manifest.get("folder", "")
        sound = (
            manifest["key"] == key
            and isinstance(manifest["meta"], dict)
            and all(_is_sound(file) for file in files)
            and (generation == "" or _is_inside(generation))
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    if not sound or text is None:
        return None
    folder = posixpath.join(kind, key, generation).rstrip("/")
    return Published(kind=kind, key=key, text=text, manifest=manifest, folder=folder, files=files)


def _is_sound(file: PublishedFile) -> bool:
    is_number = isinstance(file.size, int) and not isinstance(file.size, bool) and file.size >= 0
    return is_number and _is_inside(file.name) and _SHA256.fullmatch(file.sha256) is not None


def _is_inside(name: str) -> bool:
    return name != MANIFEST_NAME and all(part not in ("", ".", "..") for part in name.split("/")) and "\0" not in name


def read_published(files: RemoteFiles, kind: str, key: str) -> Published | None:
    """Return what a store's manifest says of an artifact; None where there is none that can be read."""
    return parse_published(files.read(f"{kind}/{key}/{MANIFEST_NAME}"), kind, key)


def sizes_fit(files: RemoteFiles, published: Published) -> bool:
    """Tell whether all files lie there with the sizes of the manifest."""
    paths = {posixpath.join(published.folder, file.name): file.size for file in published.files}
    listed = files.list_folders(sorted({posixpath.dirname(path) for path in paths}))
    sizes = {
        posixpath.join(folder, entry.name): entry.size
        for folder, entries in listed.items()
        for entry in entries
        if not entry.is_folder
    }
    return all(sizes.get(path) == size for path, size in paths.items())


def publish(
    files: RemoteFiles,
    local: Path,
    kind: str,
    key: str,
    *,
    author: str,
    is_damaged: Callable[[Published], bool],
    on_sent: Sent,
) -> Outcome:
    """Bring a whole artifact of this machine into a remote store, unless a whole one is there.

    Args:
        files: the store's place.
        local: the artifact's folder, manifest and all.
        kind: the stage that made it.
        key: its key.
        author: eight hex digits that name this machine's mirror; only one process at a time publishes under it.
        is_damaged: says of a publication that its files are known not to be what its manifest says.
        on_sent: takes the bytes as they go.

    Returns:
        `ours` when the store holds these files now, `theirs` when it holds another whole publication.
    """
    manifest = json.loads((local / MANIFEST_NAME).read_text(encoding="utf-8"))
    for entry in manifest["files"]:  # SFTP tells whole seconds: a local store on that box then trusts them
        entry["mtime_ns"] = (local / entry["name"]).stat().st_mtime_ns // 10**9 * 10**9
    manifest["published"] = uuid.uuid4().hex
    publication = _Publication(files, local, kind, key, manifest, author, is_damaged)
    there = publication.outcome()
    if there is not None:
        return there
    return publication.by_renaming(on_sent) if files.can_rename else publication.by_pointing(on_sent)


class _Publication:
    """One try to publish one artifact."""

    def __init__(
        self,
        files: RemoteFiles,
        local: Path,
        kind: str,
        key: str,
        manifest: dict[str, Any],
        author: str,
        is_damaged: Callable[[Published], bool],
    ) -> None:
        self._files = files
        self._local = local
        self._kind = kind
        self._key = key
        self._manifest = manifest
        self._author = author
        self._is_damaged = is_damaged
        self._place = f"{kind}/{key}"

    def outcome(self) -> Outcome | None:
        """Return whose whole publication lies there, or None where there is none."""
        there = read_published(self._files, self._kind, self._key)
        if there is None or self._is_damaged(there) or not sizes_fit(self._files, there):
            return None
        mine = {entry["name"]: entry["sha256"] for entry in self._manifest["files"]}
        return "ours" if mine == {file.name: file.sha256 for file in there.files} else "theirs"

    def by_renaming(self, on_sent: Sent) -> Outcome:
        temporary = f"{self._kind}/.{self._key}.{self._author}.tmp"
        self._files.remove(temporary)
        self._send(temporary, on_sent)
        self._files.write(f"{temporary}/{MANIFEST_NAME}", self._text())
        for _ in range(_ATTEMPTS):
            # The answer to a rename may be lost with its connection: then our own manifest lies there.
            if self._files.rename(temporary, self._place) or self._is_mine():
                return "ours"
            there = self.outcome()
            if there is not None:
                self._files.remove(temporary)
                return there
            aside = f"{self._kind}/.{self._key}.{uuid.uuid4().hex[:8]}.tmp"
            if self._files.rename(self._place, aside):
                self._files.remove(aside)
        raise HostError(f"{self._place} in the store {self._files.url} cannot be replaced; look there, then try again")

    def by_pointing(self, on_sent: Sent) -> Outcome:
        replaced = read_published(self._files, self._kind, self._key)
        generation = f"{self._author}-{uuid.uuid4().hex[:8]}"
        self._manifest["folder"] = generation
        self._send(f"{self._place}/{generation}", on_sent)
        there = self.outcome()
        if there is None:
            self._files.write(f"{self._place}/{MANIFEST_NAME}", self._text())
            there = "ours" if self._is_mine() else self.outcome()
        now = read_published(self._files, self._kind, self._key)
        self._clean(keep=None if now is None else now.folder, replaced=replaced)
        if there is None:
            raise HostError(f"{self._place} in the store {self._files.url} was damaged while it was written; try again")
        return there

    def _clean(self, *, keep: str | None, replaced: Published | None) -> None:
        """Remove our own generations but the one that counts: of killed uploads, or lost to another box."""
        (entries,) = self._files.list_folders([self._place]).values()
        mine = {f"{self._place}/{one.name}" for one in entries if one.name.startswith(f"{self._author}-")}
        old = {replaced.folder} if replaced is not None and replaced.folder != self._place else set()
        for folder in sorted((mine | old) - {keep}):
            self._files.remove(folder)

    def _send(self, folder: str, on_sent: Sent) -> None:
        for entry in self._manifest["files"]:
            try:
                self._files.upload(self._local / entry["name"], f"{folder}/{entry['name']}", on_sent=on_sent)
            except FileMissing as error:
                raise HostError(f"{folder} vanished from the store {self._files.url} while it was written") from error

    def _is_mine(self) -> bool:
        there = read_published(self._files, self._kind, self._key)
        return there is not None and there.manifest.get("published") == self._manifest["published"]

    def _text(self) -> bytes:
        return json.dumps(self._manifest, indent=1, allow_nan=False).encode()
