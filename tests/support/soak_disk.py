"""A disk that can be full for a while: a small tmpfs where one may be mounted, else a limit on the size of files."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

SIZE_MB = 768
"""The store keeps 64 MB free, and holds less than 1 MB for each tiny checkpoint."""


class Disk(Protocol):
    """Where a soak's store, database and Prefect's state lie."""

    kind: str

    def fill(self, pids: Iterable[int]) -> None:
        """Leave no room for what these processes write."""

    def free(self, pids: Iterable[int]) -> None:
        """Give the room back."""


class SmallDisk:
    """A file system of its own; to fill it is to write one large file."""

    kind = "tmpfs"

    def __init__(self, folder: Path) -> None:
        self._ballast = folder / "ballast"

    def fill(self, pids: Iterable[int]) -> None:
        with self._ballast.open("wb") as file, suppress(OSError):
            while True:  # what is freed meanwhile is taken, too
                room = os.fstatvfs(file.fileno())
                size = os.fstat(file.fileno()).st_size
                if room.f_bavail == 0:
                    return
                os.posix_fallocate(file.fileno(), size, room.f_bavail * room.f_frsize)

    def free(self, pids: Iterable[int]) -> None:
        self._ballast.unlink(missing_ok=True)


class FileSizeLimit:
    """Without the right to mount: no file of a process may grow beyond a few bytes."""

    kind = "limit on the size of files"

    def fill(self, pids: Iterable[int]) -> None:
        self._limit(pids, 4096)

    def free(self, pids: Iterable[int]) -> None:
        self._limit(pids, resource.RLIM_INFINITY)

    def _limit(self, pids: Iterable[int], num_bytes: int) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (num_bytes, most))


@contextmanager
def small_disk(folder: Path) -> Iterator[Disk]:
    """Make a folder on a disk of its own, where that is allowed, for the block."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_MB}m", "tmpfs", str(folder)]
    try:
        is_mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except FileNotFoundError:
        is_mounted = False
    if not is_mounted:
        yield FileSizeLimit()
        return
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, capture_output=True)
