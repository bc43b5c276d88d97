"""The tensors of a file that torch.save wrote before it wrote zip files, as a container."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from dflash_core.checkpoints.container import Container, Extent, FileRead, ReadPlan, TensorInfo
from dflash_core.checkpoints.facts import collect_facts, odd_names
from dflash_core.checkpoints.legacy_index import COUNT_BYTES, StoragePlace, is_legacy, read_legacy_index
from dflash_core.checkpoints.pickle_values import TensorRef
from dflash_core.checkpoints.pieces import Piece, Rectangle, Write, merged
from dflash_core.checkpoints.source_base import ByteRange, SourceFile
from dflash_core.checkpoints.storage_pieces import view_of
from dflash_core.checkpoints.torch_file import check_view, find_weights, is_contiguous, span_of
from dflash_core.errors import CheckpointChanged, CheckpointCorrupt

__all__ = ["TorchLegacy", "is_legacy"]


class TorchLegacy(Container):
    """A torch.save file that is no zip file; the format has no checksums."""

    def __init__(self, file: SourceFile, *, is_shard: bool = False) -> None:
        """Read the pickles at the front of an open file.

        Raises:
            UnsupportedCheckpoint: it holds no drafter, or more than one, or is of another kind.
            CheckpointCutOff: it ends early.
            CheckpointCorrupt: it contradicts itself.
        """
        super().__init__("torch_legacy", file.display, [file])
        self._index = read_legacy_index(file)
        found = find_weights(self._index.root, file.display, is_shard=is_shard)
        self._weights = {name: self._resolved(name, tensor) for name, tensor in found.tensors.items()}
        for name, tensor in self._weights.items():
            check_view(name, tensor, self._index.storages, file.display)
        self.weights_under = found.under
        self.tensors = {
            name: TensorInfo(element=tensor.element, shape=tensor.shape) for name, tensor in self._weights.items()
        }
        digest = hashlib.sha256(b"torch_legacy\0" + self._index.digest)
        digest.update(f"{file.stat.version}\n".encode())
        self.identity = digest.hexdigest()
        self.facts = collect_facts(self._index.root) if isinstance(self._index.root, dict) else {}
        self.odd_globals = odd_names(self._index.global_names)

    def plan(self, destinations: Mapping[str, int]) -> ReadPlan:
        """Return the spans to read, and the counts before and behind each storage, which show a torn file."""
        views: dict[str, list[Rectangle]] = {}
        for name, at in destinations.items():
            tensor = self._weights[name]
            view = view_of(tensor, at)
            data_offset = self._index.storages[tensor.storage.key].data_offset
            views.setdefault(tensor.storage.key, []).append(replace(view, start=data_offset + view.start))
        pieces: list[Piece] = [_CountPiece(key, place, self.display) for key, place in self._counts_of(views)]
        for of_storage in views.values():
            pieces += _span_pieces(of_storage)
        pieces.sort(key=lambda piece: piece.data.offset)
        return ReadPlan(reads=[FileRead(file=self.files[0], pieces=pieces)], unverified=list(destinations))

    def extents(self, name: str) -> tuple[Extent, ...]:
        """Return where a tensor's bytes lie, unless it is a strided view."""
        tensor = self._weights[name]
        if not is_contiguous(tensor):
            return ()
        start, end = span_of(tensor)
        offset = self._index.storages[tensor.storage.key].data_offset + start
        return (Extent(file=self.files[0], data=ByteRange(offset=offset, size=end - start), start=0),)

    def check_unchanged(self) -> None:
        """Check size, time and index: SFTP tells the time in whole seconds, and there is no checksum.

        Raises:
            CheckpointChanged: the file was replaced or rewritten.
        """
        super().check_unchanged()
        file = self.files[0]
        if hashlib.sha256(file.read_at(0, self._index.size_bytes)).digest() != self._index.digest:
            raise CheckpointChanged(f"{file.display} was rewritten while it was read; score it again")

    def _resolved(self, name: str, tensor: TensorRef) -> TensorRef:
        """Return a tensor of a part of a storage as one of the whole storage."""
        part = tensor.storage.view
        if part is None:
            return tensor
        first, num_elements = part
        is_empty = 0 in tensor.shape
        last = tensor.offset + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.strides, strict=True))
        if first + num_elements > tensor.storage.num_elements or (not is_empty and last >= num_elements):
            raise CheckpointCorrupt(f"{self.display}: tensor {name!r} reaches outside its part of a storage")
        return replace(tensor, storage=replace(tensor.storage, view=None), offset=first + tensor.offset)

    def _counts_of(self, wanted: Mapping[str, object]) -> Iterator[tuple[str, StoragePlace]]:
        """Yield the storages to read and those right behind them: a hole in the file rarely ends between two."""
        after_wanted = False
        for key, place in self._index.storages.items():
            if key in wanted or after_wanted:
                yield key, place
            after_wanted = key in wanted


def _span_pieces(views: Sequence[Rectangle]) -> list[Piece]:
    """Return one piece for each run of bytes that some views of one storage cover."""
    spans = merged(ByteRange(offset=view.start, size=view.span_bytes) for view in views if view.span_bytes)
    return [
        Piece(span, [view.receiver() for view in views if view.span_bytes and span.offset <= view.start < span.end])
        for span in spans
    ]


class _CountPiece(Piece):
    """The number of elements that stands before a storage."""

    def __init__(self, key: str, place: StoragePlace, where: str) -> None:
        super().__init__(ByteRange(offset=place.offset, size=COUNT_BYTES))
        self._key, self._expected, self._where = key, place.num_elements, where
        self._bytes = b""

    def take(self, offset: int, block: bytes | memoryview, write: Write) -> None:
        """Keep one block of it."""
        self._bytes += block

    def finish(self, write: Write) -> None:
        """Check the number.

        Raises:
            CheckpointCorrupt: it is not that of the index.
        """
        (found,) = struct.unpack("<q", self._bytes)
        if found != self._expected:
            raise CheckpointCorrupt(
                f"{self._where}: storage {self._key!r} begins with the count {found}, its index says "
                f"{self._expected}; the file is damaged, or its writer has not got there yet"
            )
