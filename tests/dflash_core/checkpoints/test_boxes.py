from __future__ import annotations

import numpy
from hypothesis import given
from hypothesis import strategies as st

from dflash_core.checkpoints.boxes import Box, count_missing, find_overlap


@st.composite
def boxes_in_a_tensor(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    boxes = []
    for _ in range(draw(st.integers(0, 4))):
        corner = tuple(draw(st.integers(0, size - 1)) for size in shape)
        boxes.append(
            Box(corner, tuple(draw(st.integers(0, size - at)) for size, at in zip(shape, corner, strict=True)))
        )
    return shape, boxes


@given(boxes_in_a_tensor())
def test_overlaps_and_gaps_are_those_that_painting_the_boxes_shows(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = case
    painted = numpy.zeros(shape, dtype=int)
    for box in boxes:
        assert box.lies_inside(shape)
        painted[tuple(slice(at, at + size) for at, size in zip(box.corner, box.shape, strict=True))] += 1
    overlap = find_overlap(boxes)
    assert (overlap is not None) == bool((painted > 1).any())
    if overlap is None:
        assert count_missing(shape, boxes) == int((painted == 0).sum())
