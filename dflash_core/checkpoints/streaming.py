"""Fetching a drafter: only its own tensors, by ranges, into one safetensors file that appears whole.

Each block is written to its place as it arrives, so that memory does not grow with the tensors. The
checkpoint's files are looked at before and after: one that changed yields nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from dflash_core import progress
from dflash_core.checkpoints.container import Container, FileRead, ReadPlan
from dflash_core.checkpoints.hashing import TensorHasher
from dflash_core.checkpoints.inspection import OpenCheckpoint, open_checkpoint
from dflash_core.checkpoints.local_source import LocalSource
from dflash_core.checkpoints.partial_file import PartialFile, partial_file
from dflash_core.checkpoints.pieces import Piece, Write, merged
from dflash_core.checkpoints.safetensors_file import build_header, read_header
from dflash_core.checkpoints.source_base import RateLimit, Source
from dflash_core.checkpoints.sources import open_source
from dflash_core.checkpoints.tables import CANONICAL, TableReading, TargetTables, mask_token_ids, read_tables
from dflash_core.checkpoints.values import StreamedCheckpoint, TensorEntry
from dflash_core.checkpoints.zip_index import RangeReader
from dflash_core.config import HostSettings
from dflash_core.errors import CheckpointChanged, CheckpointCorrupt, CheckpointError

OnProgress = Callable[[int, int], None]
"""Called with (bytes fetched, bytes wanted), in the thread that reads."""


def stream_checkpoint(
    url: str,
    destination: Path,
    *,
    hosts: Mapping[str, HostSettings] | None = None,
    run: str | None = None,
    expected_identity: str | None = None,
    target: TargetTables | None = None,
    mask_ids: Collection[int] = (),
    on_progress: OnProgress | None = None,
    source: Source | None = None,
) -> StreamedCheckpoint:
    """Fetch the drafter of a checkpoint into one safetensors file.

    An attempt that was killed or lost its link leaves what it had beside the destination, and the
    next one for the same checkpoint goes on from there.

    Args:
        url: a file or folder; a path or URL.
        destination: the file to write; its folder must exist.
        hosts: the configured hosts.
        run: name of the training run; None takes the folder that holds the steps.
        expected_identity: `CheckpointRef.identity` from an earlier look; None takes what is there.
        target: the target's embedding and head, to tell copies of them from the drafter's own; None
            takes every embedding and head for a copy and leaves it out.
        mask_ids: tokens that somebody says is the mask, beside what the checkpoint says: their rows are compared.
        on_progress: called as bytes arrive.
        source: an open source of the same place, to save a connection.

    Raises:
        CheckpointChanged: it is not the expected one, or was replaced while it was read.
        CheckpointVanished: it was deleted or renamed while it was read.
        CheckpointCorrupt: it is cut off, or its bytes contradict its checksums, or are blank.
        CheckpointNotReady: it is still being written.
        DoesNotFit: the disk has too little room.
        CheckpointNotFound, UnsupportedCheckpoint, CheckpointMismatch, HostUnreachable,
        HostKeyUnknown: as for `inspect_checkpoint`.
    """
    if source is None:
        with open_source(url, hosts or {}) as opened:
            return _counted(opened, url, destination, run, expected_identity, target, mask_ids, on_progress)
    return _counted(source, url, destination, run, expected_identity, target, mask_ids, on_progress)


def weights_digest(path: Path) -> str:
    """Return the digest of the tensors in a local safetensors file: names, types, shapes and bytes.

    It does not depend on the order or the metadata of the file.

    Raises:
        CheckpointCorrupt: the file is damaged.
    """
    with LocalSource(RateLimit(None)).open(str(path)) as file:
        header = read_header(RangeReader(file))
    with path.open("rb") as opened, TensorHasher(opened.fileno(), header) as hasher:
        return hasher.finish()


def _counted(source: Source, *arguments: Any) -> StreamedCheckpoint:
    """Stream, and tell what was read even where it fails."""
    read_before = source.bytes_read
    try:
        return _stream(source, *arguments)
    finally:
        progress.note_bytes_read(source.bytes_read - read_before)


def _stream(
    source: Source,
    url: str,
    destination: Path,
    run: str | None,
    expected_identity: str | None,
    target: TargetTables | None,
    mask_ids: Collection[int],
    on_progress: OnProgress | None,
) -> StreamedCheckpoint:
    read_before = source.bytes_read
    with open_checkpoint(source, url, run=run) as held:
        if held.refusal is not None:
            raise held.refusal
        if expected_identity is not None and held.ref.identity != expected_identity:
            raise CheckpointChanged(
                f"{url} is no longer the checkpoint that was found: identity {held.ref.identity[:12]}, "
                f"expected {expected_identity[:12]}; look at it again"
            )
        tables = TableReading((), ())
        if target is not None:
            masks = mask_token_ids(held.config, held.facts) | set(mask_ids)
            tables = read_tables(held.container, held.entries, target, also=masks)
        wanted = {entry.canonical_name: entry for entry in held.entries if entry.canonical_name is not None}
        wanted |= {CANONICAL[entry.role]: entry for entry in tables.own}
        header = build_header(
            {name: (held.container.tensors[entry.name].element, entry.shape) for name, entry in wanted.items()}
        )
        names = {entry.name: name for name, entry in wanted.items()}
        bytes_wanted = sum(entry.size_bytes for entry in wanted.values())
        with partial_file(destination, len(header.raw) + bytes_wanted, _content(held, wanted)) as new:
            new.write(0, header.raw)
            plan = held.container.plan({entry.name: header.tensors[name].data.offset for name, entry in wanted.items()})
            unverified = {names[name] for name in plan.unverified}
            with TensorHasher(new.descriptor, header, unverified) as hasher:
                _fetch(held.container, plan, new, hasher, bytes_wanted, on_progress)
                held.container.check_unchanged()
                sha256 = hasher.finish()
        return StreamedCheckpoint(
            ref=held.ref,
            path=destination,
            weights_sha256=sha256,
            bytes_read=source.bytes_read - read_before,
            bytes_wanted=bytes_wanted,
            bytes_total=held.ref.bytes_total,
            facts=held.facts,
            config=held.config,
            unverified_tensors=tuple(sorted(unverified)),
            own_tables=tuple(sorted(CANONICAL[entry.role] for entry in tables.own)),
            warnings=tables.warnings,
        )


def _content(held: OpenCheckpoint, wanted: Mapping[str, TensorEntry]) -> str:
    """Say what the new file will hold: the same text, the same bytes."""
    files = [(file.path, file.stat.version) for file in held.container.files]
    return json.dumps([held.ref.identity, files, sorted((name, entry.name) for name, entry in wanted.items())])


def _fetch(
    container: Container,
    plan: ReadPlan,
    new: PartialFile,
    hasher: TensorHasher,
    bytes_wanted: int,
    on_progress: OnProgress | None,
) -> None:
    """Read what is planned and not there yet into the new file."""
    left = [
        FileRead(file=read.file, pieces=[piece for piece in read.pieces if not new.has(read.file.path, piece.data)])
        for read in plan.reads
    ]
    done = bytes_wanted - sum(piece.data.size for read in left for piece in read.pieces)

    def report(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if on_progress is not None:
            on_progress(min(max(done, 0), bytes_wanted), bytes_wanted)

    def write(offset: int, data: bytes | memoryview) -> None:
        new.write(offset, data)
        hasher.note(offset, len(data))

    try:
        for read in left:
            writer = _PieceWriter(read, new, write, report)
            read.file.read_ranges(merged(piece.data for piece in read.pieces), writer.take)
    except CheckpointError as error:
        # Bytes that contradict the index are no damage where the file was replaced meanwhile.
        if isinstance(error, CheckpointCorrupt):
            container.check_unchanged()
        raise


class _PieceWriter:
    """Deals blocks out to the pieces they belong to, and those to the new file."""

    def __init__(self, read: FileRead, new: PartialFile, write: Write, report: Callable[[int], None]) -> None:
        self._path = read.file.path
        self._pieces: Iterator[Piece] = iter(read.pieces)
        self._piece = next(self._pieces, None)
        self._new = new
        self._write = write
        self._report = report

    def take(self, offset: int, block: bytes) -> None:
        """Take one block; blocks come in the order of the pieces."""
        self._report(len(block))
        view = memoryview(block)
        while view and self._piece is not None:
            piece = self._piece
            count = min(len(view), piece.data.end - offset)
            piece.take(offset, view[:count], self._write)
            offset, view = offset + count, view[count:]
            if offset == piece.data.end:
                piece.finish(self._write)
                self._new.note(self._path, piece.data)
                self._piece = next(self._pieces, None)
