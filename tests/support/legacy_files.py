"""Files of torch before 1.6, saved by torch or written by hand, and read back through their container."""

from __future__ import annotations

import io
import pickle
import struct
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dflash_core.checkpoints.container import FileRead
from dflash_core.checkpoints.legacy_index import MAGIC_NUMBER, PROTOCOL_VERSION
from dflash_core.checkpoints.local_source import LocalSource
from dflash_core.checkpoints.pieces import Write, merged
from dflash_core.checkpoints.source_base import RateLimit
from dflash_core.checkpoints.torch_legacy import TorchLegacy


def save_legacy(content: Any, path: Path, **options: Any) -> Path:
    torch.save(content, path, _use_new_zipfile_serialization=False, **options)
    return path


@contextmanager
def opened(path: Path, **options: Any) -> Iterator[TorchLegacy]:
    with LocalSource(RateLimit(None)) as source, source.open(str(path)) as file:
        yield TorchLegacy(file, **options)


def fetch(container: TorchLegacy, names: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
    """Carry out the plan for some tensors of a container, all unless told."""
    places: dict[str, int] = {}
    size = 0
    for name in container.tensors if names is None else names:
        places[name] = size
        size += container.tensors[name].size_bytes
    target = bytearray(size)

    def write(offset: int, data: bytes | memoryview) -> None:
        target[offset : offset + len(data)] = data

    plan = container.plan(places)
    assert sorted(plan.unverified) == sorted(places)
    for read in plan.reads:
        carry_out(read, write)
    found = {}
    for name, at in places.items():
        info = container.tensors[name]
        data = target[at : at + info.size_bytes]
        dtype = getattr(torch, info.element.name)
        found[name] = (torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)).view(info.shape)
    return found


def carry_out(read: FileRead, write: Write) -> None:
    left = iter(read.pieces)
    piece = next(left, None)

    def sink(offset: int, block: bytes) -> None:
        nonlocal piece
        while block:
            assert piece is not None
            assert piece.data.offset <= offset < piece.data.end
            count = min(len(block), piece.data.end - offset)
            piece.take(offset, block[:count], write)
            offset, block = offset + count, block[count:]
            if offset == piece.data.end:
                piece.finish(write)
                piece = next(left, None)

    read.file.read_ranges(merged(piece.data for piece in read.pieces), sink)
    assert piece is None


def read_all(path: Path) -> dict[str, torch.Tensor]:
    with opened(path) as container:
        found = fetch(container)
        container.check_unchanged()
        return found


class FakeStorage:
    def __init__(self, key: str, num_elements: Any, view: Any = None, kind: Any = torch.FloatStorage) -> None:
        self.pid = ("storage", kind, key, "cpu", num_elements, view)


class FakeTensor:
    def __init__(self, storage: FakeStorage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self.args: tuple[Any, ...] = (storage, offset, shape, strides, False, OrderedDict())

    def __reduce__(self) -> Any:
        return torch._utils._rebuild_tensor_v2, self.args


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return value.pid if isinstance(value, FakeStorage) else None


def write_legacy(
    path: Path,
    content: Any,
    storages: dict[str, bytes],
    *,
    machine: Any = None,
    version: int = PROTOCOL_VERSION,
    counts: dict[str, int] | None = None,
) -> Path:
    """Write a file as torch before 1.6 does, with storages of float32."""
    out = io.BytesIO()
    for value in (MAGIC_NUMBER, version, {"little_endian": True} if machine is None else machine):
        pickle.dump(value, out, protocol=2)
    _Pickler(out, protocol=2).dump(content)
    pickle.dump(list(storages), out, protocol=2)
    for key, data in storages.items():
        out.write(struct.pack("<q", (counts or {}).get(key, len(data) // 4)) + data)
    path.write_bytes(out.getvalue())
    return path


def floats(count: int) -> bytes:
    return torch.arange(count, dtype=torch.float32).numpy().tobytes()
