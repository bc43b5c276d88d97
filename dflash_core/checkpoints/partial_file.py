"""A file that appears whole or not at all, and that a later attempt can go on with.

It is written under a hidden name at its full size. A journal beside it lists the pieces whose bytes
are on the disk and were checked; after a crash, or when the link broke for good, the next attempt
for the same content reads only the rest. The kernel frees the lock of a process that dies.

    .weights.safetensors.<token>.part       the bytes, at their places
    .weights.safetensors.<token>.journal    what the token stands for, then one finished piece a line
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dflash_core.checkpoints.source_base import ByteRange
from dflash_core.errors import CheckpointError, DoesNotFit
from dflash_core.store import sync_folder

# Left free beside the new file, for everything else on that disk.
DISK_RESERVE_BYTES = 64 << 20
# How much may have to be read again after a crash.
SYNC_BYTES = 64 << 20

PieceKey = tuple[str, int, int]
"""File on the host, offset and size."""


class PartialFile:
    """The new file while it is written."""

    def __init__(self, descriptor: int, journal: Path, finished: set[PieceKey]) -> None:
        self.descriptor = descriptor
        self._journal = journal
        self._finished = finished
        self._pending: list[PieceKey] = []
        self._pending_bytes = 0
        self._syncing: threading.Thread | None = None

    def has(self, path: str, data: ByteRange) -> bool:
        """Tell whether an earlier attempt finished a piece."""
        return (path, data.offset, data.size) in self._finished

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Put bytes at an offset.

        Raises:
            DoesNotFit: the disk is full.
        """
        view = memoryview(data)
        while view:
            try:
                count = os.pwrite(self.descriptor, view, offset)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise DoesNotFit(
                        f"the disk of {str(self._journal.parent)!r} became full; make room and try again"
                    ) from error
                raise
            view, offset = view[count:], offset + count

    def note(self, path: str, data: ByteRange) -> None:
        """Note that a piece was written and checked."""
        self._pending.append((path, data.offset, data.size))
        self._pending_bytes += data.size
        if self._pending_bytes >= SYNC_BYTES and (self._syncing is None or not self._syncing.is_alive()):
            # Beside the transfer, which need not wait for the disk.
            self._syncing = threading.Thread(target=self._sync, args=(self._pending,), name="sync", daemon=True)
            self._pending, self._pending_bytes = [], 0
            self._syncing.start()

    def sync(self) -> None:
        """Bring what was written to the disk, then say so in the journal."""
        self.settle()
        self._sync(self._pending)
        self._pending, self._pending_bytes = [], 0

    def settle(self) -> None:
        """Wait for what is under way."""
        if self._syncing is not None:
            self._syncing.join()

    def _sync(self, pieces: list[PieceKey]) -> None:
        if not pieces:
            return
        # An error of the disk here only means that the journal knows less; the last fsync raises it again.
        with suppress(OSError):
            os.fdatasync(self.descriptor)
            with self._journal.open("a", encoding="utf-8") as journal:
                journal.writelines(json.dumps(key) + "\n" for key in pieces)


@contextmanager
def partial_file(destination: Path, size_bytes: int, content: str) -> Iterator[PartialFile]:
    """Yield a new file of that size, which takes its name only if all goes well.

    Args:
        destination: where it appears in the end; its folder must exist.
        size_bytes: its size.
        content: says what will be in it; only an attempt for the same content is gone on with.

    Raises:
        DoesNotFit: the disk has too little room; nothing was written.
    """
    token = hashlib.sha256(f"{content}\0{size_bytes}".encode()).hexdigest()[:16]
    part = destination.with_name(f".{destination.name}.{token}.part")
    descriptor = _locked(part)
    if descriptor is None:
        # Somebody else is at work on the same; be alone under another name.
        part = destination.with_name(f".{destination.name}.{token}-{os.getpid()}-{os.urandom(4).hex()}.part")
        descriptor = _locked(part)
        assert descriptor is not None, part
    journal = part.with_suffix(".journal")
    keep = False
    try:
        _remove_leftovers(destination, part)
        finished = _read_journal(journal, content) if os.fstat(descriptor).st_size == size_bytes else None
        _require_room(descriptor, size_bytes, destination)
        if finished is None:
            finished = set()
            _allocate(descriptor, size_bytes, destination)
            journal.write_text(json.dumps({"content": content}) + "\n", encoding="utf-8")
        file = PartialFile(descriptor, journal, finished)
        try:
            yield file
        except (CheckpointError, DoesNotFit):
            file.settle()
            raise  # whatever was read is of no use to anybody
        except BaseException:
            with suppress(OSError):
                file.sync()
            keep = True
            raise
        file.settle()
        os.fsync(descriptor)
        os.replace(part, destination)
        sync_folder(destination.parent)
    finally:
        if not keep:
            for path in (part, journal):
                path.unlink(missing_ok=True)
        os.close(descriptor)


def _locked(path: Path) -> int | None:
    """Return a descriptor of the file at a path, made if missing, or None where another process holds it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return None
        # Its former owner may have renamed or removed it between the two calls.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        os.close(descriptor)


def _read_journal(journal: Path, content: str) -> set[PieceKey] | None:
    """Return the pieces that an earlier attempt finished, or None where there was none for this content."""
    try:
        first, *lines = journal.read_text(encoding="utf-8").splitlines()
        if json.loads(first) != {"content": content}:
            return None
    except (OSError, ValueError):
        return None
    finished: set[PieceKey] = set()
    for line in lines:
        try:
            path, offset, size = json.loads(line)
        except (ValueError, TypeError):
            break  # the last line of a process that was killed
        finished.add((path, offset, size))
    return finished


def _require_room(descriptor: int, size_bytes: int, destination: Path) -> None:
    missing = max(0, size_bytes - os.fstat(descriptor).st_blocks * 512)
    free_bytes = shutil.disk_usage(destination.parent).free
    if missing + DISK_RESERVE_BYTES > free_bytes:
        raise DoesNotFit(
            f"{size_bytes / 1e9:.2f} GB are needed in {str(destination.parent)!r}, {free_bytes / 1e9:.2f} GB are free; "
            "make room, or move the store"
        )


def _allocate(descriptor: int, size_bytes: int, destination: Path) -> None:
    try:
        os.ftruncate(descriptor, 0)
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        raise DoesNotFit(
            f"{size_bytes / 1e9:.2f} GB cannot be had in {str(destination.parent)!r}: {error.strerror}; make room"
        ) from error


def _remove_leftovers(destination: Path, own: Path) -> None:
    """Remove what killed attempts for the same destination and other contents left behind."""
    for leftover in destination.parent.glob(f".{destination.name}.*.part"):
        if leftover == own:
            continue
        descriptor = _locked(leftover)
        if descriptor is not None:
            leftover.unlink(missing_ok=True)
            leftover.with_suffix(".journal").unlink(missing_ok=True)
            os.close(descriptor)
