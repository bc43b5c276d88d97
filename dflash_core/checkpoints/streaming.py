"""Fetching a drafter: only its own tensors, by ranges, into one safetensors file that appears whole.

The file is written under a temporary name at its full size, each block at its place, then synced
and renamed. The checkpoint's files are looked at before and after: one that changed yields nothing.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from dflash_core.checkpoints.inspection import OpenCheckpoint, WeightFile, open_checkpoint
from dflash_core.checkpoints.local_source import LocalSource
from dflash_core.checkpoints.safetensors_file import SafetensorsHeader, StoredTensor, build_header, read_header
from dflash_core.checkpoints.source_base import RateLimit, Source
from dflash_core.checkpoints.sources import open_source
from dflash_core.checkpoints.tensor_plan import Piece, merged, plan_contiguous, plan_torch
from dflash_core.checkpoints.values import StreamedCheckpoint
from dflash_core.checkpoints.zip_index import RangeReader, data_range
from dflash_core.config import HostSettings
from dflash_core.errors import CheckpointChanged, CheckpointCorrupt, DoesNotFit
from dflash_core.store import sync_folder

# Left free beside the new file, for everything else on that disk.
DISK_RESERVE_BYTES = 64 << 20
HASH_BLOCK_BYTES = 4 << 20

OnProgress = Callable[[int, int], None]
"""Called with (bytes fetched, bytes wanted), in the thread that reads."""


def stream_checkpoint(
    url: str,
    destination: Path,
    *,
    hosts: Mapping[str, HostSettings] | None = None,
    run: str | None = None,
    expected_identity: str | None = None,
    on_progress: OnProgress | None = None,
    source: Source | None = None,
) -> StreamedCheckpoint:
    """Fetch the drafter of a checkpoint into one safetensors file.

    Args:
        url: a file or folder; a path or URL.
        destination: the file to write; its folder must exist.
        hosts: the configured hosts.
        run: name of the training run; None takes the folder that holds the steps.
        expected_identity: `CheckpointRef.identity` from an earlier look; None takes what is there.
        on_progress: called as bytes arrive.
        source: an open source of the same place, to save a connection.

    Raises:
        CheckpointChanged: it is not the expected one, or was replaced while it was read.
        CheckpointCorrupt: it is cut off, or its bytes contradict its checksums.
        CheckpointNotReady: it is still being written.
        DoesNotFit: the disk has too little room; nothing was fetched.
        CheckpointNotFound, UnsupportedCheckpoint, CheckpointMismatch, HostUnreachable,
        HostKeyUnknown: as for `inspect_checkpoint`.
    """
    if source is None:
        with open_source(url, hosts or {}) as opened:
            return _stream(opened, url, destination, run, expected_identity, on_progress)
    return _stream(source, url, destination, run, expected_identity, on_progress)


def weights_digest(path: Path) -> str:
    """Return the digest of the tensors in a local safetensors file: names, types, shapes and bytes.

    It does not depend on the order or the metadata of the file.

    Raises:
        CheckpointCorrupt: the file is damaged.
    """
    digest = hashlib.sha256()
    with LocalSource(RateLimit(None)).open(str(path)) as file:
        header = read_header(RangeReader(file))
        for name, tensor in sorted(header.tensors.items()):
            about = {"name": name, "dtype": tensor.element.name, "shape": list(tensor.shape)}
            digest.update(json.dumps(about).encode() + b"\n")
            file.read_ranges([tensor.data], lambda _, block: digest.update(block))
    return digest.hexdigest()


def _stream(
    source: Source,
    url: str,
    destination: Path,
    run: str | None,
    expected_identity: str | None,
    on_progress: OnProgress | None,
) -> StreamedCheckpoint:
    read_before = source.bytes_read
    with open_checkpoint(source, url, run=run) as held:
        if expected_identity is not None and held.ref.identity != expected_identity:
            raise CheckpointChanged(
                f"{url} is no longer the checkpoint that was found: identity {held.ref.identity[:12]}, "
                f"expected {expected_identity[:12]}; look at it again"
            )
        wanted = {entry.canonical_name: entry for entry in held.entries if entry.canonical_name is not None}
        header = build_header(
            {
                name: (held.file_of[entry.name].tensors()[entry.name].element, entry.shape)
                for name, entry in wanted.items()
            }
        )
        names = {entry.name: name for name, entry in wanted.items()}
        with _new_file(destination, len(header.raw) + held.bytes_wanted) as descriptor:
            _write(descriptor, 0, header.raw)
            unverified = _fetch(held, names, header, descriptor, on_progress)
            _check_unchanged(held)
        return StreamedCheckpoint(
            ref=held.ref,
            path=destination,
            weights_sha256=weights_digest(destination),
            bytes_read=source.bytes_read - read_before,
            bytes_wanted=held.bytes_wanted,
            bytes_total=held.ref.bytes_total,
            facts=held.facts,
            config=held.config,
            unverified_tensors=tuple(sorted(names[name] for name in unverified)),
        )


def _fetch(
    held: OpenCheckpoint,
    names: Mapping[str, str],
    header: SafetensorsHeader,
    descriptor: int,
    on_progress: OnProgress | None,
) -> list[str]:
    """Read the tensors of all files into the new one; return the names that no checksum covers."""
    unverified: list[str] = []
    done = 0

    def report(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if on_progress is not None:
            on_progress(min(done, held.bytes_wanted), held.bytes_wanted)

    for file in held.files:
        places = {
            name: header.tensors[names[name]].data.offset
            for name in file.tensors()
            if name in names and held.file_of[name] is file
        }
        pieces, unchecked = _plan(file, places)
        unverified += unchecked
        writer = _PieceWriter(pieces, descriptor, report)
        try:
            file.file.read_ranges(merged(piece.data for piece in pieces), writer.take)
        except CheckpointCorrupt:
            file.file.check_unchanged()
            raise
    return unverified


def _plan(file: WeightFile, places: Mapping[str, int]) -> tuple[list[Piece], list[str]]:
    if file.torch is not None:
        return plan_torch(
            file.torch, places, where=file.file.display, data_range=lambda record: data_range(file.reader, record)
        )
    stored = {name: tensor for name, tensor in file.tensors().items() if isinstance(tensor, StoredTensor)}
    return plan_contiguous((stored[name].data, place) for name, place in places.items()), list(places)


def _check_unchanged(held: OpenCheckpoint) -> None:
    """Check that the files are those that were opened, headers without checksums by their bytes too."""
    for file in held.files:
        file.file.check_unchanged()
        if file.header is not None and file.file.read_at(0, len(file.header.raw)) != file.header.raw:
            raise CheckpointChanged(f"{file.file.display} was rewritten while it was read; score it again")


class _PieceWriter:
    """Deals blocks out to the pieces they belong to, and those to the new file."""

    def __init__(self, pieces: list[Piece], descriptor: int, report: Callable[[int], None]) -> None:
        self._pieces = iter(pieces)
        self._piece = next(self._pieces, None)
        self._descriptor = descriptor
        self._report = report

    def take(self, offset: int, block: bytes) -> None:
        """Take one block; blocks come in the order of the pieces."""
        self._report(len(block))
        while block and self._piece is not None:
            piece = self._piece
            count = min(len(block), piece.data.end - offset)
            piece.take(offset, block[:count] if count < len(block) else block, self._write)
            offset, block = offset + count, block[count:]
            if offset == piece.data.end:
                piece.finish(self._write)
                self._piece = next(self._pieces, None)

    def _write(self, offset: int, data: bytes | memoryview) -> None:
        _write(self._descriptor, offset, data)


def _write(descriptor: int, offset: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count


@contextmanager
def _new_file(destination: Path, size_bytes: int) -> Iterator[int]:
    """Yield a descriptor of a new file of that size, which takes its name only if all goes well.

    Raises:
        DoesNotFit: the disk has too little room.
    """
    _remove_leftovers(destination)
    free_bytes = shutil.disk_usage(destination.parent).free
    if size_bytes + DISK_RESERVE_BYTES > free_bytes:
        raise DoesNotFit(
            f"{size_bytes / 1e9:.2f} GB are needed in {str(destination.parent)!r}, {free_bytes / 1e9:.2f} GB are free; "
            "make room, or move the store"
        )
    temporary = destination.with_name(f".{destination.name}.{os.getpid()}-{os.urandom(4).hex()}.tmp")
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        # Held for as long as this process writes: a temporary file that can be locked is a leftover.
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        _allocate(descriptor, size_bytes, destination)
        yield descriptor
        os.fsync(descriptor)
        os.replace(temporary, destination)
        sync_folder(destination.parent)
    finally:
        os.close(descriptor)
        with suppress(FileNotFoundError):
            temporary.unlink()


def _allocate(descriptor: int, size_bytes: int, destination: Path) -> None:
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        raise DoesNotFit(
            f"{size_bytes / 1e9:.2f} GB cannot be had in {str(destination.parent)!r}: {error.strerror}; make room"
        ) from error


def _remove_leftovers(destination: Path) -> None:
    """Remove temporary files of writers of the same destination that were killed."""
    for leftover in destination.parent.glob(f".{destination.name}.*.tmp"):
        with suppress(OSError), leftover.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            leftover.unlink()
