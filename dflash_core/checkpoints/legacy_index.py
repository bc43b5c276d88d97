"""The index of a file in the format of torch before 1.6: five pickles, then the bytes of all storages.

The pickles are a magic number, the version of the format, facts about the machine, the object with
its tensors, and the keys of the storages. In the order of the keys follow, for each storage, the
number of its elements in 8 bytes and the elements themselves, to the very end of the file. Nothing
says where a storage lies, so the sizes of all of them are needed, wanted or not. There are no checksums.

Source: torch/serialization.py, `_legacy_save` and `_legacy_load`.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_core.checkpoints.dtypes import BY_STORAGE
from dflash_core.checkpoints.inert_pickle import MAX_PICKLE_BYTES, InertPickle, read_inert_from
from dflash_core.checkpoints.pickle_values import GlobalName
from dflash_core.checkpoints.source_base import SourceFile
from dflash_core.checkpoints.values import CheckpointCutOff
from dflash_core.errors import CheckpointCorrupt, UnsupportedCheckpoint

MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
PROTOCOL_VERSION = 1001
COUNT_BYTES = 8
START_BYTES = 2 << 10
# The index of a drafter with its optimizer has some 100 kB.
FIRST_READ_BYTES = 128 << 10

# Element types that no drafter has but that lie between its tensors: bytes per element.
OTHER_STORAGES = {
    **{"ComplexDoubleStorage": 16, "QInt32Storage": 4},
    **{"QInt8Storage": 1, "QUInt8Storage": 1, "QUInt4x2Storage": 1, "QUInt2x4Storage": 1},
}
# The pickle of the magic number, by pickle protocol.
_STARTS = [pickle.dumps(MAGIC_NUMBER, protocol=protocol) for protocol in range(1, 6)]
_TAR_MEMBERS = (b"sys_info", b"pickle", b"tensors", b"storages")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoragePlace:
    """Where a storage lies."""

    num_elements: int
    size: int
    """In bytes."""
    offset: int
    """Of the number of its elements, which stands before them."""

    @property
    def data_offset(self) -> int:
        """Return where its first element lies."""
        return self.offset + COUNT_BYTES

    @property
    def end(self) -> int:
        """Return the offset of the first byte after it."""
        return self.data_offset + self.size


@dataclass(frozen=True, kw_only=True, slots=True)
class LegacyIndex:
    """What the front of a file says."""

    root: Any
    global_names: frozenset[str]
    storages: Mapping[str, StoragePlace]
    """By their keys, in the order in which they lie."""
    size_bytes: int
    digest: bytes
    """Of its bytes."""


def is_legacy(start: bytes) -> bool:
    """Tell whether a file that begins with these bytes is in a format of torch before 1.6.

    A shorter start counts where it can be the beginning of one.

    Args:
        start: the first bytes of the file, `START_BYTES` or more where it has them.
    """
    begins = any(start[: len(one)] == one[: len(start)] for one in _STARTS)
    return bool(start) and (begins or _is_old_tar(start))


def read_legacy_index(file: SourceFile) -> LegacyIndex:
    """Read the front of a file; nothing in it is run.

    Raises:
        UnsupportedCheckpoint: it is of a kind that is not read, which is named.
        CheckpointCutOff: it ends early.
        CheckpointCorrupt: it contradicts itself.
    """
    front = _Front(file)
    if _is_old_tar(front.peek(START_BYTES)):
        raise UnsupportedCheckpoint(
            f"{file.display} is in the tar format of torch before 0.1.10; load it on the training box and save it again"
        )
    number, version, machine, held, keys = (read_inert_from(front, where=file.display) for _ in range(5))
    if number.root != MAGIC_NUMBER or not isinstance(machine.root, dict):
        raise CheckpointCorrupt(f"{file.display} does not begin as torch.save before 1.6 wrote it; was it damaged?")
    if version.root != PROTOCOL_VERSION:
        raise UnsupportedCheckpoint(
            f"{file.display} is of another version of its format than {PROTOCOL_VERSION}, which alone is read"
        )
    if machine.root.get("little_endian") is not True:
        raise UnsupportedCheckpoint(
            f"{file.display} was saved on a big-endian machine; save it again on a little-endian one"
        )
    storages = _places(keys.root, _sizes(held, file.display), front.position, file.display)
    _check_end(storages, front.position, file)
    return LegacyIndex(
        root=held.root,
        global_names=held.global_names,
        storages=storages,
        size_bytes=front.position,
        digest=hashlib.sha256(front.peek(front.position)).digest(),
    )


class _Front:
    """The front of a file as a stream, read in few requests: each doubles what is there."""

    def __init__(self, file: SourceFile) -> None:
        self._file = file
        self._data = b""
        self.position = 0

    def peek(self, size: int) -> bytes:
        """Return the first bytes of the file, as many as it has."""
        self._fetch(min(size, self._file.stat.size))
        return self._data[:size]

    def read(self, size: int, /) -> bytes:
        """Return the next bytes."""
        start, self.position = self.position, self.position + size
        if self.position > len(self._data):
            self._fetch(self.position)
        return self._data[start : self.position]

    def readline(self) -> bytes:
        """Return the next bytes up to the end of a line."""
        searched = self.position
        while (end := self._data.find(b"\n", searched)) < 0:
            searched = len(self._data)
            self._fetch(searched + 1)
        return self.read(end + 1 - self.position)

    def _fetch(self, end: int) -> None:
        have, file = len(self._data), self._file
        if end <= have:
            return
        if end > file.stat.size:
            raise CheckpointCutOff(
                f"cut off: {file.display} has {file.stat.size} bytes and ends inside its index; "
                "it is still being written, or was not copied whole"
            )
        if end > MAX_PICKLE_BYTES:
            raise UnsupportedCheckpoint(
                f"{file.display}: its pickles have more than {MAX_PICKLE_BYTES} bytes, which no checkpoint of a "
                "drafter needs"
            )
        until = min(max(end, FIRST_READ_BYTES, 2 * have), file.stat.size, MAX_PICKLE_BYTES)
        self._data += file.read_at(have, until - have)


def _is_old_tar(start: bytes) -> bool:
    # Python 3 put two blocks with the exact time before the first header.
    headers = (start, start[1024:])
    return any(header[257:262] == b"ustar" and header[:100].rstrip(b"\0") in _TAR_MEMBERS for header in headers)


def _sizes(held: InertPickle, where: str) -> dict[str, tuple[int, int]]:
    """Return (elements, bytes) of each storage that the object names."""
    sizes: dict[str, tuple[int, int]] = {}
    for pid in held.persistent_ids:
        if isinstance(pid, str):
            raise UnsupportedCheckpoint(
                f"{where} was saved with pickle protocol 0, which torch itself cannot load; save it with protocol 2"
            )
        if not isinstance(pid, tuple) or len(pid) < 5 or pid[0] != "storage":
            continue
        _, kind, key, _, count = pid[:5]
        if not isinstance(key, str) or not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise CheckpointCorrupt(f"{where}: it names a storage without a key or a size; was the file damaged?")
        size = (count, count * _itemsize(kind, where))
        if sizes.setdefault(key, size) != size:
            raise CheckpointCorrupt(f"{where}: it names two different sizes for storage {key[:40]!r}; it is damaged")
    return sizes


def _itemsize(kind: Any, where: str) -> int:
    name = kind.name if isinstance(kind, GlobalName) else ""
    element = BY_STORAGE.get(name)
    itemsize = element.itemsize if element is not None else OTHER_STORAGES.get(name)
    if itemsize is None:
        raise UnsupportedCheckpoint(
            f"{where} holds a storage of the unknown type {str(kind)[:80] if name else 'that is no class'!r}, so the "
            "places of all that follow cannot be told"
        )
    return itemsize


def _places(keys: Any, sizes: Mapping[str, tuple[int, int]], position: int, where: str) -> dict[str, StoragePlace]:
    """Return where each storage lies, the first one at `position`."""
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise CheckpointCorrupt(f"{where}: its list of storages is damaged")
    if len(set(keys)) != len(keys) or set(keys) != set(sizes):
        raise CheckpointCorrupt(
            f"{where}: it lists {len(keys)} storages, its tensors need {len(sizes)}, and these are not the same ones"
        )
    places: dict[str, StoragePlace] = {}
    for key in keys:
        num_elements, size = sizes[key]
        places[key] = StoragePlace(num_elements=num_elements, size=size, offset=position)
        position = places[key].end
    return places


def _check_end(storages: Mapping[str, StoragePlace], index_end: int, file: SourceFile) -> None:
    end = max((place.end for place in storages.values()), default=index_end)
    if end > file.stat.size:
        raise CheckpointCutOff(
            f"cut off: {file.display} has {file.stat.size} bytes, its index promises {end}; "
            "it is still being written, or was not copied whole"
        )
    if end < file.stat.size:
        raise CheckpointCorrupt(
            f"{file.display} has {file.stat.size} bytes, {file.stat.size - end} more than its index says"
        )
