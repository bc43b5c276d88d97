"""Reading distributed checkpoints in tests: through a source that counts, and without the rest of the project."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dflash_core.checkpoints.container import Container
from dflash_core.checkpoints.dcp import DcpCheckpoint
from dflash_core.checkpoints.file_views import FilePart
from dflash_core.checkpoints.local_source import LocalSource
from dflash_core.checkpoints.pieces import Piece, Write, merged
from dflash_core.checkpoints.source_base import ByteRange, RateLimit, Sink, SourceFile


class RecordedFile(FilePart):
    """A whole file whose reads are counted."""

    def __init__(self, source: RecordingSource, file: SourceFile) -> None:
        super().__init__(file, ByteRange(offset=0, size=file.stat.size), display=file.display)
        self._source = source

    def read_ranges(self, ranges: Sequence[ByteRange], sink: Sink) -> None:
        self._source.num_calls += 1
        self._source.num_ranges += len(ranges)
        super().read_ranges(ranges, sink)

    def close(self) -> None:
        self._file.close()


class RecordingSource(LocalSource):
    """Files of this machine; what is opened and how often it is read is noted."""

    def __init__(self) -> None:
        super().__init__(RateLimit(None))
        self.opened: list[str] = []
        self.num_calls = 0
        self.num_ranges = 0

    def open(self, path: str) -> SourceFile:
        self.opened.append(path)
        return RecordedFile(self, super().open(path))


@dataclass
class Opened:
    """An open container and its source."""

    container: Any
    source: RecordingSource = field(default_factory=RecordingSource)


@contextmanager
def opened(folder: Path, kind: Callable[..., Container] = DcpCheckpoint) -> Iterator[Opened]:
    source = RecordingSource()
    with ExitStack() as stack:
        yield Opened(kind(source, str(folder), stack), source)


class Fetched(NamedTuple):
    tensors: dict[str, torch.Tensor]
    unverified: list[str]


class Dealer:
    """Hands blocks to the pieces that they belong to."""

    def __init__(self, pieces: Iterable[Piece], write: Write) -> None:
        self._pieces = iter(pieces)
        self._write = write
        self.piece = next(self._pieces, None)

    def take(self, offset: int, block: bytes) -> None:
        while block and self.piece is not None:
            count = min(len(block), self.piece.data.end - offset)
            self.piece.take(offset, block[:count], self._write)
            offset, block = offset + count, block[count:]
            if offset == self.piece.data.end:
                self.piece.finish(self._write)
                self.piece = next(self._pieces, None)


def fetch(container: Container, names: Iterable[str] | None = None) -> Fetched:
    """Return tensors read as a container plans it; what is not written keeps a pattern."""
    names = list(container.tensors if names is None else names)
    places: dict[str, int] = {}
    size = 0
    for name in names:
        places[name] = size
        size += container.tensors[name].size_bytes
    target = bytearray(b"\xa5" * size)

    def write(offset: int, data: bytes | memoryview) -> None:
        assert offset + len(data) <= size
        target[offset : offset + len(data)] = data

    plan = container.plan(places)
    for read in plan.reads:
        dealer = Dealer(read.pieces, write)
        read.file.read_ranges(merged(one.data for one in read.pieces), dealer.take)
        assert dealer.piece is None
    tensors = {
        name: torch.frombuffer(
            bytearray(target[at : at + container.tensors[name].size_bytes]) or bytearray(1), dtype=torch.uint8
        )[: container.tensors[name].size_bytes]
        .view(getattr(torch, container.tensors[name].element.name))
        .reshape(container.tensors[name].shape)
        for name, at in places.items()
    }
    return Fetched(tensors, plan.unverified)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert raw(found[name]) == raw(tensor), name


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())


def edit_metadata(folder: Path, edit: Callable[[Any], object]) -> None:
    """Change the index as torch reads it, and write it as torch does."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    edit(metadata)
    path.write_bytes(pickle.dumps(metadata))
