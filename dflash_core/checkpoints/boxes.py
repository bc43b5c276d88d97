"""Boxes of a tensor's elements: the parts that the ranks of a distributed run save of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor."""

    corner: tuple[int, ...]
    """Index of its first element in the whole tensor."""
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Return how many elements it has."""
        return prod(self.shape)

    def lies_inside(self, shape: Sequence[int]) -> bool:
        """Tell whether it is a part of a tensor of that shape."""
        if not len(self.corner) == len(self.shape) == len(shape):
            return False
        return all(at + size <= whole for at, size, whole in zip(self.corner, self.shape, shape, strict=True))

    def overlaps(self, other: Box) -> bool:
        """Tell whether the two share an element; both must have some."""
        mine, its = zip(self.corner, self.shape, strict=True), zip(other.corner, other.shape, strict=True)
        return all(a < b + b_size and b < a + a_size for (a, a_size), (b, b_size) in zip(mine, its, strict=True))


class Overlap(NamedTuple):
    """Two boxes that share an element."""

    first: Box
    second: Box


def find_overlap(boxes: Iterable[Box]) -> Overlap | None:
    """Return two boxes of one tensor that share an element, or None."""
    filled = [box for box in boxes if box.num_elements]
    if len(filled) < 2:
        return None
    num_dims = len(filled[0].shape)
    # Sorted along the dimension that tells most of them apart, only few must be compared with each other.
    dim = max(range(num_dims), key=lambda dim: len({box.corner[dim] for box in filled}), default=None)
    if dim is None:
        return Overlap(filled[0], filled[1])
    open_boxes: list[Box] = []
    for box in sorted(filled, key=lambda box: box.corner[dim]):
        open_boxes = [one for one in open_boxes if one.corner[dim] + one.shape[dim] > box.corner[dim]]
        for one in open_boxes:
            if one.overlaps(box):
                return Overlap(one, box)
        open_boxes.append(box)
    return None


def count_missing(shape: Sequence[int], boxes: Iterable[Box]) -> int:
    """Return how many elements of a tensor no box covers; the boxes must lie inside and not overlap."""
    return prod(shape) - sum(box.num_elements for box in boxes)
