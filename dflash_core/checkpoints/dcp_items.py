"""The items in the data files of a torch distributed checkpoint, found with few bytes.

A chunk of a tensor is a small torch.save zip file of its own inside a data file, or a tensor of the
safetensors blob that ends one. Of all chunks that are wanted the first and last KB are read in one
go per file: they hold the pickle (type, strides) and the zip's index (where the data lie, their CRC-32).
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from dflash_core.checkpoints.boxes import Box
from dflash_core.checkpoints.container import Extent
from dflash_core.checkpoints.dcp_metadata import Chunk, ChunkedTensor, StoredItem
from dflash_core.checkpoints.dtypes import ElementType
from dflash_core.checkpoints.file_views import FilePart
from dflash_core.checkpoints.inert_pickle import InertPickle, read_inert
from dflash_core.checkpoints.pickle_values import RefusedTensor, TensorRef
from dflash_core.checkpoints.pieces import Rectangle, Straight, merged
from dflash_core.checkpoints.safetensors_file import SafetensorsHeader, read_header
from dflash_core.checkpoints.source_base import ByteRange, SourceFile
from dflash_core.checkpoints.storage_pieces import view_of
from dflash_core.checkpoints.torch_file import check_view
from dflash_core.checkpoints.values import CheckpointCutOff
from dflash_core.checkpoints.zip_index import (
    LOCAL_MAGIC,
    RangeReader,
    ZipIndex,
    ZipRecord,
    data_range,
    read_record,
    read_zip_index,
)
from dflash_core.errors import CheckpointCorrupt, UnsupportedCheckpoint

# torch 2.13 puts the pickle and the header of the data into the first 710 bytes, the index into the last 561.
HEAD_BYTES = 1024
TAIL_BYTES = 768
SHARDING_KEY = "DCP_SHARDING_INFO"
OFFSETS_KEY = "saved_offsets"


@dataclass(frozen=True, slots=True)
class WantedChunk:
    """A chunk to find, and the tensor that it is a part of."""

    name: str
    whole: ChunkedTensor
    chunk: Chunk


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundChunk:
    """A chunk whose bytes were found in its file."""

    view: Rectangle
    """The chunk in its storage, counted from the storage's first byte, in a destination that is the whole tensor."""
    data: ByteRange
    """Where the storage lies in the file."""
    record: ZipRecord | None
    """The storage's record, its offsets counted in the file; None in a safetensors blob."""
    has_checksum: bool


def find_chunks(file: SourceFile, wanted: Sequence[WantedChunk]) -> list[FoundChunk]:
    """Return where the bytes of some chunks of one file lie, in the order given.

    Args:
        file: the data file.
        wanted: chunks of it.

    Raises:
        UnsupportedCheckpoint: one is of a kind that is not read.
        CheckpointCutOff: one ends early, or is all zeros.
        CheckpointCorrupt: one contradicts the checkpoint's index.
    """
    readers = _read_edges(file, [one.chunk.item for one in wanted])
    blobs: dict[int, _Blob] = {}
    found: list[FoundChunk] = []
    for one in wanted:
        item, reader = one.chunk.item, readers[one.chunk.item.offset]
        start = reader.read(0, min(reader.file.stat.size, len(LOCAL_MAGIC)))
        if start == LOCAL_MAGIC:
            found.append(_find_in_zip(one, reader))
            continue
        if not start.strip(b"\0"):
            raise CheckpointCutOff(
                f"cut off: {reader.file.display} begins with zeros; it is still being written, or was lost in a crash"
            )
        if item.offset not in blobs:
            blob = ByteRange(offset=item.offset, size=file.stat.size - item.offset)
            header = read_header(RangeReader(FilePart(file, blob, display=reader.file.display)))
            blobs[item.offset] = _Blob(header, saved_corners(header, reader.file.display))
        found.append(_find_in_blob(one, blobs[item.offset], reader.file.display))
    return found


def read_objects(file: SourceFile, items: Mapping[str, StoredItem]) -> dict[str, InertPickle]:
    """Return the values of small objects of one file, inert; those that torch.save did not write are left out.

    Raises:
        CheckpointCutOff: one ends early, or is all zeros.
        CheckpointCorrupt: one is damaged.
    """
    runs = _read_ranges(file, [ByteRange(offset=item.offset, size=item.size) for item in items.values()])
    values: dict[str, InertPickle] = {}
    for name, item in items.items():
        reader = _part_reader(file, item)
        data = runs.read(item.offset, item.size)
        reader.keep(0, data)
        if not data.strip(b"\0"):
            raise CheckpointCutOff(f"cut off: {reader.file.display} is all zeros; it is still being written")
        if not data.startswith(LOCAL_MAGIC):
            continue
        index = read_zip_index(reader, tail_bytes=item.size)
        if not index.packed and "data.pkl" in index.records:
            values[name] = read_inert(read_record(reader, index.records["data.pkl"]), where=reader.file.display)
    return values


def _find_in_zip(one: WantedChunk, reader: RangeReader) -> FoundChunk:
    where = reader.file.display
    index = read_zip_index(reader, tail_bytes=TAIL_BYTES)
    tensor = _read_tensor(one, reader, index)
    records = {name.removeprefix("data/"): record for name, record in index.records.items() if name.startswith("data/")}
    if tensor.shape != one.chunk.box.shape or tensor.element != one.whole.element:
        raise CheckpointCorrupt(
            f"{where} holds a {tensor.element.name} tensor {list(tensor.shape)}, the index says "
            f"{one.whole.element.name} {list(one.chunk.box.shape)}"
        )
    check_view(one.name, tensor, records, where)
    record, base = records[tensor.storage.key], one.chunk.item.offset
    data = data_range(reader, record)
    return FoundChunk(
        view=replace(view_of(tensor, 0), whole_shape=one.whole.shape, corner=one.chunk.box.corner),
        data=ByteRange(offset=base + data.offset, size=data.size),
        record=replace(record, header_offset=base + record.header_offset, limit=base + record.limit),
        has_checksum=index.has_checksums,
    )


def _read_tensor(one: WantedChunk, reader: RangeReader, index: ZipIndex) -> TensorRef:
    where = reader.file.display
    if index.packed or "data.pkl" not in index.records:
        raise UnsupportedCheckpoint(
            f"{where} is a zip file that torch.save does not write: packed, or without data.pkl"
        )
    byte_order = index.records.get("byteorder")
    if byte_order is not None and read_record(reader, byte_order) != b"little":
        raise UnsupportedCheckpoint(f"{where} was saved on a big-endian machine; save it again on a little-endian one")
    tensor = read_inert(read_record(reader, index.records["data.pkl"]), where=where).root
    if isinstance(tensor, RefusedTensor):
        raise UnsupportedCheckpoint(f"{where}: tensor {one.name!r} is of a kind that is not read: {tensor.reason}")
    if not isinstance(tensor, TensorRef):
        raise CheckpointCorrupt(f"{where} holds a {type(tensor).__name__}, expected a part of tensor {one.name!r}")
    return tensor


class _Blob(NamedTuple):
    """The header of a safetensors blob, and the first index of each tensor's part in it."""

    header: SafetensorsHeader
    corners: Mapping[str, tuple[int, ...]]


def _find_in_blob(one: WantedChunk, blob: _Blob, where: str) -> FoundChunk:
    stored, box = blob.header.tensors.get(one.name), one.chunk.box
    corner = blob.corners.get(one.name, box.corner)
    if stored is None or (stored.shape, stored.element, corner) != (box.shape, one.whole.element, box.corner):
        raise CheckpointCorrupt(
            f"{where} does not hold the part {list(box.shape)} at {list(box.corner)} of tensor {one.name!r}, "
            "which the index puts there"
        )
    return FoundChunk(
        view=contiguous_view(stored.element, box, one.whole.shape),
        data=ByteRange(offset=one.chunk.item.offset + stored.data.offset, size=stored.data.size),
        record=None,
        has_checksum=False,
    )


def contiguous_view(element: ElementType, box: Box, whole_shape: tuple[int, ...]) -> Rectangle:
    """Return the place of a part of a tensor that lies in its own order, from byte 0 on."""
    strides: list[int] = []
    stride = element.itemsize
    for size in reversed(box.shape):
        strides.append(stride)
        stride *= size
    return Rectangle(
        start=0,
        shape=box.shape,
        strides=tuple(reversed(strides)),
        itemsize=element.itemsize,
        destination=0,
        whole_shape=whole_shape,
        corner=box.corner,
    )


def run_of(view: Rectangle, file: SourceFile) -> Extent | None:
    """Return a part of a tensor as one run of the tensor's bytes, or None where it is not one.

    Args:
        view: the part, counted from the start of the file, in a destination that is the whole tensor.
        file: the file that it lies in.
    """
    receiver = view.receiver()
    if not isinstance(receiver, Straight):
        return None
    data = ByteRange(offset=receiver.start, size=receiver.size)
    return Extent(file=file, data=data, start=receiver.destination)


def saved_corners(header: SafetensorsHeader, where: str) -> dict[str, tuple[int, ...]]:
    """Return the index of the first element of each tensor's part that a safetensors file holds.

    Empty where the file does not say: then it holds whole tensors.

    Raises:
        CheckpointCorrupt: what it says cannot be.
    """
    try:
        text = header.metadata.get(SHARDING_KEY)
        if text is None:
            return {}
        corners = {name: tuple(entry[OFFSETS_KEY]) for name, entry in json.loads(text).items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointCorrupt(f"{where}: its {SHARDING_KEY} cannot be read ({error!r:.80})") from error
    for name, tensor in header.tensors.items():
        corner = corners.get(name, ())
        if len(corner) != len(tensor.shape) or not all(_is_index(value) for value in corner):
            raise CheckpointCorrupt(f"{where}: its {SHARDING_KEY} puts tensor {name!r} at {list(corner)!r:.80}")
    return corners


def _is_index(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _read_edges(file: SourceFile, items: Sequence[StoredItem]) -> dict[int, RangeReader]:
    """Return readers of some items, by their offsets, that hold their first and last bytes already."""
    edges = {item.offset: (item, _edges_of(item, file.stat.size)) for item in items}
    runs = _read_ranges(file, [edge for _, parts in edges.values() for edge in parts])
    readers: dict[int, RangeReader] = {}
    for offset, (item, parts) in edges.items():
        readers[offset] = _part_reader(file, item)
        for edge in parts:
            readers[offset].keep(edge.offset - offset, runs.read(edge.offset, edge.size))
    return readers


def _edges_of(item: StoredItem, file_size: int) -> list[ByteRange]:
    if item.size <= HEAD_BYTES + TAIL_BYTES:
        # The bytes of a small tensor in a blob are fewer than tell what they are.
        return [ByteRange(offset=item.offset, size=min(max(item.size, len(LOCAL_MAGIC)), file_size - item.offset))]
    tail = ByteRange(offset=item.end - TAIL_BYTES, size=TAIL_BYTES)
    return [ByteRange(offset=item.offset, size=HEAD_BYTES), tail]


def _part_reader(file: SourceFile, item: StoredItem) -> RangeReader:
    display = f"{file.display} (at byte {item.offset})" if item.offset else file.display
    part = ByteRange(offset=item.offset, size=max(item.size, min(len(LOCAL_MAGIC), file.stat.size - item.offset)))
    return RangeReader(FilePart(file, part, display=display))


class _Runs:
    """Runs of bytes of a file, taken in the order of their offsets."""

    def __init__(self, runs: Sequence[ByteRange]) -> None:
        self._starts = [run.offset for run in runs]
        self._blocks = [bytearray() for _ in runs]

    def take(self, offset: int, data: bytes) -> None:
        self._blocks[bisect_right(self._starts, offset) - 1] += data

    def read(self, offset: int, size: int) -> bytes:
        """Return some of the bytes; fewer where there are no more."""
        number = bisect_right(self._starts, offset) - 1
        if number < 0:
            return b""
        at = offset - self._starts[number]
        return bytes(self._blocks[number][at : at + size])


def _read_ranges(file: SourceFile, ranges: Sequence[ByteRange]) -> _Runs:
    """Read ranges in one go."""
    runs = merged(part for part in ranges if part.size)
    held = _Runs(runs)
    file.read_ranges(runs, held.take)
    return held
