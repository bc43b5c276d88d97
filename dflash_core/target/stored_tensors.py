"""The tensors of a target's shards, read by name or by row, with nothing mapped and nothing kept.

    8 bytes          header length N, little-endian
    N bytes          JSON: name -> {dtype, shape, data_offsets}
    then             the tensors, rows of the first axis one after another

A memory map would count every page that was touched as this process's memory, so bytes are read straight into
the tensor that needs them, and a cast goes chunk by chunk: a layer never lies in memory in two dtypes at once.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_core.errors import TargetError
from dflash_core.target.loading import Target

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_CHUNK_BYTES = 1 << 20
_LARGEST_HEADER_BYTES = 100 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """Where one tensor lies."""

    name: str
    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the file."""

    @property
    def num_elements(self) -> int:
        """Return how many numbers it holds."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Return its size as stored."""
        return self.num_elements * self.dtype.itemsize


class StoredTensors(Mapping[str, StoredTensor]):
    """All tensors of a target's shards by name; counts the bytes that were read."""

    def __init__(self, target: Target) -> None:
        self._tensors: dict[str, StoredTensor] = {}
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self.bytes_read = 0
        for shard in target.shards:
            for tensor in _read_header(target.folder / shard):
                self._tensors[tensor.name] = tensor

    def __getitem__(self, name: str) -> StoredTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def read(self, name: str) -> Tensor:
        """Return a whole tensor as stored.

        Raises:
            TargetError: the shard is cut off or cannot be read.
        """
        stored = self._tensors[name]
        tensor = torch.empty(stored.shape, dtype=stored.dtype)
        self.read_into(tensor, name)
        return tensor

    def read_into(self, tensor: Tensor, name: str, first: int = 0) -> None:
        """Fill a contiguous tensor with as many rows of a stored one, from row `first` on, in the tensor's own dtype.

        Raises:
            TargetError: the shard is cut off or cannot be read.
        """
        stored = self._tensors[name]
        with _opened(stored.path) as file:
            self._fill(file.fileno(), stored, first * math.prod(stored.shape[1:]), tensor.view(-1))

    def gather_rows(self, name: str, ids: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return some rows of a tensor's first axis, in the order given."""
        stored = self._tensors[name]
        rows = torch.empty(len(ids), *stored.shape[1:], dtype=dtype)
        with _opened(stored.path) as file:
            width = math.prod(stored.shape[1:])
            for place, index in enumerate(ids):
                self._fill(file.fileno(), stored, index * width, rows[place].view(-1))
        return rows

    def will_read(self, names: Sequence[str]) -> None:
        """Tell the system that some tensors are needed soon, so that the disk works while the CPU does."""
        for name in names:
            stored = self._tensors[name]
            try:
                with stored.path.open("rb", buffering=0) as file:
                    os.posix_fadvise(file.fileno(), stored.offset, stored.size_bytes, os.POSIX_FADV_WILLNEED)
            except (OSError, AttributeError):
                return  # an advice; a system without it reads later

    def _fill(self, descriptor: int, stored: StoredTensor, first: int, flat: Tensor) -> None:
        """Fill a flat tensor with the elements from `first` on, casting chunk by chunk."""
        size = stored.dtype.itemsize
        if flat.dtype == stored.dtype:
            self._pread(descriptor, stored, first * size, flat)
            return
        step = _CHUNK_BYTES // size
        needed = min(step, flat.numel()) * size
        if self._chunk.numel() < needed:
            self._chunk = torch.empty(needed, dtype=torch.uint8)
        chunk = self._chunk[:needed].view(stored.dtype)
        for begin in range(0, flat.numel(), step):
            part = chunk[: min(step, flat.numel() - begin)]
            self._pread(descriptor, stored, (first + begin) * size, part)
            flat[begin : begin + part.numel()].copy_(part)

    def _pread(self, descriptor: int, stored: StoredTensor, begin: int, flat: Tensor) -> None:
        view = bytes_of(flat)
        done = 0
        while done < len(view):
            try:
                count = os.preadv(descriptor, [view[done:]], stored.offset + begin + done)
            except OSError as error:
                raise TargetError(f"{stored.path} cannot be read: {error}; copy it again") from error
            if count == 0:
                raise TargetError(f"{stored.path} is cut off inside {stored.name!r}; copy it again")
            done += count
        self.bytes_read += done


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor as bytes."""
    return tensor.view(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")


def _opened(path: Path) -> FileIO:
    try:
        return path.open("rb", buffering=0)
    except OSError as error:
        raise TargetError(f"{path} cannot be read: {error}; copy it again") from error


def _read_header(path: Path) -> list[StoredTensor]:
    """Read the index of one shard; every range is checked against the file's size."""
    with _opened(path) as file:
        file_bytes = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(_LARGEST_HEADER_BYTES, file_bytes - 8):
            raise TargetError(f"{path} is not a safetensors file: it says that its header has {length} bytes")
        raw = file.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        return [_entry(path, name, entry, 8 + length, file_bytes) for name, entry in header.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, TargetError):
            raise
        raise TargetError(f"{path} is not a safetensors file: {' '.join(str(error).split())[:200]}") from error


def _entry(path: Path, name: str, entry: Mapping[str, Any], data_start: int, file_bytes: int) -> StoredTensor:
    code, shape = str(entry["dtype"]), tuple(int(size) for size in entry["shape"])
    begin, end = (int(offset) for offset in entry["data_offsets"])
    if code not in _DTYPES:
        raise TargetError(f"{path}: tensor {name!r} is of type {code}, which is not known")
    stored = StoredTensor(name=name, path=path, dtype=_DTYPES[code], shape=shape, offset=data_start + begin)
    if min(begin, *shape, 0) < 0 or end - begin != stored.size_bytes or data_start + end > file_bytes:
        raise TargetError(f"{path} is cut off or damaged: {name!r} lies outside the file or has another size")
    return stored
