"""The tensors of a torch.save zip file as a container."""

from __future__ import annotations

from collections.abc import Mapping

from dflash_core.checkpoints.container import Container, Extent, FileRead, ReadPlan, TensorInfo
from dflash_core.checkpoints.source_base import ByteRange, SourceFile
from dflash_core.checkpoints.storage_pieces import StorageViews, plan_storages, view_of
from dflash_core.checkpoints.torch_file import TorchFile, check_view, is_contiguous, read_torch_file, span_of
from dflash_core.checkpoints.zip_index import RangeReader, data_range


class TorchZip(Container):
    """A torch.save zip file."""

    def __init__(self, file: SourceFile, *, is_shard: bool = False) -> None:
        """Read the index and the pickle of an open file.

        Raises:
            UnsupportedCheckpoint: it holds no drafter, or more than one, or is of another kind.
            CheckpointCutOff: it ends early.
            CheckpointCorrupt: it contradicts itself.
        """
        super().__init__("torch_zip", file.display, [file])
        self._reader = RangeReader(file)
        self._torch: TorchFile = read_torch_file(self._reader, is_shard=is_shard)
        for name, tensor in self._torch.weights.items():
            check_view(name, tensor, self._torch.records, file.display)
        self.tensors = {
            name: TensorInfo(element=tensor.element, shape=tensor.shape) for name, tensor in self._torch.weights.items()
        }
        self.identity, self.has_checksums = self._torch.identity, self._torch.has_checksums
        self.weights_under = self._torch.weights_under
        self.facts, self.odd_globals = self._torch.facts, self._torch.odd_globals

    def plan(self, destinations: Mapping[str, int]) -> ReadPlan:
        """Return the records to read, whole where that costs little."""
        storages: dict[str, StorageViews] = {}
        for name, at in destinations.items():
            tensor = self._torch.weights[name]
            key = tensor.storage.key
            views = storages.setdefault(key, StorageViews(record=self._torch.records[key]))
            views.views.append((name, view_of(tensor, at)))
        pieces, unverified = plan_storages(
            storages.values(),
            where=self.display,
            has_checksums=self._torch.has_checksums,
            data_range=lambda record: data_range(self._reader, record),
        )
        return ReadPlan(reads=[FileRead(file=self.files[0], pieces=pieces)], unverified=unverified)

    def extents(self, name: str) -> tuple[Extent, ...]:
        """Return where a tensor's bytes lie, unless it is a strided view."""
        tensor = self._torch.weights[name]
        if not is_contiguous(tensor):
            return ()
        start, end = span_of(tensor)
        data = data_range(self._reader, self._torch.records[tensor.storage.key])
        return (Extent(file=self.files[0], data=ByteRange(offset=data.offset + start, size=end - start), start=0),)
