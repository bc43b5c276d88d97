"""The files of stored states: one tensor each, written row by row and read memory-mapped."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from dflash_core.errors import ArtifactDamaged
from dflash_core.target.stored_tensors import bytes_of

_CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_ALIGNMENT = 64


def write_rows(path: Path, name: str, shape: tuple[int, int], dtype: torch.dtype, rows: Iterable[Tensor]) -> None:
    """Write a safetensors file of one tensor, given part by part, so that it never lies in memory as a whole.

    Args:
        path: the file.
        name: of the tensor.
        shape: (T, D).
        dtype: written; parts are cast to it.
        rows: parts (R, D) that together have T rows.
    """
    size = shape[0] * shape[1] * dtype.itemsize
    header = json.dumps({name: {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [0, size]}}).encode()
    header += b" " * (-(8 + len(header)) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for part in rows:
            file.write(bytes_of(part.to(dtype).contiguous()))
        assert file.tell() == 8 + len(header) + size, (file.tell(), len(header), size)


def read_tensors(path: Path, *names: str) -> list[Tensor]:
    """Return tensors of a file, memory-mapped.

    Raises:
        ArtifactDamaged: the file cannot be read, or lacks one of them.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return [file.get_tensor(name) for name in names]
    except Exception as error:  # safetensors raises its own type, which derives from Exception alone
        raise ArtifactDamaged(f"{path} cannot be read: {error}; remove its folder, it will be made again") from error
