"""A store that several machines share: a local mirror in front of files at any fsspec URL or on an SSH host.

    <mirror>/<digest of the URL>/           a local store: what was made here, or brought here
        mirror.json                         the URL, for people, and eight digits that name this mirror
        due/<kind>-<key>                    made here and not known to be in the store yet; holds the manifest that
                                            gives way to it there

To find an artifact is to have it whole in the mirror: what is not there is downloaded, its lengths checked and its
digests compared while it arrives, and then published in the mirror like anything built here. To build one is to
build it in the mirror, under the mirror's lock, and then to upload it (`store_publication`). A store that cannot be
reached costs nothing that was made: it stays due, and goes up when it is next asked for.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dflash_core import progress, refreshing
from dflash_core.errors import DoesNotFit, HostError, HostUnreachable
from dflash_core.store import MANIFEST_NAME, Artifact, Store, replace_folder, write_durably
from dflash_core.store_files import FileMissing, RemoteFiles
from dflash_core.store_publication import Published, PublishedFile, publish, read_published, sizes_fit

LOOK_AGAIN_S = 60.0
"""What lies in the mirror is looked for in the store again after so long: it may have been pruned or damaged there."""
DOWNLOADING, UPLOADING = "download from store", "upload to store"
_ATTEMPTS = 3
_CHUNK_BYTES = 4 << 20


class RemoteStore(Store):
    """A shared store. Cheap to make: nothing is sent before something is looked for that the mirror lacks."""

    def __init__(self, url: str, mirror: Path, connect: Callable[[], RemoteFiles]) -> None:
        """Remember where it lies.

        Args:
            url: for people.
            mirror: the folder of this store's mirror.
            connect: returns the store's files; called when they are needed.
        """
        super().__init__(mirror)
        self.url = url
        self._connect = connect
        self._damaged: dict[tuple[str, str], bytes] = {}

    def __str__(self) -> str:
        return self.url

    @property
    def mirror(self) -> Store:
        """The copies on this machine, as a store of their own."""
        return Store(self.root)

    @property
    def files(self) -> RemoteFiles:
        """The store's own files."""
        return self._connect()

    def find(self, kind: str, key: str) -> Artifact | None:
        """Return a whole artifact, downloaded where the mirror lacks it, or None where the store lacks it too.

        Raises:
            HostError: the store cannot be reached, or refuses.
            DoesNotFit: the mirror's disk is too full.
        """
        if refreshing.is_due(kind, key):
            return None
        mirrored = super().find(kind, key)
        if mirrored is None:
            return self._fetch(kind, key)
        return self._keep_published(mirrored)

    def is_due(self, kind: str, key: str) -> bool:
        """Tell whether an artifact of the mirror still has to go up."""
        return self._due(kind, key).exists()

    def _publish(self, kind: str, key: str, write: Callable[[Path], Mapping[str, Any]]) -> Artifact:
        """Build in the mirror, then upload; the artifact's lock is ours."""
        replaced = read_published(self.files, kind, key) if refreshing.is_due(kind, key) else None
        with self._marked(kind, key, replaced):
            artifact = super()._publish(kind, key, write)
        with self.lock(f"send-{kind}", key):
            return self._send(artifact, may_adopt=True)

    def _digests_of(self, kind: str, key: str) -> dict[str, str]:
        mirrored = super()._digests_of(kind, key)
        if mirrored:
            return mirrored
        published = read_published(self.files, kind, key)
        return {} if published is None else {file.name: file.sha256 for file in published.files}

    def look_again(self) -> None:
        """Look for what lies in the mirror in the store again, now: another box may have made it anew."""
        self.files.looked_at.clear()

    def _keep_published(self, artifact: Artifact) -> Artifact:
        """Upload what is due or not there any more, of what lies in the mirror; look at most once a minute."""
        kind, key = artifact.kind, artifact.key
        is_due = self.is_due(kind, key)
        files, now = self.files, time.monotonic()
        if not is_due and now < max(files.away_until, files.looked_at.get((kind, key), float("-inf")) + LOOK_AGAIN_S):
            return artifact
        try:
            if not is_due:
                files.looked_at[kind, key] = now
                published = read_published(files, kind, key)
                is_same = published is not None and self._is_mirrored(published)
                if published is not None and is_same and sizes_fit(files, published):
                    files.touch(f"{kind}/{key}/{MANIFEST_NAME}")
                    return artifact
                self._mark(kind, key)
            with self.lock(f"send-{kind}", key):
                if not self.is_due(kind, key):  # another process was faster
                    return super().find(kind, key) or artifact
                return self._send_or_adopt(artifact)
        except HostUnreachable:
            if is_due:
                raise
            files.away_until = time.monotonic() + LOOK_AGAIN_S
            return artifact  # it is here, and nobody waits for it that we know of

    def _is_mirrored(self, published: Published) -> bool:
        """Tell whether the mirror's copy is the one that is published now; another box may have made it anew."""
        mirrored = super()._digests_of(published.kind, published.key)
        return mirrored == {file.name: file.sha256 for file in published.files}

    def _send_or_adopt(self, artifact: Artifact) -> Artifact:
        """Send; take another box's publication in its place only while nobody here reads or builds it."""
        try:
            with self.lock(artifact.kind, artifact.key, wait=False):
                return self._send(artifact, may_adopt=True)
        except BlockingIOError:
            return self._send(artifact, may_adopt=False)

    def _send(self, artifact: Artifact, *, may_adopt: bool) -> Artifact:
        """Publish an artifact of the mirror; where another whole one is there, take that into the mirror.

        Raises:
            HostError: the store cannot be reached, or refuses; the artifact stays in the mirror, due.
        """
        kind, key = artifact.kind, artifact.key
        total = sum(path.stat().st_size for path in artifact.path.rglob("*") if path.name != MANIFEST_NAME)
        sent = _Counter(UPLOADING, f"{kind} {key[:8]}", total)
        replaced = self._replaced(kind, key)
        try:
            for _ in range(_ATTEMPTS):
                outcome = publish(
                    self.files,
                    artifact.path,
                    kind,
                    key,
                    author=self._name(),
                    is_damaged=lambda one: one.text in (replaced, self._damaged.get((kind, key))),
                    on_sent=sent.add,
                )
                theirs = None
                if outcome == "theirs" and may_adopt:
                    with self.lock(f"fetch-{kind}", key):
                        theirs = self._download_and_replace(kind, key)
                    if theirs is None:  # known to be damaged now, or gone
                        continue
                self.files.looked_at[kind, key] = time.monotonic()
                self._due(kind, key).unlink(missing_ok=True)
                return artifact if theirs is None else _built(theirs, was_built=artifact.was_built)
        except HostError as error:
            raise type(error)(
                f"{error}; {kind} {key[:8]} is kept in {self.root} and goes to the store at the next try"
            ) from error
        raise HostError(f"{kind} {key[:8]} in the store {self.url} keeps being replaced by damaged ones; look there")

    def _fetch(self, kind: str, key: str) -> Artifact | None:
        files = self.files
        if read_published(files, kind, key) is None:
            return None
        with self.lock(f"fetch-{kind}", key):
            return super().find(kind, key) or self._download_and_replace(kind, key)

    def _download_and_replace(self, kind: str, key: str) -> Artifact | None:
        """Bring the store's artifact into the mirror; None where it is gone or damaged. The lock for it is ours.

        A cut off download leaves what it has, and the next one goes on from there.
        """
        damaged: bytes | None = None
        with self.unfinished(f"fetch-{kind}", key) as folder:
            for _ in range(_ATTEMPTS):
                published = read_published(self.files, kind, key)
                if published is None:
                    return None
                if self._download(published, folder):
                    return self._take_in(published, folder)
                if damaged == published.text:  # twice the same: it was not replaced while we read
                    break
                damaged = published.text
        if damaged is not None:
            self._damaged[kind, key] = damaged
        return None

    def _download(self, published: Published, folder: Path) -> bool:
        """Have all files of a publication in a folder; False where one is not what the manifest says."""
        wanted = {folder / file.name: file for file in published.files}
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path not in wanted:
                path.unlink()
        there = sum(path.stat().st_size for path in wanted if path.is_file())
        free = shutil.disk_usage(folder).free
        if published.size_bytes - there > free:
            raise DoesNotFit(
                f"{published.kind} {published.key[:8]} of the store {self.url} needs "
                f"{(published.size_bytes - there) / 1e9:.1f} GB, {free / 1e9:.1f} GB are free in {self.root}; "
                "free some, or set store_mirror to a folder on a larger disk"
            )
        received = _Counter(DOWNLOADING, f"{published.kind} {published.key[:8]}", published.size_bytes)
        return all(self._download_file(published, file, path, received) for path, file in wanted.items())

    def _download_file(self, published: Published, file: PublishedFile, path: Path, received: _Counter) -> bool:
        path.parent.mkdir(parents=True, exist_ok=True)
        sha256 = hashlib.sha256()
        with path.open("a+b") as local:
            start = local.tell()
            if start > file.size:
                start = local.truncate(0)
            local.seek(0)
            while chunk := local.read(_CHUNK_BYTES):
                sha256.update(chunk)
            received.add(start)

            def receive(data: bytes) -> None:
                sha256.update(data)
                local.write(data)
                received.add(len(data))

            if start < file.size:
                try:
                    self.files.download(f"{published.folder}/{file.name}", start=start, size=file.size, receive=receive)
                except FileMissing:
                    return False
            local.flush()
            os.fsync(local.fileno())
            is_whole = local.tell() == file.size and sha256.hexdigest() == file.sha256
        if not is_whole:
            path.unlink()
        return is_whole

    def _take_in(self, published: Published, folder: Path) -> Artifact:
        """Publish a download in the mirror."""
        files = {file.name: (folder / file.name).stat().st_mtime_ns for file in published.files}
        entries = [{**entry, "mtime_ns": files[entry["name"]]} for entry in published.manifest["files"]]
        manifest = {name: value for name, value in published.manifest.items() if name not in ("folder", "published")}
        write_durably(folder / MANIFEST_NAME, json.dumps(manifest | {"files": entries}, indent=1, allow_nan=False))
        final = self.folder(published.kind, published.key)
        final.parent.mkdir(parents=True, exist_ok=True)
        replace_folder(folder, final)
        self._damaged.pop((published.kind, published.key), None)
        self.files.looked_at[published.kind, published.key] = time.monotonic()
        self.files.touch(f"{published.kind}/{published.key}/{MANIFEST_NAME}")
        return Artifact(kind=published.kind, key=published.key, path=final, meta=manifest["meta"], was_built=False)

    def _due(self, kind: str, key: str) -> Path:
        return self.root / "due" / f"{kind}-{key}"

    def _replaced(self, kind: str, key: str) -> bytes:
        """Return the manifest of the publication that gives way to what is due; empty where none does."""
        try:
            return self._due(kind, key).read_bytes()
        except FileNotFoundError:
            return b""

    def _mark(self, kind: str, key: str, replaced: Published | None = None) -> None:
        path = self._due(kind, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        if replaced is not None:
            path.write_bytes(replaced.text)

    @contextmanager
    def _marked(self, kind: str, key: str, replaced: Published | None) -> Iterator[None]:
        """Mark an artifact as due before it is there, so that a kill in between leaves it due."""
        self._mark(kind, key, replaced)
        try:
            yield
        except BaseException:
            self._due(kind, key).unlink(missing_ok=True)
            raise

    def _name(self) -> str:
        """Return the eight digits of this mirror, given once."""
        path = self.root / "mirror.json"
        if not path.exists():
            self.root.mkdir(parents=True, exist_ok=True)
            name = uuid.uuid4().hex[:8]
            temporary = self.root / f".mirror.{name}.tmp"
            write_durably(temporary, json.dumps({"url": self.url, "name": name}))
            with suppress(FileExistsError):
                os.link(temporary, path)
            temporary.unlink()
        return str(json.loads(path.read_text(encoding="utf-8"))["name"])


class _Counter:
    """Reports the bytes of one artifact."""

    def __init__(self, stage: str, detail: str, total: int) -> None:
        self._stage = stage
        self._detail = detail
        self._total = total
        self._done = 0

    def add(self, num_bytes: int) -> None:
        """Count some more; a try that failed takes back what it had counted."""
        self._done += num_bytes
        progress.report(self._stage, min(self._done, self._total), self._total, self._detail, unit="bytes")


def _built(artifact: Artifact, *, was_built: bool) -> Artifact:
    return Artifact(kind=artifact.kind, key=artifact.key, path=artifact.path, meta=artifact.meta, was_built=was_built)
