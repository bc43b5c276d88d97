"""The tensors of a distributed checkpoint in safetensors files: one a rank, each with parts of tensors.

torch's HuggingFaceStorageWriter writes them as `shard-00001-model-00001-of-00002.safetensors` when every
rank saves its own part. Each file says in its header at which index its part of a tensor begins; there is
no index of the whole, so that a tensor's shape follows from the parts that are there.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace

from dflash_core.checkpoints.boxes import Box, count_missing, find_overlap
from dflash_core.checkpoints.container import Container, Extent, FileRead, ReadPlan, TensorInfo
from dflash_core.checkpoints.dcp_items import contiguous_view, run_of, saved_corners
from dflash_core.checkpoints.dtypes import ElementType
from dflash_core.checkpoints.names import shortened
from dflash_core.checkpoints.paths import is_file, is_unfinished_name
from dflash_core.checkpoints.pieces import Piece, Rectangle
from dflash_core.checkpoints.safetensors_container import SafetensorsFile
from dflash_core.checkpoints.source_base import ByteRange, DirEntry, Source, vanished
from dflash_core.errors import (
    CheckpointChanged,
    CheckpointCorrupt,
    CheckpointNotFound,
    CheckpointNotReady,
    UnsupportedCheckpoint,
)

MAX_FILES = 4096
_SHARD = re.compile(r"^shard-(\d+)-model-(\d+)-of-(\d+)\.safetensors$")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """A part of a tensor in one of the files."""

    holder: SafetensorsFile
    element: ElementType
    box: Box
    data: ByteRange

    def placed(self, whole_shape: tuple[int, ...], destination: int) -> Rectangle:
        """Return its place, counted from the start of its file."""
        view = contiguous_view(self.element, self.box, whole_shape)
        return replace(view, start=self.data.offset, destination=destination)


class DcpSafetensors(Container):
    """A folder of safetensors files that each hold parts of tensors; the format has no checksums."""

    def __init__(self, source: Source, folder: str, stack: ExitStack) -> None:
        """Open all files of the folder and read their headers.

        Args:
            source: where it lies.
            folder: its folder.
            stack: closes the files.

        Raises:
            CheckpointNotReady: a file is missing, or still being written.
            CheckpointCutOff: a file ends before its header says.
            CheckpointCorrupt: two files contradict each other.
            UnsupportedCheckpoint: a tensor has an element type that is not known.
        """
        where = source.url_of(folder)
        super().__init__("dcp_safetensors", where, [])
        self._source, self._folder = source, folder
        self._names = _require_files(source.list_dir(folder), where)
        self._holders = {
            name: SafetensorsFile(stack.enter_context(source.open(posixpath.join(folder, name))))
            for name in self._names
        }
        self.files = tuple(holder.files[0] for holder in self._holders.values())
        parts: dict[str, list[_Part]] = {}
        for holder in self._holders.values():
            for name, part in _parts_of(holder).items():
                parts.setdefault(name, []).append(part)
        self.tensors = {name: _whole(name, held, where) for name, held in parts.items()}
        self._parts = {name: [part for part in held if part.data.size] for name, held in parts.items()}
        digest = hashlib.sha256(b"dcp_safetensors\0")
        for name, holder in self._holders.items():
            digest.update(f"{name} {holder.identity}\n".encode())
        self.identity = digest.hexdigest()

    def plan(self, destinations: Mapping[str, int]) -> ReadPlan:
        """Return one piece per part of a tensor."""
        pieces: dict[str, list[Piece]] = {}
        for name, at in destinations.items():
            for part in self._parts[name]:
                receiver = part.placed(self.tensors[name].shape, at).receiver()
                pieces.setdefault(part.holder.display, []).append(Piece(part.data, [receiver]))
        reads = [
            FileRead(file=file, pieces=sorted(pieces[file.display], key=lambda piece: piece.data.offset))
            for file in self.files
            if file.display in pieces
        ]
        return ReadPlan(reads=reads, unverified=list(destinations))

    def extents(self, name: str) -> tuple[Extent, ...]:
        """Return where a tensor's bytes lie, unless a file holds parts of its rows."""
        runs: list[Extent] = []
        for part in self._parts[name]:
            run = run_of(part.placed(self.tensors[name].shape, 0), part.holder.files[0])
            if run is None:
                return ()
            runs.append(run)
        return tuple(sorted(runs, key=lambda run: run.start))

    def check_unchanged(self) -> None:
        """Check that the files are those that were opened, and that no other has come.

        Raises:
            CheckpointChanged: one was replaced or rewritten, or there is another one.
            CheckpointVanished: one is gone.
        """
        try:
            entries = self._source.list_dir(self._folder)
        except CheckpointNotFound as error:
            raise vanished(self.display) from error
        added = {entry.name for entry in entries if _SHARD.match(entry.name)} - set(self._names)
        if added:
            raise CheckpointChanged(
                f"{self.display}: {shortened(sorted(added))} came while it was read; score it again"
            )
        for holder in self._holders.values():
            holder.check_unchanged()


def _require_files(entries: list[DirEntry], where: str) -> list[str]:
    """Return the names of the files that hold the model, after checking that none is known to be missing.

    Raises:
        CheckpointNotReady: one is.
    """
    files = [entry.name for entry in entries if is_file(entry)]
    names = [name for name in files if name.endswith(".safetensors") and not is_unfinished_name(name)]
    numbered = [match for name in names if (match := _SHARD.match(name))]
    if not numbered:
        raise CheckpointNotFound(f"{where} holds no shard-…-model-….safetensors")
    others = [name for name in names if not _SHARD.match(name)]
    totals = {int(match[3]) for match in numbered}
    present = {int(match[2]) for match in numbered}
    missing = sorted(set(range(1, min(max(totals), MAX_FILES) + 1)) - present)
    if missing:
        raise CheckpointNotReady(
            f"{where}: of the {max(totals)} files of the model, those numbered {missing[:3]} are missing on all ranks; "
            "still being written, or not copied whole"
        )
    if len(totals) > 1 or len(numbered) > MAX_FILES or others:
        raise UnsupportedCheckpoint(
            f"{where} holds files of several models: {shortened(others or [match[0] for match in numbered])}; "
            "which one is meant cannot be told"
        )
    return [match[0] for match in numbered]


def _parts_of(holder: SafetensorsFile) -> dict[str, _Part]:
    corners = saved_corners(holder.header, holder.display)
    return {
        name: _Part(
            holder=holder,
            element=tensor.element,
            box=Box(corners.get(name, (0,) * len(tensor.shape)), tensor.shape),
            data=tensor.data,
        )
        for name, tensor in holder.header.tensors.items()
    }


def _whole(name: str, parts: list[_Part], where: str) -> TensorInfo:
    """Return a tensor's type and shape from its parts.

    Raises:
        CheckpointNotReady: the parts leave a gap.
        CheckpointCorrupt: they overlap or are of different kinds.
    """
    if len({(part.element, len(part.box.shape)) for part in parts}) > 1:
        raise CheckpointCorrupt(f"{where}: the parts of tensor {name!r} differ in type or number of dimensions")
    boxes = [part.box for part in parts]
    overlap = find_overlap(boxes)
    if overlap is not None:
        raise CheckpointCorrupt(
            f"{where}: two files hold the same elements of tensor {name!r}, at {list(overlap.first.corner)} and "
            f"{list(overlap.second.corner)}"
        )
    ends = zip(*([at + size for at, size in zip(box.corner, box.shape, strict=True)] for box in boxes), strict=True)
    shape = tuple(map(max, ends))
    missing = count_missing(shape, boxes)
    if missing:
        raise CheckpointNotReady(
            f"{where}: {missing} elements of tensor {name!r} are in no file: the file of a rank is missing; "
            "still being written, or not copied whole"
        )
    return TensorInfo(element=parts[0].element, shape=shape)
