"""Which bytes to read for a set of tensors, and where each of them goes.

A record of a torch file is read whole wherever that costs little, so that its CRC-32 can be checked;
a small view into a large storage is read alone, and is then reported as unverified.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy

from dflash_core.checkpoints.pickle_values import TensorRef
from dflash_core.checkpoints.source_base import ByteRange
from dflash_core.checkpoints.torch_file import TorchFile, is_contiguous, span_of
from dflash_core.checkpoints.zip_index import LOCAL_HEADER_BYTES, ZipRecord, data_range_from
from dflash_core.errors import CheckpointCorrupt

# What may be read beyond the tensors' own bytes so that checksums can be checked.
EXTRA_SHARE = 0.005
EXTRA_BYTES = 256 << 10
# Gaps up to this size are read along with their neighbours rather than asked around.
COALESCE_BYTES = 4 << 10

Write = Callable[[int, bytes | memoryview], None]
"""Puts bytes at an offset of the destination."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A contiguous run of bytes and where it goes."""

    start: int
    size: int
    destination: int


class Piece:
    """A range of the source whose bytes are passed on as they arrive, in order."""

    def __init__(self, data: ByteRange, placements: Iterable[Placement]) -> None:
        self.data = data
        self._placements = tuple(placements)

    def take(self, offset: int, block: bytes, write: Write) -> None:
        """Pass on one block of the range.

        Args:
            offset: where it starts in the source.
            block: its bytes.
            write: where they go.
        """
        end = offset + len(block)
        view = memoryview(block)
        for place in self._placements:
            start, stop = max(offset, place.start), min(end, place.start + place.size)
            if start < stop:
                write(place.destination + start - place.start, view[start - offset : stop - offset])

    def finish(self, write: Write) -> None:
        """Do what can only be done once all bytes have come.

        Raises:
            CheckpointCorrupt: the bytes are not those that the index describes.
        """


@dataclass(kw_only=True, slots=True)
class _Views:
    """The tensors of one storage, with their places in the destination."""

    record: ZipRecord
    tensors: list[tuple[str, TensorRef, int]] = field(default_factory=list)

    def spans(self) -> list[ByteRange]:
        return merged(
            [ByteRange(offset=a, size=b - a) for _, tensor, _ in self.tensors for a, b in [span_of(tensor)] if b]
        )


class _StoragePiece(Piece):
    """A whole record, its header first, or one span of its data."""

    def __init__(self, views: _Views, span: ByteRange | None, data: ByteRange, where: str) -> None:
        super().__init__(data, ())
        self._views = views
        self._where = where
        self._span = span
        self._data_start = None if span is None else data.offset - span.offset
        self._head = b""
        self._crc = 0
        self._kept: list[tuple[ByteRange, bytearray]] | None = None
        self._placements = tuple(
            Placement(start=a, size=b - a, destination=destination)
            for _, tensor, destination in views.tensors
            if is_contiguous(tensor)
            for a, b in [span_of(tensor)]
            if self._holds(a, b)
        )

    def take(self, offset: int, block: bytes, write: Write) -> None:
        if self._data_start is None:
            self._head += block
            if len(self._head) < LOCAL_HEADER_BYTES:
                return
            start = self.data.offset
            self._data_start = data_range_from(self._head[:LOCAL_HEADER_BYTES], self._views.record, self._where).offset
            offset, block, self._head = start, self._head, b""
        at = offset - self._data_start
        view = memoryview(block)[max(0, -at) : max(0, self._views.record.size - at)]
        at = max(0, at)
        if self._span is None:
            self._crc = zlib.crc32(view, self._crc)
        if self._kept is None:
            self._kept = self._buffers()
        for span, kept in self._kept:
            start, stop = max(at, span.offset), min(at + len(view), span.end)
            if start < stop:
                kept[start - span.offset : stop - span.offset] = view[start - at : stop - at]
        for place in self._placements:
            start, stop = max(at, place.start), min(at + len(view), place.start + place.size)
            if start < stop:
                write(place.destination + start - place.start, view[start - at : stop - at])

    def finish(self, write: Write) -> None:
        record = self._views.record
        if self._span is None and self._crc != record.crc:
            names = ", ".join(repr(name) for name, _, _ in self._views.tensors[:3])
            raise CheckpointCorrupt(
                f"{self._where}: the bytes of record {record.name!r} ({names}) have CRC-32 {self._crc:08x}, "
                f"the index says {record.crc:08x}; the file is damaged"
            )
        buffers = dict(self._kept or [])
        self._kept = None
        for _, tensor, destination in self._views.tensors:
            a, b = span_of(tensor)
            buffer = buffers.get(ByteRange(offset=a, size=b - a))
            if buffer is not None and not is_contiguous(tensor):
                write(destination, _laid_out(tensor, buffer))

    def _holds(self, start: int, end: int) -> bool:
        return end > start and (self._span is None or (self._span.offset <= start and end <= self._span.end))

    def _buffers(self) -> list[tuple[ByteRange, bytearray]]:
        """Return room for the tensors that must be laid out anew once all their bytes have come."""
        spans = {span_of(tensor) for _, tensor, _ in self._views.tensors if not is_contiguous(tensor)}
        return [(ByteRange(offset=a, size=b - a), bytearray(b - a)) for a, b in sorted(spans) if self._holds(a, b)]


def plan_torch(
    torch: TorchFile, destinations: Mapping[str, int], *, where: str, data_range: Callable[[ZipRecord], ByteRange]
) -> tuple[list[Piece], list[str]]:
    """Return the pieces to read for tensors of a torch file, and the tensors left unverified.

    Args:
        torch: the file's index.
        destinations: tensor name to its offset in the destination.
        where: the file, for messages.
        data_range: says where the data of a record lie; asked only for records not read whole.
    """
    storages: dict[str, _Views] = {}
    for name, destination in destinations.items():
        tensor = torch.weights[name]
        views = storages.setdefault(tensor.storage.key, _Views(record=torch.records[tensor.storage.key]))
        views.tensors.append((name, tensor, destination))
    wanted = sum(span.size for views in storages.values() for span in views.spans())
    extra_left = EXTRA_BYTES + int(EXTRA_SHARE * wanted)
    pieces: list[Piece] = []
    unverified: list[str] = []
    for views in sorted(storages.values(), key=_extra_of):
        spans, extra = views.spans(), _extra_of(views)
        if not spans:
            continue
        if torch.has_checksums and extra <= extra_left:
            extra_left -= extra
            pieces.append(_StoragePiece(views, None, _whole(views.record), where))
            continue
        unverified += [name for name, _, _ in views.tensors]
        start = data_range(views.record).offset
        for span in spans:
            data = ByteRange(offset=start + span.offset, size=span.size)
            pieces.append(_StoragePiece(views, span, data, where))
    return sorted(pieces, key=lambda piece: piece.data.offset), unverified


def plan_contiguous(tensors: Iterable[tuple[ByteRange, int]]) -> list[Piece]:
    """Return the pieces to read for tensors that lie in their own order, with small gaps closed.

    Args:
        tensors: (where its bytes lie, its offset in the destination) of each.
    """
    placements = sorted(
        (Placement(start=data.offset, size=data.size, destination=at) for data, at in tensors), key=lambda p: p.start
    )
    groups = merged([ByteRange(offset=p.start, size=p.size) for p in placements if p.size], gap=COALESCE_BYTES)
    return [
        Piece(group, [p for p in placements if group.offset <= p.start and p.start + p.size <= group.end and p.size])
        for group in groups
    ]


def merged(ranges: Iterable[ByteRange], *, gap: int = 0) -> list[ByteRange]:
    """Return ranges in order, joined where they overlap or lie at most `gap` bytes apart."""
    joined: list[ByteRange] = []
    for part in sorted(ranges, key=lambda part: part.offset):
        if joined and part.offset <= joined[-1].end + gap:
            last = joined[-1]
            joined[-1] = ByteRange(offset=last.offset, size=max(last.end, part.end) - last.offset)
        else:
            joined.append(part)
    return joined


def _whole(record: ZipRecord) -> ByteRange:
    """Return where a record lies: its header, its data, and what torch pads around them."""
    return ByteRange(offset=record.header_offset, size=record.limit - record.header_offset)


def _extra_of(views: _Views) -> int:
    """Return how many bytes more than its tensors' own the whole record has."""
    return _whole(views.record).size - sum(span.size for span in views.spans())


def _laid_out(tensor: TensorRef, buffer: bytearray) -> bytes:
    """Return the elements of a strided tensor in their own order; `buffer` starts at its first one."""
    itemsize = tensor.element.itemsize
    array = numpy.ndarray(
        tensor.shape, dtype=f"V{itemsize}", buffer=buffer, strides=[stride * itemsize for stride in tensor.strides]
    )
    return array.tobytes()
