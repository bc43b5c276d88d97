"""The index of a zip file as torch.save writes it: uncompressed records, found from the file's end.

The end of a file that is still being written, or was cut off, has no end record: that is how one is
told from a whole one. Every size is checked against the file before anything is read or allocated.
Format: PKWARE APPNOTE, sections 4.3.7 (local header) to 4.3.16 (end record), zip64 included.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from dflash_core.checkpoints.source_base import ByteRange, SourceFile
from dflash_core.checkpoints.values import CheckpointCutOff
from dflash_core.errors import CheckpointCorrupt, UnsupportedCheckpoint

LOCAL_MAGIC = b"PK\x03\x04"
_ENTRY_MAGIC = b"PK\x01\x02"
_END_MAGIC = b"PK\x05\x06"
_END64_MAGIC = b"PK\x06\x06"
_LOCATOR64_MAGIC = b"PK\x06\x07"
LOCAL_HEADER_BYTES = 30
_END_BYTES, _LOCATOR64_BYTES, _END64_BYTES, _ENTRY_BYTES = 22, 20, 56, 46
_MAX_COMMENT_BYTES = 0xFFFF
TAIL_BYTES = 64 << 10
# 100 bytes a record: room for 300 000 of them.
MAX_INDEX_BYTES = 32 << 20
# Of a record that is held in memory, as the pickle is.
MAX_RECORD_BYTES = 64 << 20
_U32_FULL = 0xFFFF_FFFF


@dataclass(frozen=True, kw_only=True, slots=True)
class ZipRecord:
    """One record: a name and where its header lies; its data follow the header."""

    name: str
    """Without the folder that torch.save puts all records into."""
    size: int
    crc: int
    header_offset: int
    limit: int
    """Offset of whatever comes after it: its data end here or before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ZipIndex:
    """All records of a file."""

    records: Mapping[str, ZipRecord]
    has_checksums: bool
    """False for files that were saved with checksums turned off."""
    packed: tuple[str, ...]
    """Names of records that are compressed or encrypted, which torch.save never does."""


class RangeReader:
    """Reads a file by ranges and keeps what it read: an index is looked at more than once."""

    def __init__(self, file: SourceFile) -> None:
        self.file = file
        self._kept: list[tuple[int, bytes]] = []

    def keep(self, offset: int, data: bytes) -> None:
        """Take bytes that were read by other means."""
        self._kept.append((offset, data))

    def read(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset` on, from memory where they were read before."""
        for start, data in self._kept:
            if start <= offset and offset + size <= start + len(data):
                return data[offset - start : offset - start + size]
        data = self.file.read_at(offset, size)
        self._kept.append((offset, data))
        return data


def read_zip_index(reader: RangeReader, *, tail_bytes: int = TAIL_BYTES) -> ZipIndex:
    """Read the list of records at the end of a zip file.

    Args:
        reader: the open file.
        tail_bytes: how much of its end to read at once; the rest of a longer list is read after it.

    Raises:
        CheckpointCutOff: no end record lies at the very end.
        CheckpointCorrupt: the list contradicts itself or the file.
    """
    where, file_size = reader.file.display, reader.file.stat.size
    tail_start = max(0, file_size - tail_bytes)
    tail = reader.read(tail_start, file_size - tail_start)
    end_at = _find_end(tail)
    if end_at is None:
        raise CheckpointCutOff(
            f"cut off: {where} has no zip end record at its end ({file_size} bytes); "
            "it is still being written, or was not copied whole"
        )
    end_offset = tail_start + end_at
    # torch writes the records of 64-bit files always, and in small files leaves the short ones valid too.
    wide = _read_end64(reader, end_offset)
    num_records, index_size, index_offset, index_end = wide or (
        *struct.unpack_from("<HII", tail, end_at + 10),
        end_offset,
    )
    if (
        index_size > MAX_INDEX_BYTES
        or index_offset + index_size != index_end
        or num_records * _ENTRY_BYTES > index_size
    ):
        raise CheckpointCorrupt(f"{where}: its zip end record contradicts the file; was the file damaged?")
    entries = _parse_entries(reader.read(index_offset, index_size), num_records, where)
    return _checked(entries, index_offset, where)


def read_record(reader: RangeReader, record: ZipRecord) -> bytes:
    """Return the data of a small record.

    Raises:
        UnsupportedCheckpoint: it is not small.
        CheckpointCorrupt: it does not have the checksum that the index says.
    """
    if record.size > MAX_RECORD_BYTES:
        raise UnsupportedCheckpoint(
            f"{reader.file.display}: record {record.name!r} has {record.size} bytes, at most {MAX_RECORD_BYTES} are "
            "read into memory"
        )
    where = data_range(reader, record)
    data = reader.read(where.offset, where.size)
    if record.crc and zlib.crc32(data) != record.crc:
        raise CheckpointCorrupt(
            f"{reader.file.display}: record {record.name!r} does not have its checksum; it is damaged"
        )
    return data


def data_range(reader: RangeReader, record: ZipRecord) -> ByteRange:
    """Return where the data of a record lie; reads its header."""
    header = reader.read(record.header_offset, LOCAL_HEADER_BYTES)
    return data_range_from(header, record, reader.file.display)


def data_range_from(header: bytes, record: ZipRecord, where: str) -> ByteRange:
    """Return where the data of a record lie, given the first 30 bytes of it.

    Raises:
        CheckpointCorrupt: no header of this record lies there.
    """
    name_bytes, extra_bytes = struct.unpack_from("<HH", header, 26)
    start = record.header_offset + LOCAL_HEADER_BYTES + name_bytes + extra_bytes
    if header[:4] != LOCAL_MAGIC or start + record.size > record.limit:
        raise CheckpointCorrupt(
            f"{where}: record {record.name!r} does not lie where the index says; damaged, or rewritten"
        )
    return ByteRange(offset=start, size=record.size)


def _find_end(tail: bytes) -> int | None:
    """Return where the end record starts whose comment ends exactly where the file does."""
    at = tail.rfind(_END_MAGIC)
    while at >= 0 and at >= len(tail) - _END_BYTES - _MAX_COMMENT_BYTES:
        if at + _END_BYTES <= len(tail):
            (comment_bytes,) = struct.unpack_from("<H", tail, at + 20)
            if at + _END_BYTES + comment_bytes == len(tail):
                return at
        at = tail.rfind(_END_MAGIC, 0, at)
    return None


def _read_end64(reader: RangeReader, end_offset: int) -> tuple[int, int, int, int] | None:
    """Return (records, index size, index offset, index end) of a file with 64-bit sizes, or None."""
    where = reader.file.display
    locator = reader.read(max(0, end_offset - _LOCATOR64_BYTES), min(end_offset, _LOCATOR64_BYTES))
    if locator[:4] != _LOCATOR64_MAGIC:
        return None
    (end64_offset,) = struct.unpack_from("<Q", locator, 8)
    if end64_offset + _END64_BYTES > end_offset - _LOCATOR64_BYTES:
        raise CheckpointCorrupt(f"{where}: its zip64 end record lies outside the file; was the file damaged?")
    end64 = reader.read(end64_offset, _END64_BYTES)
    if end64[:4] != _END64_MAGIC:
        raise CheckpointCorrupt(f"{where}: its zip64 end record is missing; was the file damaged?")
    num_records, index_size, index_offset = struct.unpack_from("<QQQ", end64, 32)
    return num_records, index_size, index_offset, end64_offset


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    size: int
    crc: int
    header_offset: int
    is_plain: bool


def _parse_entries(index: bytes, num_records: int, where: str) -> list[_Entry]:
    entries: list[_Entry] = []
    at = 0
    for _ in range(num_records):
        if index[at : at + 4] != _ENTRY_MAGIC or at + _ENTRY_BYTES > len(index):
            raise CheckpointCorrupt(f"{where}: its zip index is damaged at record {len(entries)}")
        flags, method = struct.unpack_from("<HH", index, at + 8)
        crc, packed_size, size, name_bytes, extra_bytes, comment_bytes = struct.unpack_from("<IIIHHH", index, at + 16)
        (header_offset,) = struct.unpack_from("<I", index, at + 42)
        name = index[at + _ENTRY_BYTES : at + _ENTRY_BYTES + name_bytes].decode("utf-8", errors="surrogateescape")
        extra_at = at + _ENTRY_BYTES + name_bytes
        extra = index[extra_at : extra_at + extra_bytes]
        size, packed_size, header_offset = _widened(extra, size, packed_size, header_offset)
        is_plain = method == 0 and not flags & 1 and packed_size == size
        entries.append(_Entry(name, size if is_plain else packed_size, crc, header_offset, is_plain))
        at = extra_at + extra_bytes + comment_bytes
    return entries


def _widened(extra: bytes, *sizes: int) -> tuple[int, ...]:
    """Return (size, packed size, header offset) with the 64-bit values in place of full 32-bit ones."""
    at, wide = 0, b""
    while at + 4 <= len(extra):
        kind, num_bytes = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            wide = extra[at + 4 : at + 4 + num_bytes]
        at += 4 + num_bytes
    values = iter(struct.unpack(f"<{len(wide) // 8}Q", wide[: len(wide) // 8 * 8]))
    return tuple(next(values, size) if size == _U32_FULL else size for size in sizes)


def _checked(entries: list[_Entry], index_offset: int, where: str) -> ZipIndex:
    """Return the records by name, each with its limit, after checking that none overlaps the next."""
    folder = entries[0].name.partition("/")[0] + "/" if entries else ""
    records: dict[str, ZipRecord] = {}
    ordered = sorted(entries, key=lambda entry: entry.header_offset)
    limits = [*(entry.header_offset for entry in ordered[1:]), index_offset]
    for entry, limit in zip(ordered, limits, strict=True):
        name = entry.name.removeprefix(folder)
        if (
            entry.header_offset + LOCAL_HEADER_BYTES + len(entry.name.encode(errors="surrogateescape")) + entry.size
            > limit
            or name in records
        ):
            raise CheckpointCorrupt(
                f"{where}: record {entry.name!r} overlaps another one or the index; was the file damaged?"
            )
        records[name] = ZipRecord(
            name=name, size=entry.size, crc=entry.crc, header_offset=entry.header_offset, limit=limit
        )
    return ZipIndex(
        records=records,
        has_checksums=any(record.crc for record in records.values() if record.size),
        packed=tuple(entry.name for entry in entries if not entry.is_plain),
    )
