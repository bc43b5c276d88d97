"""Samples of tensors: a few bytes at fixed places, enough to tell a copy from another tensor.

Two tensors of a training run that differ at all differ nearly everywhere, so that a few hundred
elements spread over each show it; bytes that nobody sampled are not proven equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from dflash_core.checkpoints.container import Container, Extent
from dflash_core.checkpoints.pieces import merged
from dflash_core.checkpoints.source_base import ByteRange, SourceFile

SAMPLE_BYTES = 256
SAMPLES_PER_TENSOR = 3


def sample_ranges(size_bytes: int, *, count: int = SAMPLES_PER_TENSOR, size: int = SAMPLE_BYTES) -> list[ByteRange]:
    """Return ranges spread evenly over a tensor's bytes, its first and last among them."""
    size = min(size, size_bytes)
    if count < 2 or size_bytes <= count * size:
        return [ByteRange(offset=0, size=min(size_bytes, count * size))] if size_bytes else []
    # Aligned to 8 bytes: no element is cut.
    step = (size_bytes - size) / (count - 1)
    return [ByteRange(offset=min(size_bytes - size, int(step * i) // 8 * 8), size=size) for i in range(count)]


def read_samples(container: Container, wanted: Mapping[str, Sequence[ByteRange]]) -> dict[str, list[bytes] | None]:
    """Return some of the bytes of some tensors, read in one go per file.

    Args:
        container: the open container.
        wanted: tensor name to ranges of its bytes in their own order.

    Returns:
        The bytes by name; None for a tensor whose bytes do not lie in their own order.
    """
    places: dict[str, list[tuple[SourceFile, ByteRange]] | None] = {}
    for name, ranges in wanted.items():
        extents = container.extents(name)
        places[name] = None if not extents else [one for part in ranges for one in _places(extents, part)]
    read: dict[tuple[int, int], bytes] = {}
    for file in {id(file): file for at in places.values() for file, _ in at or []}.values():
        ranges = merged(part for at in places.values() for other, part in at or [] if other is file)
        blocks: dict[int, bytearray] = {part.offset: bytearray() for part in ranges}
        starts = sorted(blocks)

        def take(offset: int, data: bytes, starts: list[int] = starts, blocks: dict[int, bytearray] = blocks) -> None:
            blocks[max(start for start in starts if start <= offset)] += data

        file.read_ranges(ranges, take)
        for part in ranges:
            read[id(file), part.offset] = bytes(blocks[part.offset])
    return {name: None if at is None else [_cut(read, file, part) for file, part in at] for name, at in places.items()}


def hold_the_same(one: Container, other: Container, pairs: Iterable[tuple[str, str]]) -> str | None:
    """Return the first of some tensors whose samples differ in two containers, or None.

    A tensor that cannot be sampled on one side counts as different: what cannot be compared is not the same.
    """
    listed = list(pairs)
    mine = read_samples(one, {name: sample_ranges(one.tensors[name].size_bytes) for name, _ in listed})
    its = read_samples(other, {name: sample_ranges(other.tensors[name].size_bytes) for _, name in listed})
    for name, other_name in listed:
        a, b = mine[name], its[other_name]
        if one.tensors[name].size_bytes and (a is None or b is None or b"".join(a) != b"".join(b)):
            return name
    return None


def _places(extents: Sequence[Extent], part: ByteRange) -> Iterable[tuple[SourceFile, ByteRange]]:
    for extent in extents:
        start, end = max(part.offset, extent.start), min(part.end, extent.start + extent.data.size)
        if start < end:
            yield extent.file, ByteRange(offset=extent.data.offset + start - extent.start, size=end - start)


def _cut(read: Mapping[tuple[int, int], bytes], file: SourceFile, part: ByteRange) -> bytes:
    start = max(offset for number, offset in read if number == id(file) and offset <= part.offset)
    block = read[id(file), start]
    return block[part.offset - start : part.end - start]
