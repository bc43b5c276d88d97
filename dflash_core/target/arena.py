"""One piece of memory that is given out and taken back as a whole."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_ALIGNMENT = 64
"""Bytes; as torch aligns its own tensors, on which the last bits of a matrix product may depend."""


class Arena:
    """One piece of memory that every layer is loaded into: what is freed and taken again piecemeal gets scattered."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def reserve(self, size_bytes: int) -> None:
        """Make room for so much, and take back all that was given out."""
        if self._memory.numel() < size_bytes:
            self._memory = torch.empty(size_bytes, dtype=torch.uint8)
        self.clear()

    def clear(self) -> None:
        """Take back all that was given out."""
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory for a tensor, aligned as torch aligns its own; outside where the room is used up."""
        size = math.prod(shape) * dtype.itemsize
        if self._used + size > self._memory.numel():
            return torch.empty(shape, dtype=dtype)
        flat = self._memory[self._used : self._used + size]
        self._used += aligned(size)
        return flat.view(dtype).view(shape)


def aligned(size_bytes: int) -> int:
    """Return a size rounded up, so that what follows is aligned."""
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
