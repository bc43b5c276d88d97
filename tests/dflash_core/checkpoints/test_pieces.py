"""Bytes in any order of dimensions, any part of a larger tensor, cut into blocks anyhow, against numpy."""

from __future__ import annotations

import itertools

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.checkpoints import pieces
from dflash_core.checkpoints.pieces import Piece, Rectangle, merged, plan_contiguous
from dflash_core.checkpoints.source_base import ByteRange


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "SLICE_BYTES", 64)


def deliver(piece: Piece, source: bytes, size: int, cuts: list[int]) -> bytearray:
    """Feed a piece block by block and return what it wrote; every byte at most once."""
    out = bytearray(b"\xee" * size)
    written = numpy.zeros(size, dtype=int)

    def write(offset: int, data: bytes | memoryview) -> None:
        out[offset : offset + len(data)] = data
        written[offset : offset + len(data)] += 1

    inner = [piece.data.offset + cut % max(1, piece.data.size) for cut in cuts]
    ends = sorted({piece.data.offset, *inner, piece.data.end})
    for start, end in itertools.pairwise(ends):
        piece.take(start, source[start:end], write)
    piece.finish(write)
    assert written.max(initial=0) <= 1
    return out


@st.composite
def parts(draw: st.DrawFn) -> tuple[Rectangle, int]:
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    itemsize = draw(st.sampled_from([1, 2, 4]))
    order = draw(st.permutations(range(len(shape))))
    strides, step = [0] * len(shape), itemsize
    for dim in reversed(order):
        strides[dim] = step
        step *= shape[dim]
        step += draw(st.integers(0, 2)) * itemsize
    corner = tuple(draw(st.integers(0, 2)) for _ in shape)
    whole = tuple(size + at + draw(st.integers(0, 2)) for size, at in zip(shape, corner, strict=True))
    start, destination = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    part = Rectangle(
        start=start,
        shape=shape,
        strides=tuple(strides),
        itemsize=itemsize,
        destination=destination,
        whole_shape=whole,
        corner=corner,
    )
    return part, start + step + 20


@settings(max_examples=400, deadline=None)
@given(parts(), st.lists(st.integers(0, 10_000), max_size=12), st.integers(0, 2**32 - 1))
def test_a_part_lands_where_numpy_puts_it(part_and_size: tuple[Rectangle, int], cuts: list[int], seed: int) -> None:
    part, source_bytes = part_and_size
    source = numpy.random.default_rng(seed).bytes(source_bytes)
    element = f"V{part.itemsize}"
    view = numpy.ndarray(part.shape, dtype=element, buffer=source, offset=part.start, strides=part.strides)
    whole_bytes = int(numpy.prod(part.whole_shape, dtype=int)) * part.itemsize
    expected = bytearray(b"\xee" * (part.destination + whole_bytes))
    into = numpy.ndarray(part.whole_shape, dtype=element, buffer=expected, offset=part.destination)
    into[tuple(slice(at, at + size) for at, size in zip(part.corner, part.shape, strict=True))] = view
    # The piece begins before the part and ends behind it, as a record does.
    piece = Piece(ByteRange(offset=0, size=source_bytes), [part.receiver()])
    assert deliver(piece, source, len(expected), cuts) == expected


def test_views_that_overlap_themselves_are_laid_out_all_the_same() -> None:
    source = bytes(range(40))
    part = Rectangle(
        start=4, shape=(3, 4), strides=(2, 2), itemsize=2, destination=0, whole_shape=(3, 4), corner=(0, 0)
    )
    expected = numpy.ndarray((3, 4), dtype="V2", buffer=source, offset=4, strides=(2, 2)).tobytes()
    out = deliver(Piece(ByteRange(offset=0, size=40), [part.receiver()]), source, 24, [5, 6, 7])
    assert bytes(out) == expected


def test_an_expanded_view_is_laid_out() -> None:
    part = Rectangle(
        start=0, shape=(5, 2), strides=(0, 2), itemsize=2, destination=0, whole_shape=(5, 2), corner=(0, 0)
    )
    out = deliver(Piece(ByteRange(offset=0, size=4), [part.receiver()]), b"abcd", 20, [1])
    assert bytes(out) == b"abcd" * 5


def test_contiguous_tensors_are_pieces_of_their_own_in_order() -> None:
    planned = plan_contiguous(
        [(ByteRange(offset=50, size=10), 0), (ByteRange(offset=0, size=5), 90), (ByteRange(offset=7, size=0), 3)]
    )
    assert [(piece.data.offset, piece.data.size) for piece in planned] == [(0, 5), (50, 10)]


def test_ranges_that_touch_are_read_in_one_go() -> None:
    ranges = [ByteRange(offset=10, size=5), ByteRange(offset=0, size=10), ByteRange(offset=17, size=1)]
    assert merged(ranges) == [ByteRange(offset=0, size=15), ByteRange(offset=17, size=1)]
    assert merged(ranges, gap=2) == [ByteRange(offset=0, size=18)]
