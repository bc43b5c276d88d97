"""The residual stream of all transcripts between two layers, kept in files, so that a killed run goes on.

    state_0.bin, state_1.bin     (T, D) in the compute dtype: one is read, the other written
    progress.json                which of them is whole, after which step, with a checksum of every transcript

Steps: -1 the embeddings, 0..depth-1 the decoder layers, depth the final norm.
A layer reads one file and writes the other, so the last finished step is always whole: what a kill costs is at
most the layer that was running. Files are written, not mapped: what the kernel caches of them is not this
process's memory. Nothing waits for the disk; a power cut may lose what was not written back yet, which the
checksums show, and the run begins anew.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_core.target.stored_tensors import bytes_of

EMBEDDINGS = -1
_MARKER = "progress.json"


class LayerScratch:
    """Activations of every transcript after the last finished step."""

    def __init__(self, folder: Path, lengths: Sequence[int], width: int, dtype: torch.dtype) -> None:
        self._folder = folder
        self._lengths = list(lengths)
        self._width = width
        self._dtype = dtype
        self._row_bytes = width * dtype.itemsize
        self._starts = [0]
        for length in lengths:
            self._starts.append(self._starts[-1] + length)
        self._checksums = [0] * len(self._lengths)
        self._current = 0
        self._files: list[int] = []
        self.finished: int | None = None
        """The last finished step; None where nothing is."""

    def __enter__(self) -> LayerScratch:
        self._folder.mkdir(parents=True, exist_ok=True)
        total = self._starts[-1] * self._row_bytes
        for number in range(2):
            descriptor = os.open(self._folder / f"state_{number}.bin", os.O_RDWR | os.O_CREAT, 0o600)
            self._files.append(descriptor)
            if os.fstat(descriptor).st_size != total:
                os.ftruncate(descriptor, total)
        self._resume()
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._files:
            os.close(descriptor)
        self._files.clear()

    @property
    def size_bytes(self) -> int:
        """Return what both files take."""
        return 2 * self._starts[-1] * self._row_bytes

    def read(self, index: int) -> Tensor:
        """Return hidden_1TD of one transcript after the last finished step, in memory of its own."""
        rows = torch.empty(self._lengths[index], self._width, dtype=self._dtype)
        _transfer(os.preadv, self._files[self._current], rows, self._starts[index] * self._row_bytes)
        return rows[None]

    def gather(self, places_R: Tensor) -> Tensor:
        """Return the rows (R, D) at some places of the axis T after the last finished step."""
        rows = torch.empty(len(places_R), self._width, dtype=self._dtype)
        places = places_R.tolist()
        first = 0
        while first < len(places):
            last = first + 1
            while last < len(places) and places[last] == places[last - 1] + 1:
                last += 1
            _transfer(os.preadv, self._files[self._current], rows[first:last], places[first] * self._row_bytes)
            first = last
        return rows

    def forget(self) -> None:
        """Begin anew."""
        (self._folder / _MARKER).unlink(missing_ok=True)
        self.finished = None

    def write(self, index: int, hidden_1TD: Tensor) -> None:
        """Keep hidden_1TD of one transcript after the step that is running."""
        rows = hidden_1TD[0].to(self._dtype).contiguous()
        assert rows.shape == (self._lengths[index], self._width), (rows.shape, self._lengths[index], self._width)
        _transfer(os.pwritev, self._files[1 - self._current], rows, self._starts[index] * self._row_bytes)
        self._checksums[index] = _checksum(rows)

    def finish(self, step: int, *, can_resume: bool = True) -> None:
        """Tell that every transcript was written: from now on `read` returns this step.

        Args:
            step: what was finished.
            can_resume: false where later steps need more than these states, so that another run begins anew.
        """
        self._current = 1 - self._current
        self.finished = step
        if not can_resume:
            (self._folder / _MARKER).unlink(missing_ok=True)
            return
        marker = {"step": step, "file": self._current, "checksums": self._checksums, **self._facts()}
        temporary = self._folder / f"{_MARKER}.tmp"
        temporary.write_text(json.dumps(marker), encoding="utf-8")
        temporary.replace(self._folder / _MARKER)

    def _facts(self) -> dict[str, Any]:
        return {"lengths": self._lengths, "width": self._width, "dtype": str(self._dtype)}

    def _resume(self) -> None:
        """Take over what an earlier run finished, where it is whole and of the same transcripts."""
        try:
            marker = json.loads((self._folder / _MARKER).read_text(encoding="utf-8"))
            step, current, checksums = int(marker["step"]), int(marker["file"]), list(marker["checksums"])
            same = {key: marker[key] for key in self._facts()} == self._facts() and current in (0, 1)
        except (OSError, ValueError, KeyError, TypeError):
            return
        if not same or len(checksums) != len(self._lengths):
            return
        self._current = current
        if all(_checksum(self.read(index)[0]) == checksums[index] for index in range(len(self._lengths))):
            self.finished, self._checksums = step, checksums
        else:
            self._current = 0


def _checksum(rows: Tensor) -> int:
    return zlib.crc32(bytes_of(rows))


def _transfer(call: Any, descriptor: int, rows: Tensor, offset: int) -> None:
    view = bytes_of(rows)
    done = 0
    while done < len(view):
        count = call(descriptor, [view[done:]], offset + done)
        if count <= 0:
            raise OSError(f"a scratch file ended at byte {offset + done}")
        done += count
