"""What a container of weights is: named tensors in a file, or in files that belong together.

A container is open: its index was read and checked, its files are ready to be read by ranges. All
layouts look alike from here on; what differs is how each finds the bytes of a tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from dflash_core.checkpoints.dtypes import ElementType
from dflash_core.checkpoints.pieces import Piece
from dflash_core.checkpoints.source_base import ByteRange, SourceFile
from dflash_core.checkpoints.values import Facts, Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    """One tensor as its container's index describes it; its bytes were checked to fit the file."""

    element: ElementType
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Return how many bytes its elements have in their own order."""
        return prod(self.shape) * self.element.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class Extent:
    """A run of a tensor's bytes in a file."""

    file: SourceFile
    data: ByteRange
    """Where it lies in the file."""
    start: int
    """Which of the tensor's bytes, in its own order, is the first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRead:
    """What to read from one file: pieces in the order of their offsets, none overlapping another."""

    file: SourceFile
    pieces: Sequence[Piece]


@dataclass(kw_only=True, slots=True)
class ReadPlan:
    """What to read for a set of tensors."""

    reads: list[FileRead] = field(default_factory=list)
    unverified: list[str] = field(default_factory=list)
    """Names of tensors whose bytes no checksum of the container covers."""


class Container(ABC):
    """Named tensors in one file, or in files that belong together."""

    layout: Layout
    display: str
    """The address to show in messages."""
    files: tuple[SourceFile, ...]
    """All open files, those of the index included."""
    tensors: Mapping[str, TensorInfo]
    """By the names in the container."""
    identity: str
    """Digest of the index (names, sizes, checksums, times where there are none): other bytes, other identity."""
    facts: Facts
    """Plain values that lie beside the weights in the same file."""
    odd_globals: tuple[str, ...]
    """Names in a pickle that no ordinary checkpoint holds."""
    weights_under: str | None
    """The key of a torch file's dict that holds the weights."""
    has_checksums: bool
    """Do checksums of the bytes stand in the index, and so in `identity`?"""

    def __init__(self, layout: Layout, display: str, files: Sequence[SourceFile]) -> None:
        self.layout, self.display, self.files = layout, display, tuple(files)
        self.tensors, self.identity, self.facts, self.odd_globals, self.weights_under = {}, "", {}, (), None
        self.has_checksums = False

    @abstractmethod
    def plan(self, destinations: Mapping[str, int]) -> ReadPlan:
        """Return what to read for some tensors.

        Args:
            destinations: tensor name to the offset in the destination at which its elements go, in
                their own order.
        """

    @abstractmethod
    def extents(self, name: str) -> tuple[Extent, ...]:
        """Return where a tensor's bytes lie, in their own order; none where they lie in another one."""

    def check_unchanged(self) -> None:
        """Check that the files are those that were opened.

        Raises:
            CheckpointChanged: one was replaced or rewritten.
            CheckpointVanished: one is gone.
        """
        for file in self.files:
            file.check_unchanged()


class JoinedContainer(Container):
    """Several containers that hold one model: its shards."""

    def __init__(self, layout: Layout, display: str, parts: Sequence[Container]) -> None:
        super().__init__(layout, display, [file for part in parts for file in part.files])
        self._parts = tuple(parts)
        self.has_checksums = all(part.has_checksums for part in parts)
        self.holders: dict[str, Container] = {}
        """The part that each tensor lies in."""

    def plan(self, destinations: Mapping[str, int]) -> ReadPlan:
        """Return what to read for some tensors, part by part."""
        plan = ReadPlan()
        for part in self._parts:
            own = {name: at for name, at in destinations.items() if self.holders[name] is part}
            if own:
                of_part = part.plan(own)
                plan.reads += of_part.reads
                plan.unverified += of_part.unverified
        return plan

    def extents(self, name: str) -> tuple[Extent, ...]:
        """Return where a tensor's bytes lie."""
        return self.holders[name].extents(name)

    def check_unchanged(self) -> None:
        """Check that the files of all parts are those that were opened."""
        for part in self._parts:
            part.check_unchanged()
