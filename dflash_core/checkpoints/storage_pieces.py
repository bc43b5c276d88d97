"""Which bytes of a torch file's records to read for a set of tensors.

A record is read whole wherever that costs little, so that its CRC-32 can be checked; a small view
into a large storage is read alone, and is then reported as unverified.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from dflash_core.checkpoints.pickle_values import TensorRef
from dflash_core.checkpoints.pieces import Piece, Rectangle, Write, merged
from dflash_core.checkpoints.source_base import ByteRange
from dflash_core.checkpoints.zip_index import LOCAL_HEADER_BYTES, ZipRecord, data_range_from
from dflash_core.errors import CheckpointCorrupt

# What may be read beyond the tensors' own bytes so that checksums can be checked.
EXTRA_SHARE = 0.005
EXTRA_BYTES = 256 << 10


@dataclass(kw_only=True, slots=True)
class StorageViews:
    """The tensors of one storage; their offsets count from its first byte."""

    record: ZipRecord
    views: list[tuple[str, Rectangle]] = field(default_factory=list)
    """Name and place of each."""

    def spans(self) -> list[ByteRange]:
        """Return the runs of bytes that the tensors cover."""
        return merged(ByteRange(offset=view.start, size=view.span_bytes) for _, view in self.views if view.span_bytes)

    @property
    def whole(self) -> ByteRange:
        """Return where the record lies: its header, its data, and what torch pads around them."""
        return ByteRange(offset=self.record.header_offset, size=self.record.limit - self.record.header_offset)

    @property
    def extra_bytes(self) -> int:
        """Return how many bytes more than its tensors' own the whole record has."""
        return self.whole.size - sum(span.size for span in self.spans())


def view_of(tensor: TensorRef, destination: int) -> Rectangle:
    """Return the place of a tensor that fills its destination alone."""
    itemsize = tensor.element.itemsize
    return Rectangle(
        start=tensor.offset * itemsize,
        shape=tensor.shape,
        strides=tuple(stride * itemsize for stride in tensor.strides),
        itemsize=itemsize,
        destination=destination,
        whole_shape=tensor.shape,
        corner=(0,) * len(tensor.shape),
    )


def plan_storages(
    storages: Iterable[StorageViews],
    *,
    where: str,
    has_checksums: bool,
    data_range: Callable[[ZipRecord], ByteRange],
) -> tuple[list[Piece], list[str]]:
    """Return the pieces to read for the tensors of some storages, and the tensors left unverified.

    Args:
        storages: what to read of each.
        where: the file, for messages.
        has_checksums: False for a file that was saved without them.
        data_range: says where the data of a record lie; asked only for records not read whole.
    """
    ordered = sorted(storages, key=lambda views: views.extra_bytes)
    wanted = sum(span.size for views in ordered for span in views.spans())
    extra_left = EXTRA_BYTES + int(EXTRA_SHARE * wanted)
    pieces: list[Piece] = []
    unverified: list[str] = []
    for views in ordered:
        spans, extra = views.spans(), views.extra_bytes
        if not spans:
            continue
        if has_checksums and extra <= extra_left:
            extra_left -= extra
            pieces.append(_RecordPiece(views, where))
            continue
        unverified += [name for name, _ in views.views]
        start = data_range(views.record).offset
        for span in spans:
            held = [view for _, view in views.views if _holds(span, view)]
            pieces.append(_SpanPiece(span, start, held))
    return sorted(pieces, key=lambda piece: piece.data.offset), unverified


def _holds(span: ByteRange, view: Rectangle) -> bool:
    return view.span_bytes > 0 and span.offset <= view.start < span.end


class _SpanPiece(Piece):
    """A span of a storage's data; its tensors count from the first byte of the storage."""

    def __init__(self, span: ByteRange, data_start: int, views: Iterable[Rectangle]) -> None:
        super().__init__(
            ByteRange(offset=data_start + span.offset, size=span.size), [view.receiver() for view in views]
        )
        self._data_start = data_start

    def take(self, offset: int, block: bytes | memoryview, write: Write) -> None:
        """Pass on one block of the span."""
        super().take(offset - self._data_start, block, write)


class _RecordPiece(Piece):
    """A whole record, its header first; its checksum is computed as its bytes arrive."""

    def __init__(self, views: StorageViews, where: str) -> None:
        super().__init__(views.whole, [view.receiver() for _, view in views.views if view.span_bytes])
        self._record = views.record
        self._names = [name for name, _ in views.views]
        self._where = where
        self._data_start: int | None = None
        self._head = b""
        self._crc = 0

    def take(self, offset: int, block: bytes | memoryview, write: Write) -> None:
        """Pass on one block of the record."""
        if self._data_start is None:
            self._head += block
            if len(self._head) < LOCAL_HEADER_BYTES:
                return
            self._data_start = data_range_from(self._head[:LOCAL_HEADER_BYTES], self._record, self._where).offset
            offset, block, self._head = self.data.offset, self._head, b""
        at = offset - self._data_start
        view = memoryview(block)[max(0, -at) : max(0, self._record.size - at)]
        self._crc = zlib.crc32(view, self._crc)
        super().take(max(0, at), view, write)

    def finish(self, write: Write) -> None:
        """Check the checksum of the record.

        Raises:
            CheckpointCorrupt: it is not that of the index.
        """
        if self._crc != self._record.crc:
            names = ", ".join(repr(name) for name in self._names[:3])
            raise CheckpointCorrupt(
                f"{self._where}: the bytes of record {self._record.name!r} ({names}) have CRC-32 {self._crc:08x}, "
                f"the index says {self._record.crc:08x}; the file is damaged"
            )
