"""Reading and writing the header of a safetensors file.

A header is 8 bytes of length and that much JSON; the tensors follow. The format demands that they
cover the rest of the file without gaps, which is how a file that is cut off is told from a whole one.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from dflash_core.checkpoints.dtypes import BY_CODE, WRITE_RANK, ElementType
from dflash_core.checkpoints.source_base import ByteRange, SourceFile
from dflash_core.checkpoints.values import CheckpointCutOff
from dflash_core.checkpoints.zip_index import RangeReader
from dflash_core.errors import CheckpointCorrupt, UnsupportedCheckpoint

LENGTH_BYTES = 8
# The limit of the safetensors library.
MAX_HEADER_BYTES = 100_000_000
FIRST_READ_BYTES = 16 << 10
MAX_DIMS = 16
METADATA_KEY = "__metadata__"


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """One tensor of a safetensors file."""

    element: ElementType
    shape: tuple[int, ...]
    data: ByteRange
    """Where its bytes lie in the file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SafetensorsHeader:
    """The header of a safetensors file."""

    raw: bytes
    """Its bytes, length included."""
    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]


def read_header(reader: RangeReader) -> SafetensorsHeader:
    """Read and check the header of a safetensors file.

    Raises:
        CheckpointCutOff: the file ends before its header says.
        CheckpointCorrupt: the header contradicts itself or the file.
        UnsupportedCheckpoint: it holds an element type that is not known.
    """
    file = reader.file
    raw = _raw_header(reader)
    try:
        table = json.loads(raw[LENGTH_BYTES:].decode("utf-8"))
        metadata = table.pop(METADATA_KEY, None) or {}
        tensors = {name: _tensor(name, entry, len(raw), file.display) for name, entry in table.items()}
    except (UnicodeDecodeError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointCorrupt | UnsupportedCheckpoint):
            raise
        raise CheckpointCorrupt(f"{file.display}: its header is not that of a safetensors file ({error})") from error
    _check_layout(tensors, len(raw), file)
    return SafetensorsHeader(raw=raw, tensors=tensors, metadata=metadata)


def build_header(tensors: Mapping[str, tuple[ElementType, Sequence[int]]]) -> SafetensorsHeader:
    """Return the header that the safetensors library would write for these tensors.

    Args:
        tensors: name to element type and shape.
    """
    ordered = sorted(tensors.items(), key=lambda item: (WRITE_RANK[item[1][0].name], item[0]))
    table: dict[str, Any] = {}
    position = 0
    for name, (element, shape) in ordered:
        end = position + prod(shape) * element.itemsize
        table[name] = {"dtype": element.code, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    raw = struct.pack("<Q", len(text)) + text
    stored = {name: _tensor(name, entry, len(raw), "the new file") for name, entry in table.items()}
    return SafetensorsHeader(raw=raw, tensors=stored, metadata={})


def _raw_header(reader: RangeReader) -> bytes:
    file, size = reader.file, reader.file.stat.size
    if size < LENGTH_BYTES:
        raise CheckpointCutOff(f"cut off: {file.display} has {size} bytes, too few for a safetensors header")
    start = reader.read(0, min(size, FIRST_READ_BYTES))
    (length,) = struct.unpack_from("<Q", start)
    if length > MAX_HEADER_BYTES:
        raise CheckpointCorrupt(
            f"{file.display}: its header claims {length} bytes, at most {MAX_HEADER_BYTES} are allowed; "
            "it is no safetensors file, or damaged"
        )
    if LENGTH_BYTES + length > size:
        raise CheckpointCutOff(
            f"cut off: {file.display} has {size} bytes, its header alone needs {LENGTH_BYTES + length}; "
            "it is still being written, or was not copied whole"
        )
    rest = LENGTH_BYTES + length - len(start)
    return start[: LENGTH_BYTES + length] if rest <= 0 else start + reader.read(len(start), rest)


def _tensor(name: str, entry: Mapping[str, Any], header_bytes: int, where: str) -> StoredTensor:
    element = BY_CODE.get(entry["dtype"])
    if element is None:
        raise UnsupportedCheckpoint(f"{where}: tensor {name!r} has the unknown element type {entry['dtype']!r}")
    shape, (start, end) = tuple(entry["shape"]), entry["data_offsets"]
    numbers = (*shape, start, end)
    are_counts = all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in numbers)
    if not are_counts or len(shape) > MAX_DIMS:
        raise CheckpointCorrupt(f"{where}: tensor {name!r} has the shape {list(shape)} and the bytes {start} to {end}")
    if end - start != prod(shape) * element.itemsize:
        raise CheckpointCorrupt(
            f"{where}: tensor {name!r} of shape {list(shape)} and type {element.name} cannot have {end - start} bytes"
        )
    return StoredTensor(element=element, shape=shape, data=ByteRange(offset=header_bytes + start, size=end - start))


def _check_layout(tensors: Mapping[str, StoredTensor], header_bytes: int, file: SourceFile) -> None:
    """Check that the tensors cover the file from the header to its end, without gap or overlap."""
    position = header_bytes
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].data.offset, item[1].data.end)):
        if tensor.data.offset != position:
            raise CheckpointCorrupt(
                f"{file.display}: tensor {name!r} starts at {tensor.data.offset}, expected {position}"
            )
        position = tensor.data.end
    if position > file.stat.size:
        raise CheckpointCutOff(
            f"cut off: {file.display} has {file.stat.size} bytes, its header promises {position}; "
            "it is still being written, or was not copied whole"
        )
    if position < file.stat.size:
        raise CheckpointCorrupt(
            f"{file.display} has {file.stat.size} bytes, {file.stat.size - position} more than its header says"
        )
