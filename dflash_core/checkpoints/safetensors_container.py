"""The tensors of a safetensors file as a container."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from dflash_core.checkpoints.container import Container, Extent, FileRead, ReadPlan, TensorInfo
from dflash_core.checkpoints.pieces import plan_contiguous
from dflash_core.checkpoints.safetensors_file import read_header
from dflash_core.checkpoints.source_base import SourceFile
from dflash_core.checkpoints.zip_index import RangeReader
from dflash_core.errors import CheckpointChanged


class SafetensorsFile(Container):
    """A safetensors file; the format has no checksums."""

    def __init__(self, file: SourceFile) -> None:
        """Read the header of an open file.

        Raises:
            CheckpointCutOff: the file ends before its header says.
            CheckpointCorrupt: the header contradicts itself or the file.
            UnsupportedCheckpoint: it holds an element type that is not known.
        """
        super().__init__("safetensors", file.display, [file])
        self.header = read_header(RangeReader(file))
        self.tensors = {
            name: TensorInfo(element=tensor.element, shape=tensor.shape) for name, tensor in self.header.tensors.items()
        }
        digest = hashlib.sha256(b"safetensors\0" + self.header.raw)
        digest.update(f"{file.stat.version}\n".encode())
        self.identity = digest.hexdigest()

    def plan(self, destinations: Mapping[str, int]) -> ReadPlan:
        """Return one piece per tensor."""
        pieces = plan_contiguous((self.header.tensors[name].data, at) for name, at in destinations.items())
        return ReadPlan(reads=[FileRead(file=self.files[0], pieces=pieces)], unverified=list(destinations))

    def extents(self, name: str) -> tuple[Extent, ...]:
        """Return where a tensor's bytes lie."""
        return (Extent(file=self.files[0], data=self.header.tensors[name].data, start=0),)

    def check_unchanged(self) -> None:
        """Check size, time and header: SFTP tells the time in whole seconds, and there is no checksum.

        Raises:
            CheckpointChanged: the file was replaced or rewritten.
        """
        super().check_unchanged()
        file = self.files[0]
        if file.read_at(0, len(self.header.raw)) != self.header.raw:
            raise CheckpointChanged(f"{file.display} was rewritten while it was read; score it again")
