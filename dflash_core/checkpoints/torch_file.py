"""What a torch.save file holds, from its index and its pickle alone.

Candidates for the weights are dicts of name to tensor at the top of the file or one level below it
that hold the marks of a drafter. Two different ones are reported, not decided between.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, Protocol

from dflash_core.checkpoints.facts import TRAINING_STATE, collect_facts, odd_names
from dflash_core.checkpoints.inert_pickle import read_inert
from dflash_core.checkpoints.legacy_index import is_legacy
from dflash_core.checkpoints.names import looks_like_drafter, shortened
from dflash_core.checkpoints.pickle_values import Inert, RefusedTensor, TensorRef
from dflash_core.checkpoints.source_base import SourceFile
from dflash_core.checkpoints.storage_pieces import view_of
from dflash_core.checkpoints.values import CheckpointCutOff, Facts, NoDrafter
from dflash_core.checkpoints.zip_index import (
    LOCAL_MAGIC,
    MAX_RECORD_BYTES,
    RangeReader,
    ZipIndex,
    ZipRecord,
    read_record,
    read_zip_index,
)
from dflash_core.errors import CheckpointCorrupt, UnsupportedCheckpoint

# Small records stand between the pickle and the first tensor; reading on saves round trips.
FRONT_SLACK_BYTES = 4 << 10
SERIALIZATION_ID = ".data/serialization_id"
SMALL_EXPANSION_BYTES = 1 << 20
MAX_HELD_BYTES = 64 << 20
FLAT = "the top level"


class LegacyTorchFile(UnsupportedCheckpoint):
    """Raised for a file in the format that torch.save wrote before it wrote zip files."""


class FoundWeights(NamedTuple):
    """The drafter's dict of tensors in a torch file."""

    under: str
    """Its dotted key, or `FLAT`."""
    tensors: Mapping[str, TensorRef]


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchFile:
    """The index of a torch.save file."""

    identity: str
    weights: Mapping[str, TensorRef]
    """The tensors of the drafter's dict, by the names it uses."""
    weights_under: str
    records: Mapping[str, ZipRecord]
    """The record of each storage key."""
    has_checksums: bool
    facts: Facts
    odd_globals: tuple[str, ...]


def read_torch_index(reader: RangeReader) -> ZipIndex:
    """Read the records of a torch.save file.

    Raises:
        UnsupportedCheckpoint: it is of another kind, which is named.
        CheckpointCutOff: it ends early.
        CheckpointCorrupt: it contradicts itself.
    """
    file = reader.file
    if file.stat.size == 0:
        raise CheckpointCutOff(f"cut off: {file.display} is empty; it is still being written, or the disk was full")
    start = reader.read(0, min(file.stat.size, FRONT_SLACK_BYTES))
    _refuse_other_kinds(start, file)
    index = read_zip_index(reader)
    if "constants.pkl" in index.records or any(name.startswith("code/") for name in index.records):
        raise UnsupportedCheckpoint(f"{file.display} is a TorchScript program; save the module's state_dict instead")
    if index.packed:
        raise UnsupportedCheckpoint(
            f"{file.display}: {len(index.packed)} records are compressed or encrypted, which torch.save never does: "
            f"{shortened(index.packed)}"
        )
    if "data.pkl" not in index.records:
        raise UnsupportedCheckpoint(f"{file.display} is a zip file without data.pkl, so torch.save did not write it")
    return index


def read_torch_file(reader: RangeReader, *, is_shard: bool = False) -> TorchFile:
    """Read the index and the pickle of a torch.save file; nothing in it is run.

    Args:
        reader: the open file.
        is_shard: the file holds some of a model's tensors at its top level.

    Raises:
        UnsupportedCheckpoint: it holds no drafter, or more than one, or is of another kind.
        CheckpointCutOff: it ends early.
        CheckpointCorrupt: it contradicts itself.
    """
    where = reader.file.display
    index = read_torch_index(reader)
    pickle_record = index.records["data.pkl"]
    front_bytes = min(pickle_record.size + FRONT_SLACK_BYTES, reader.file.stat.size)
    if pickle_record.header_offset == 0 and pickle_record.size <= MAX_RECORD_BYTES:
        reader.read(0, front_bytes)
    byte_order = index.records.get("byteorder")
    if byte_order is not None and read_record(reader, byte_order) != b"little":
        raise UnsupportedCheckpoint(f"{where} was saved on a big-endian machine; save it again on a little-endian one")
    held = read_inert(read_record(reader, pickle_record), where=where)
    found = find_weights(held.root, where, is_shard=is_shard)
    root = held.root if isinstance(held.root, dict) else {}
    return TorchFile(
        identity=_identity(reader, index),
        weights=found.tensors,
        weights_under=found.under,
        records={
            name.removeprefix("data/"): record for name, record in index.records.items() if name.startswith("data/")
        },
        has_checksums=index.has_checksums,
        facts=collect_facts(root),
        odd_globals=odd_names(held.global_names),
    )


def read_plain_facts(file: SourceFile) -> Facts:
    """Return the plain values in a small torch.save file beside the weights; none where it holds no dict.

    Raises:
        UnsupportedCheckpoint, CheckpointCorrupt: it cannot be read.
    """
    reader = RangeReader(file)
    record = read_torch_index(reader).records["data.pkl"]
    root = read_inert(read_record(reader, record), where=file.display).root
    return collect_facts(root) if isinstance(root, dict) else {}


class _HasSize(Protocol):
    """The place of a storage in a file."""

    @property
    def size(self) -> int:
        """Return how many bytes are there."""


def check_view(name: str, tensor: TensorRef, records: Mapping[str, _HasSize], where: str) -> int:
    """Check that a tensor lies inside its storage and return its size in bytes.

    Raises:
        CheckpointCorrupt: it does not, or its storage has no record of that size.
        UnsupportedCheckpoint: it repeats its storage many times over, or lies in it in a way that takes much memory.
    """
    record = records.get(tensor.storage.key)
    storage_bytes = tensor.storage.num_elements * tensor.storage.element.itemsize
    if record is None or record.size != storage_bytes:
        found = "none" if record is None else f"{record.size} bytes"
        raise CheckpointCorrupt(f"{where}: tensor {name!r} needs a record of {storage_bytes} bytes, found {found}")
    size_bytes = prod(tensor.shape) * tensor.element.itemsize
    if size_bytes and span_of(tensor)[1] > storage_bytes:
        raise CheckpointCorrupt(f"{where}: tensor {name!r} of shape {list(tensor.shape)} reaches outside its storage")
    if size_bytes > max(storage_bytes, SMALL_EXPANSION_BYTES):
        raise UnsupportedCheckpoint(
            f"{where}: tensor {name!r} of {size_bytes} bytes repeats a storage of {storage_bytes} bytes; "
            "save it contiguous"
        )
    if size_bytes and view_of(tensor, 0).held_bytes > MAX_HELD_BYTES:
        raise UnsupportedCheckpoint(
            f"{where}: tensor {name!r} of shape {list(tensor.shape)} and strides {list(tensor.strides)} would have "
            "to be held in memory to be put in order; save it contiguous"
        )
    return size_bytes


def span_of(tensor: TensorRef) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage and the one after its last."""
    if not prod(tensor.shape):
        return 0, 0
    last = tensor.offset + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True))
    return tensor.offset * tensor.element.itemsize, (last + 1) * tensor.element.itemsize


def is_contiguous(tensor: TensorRef) -> bool:
    """Tell whether a tensor's elements lie in its storage in their own order, without gaps."""
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _refuse_other_kinds(start: bytes, file: SourceFile) -> None:
    if start[:4] == LOCAL_MAGIC[: len(start)] or start[:4] == b"PK\x05\x06":
        return
    if is_legacy(start):
        raise LegacyTorchFile(f"{file.display} is in the format of torch before 1.6")
    if not start.strip(b"\0"):
        raise CheckpointCutOff(
            f"cut off: {file.display} begins with zeros; it is still being written, or was lost in a crash"
        )
    raise UnsupportedCheckpoint(
        f"{file.display} is not a torch.save zip file: it begins with {start[:4]!r}, expected {LOCAL_MAGIC!r}"
    )


def _identity(reader: RangeReader, index: ZipIndex) -> str:
    """Return a digest of all records' names, sizes and checksums, and of torch's own id of the content."""
    digest = hashlib.sha256(b"torch_zip\0")
    for name, record in sorted(index.records.items()):
        digest.update(f"{name}\0{record.size}\0{record.crc}\n".encode(errors="surrogateescape"))
    id_record = index.records.get(SERIALIZATION_ID)
    if id_record is not None and id_record.size <= FRONT_SLACK_BYTES:
        digest.update(read_record(reader, id_record))
    if not index.has_checksums:
        digest.update(reader.file.stat.version.encode())
    return digest.hexdigest()


def find_weights(root: Any, where: str, *, is_shard: bool = False) -> FoundWeights:
    """Return the drafter's dict of tensors in what a torch file holds.

    Args:
        root: the value of its pickle.
        where: the file, for messages.
        is_shard: take the tensors at the top level, whatever they are.

    Raises:
        NoDrafter: it holds no drafter.
        UnsupportedCheckpoint: it holds two different ones, or tensors of a kind that is not read.
    """
    if isinstance(root, Inert):
        raise NoDrafter(
            f"{where} is a pickled {root.made_by}, which has no names for its tensors without running its code; "
            "save its state_dict()"
        )
    if not isinstance(root, dict):
        raise NoDrafter(f"{where} holds a {type(root).__name__}, expected a dict with the drafter's tensors")
    found = {
        label: tensors
        for label, tensors in _tensor_dicts(root)
        if looks_like_drafter(tensors) or (is_shard and label == FLAT)
    }
    different = {_fingerprint(tensors) for tensors in found.values()}
    if len(different) > 1:
        raise UnsupportedCheckpoint(
            f"{where} holds {len(different)} sets of drafter weights: {shortened(found)}; "
            "which one is meant cannot be told"
        )
    if not found:
        keys = [str(key) for key in root]
        raise NoDrafter(
            f"{where} holds no drafter: no dict in it has fc.weight; at its top are {shortened(keys)}",
            collect_facts(root),
        )
    label, weights = next(iter(found.items()))
    refused = {name: value.reason for name, value in weights.items() if isinstance(value, RefusedTensor)}
    if refused:
        reasons = shortened(f"{name}: {reason}" for name, reason in refused.items())
        raise UnsupportedCheckpoint(
            f"{where}: {len(refused)} tensors under {label!r} are of a kind that is not read: {reasons}"
        )
    others = [name for name, value in weights.items() if not isinstance(value, TensorRef)]
    if others and label != FLAT:
        raise UnsupportedCheckpoint(f"{where}: under {label!r}, {shortened(others)} are not tensors")
    return FoundWeights(label, {name: value for name, value in weights.items() if isinstance(value, TensorRef)})


def _fingerprint(tensors: Mapping[str, Any]) -> frozenset[tuple[str, TensorRef]]:
    """Return what makes two dicts of tensors the same: one that is listed twice is no second set."""
    return frozenset((name, value) for name, value in tensors.items() if isinstance(value, TensorRef))


def _tensor_dicts(root: Mapping[Any, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (where, named tensors) for the top level, its dicts, and theirs."""
    flat = {key: value for key, value in root.items() if isinstance(value, TensorRef | RefusedTensor)}
    yield FLAT, {key: value for key, value in flat.items() if isinstance(key, str)}
    seen: set[int] = set()
    for key, value in root.items():
        if not _is_named_dict(key, value, seen):
            continue
        yield key, value
        for inner_key, inner in value.items():
            if _is_named_dict(inner_key, inner, seen):
                yield f"{key}.{inner_key}", inner


def _is_named_dict(key: Any, value: Any, seen: set[int]) -> bool:
    """Tell whether a value is a dict of names; each dict is looked at once, however often a file names it."""
    if not isinstance(key, str) or not isinstance(value, dict) or TRAINING_STATE.match(key) or id(value) in seen:
        return False
    seen.add(id(value))
    return all(isinstance(name, str) for name in value)
