"""The digest of a drafter's tensors, computed beside the transfer.

Each tensor is hashed by itself once its last byte was written, in a thread of its own: hashing and
reading from the page cache let the transfer go on meanwhile. The digest of the whole is that of all
names, types, shapes and hashes in the order of the names, so that neither the order of arrival nor
the file they lie in matters.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import threading
from bisect import bisect_right
from collections.abc import Collection

from dflash_core.checkpoints.blank import BlankFinder
from dflash_core.checkpoints.safetensors_file import SafetensorsHeader

READ_BYTES = 4 << 20


class TensorHasher:
    """Hashes the tensors of one local safetensors file; use it in a `with` block."""

    def __init__(self, descriptor: int, header: SafetensorsHeader, suspicious: Collection[str] = ()) -> None:
        """Begin.

        Args:
            descriptor: of the file.
            header: where its tensors lie.
            suspicious: names of tensors that no checksum covered, which must not be blank.
        """
        self._descriptor = descriptor
        self._header = header
        self._suspicious = frozenset(suspicious)
        places = sorted((tensor.data.offset, name) for name, tensor in header.tensors.items() if tensor.data.size)
        self._starts = [start for start, _ in places]
        self._names = [name for _, name in places]
        self._left = {name: tensor.data.size for name, tensor in header.tensors.items()}
        self._hashes: dict[str, str] = {}
        self._error: Exception | None = None
        self._due: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="hash tensors", daemon=True)
        self._thread.start()

    def note(self, offset: int, num_bytes: int) -> None:
        """Take note that bytes were written; none is ever written twice."""
        number = bisect_right(self._starts, offset) - 1
        if number < 0 or not num_bytes:
            return
        name = self._names[number]
        self._left[name] -= num_bytes
        if not self._left[name]:
            self._due.put(name)

    def finish(self) -> str:
        """Hash what is left, and return the digest of all as hex.

        Raises:
            CheckpointCorrupt: a suspicious tensor is blank.
        """
        for name, left in self._left.items():
            if left or not self._header.tensors[name].data.size:
                self._due.put(name)
        self.close()
        if self._error is not None:
            raise self._error
        digest = hashlib.sha256()
        for name, tensor in sorted(self._header.tensors.items()):
            about = [name, tensor.element.name, list(tensor.shape), self._hashes[name]]
            digest.update(json.dumps(about).encode() + b"\n")
        return digest.hexdigest()

    def close(self) -> None:
        """End the thread; harmless when done twice."""
        self._due.put(None)
        self._thread.join()

    def __enter__(self) -> TensorHasher:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def _work(self) -> None:
        while (name := self._due.get()) is not None:
            if self._error is None:
                try:
                    self._hashes[name] = self._hash(name)
                except Exception as error:  # handed to whoever waits for the digest
                    self._error = error

    def _hash(self, name: str) -> str:
        data = self._header.tensors[name].data
        finder = BlankFinder(name) if name in self._suspicious else None
        digest = hashlib.sha256()
        position = data.offset
        while position < data.end:
            block = os.pread(self._descriptor, min(READ_BYTES, data.end - position), position)
            if not block:
                raise OSError(f"the new file ends at byte {position}, inside {name}")
            digest.update(block)
            if finder is not None:
                finder.take(block)
            position += len(block)
        if finder is not None:
            finder.finish()
        return digest.hexdigest()
