"""The tensors of a torch distributed checkpoint: a folder with `.metadata` and `.distcp` files.

Only the chunks of the tensors that are asked for are read, and put together to whole tensors as their
bytes arrive. A data file is opened when something in it is first needed.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace

from dflash_core.checkpoints.container import Container, Extent, FileRead, ReadPlan, TensorInfo
from dflash_core.checkpoints.dcp_items import FoundChunk, WantedChunk, find_chunks, read_objects, run_of
from dflash_core.checkpoints.dcp_metadata import Chunk, DcpIndex, StoredItem, read_dcp_metadata
from dflash_core.checkpoints.facts import collect_facts, odd_names
from dflash_core.checkpoints.file_views import LazyFile
from dflash_core.checkpoints.inert_pickle import MAX_PICKLE_BYTES
from dflash_core.checkpoints.paths import is_file
from dflash_core.checkpoints.pieces import Piece
from dflash_core.checkpoints.source_base import ByteRange, DirEntry, Source, require_same, vanished
from dflash_core.checkpoints.storage_pieces import StorageViews, plan_storages
from dflash_core.checkpoints.values import CheckpointCutOff, Facts
from dflash_core.errors import (
    CheckpointChanged,
    CheckpointCorrupt,
    CheckpointNotFound,
    CheckpointNotReady,
    UnsupportedCheckpoint,
)

METADATA_NAME = ".metadata"
METADATA_TEMPORARY = ".metadata.tmp"
# Objects beside the tensors: a step counter has 1.3 KB, all arguments of a trainer some 10.
MAX_OBJECT_BYTES = 64 << 10
MAX_OBJECTS = 256
MAX_OBJECT_FILES = 8
MAX_ALL_OBJECTS_BYTES = 512 << 10


class DcpCheckpoint(Container):
    """A torch distributed checkpoint."""

    training_state: tuple[str, ...]
    """Names of what belongs to the optimizer, the scheduler or the random generators; not among the tensors."""

    def __init__(self, source: Source, folder: str, stack: ExitStack) -> None:
        """Read the index of a checkpoint's folder, and the few plain values beside the tensors.

        Args:
            source: where it lies.
            folder: its folder.
            stack: closes the files.

        Raises:
            CheckpointNotReady: the index, or a file that it names, is not there yet.
            CheckpointCutOff: a file ends before the index says.
            CheckpointCorrupt: the index contradicts itself.
            UnsupportedCheckpoint: it holds something of a kind that is not read.
        """
        where = source.url_of(folder)
        super().__init__("dcp", where, [])
        self._source, self._folder = source, folder
        listing = self._list()
        metadata = stack.enter_context(source.open(_require_metadata(listing, where).path))
        if metadata.stat.size > MAX_PICKLE_BYTES:
            raise UnsupportedCheckpoint(
                f"{metadata.display} has {metadata.stat.size} bytes, at most {MAX_PICKLE_BYTES} are read"
            )
        if not metadata.stat.size:
            raise CheckpointCutOff(f"cut off: {metadata.display} is empty; it is still being written")
        self._raw = metadata.read_at(0, metadata.stat.size)
        self._index: DcpIndex = read_dcp_metadata(self._raw, where=metadata.display)
        self._data = {
            name: LazyFile(source, _require_whole(listing, name, end, where), stack)
            for name, end in sorted(self._index.file_ends.items())
        }
        self.files = (metadata, *self._data.values())
        self._listed = {name: listing[name] for name in (METADATA_NAME, *self._data)}
        self.tensors = {
            name: TensorInfo(element=tensor.element, shape=tensor.shape) for name, tensor in self._index.tensors.items()
        }
        self.training_state = self._index.training_state
        self.identity = self._digest()
        self._found: dict[str, list[tuple[Chunk, FoundChunk]]] = {}
        self.odd_globals = self._index.odd_globals
        self.facts = self._read_facts()

    def plan(self, destinations: Mapping[str, int]) -> ReadPlan:
        """Return the chunks to read, their records whole where that costs little."""
        self._find(destinations)
        chunks: dict[str, list[tuple[str, FoundChunk]]] = defaultdict(list)
        for name in destinations:
            for chunk, found in self._found[name]:
                chunks[chunk.item.file].append((name, found))
        plan = ReadPlan()
        unverified: dict[str, None] = {}
        for file, held in sorted(chunks.items()):
            pieces, unchecked = _plan_file(held, destinations, self._data[file].display)
            plan.reads.append(FileRead(file=self._data[file], pieces=pieces))
            unverified |= dict.fromkeys(unchecked)
        plan.unverified = list(unverified)
        return plan

    def extents(self, name: str) -> tuple[Extent, ...]:
        """Return where a tensor's bytes lie, unless a chunk of it holds parts of rows."""
        # Whoever asks for one asks for others too: the first bytes of all chunks are read in one go.
        self._find(self.tensors)
        runs: list[Extent] = []
        for chunk, found in self._found[name]:
            view = replace(found.view, start=found.data.offset + found.view.start)
            run = run_of(view, self._data[chunk.item.file])
            if run is None:
                return ()
            runs.append(run)
        return tuple(sorted(runs, key=lambda run: run.start))

    def check_unchanged(self) -> None:
        """Check that all files are those that were listed, and that the index has the same bytes.

        Raises:
            CheckpointChanged: one was replaced or rewritten.
            CheckpointVanished: one is gone.
        """
        try:
            listing = self._list()
        except CheckpointNotFound as error:
            raise vanished(self.display) from error
        for name, before in self._listed.items():
            now = listing.get(name)
            if now is None or now.stat is None or before.stat is None:
                raise vanished(self._source.url_of(before.path))
            require_same(before.stat, now.stat, self._source.url_of(before.path))
        # Each save has an id of its own in its index; SFTP tells times in whole seconds.
        metadata = self.files[0]
        try:
            now_raw = self._source.read_at(metadata.path, 0, metadata.stat.size)
        except CheckpointNotFound as error:
            raise vanished(metadata.display) from error
        if now_raw != self._raw:
            raise CheckpointChanged(f"{metadata.display} was rewritten while it was read; score it again")

    def _list(self) -> dict[str, DirEntry]:
        return {entry.name: entry for entry in self._source.list_dir(self._folder)}

    def _digest(self) -> str:
        digest = hashlib.sha256(b"dcp\0" + self._raw)
        for name, file in self._data.items():
            digest.update(f"{name}\0{file.stat.version}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()

    def _find(self, names: Iterable[str]) -> None:
        """Find the chunks of some tensors, those that were found before left out, in one go per file."""
        new = [name for name in names if name not in self._found]
        by_file: dict[str, list[WantedChunk]] = defaultdict(list)
        for name in new:
            tensor = self._index.tensors[name]
            for chunk in tensor.chunks:
                by_file[chunk.item.file].append(WantedChunk(name, tensor, chunk))
        chunks: dict[str, list[tuple[Chunk, FoundChunk]]] = {name: [] for name in new}
        for file, wanted in sorted(by_file.items()):
            for one, found in zip(wanted, find_chunks(self._data[file], wanted), strict=True):
                chunks[one.name].append((one.chunk, found))
        self._found |= chunks

    def _read_facts(self) -> Facts:
        """Return the plain values among the objects beside the tensors; large ones are left out."""
        facts: Facts = {}
        odd = set(self.odd_globals)
        for file, items in _small_objects(self._index.objects).items():
            for name, held in read_objects(self._data[file], items).items():
                facts |= collect_facts({name: held.root})
                odd.update(odd_names(held.global_names))
        self.odd_globals = tuple(sorted(odd))
        return facts


def _require_metadata(listing: Mapping[str, DirEntry], where: str) -> DirEntry:
    """Return the entry of the index.

    Raises:
        CheckpointNotReady: it is not there yet, or about to be replaced.
        UnsupportedCheckpoint: each rank wrote an index of its own.
    """
    if METADATA_TEMPORARY in listing:
        raise CheckpointNotReady(
            f"{where} holds {METADATA_TEMPORARY!r}: it is still being written, or its writer was killed"
        )
    entry = listing.get(METADATA_NAME)
    if entry is not None and is_file(entry):
        return entry
    if any(name.endswith(METADATA_NAME) and is_file(entry) for name, entry in listing.items()):
        raise UnsupportedCheckpoint(
            f"{where} holds an index of each rank but no {METADATA_NAME!r}: it was saved with use_collectives=False, "
            "which is not read"
        )
    raise CheckpointNotReady(
        f"{where} holds no {METADATA_NAME!r}, which torch writes last: it is still being written, or not copied whole"
    )


def _require_whole(listing: Mapping[str, DirEntry], name: str, end: int, where: str) -> DirEntry:
    """Return the entry of a data file.

    Raises:
        CheckpointNotReady: it is not there.
        CheckpointCutOff: it is shorter than the index says.
    """
    entry = listing.get(name)
    if entry is None or entry.stat is None or not is_file(entry):
        raise CheckpointNotReady(
            f"{where}: {name!r}, which its index names, is missing; still being written, or not copied whole"
        )
    if entry.stat.size < end:
        raise CheckpointCutOff(
            f"cut off: {where}: {name!r} has {entry.stat.size} bytes, the index needs {end}; "
            "it is still being written, or was not copied whole"
        )
    return entry


def _small_objects(objects: Mapping[str, StoredItem]) -> dict[str, dict[str, StoredItem]]:
    """Return the objects to read, by file and name: small ones as they are written, and not too many."""
    chosen: dict[str, dict[str, StoredItem]] = {}
    num_bytes = num_objects = 0
    for name, item in sorted(objects.items(), key=lambda one: (one[1].file, one[1].offset)):
        fits = item.size <= MAX_OBJECT_BYTES and num_bytes + item.size <= MAX_ALL_OBJECTS_BYTES
        if item.transforms or not item.size or not fits or num_objects == MAX_OBJECTS:
            continue
        if item.file not in chosen and len(chosen) == MAX_OBJECT_FILES:
            continue
        chosen.setdefault(item.file, {})[name] = item
        num_bytes, num_objects = num_bytes + item.size, num_objects + 1
    return chosen


def _plan_file(
    held: Iterable[tuple[str, FoundChunk]], destinations: Mapping[str, int], where: str
) -> tuple[list[Piece], list[str]]:
    """Return the pieces of one file, and the tensors that no checksum covers.

    Raises:
        CheckpointCorrupt: two chunks lie in the same place.
    """
    pieces: list[Piece] = []
    unverified: list[str] = []
    storages: dict[bool, list[StorageViews]] = {True: [], False: []}
    starts: dict[int, ByteRange] = {}
    for name, found in held:
        view = replace(found.view, destination=destinations[name])
        if found.record is not None:
            starts[found.record.header_offset] = found.data
            storages[found.has_checksum].append(StorageViews(record=found.record, views=[(name, view)]))
            continue
        view = replace(view, start=found.data.offset + view.start)
        pieces.append(Piece(found.data, [view.receiver()]))
        unverified.append(name)
    for has_checksums, views in storages.items():
        planned, unchecked = plan_storages(
            views,
            where=where,
            has_checksums=has_checksums,
            data_range=lambda record: starts[record.header_offset],
        )
        pieces += planned
        unverified += unchecked
    pieces.sort(key=lambda piece: piece.data.offset)
    for piece, following in zip(pieces, pieces[1:], strict=False):
        if piece.data.end > following.data.offset:
            raise CheckpointCorrupt(f"{where}: two chunks lie in the same place, at byte {following.data.offset}")
    return pieces, unverified
