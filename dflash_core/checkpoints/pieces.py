"""Pieces of a source file, and how their bytes come to lie in the destination as they arrive.

A piece is read in one go. Its bytes go straight to their place where a tensor lies in its own order;
a strided view, or a shard that covers part of the columns, is put in order slice by slice, so that
never more than a few MB are held, however large the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Protocol

import numpy

from dflash_core.checkpoints.source_base import ByteRange

Write = Callable[[int, bytes | memoryview], None]
"""Puts bytes at an offset of the destination."""

# How much of a tensor that must be laid out anew is held at once.
SLICE_BYTES = 8 << 20


class Receiver(Protocol):
    """Takes the bytes of one tensor out of those of a piece."""

    def take(self, at: int, view: memoryview, write: Write) -> None:
        """Take what is its own of a block that starts at `at`; blocks come in order."""


@dataclass(frozen=True, slots=True)
class Straight:
    """A contiguous run of bytes and where it goes."""

    start: int
    """Where it begins, counted as the piece counts."""
    size: int
    destination: int

    def take(self, at: int, view: memoryview, write: Write) -> None:
        """Write what is its own of a block."""
        start, stop = max(at, self.start), min(at + len(view), self.start + self.size)
        if start < stop:
            write(self.destination + start - self.start, view[start - at : stop - at])


@dataclass(frozen=True, kw_only=True, slots=True)
class Rectangle:
    """A part of a tensor: a strided view in the source, a box of rows and columns in the destination."""

    start: int
    """First byte of the view, counted as the piece counts."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In bytes."""
    itemsize: int
    destination: int
    """Where the whole tensor begins in the destination."""
    whole_shape: tuple[int, ...]
    corner: tuple[int, ...]
    """Index of the part's first element in the whole tensor."""

    @property
    def span_bytes(self) -> int:
        """Return how many bytes lie from its first to its last."""
        if not prod(self.shape):
            return 0
        steps = ((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return sum(steps) + self.itemsize

    @property
    def held_bytes(self) -> int:
        """Return how much of it must be held at once to put it in order."""
        if self._is_one_run():
            return 0
        dim = self.outermost()
        return self.span_bytes if dim is None else max(self._inner_span(dim), min(SLICE_BYTES, self.span_bytes))

    def receiver(self) -> Receiver:
        """Return what takes its bytes: the simplest that does."""
        if self._is_one_run():
            return Straight(self.start, self.span_bytes, self.destination + self._offset_of(self.corner))
        return _Relayout(self)

    def write_slices(self, dim: int | None, first: int, buffer: bytearray, write: Write) -> None:
        """Write some slices of the view along one dimension; `buffer` begins at the first of them."""
        shape = list(self.shape)
        corner = list(self.corner)
        if dim is not None:
            count = (len(buffer) - self._inner_span(dim)) // self.strides[dim] + 1
            shape[dim] = count
            corner[dim] += first
        array = numpy.ndarray(tuple(shape), dtype=f"V{self.itemsize}", buffer=buffer, strides=self.strides)
        data = memoryview(array.tobytes())
        run_bytes = self._run_bytes(shape)
        for number, index in enumerate(_outer_indices(shape, self.whole_shape)):
            place = self._offset_of([a + b for a, b in zip(corner, index, strict=True)])
            write(self.destination + place, data[number * run_bytes : (number + 1) * run_bytes])

    def _is_one_run(self) -> bool:
        expected = self.itemsize
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return self._run_bytes(self.shape) == prod(self.shape) * self.itemsize

    def _run_bytes(self, shape: Sequence[int]) -> int:
        """Return how many bytes of a box of that shape lie together in the destination."""
        run = self.itemsize
        for size, whole in zip(reversed(shape), reversed(self.whole_shape), strict=True):
            run *= size
            if size != whole:
                break
        return run

    def _offset_of(self, index: Sequence[int]) -> int:
        offset = 0
        for position, size in zip(index, self.whole_shape, strict=True):
            offset = offset * size + position
        return offset * self.itemsize

    def outermost(self) -> int | None:
        """Return the dimension along which slices follow each other in the source, or None where they overlap."""
        order = sorted(
            (dim for dim, size in enumerate(self.shape) if size > 1), key=lambda dim: self.strides[dim], reverse=True
        )
        nested = all(self.strides[dim] >= self._span_of(order[i + 1 :]) for i, dim in enumerate(order))
        return order[0] if order and nested else None

    def _inner_span(self, dim: int) -> int:
        return self._span_of([other for other in range(len(self.shape)) if other != dim])

    def _span_of(self, dims: Sequence[int]) -> int:
        return sum((self.shape[dim] - 1) * self.strides[dim] for dim in dims) + self.itemsize


class _Relayout:
    """Collects slices of a rectangle and writes them in the destination's order."""

    def __init__(self, part: Rectangle) -> None:
        self._part = part
        self._dim = part.outermost()
        self._stride = part.span_bytes if self._dim is None else part.strides[self._dim]
        self._inner = part.span_bytes if self._dim is None else part._inner_span(self._dim)
        self._num_slices = 1 if self._dim is None else part.shape[self._dim]
        self._per_turn = max(1, SLICE_BYTES // self._stride)
        self._first = 0
        self._begin()

    def _begin(self) -> None:
        count = min(self._per_turn, self._num_slices - self._first)
        self._buffer = bytearray((count - 1) * self._stride + self._inner if count else 0)
        self._start = self._part.start + self._first * self._stride
        self._filled = 0

    def take(self, at: int, view: memoryview, write: Write) -> None:
        while self._first < self._num_slices:
            # The gap between two turns is passed over: it belongs to nobody.
            begin = max(at, self._start + self._filled)
            stop = min(at + len(view), self._start + len(self._buffer))
            if begin >= stop:
                return
            self._buffer[begin - self._start : stop - self._start] = view[begin - at : stop - at]
            self._filled = stop - self._start
            if self._filled < len(self._buffer):
                return
            self._part.write_slices(self._dim, self._first, self._buffer, write)
            self._first += self._per_turn
            if self._first < self._num_slices:
                self._begin()


class Piece:
    """A range of a source file whose bytes are passed on as they arrive, in order."""

    def __init__(self, data: ByteRange, receivers: Iterable[Receiver] = ()) -> None:
        self.data = data
        self._receivers = tuple(receivers)

    def take(self, offset: int, block: bytes | memoryview, write: Write) -> None:
        """Pass on one block of the range.

        Args:
            offset: where it starts in the source.
            block: its bytes.
            write: where they go.
        """
        view = memoryview(block)
        for receiver in self._receivers:
            receiver.take(offset, view, write)

    def finish(self, write: Write) -> None:
        """Do what can only be done once all bytes have come.

        Raises:
            CheckpointCorrupt: the bytes are not those that the index describes.
        """


def plan_contiguous(tensors: Iterable[tuple[ByteRange, int]]) -> list[Piece]:
    """Return one piece per tensor that lies in its own order.

    Args:
        tensors: (where its bytes lie, its offset in the destination) of each.
    """
    ordered = sorted(tensors, key=lambda one: one[0].offset)
    return [Piece(data, [Straight(data.offset, data.size, at)]) for data, at in ordered if data.size]


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


def _outer_indices(shape: Sequence[int], whole_shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the index of each run's first element, in order."""
    inner = len(shape)
    while inner > 0:
        inner -= 1
        if shape[inner] != whole_shape[inner]:
            break
    for index in product(*(range(size) for size in shape[:inner])):
        yield (*index, *(0 for _ in shape[inner:]))
