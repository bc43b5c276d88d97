"""Telling weights from blank disk: a file whose size is right while its bytes never arrived.

A file that was allocated and not filled, or lost its pages in a crash, reads as zeros. Where no
checksum covers a tensor, two signs give that away: a norm of nothing but zeros, which no training
reaches (the drafter would be dead), and a long run of zeros beside other values in one matrix. A
projection that is zero as a whole is believed: some begin like that.
"""

from __future__ import annotations

import re

import numpy

from dflash_core.errors import CheckpointCorrupt

BLANK_RUN_BYTES = 256 << 10
_BLOCK_BYTES = 4 << 10
_NORM = re.compile(r"norm\.weight$")


class BlankFinder:
    """Looks for blank parts in the bytes of one tensor, given in order."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._position = 0
        self._run = 0
        self._holds_something = False
        self._long_run_at: int | None = None

    def take(self, block: bytes) -> None:
        """Look at the next block of bytes."""
        data = numpy.frombuffer(block, dtype=numpy.uint8)
        num_whole = len(data) // _BLOCK_BYTES
        whole = data[: num_whole * _BLOCK_BYTES].reshape(num_whole, _BLOCK_BYTES)
        filled = list(map(bool, numpy.any(whole, axis=1)))
        if num_whole * _BLOCK_BYTES < len(data):
            filled.append(bool(data[num_whole * _BLOCK_BYTES :].any()))
        if all(filled):
            self._run, self._holds_something = 0, self._holds_something or bool(filled)
        else:
            self._count_runs(filled, len(data))
        self._position += len(data)

    def finish(self) -> None:
        """Say that all bytes were given.

        Raises:
            CheckpointCorrupt: part of them is blank.
        """
        if self._holds_something and self._long_run_at is not None:
            raise self._blank(self._long_run_at)
        if self._position and not self._holds_something and _NORM.search(self._name):
            raise self._blank(0)

    def _count_runs(self, filled: list[bool], num_bytes: int) -> None:
        for number, is_filled in enumerate(filled):
            if is_filled:
                self._run, self._holds_something = 0, True
                continue
            end = min((number + 1) * _BLOCK_BYTES, num_bytes)
            self._run += end - number * _BLOCK_BYTES
            if self._run >= BLANK_RUN_BYTES and self._long_run_at is None:
                self._long_run_at = self._position + end - self._run

    def _blank(self, at: int) -> CheckpointCorrupt:
        return CheckpointCorrupt(
            f"{self._name} is blank: only zeros from its byte {at} on, which no training leaves there; "
            "the file was not written whole, or lost its bytes in a crash"
        )
