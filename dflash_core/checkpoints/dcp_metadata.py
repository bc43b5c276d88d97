"""The index of a torch distributed checkpoint: its `.metadata` file, a pickle, read without running it.

It names tensors by their path in the state dict, the boxes that ranks saved of each, and the range of
a file in which each box lies. torch's own reader would execute the pickle; here its objects are mere
records, told apart by their fields, so that the classes of all versions since torch 2.0 are understood.
Everything is checked against itself before a byte of data is read or memory is taken for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, TypeGuard

from dflash_core.checkpoints.boxes import Box, count_missing, find_overlap
from dflash_core.checkpoints.dtypes import BY_NAME, ElementType
from dflash_core.checkpoints.facts import TRAINING_STATE, odd_names
from dflash_core.checkpoints.inert_pickle import read_inert
from dflash_core.checkpoints.names import shortened
from dflash_core.checkpoints.pickle_values import MAX_DIMS, GlobalName, Inert
from dflash_core.errors import CheckpointCorrupt, UnsupportedCheckpoint

# One a rank; the largest runs have some thousand.
MAX_CHUNKS_PER_TENSOR = 1 << 14
_OWN_MODULES = ("torch.distributed.checkpoint.", "torch.distributed._shard.")
_OWN_CLASSES = frozenset(
    {"Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata", "_StorageInfo"}
    | {"ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING"}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredItem:
    """Where a box of a tensor, or an object, lies."""

    file: str
    """Name of a file in the checkpoint's folder."""
    offset: int
    size: int
    transforms: tuple[str, ...]
    """What its bytes went through when they were written, such as `stream.zstd`."""

    @property
    def end(self) -> int:
        """Offset of the first byte after it."""
        return self.offset + self.size


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor and where it lies."""

    box: Box
    item: StoredItem


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkedTensor:
    """A tensor whose chunks cover it exactly; chunks without elements are left out."""

    element: ElementType
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DcpIndex:
    """What a `.metadata` file tells."""

    tensors: Mapping[str, ChunkedTensor]
    """All but those of the training's state."""
    objects: Mapping[str, StoredItem]
    """What is no tensor, the training's state left out."""
    training_state: tuple[str, ...]
    """Names of what belongs to the optimizer, the scheduler or the random generators."""
    file_ends: Mapping[str, int]
    """Name of each file to the number of bytes that it must have at least."""
    odd_globals: tuple[str, ...]


_Places = Mapping[tuple[str, tuple[int, ...] | None], StoredItem]


def read_dcp_metadata(data: bytes, *, where: str) -> DcpIndex:
    """Read and check the content of a `.metadata` file; nothing in it is run.

    Args:
        data: all of the file.
        where: its address, for messages.

    Raises:
        UnsupportedCheckpoint: it holds something of a kind that is not read, which is named.
        CheckpointCorrupt: it is damaged, or contradicts itself.
    """
    held = read_inert(data, where=where)
    state = held.root.state if isinstance(held.root, Inert) else {}
    entries, stored = state.get("state_dict_metadata"), state.get("storage_data")
    if not isinstance(entries, dict) or not isinstance(stored, dict):
        made_by = held.root.made_by if isinstance(held.root, Inert) else type(held.root).__name__
        raise UnsupportedCheckpoint(
            f"{where} holds a {made_by}, expected the Metadata that torch.distributed.checkpoint writes"
        )
    places = _read_places(stored, where)
    paths = state.get("planner_data")
    tensors: dict[str, ChunkedTensor] = {}
    objects: dict[str, StoredItem] = {}
    training_state: list[str] = []
    for name, entry in entries.items():
        if not isinstance(name, str):
            raise CheckpointCorrupt(f"{where}: it names a tensor {str(name)[:80]!r}, expected text")
        if _is_training_state(name, paths):
            training_state.append(name)
        elif isinstance(entry, Inert) and {"properties", "size", "chunks"} <= entry.state.keys():
            tensors[name] = _read_tensor(name, entry, places, where)
        elif isinstance(entry, Inert) and entry.made_by.endswith(".BytesStorageMetadata"):
            if (name, None) in places:
                objects[name] = places[name, None]
        else:
            kind = entry.made_by if isinstance(entry, Inert) else type(entry).__name__
            raise UnsupportedCheckpoint(f"{where}: {name!r} is stored as {kind}, which is not read")
    return DcpIndex(
        tensors=tensors,
        objects=objects,
        training_state=tuple(training_state),
        file_ends=_file_ends(places.values(), where),
        odd_globals=odd_names(name for name in held.global_names if not _is_own_class(name)),
    )


def _is_own_class(name: str) -> bool:
    return name.startswith(_OWN_MODULES) and name.rpartition(".")[2] in _OWN_CLASSES


def _is_training_state(name: str, paths: Any) -> bool:
    """Tell whether a name lies under a key of the trainer's that holds state of the training.

    Where the keys are known that the name was joined from, those that are parameters' names are not
    looked at: `model` + `random_head.weight` is a tensor of the model.
    """
    path = paths.get(name) if isinstance(paths, dict) else None
    if isinstance(path, tuple) and len(path) > 1:
        parts = [part for part in path if isinstance(part, str) and "." not in part]
    else:
        parts = name.split(".")
    return any(TRAINING_STATE.match(part) for part in parts)


def _read_places(stored: Mapping[Any, Any], where: str) -> _Places:
    """Return where everything lies, by name and, for a part of a tensor, the index of its first element."""
    places: dict[tuple[str, tuple[int, ...] | None], StoredItem] = {}
    for key, info in stored.items():
        if not isinstance(key, Inert) or not isinstance(key.state.get("fqn"), str) or not isinstance(info, Inert):
            raise UnsupportedCheckpoint(
                f"{where}: it says where things lie in a way that torch's own file writer does not, which is not read"
            )
        name, corner = key.state["fqn"], key.state.get("offset")
        if corner is not None and not _are_counts(corner):
            raise CheckpointCorrupt(f"{where}: a part of {name!r} begins at the impossible index {corner!r:.80}")
        item = _read_item(name, info.state, where)
        if places.setdefault((name, corner), item) != item:
            raise CheckpointCorrupt(f"{where}: it gives two places for the same part of {name!r}")
    return places


def _read_item(name: str, info: Mapping[Any, Any], where: str) -> StoredItem:
    file, offset, size = info.get("relative_path"), info.get("offset"), info.get("length")
    transforms = info.get("transform_descriptors") or ()
    if not isinstance(file, str) or not _is_plain_name(file):
        raise CheckpointCorrupt(
            f"{where}: {name!r} lies in {str(file)[:80]!r}, expected the name of a file in the same folder"
        )
    if not _are_counts((offset, size)) or not isinstance(transforms, list | tuple):
        raise CheckpointCorrupt(f"{where}: {name!r} lies at the impossible place {offset!r:.40} + {size!r:.40}")
    assert isinstance(offset, int)
    assert isinstance(size, int)
    return StoredItem(file=file, offset=offset, size=size, transforms=tuple(map(str, transforms)))


def _is_plain_name(name: str) -> bool:
    return name not in ("", ".", "..") and not set(name) & set("/\\\0") and len(name) <= 255


def _read_tensor(name: str, entry: Inert, places: _Places, where: str) -> ChunkedTensor:
    shape, listed = entry.state["size"], entry.state["chunks"]
    if not _are_counts(shape) or len(shape) > MAX_DIMS or not isinstance(listed, list):
        raise CheckpointCorrupt(f"{where}: tensor {name!r} has the impossible shape {shape!r:.80}")
    if len(listed) > MAX_CHUNKS_PER_TENSOR:
        raise UnsupportedCheckpoint(
            f"{where}: tensor {name!r} lies in {len(listed)} chunks, at most {MAX_CHUNKS_PER_TENSOR} are read"
        )
    element = _read_element(name, entry.state["properties"], where)
    # Ranks that hold the same part may each list it; there is one place for it all the same.
    boxes = dict.fromkeys(_read_box(name, one, shape, where) for one in listed)
    filled = [box for box in boxes if box.num_elements]
    overlap = find_overlap(filled)
    if overlap is not None:
        raise CheckpointCorrupt(
            f"{where}: two chunks of tensor {name!r} overlap: {list(overlap.first.shape)} at "
            f"{list(overlap.first.corner)} and {list(overlap.second.shape)} at {list(overlap.second.corner)}"
        )
    missing = count_missing(shape, filled)
    if missing:
        raise CheckpointCorrupt(
            f"{where}: {missing} of {prod(shape)} elements of tensor {name!r} lie in no chunk; did all ranks save it?"
        )
    chunks = tuple(Chunk(box, _place_of(name, box, element, places, where)) for box in filled)
    return ChunkedTensor(element=element, shape=shape, chunks=chunks)


def _read_element(name: str, properties: Any, where: str) -> ElementType:
    """Return the element type; torch pickles the properties as a tuple that begins with it."""
    held: Any = None
    if isinstance(properties, Inert):
        fields = properties.items[0] if properties.items else ()
        held = properties.state.get("dtype") or (fields[0] if isinstance(fields, tuple) and fields else None)
    element = BY_NAME.get(held.name) if isinstance(held, GlobalName) and held.module == "torch" else None
    if element is None:
        kind = str(held) if isinstance(held, GlobalName) else "an unknown type"
        raise UnsupportedCheckpoint(f"{where}: tensor {name!r} is of {kind}, which is not read")
    return element


def _read_box(name: str, chunk: Any, shape: tuple[int, ...], where: str) -> Box:
    state: Mapping[Any, Any] = chunk.state if isinstance(chunk, Inert) else {}
    corner, sizes = state.get("offsets"), state.get("sizes")
    box = Box(corner, sizes) if _are_counts(corner) and _are_counts(sizes) else None
    if box is None or not box.lies_inside(shape):
        raise CheckpointCorrupt(
            f"{where}: a chunk {sizes!r:.80} at {corner!r:.80} is not inside tensor {name!r} of shape {list(shape)}"
        )
    return box


def _place_of(name: str, box: Box, element: ElementType, places: _Places, where: str) -> StoredItem:
    item = places.get((name, box.corner))
    if item is None and not any(box.corner):
        item = places.get((name, None))
    if item is None:
        raise CheckpointCorrupt(f"{where}: the chunk of tensor {name!r} at {list(box.corner)} has no place in any file")
    if item.transforms:
        raise UnsupportedCheckpoint(
            f"{where}: tensor {name!r} was written through {shortened(item.transforms)}, which is not read; "
            "save it without extensions"
        )
    needed = box.num_elements * element.itemsize
    if item.size < needed:
        raise CheckpointCorrupt(f"{where}: a chunk of tensor {name!r} needs {needed} bytes, its place has {item.size}")
    return item


def _file_ends(items: Iterable[StoredItem], where: str) -> dict[str, int]:
    """Return how long each file must be, after checking that nothing lies in the place of something else.

    Items that begin at the same byte are the tensors of one safetensors blob; their sizes add up.
    """
    ends: dict[str, int] = {}
    start: tuple[str, int] | None = None
    for item in sorted(items, key=lambda item: (item.file, item.offset)):
        if (item.file, item.offset) == start:
            ends[item.file] += item.size
            continue
        if item.offset < ends.get(item.file, 0):
            raise CheckpointCorrupt(f"{where}: two items overlap at byte {item.offset} of {item.file!r}")
        start, ends[item.file] = (item.file, item.offset), item.end
    return ends


def _are_counts(values: Any) -> TypeGuard[tuple[int, ...]]:
    return isinstance(values, tuple) and all(
        isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63 for value in values
    )
