"""What a remote store needs of the place where it lies: files that are listed, read, written, and put aside.

Paths are relative to the store's root, with `/` between their parts. Whatever a library raises is told as one of two
things: the file is not (or no longer) what was asked for, or the place cannot be used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

Received = Callable[[bytes], None]
"""Takes the bytes of a file, in order."""
Sent = Callable[[int], None]
"""Takes how many more bytes of a file were sent."""


class FileMissing(Exception):
    """Raised when a file is not there, or is another one than when it was looked at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteEntry:
    """One name in a folder."""

    name: str
    is_folder: bool
    size: int
    changed_at: float
    """Seconds since 1970, as the place tells it; 0 where it does not."""


class RemoteFiles(ABC):
    """The files under one root; usable from several threads.

    Every method raises HostUnreachable, HostKeyUnknown or HostError, in one line, where the place cannot be used:
    passing faults of the network were tried again a few times by then.
    """

    can_rename: bool
    """Can a whole folder be moved in one step?"""
    url: str

    def __init__(self) -> None:
        self.looked_at: dict[tuple[str, str], float] = {}
        """When an artifact was last seen to be there, by the monotonic clock; shared by all stores at this place."""
        self.away_until = float("-inf")
        """Until when nobody need ask again, by the monotonic clock, unless something depends on the answer."""

    @abstractmethod
    def list_folders(self, paths: Sequence[str]) -> dict[str, list[RemoteEntry]]:
        """Return what lies in folders, asked for at once; one that is not there is empty."""

    @abstractmethod
    def read_many(self, paths: Sequence[str]) -> dict[str, bytes | None]:
        """Return the bytes of small files, asked for at once; None for one that is not there."""

    @abstractmethod
    def download(self, path: str, *, start: int, size: int, receive: Received) -> None:
        """Read a file of `size` bytes from `start` on, with bounded memory.

        Raises:
            FileMissing: it is not there, has another size, or changed on the way.
        """

    @abstractmethod
    def upload(self, local: Path, path: str, *, on_sent: Sent) -> None:
        """Write a whole file, its folders too, with bounded memory; it takes the local file's time, in seconds."""

    @abstractmethod
    def write(self, path: str, data: bytes) -> None:
        """Write a small file; where folders cannot be renamed, readers see the old one or the new one."""

    @abstractmethod
    def rename(self, path: str, to: str) -> bool:
        """Move a folder to where nothing lies; False where something does, or where it is gone itself."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """Remove a file or a folder with all in it; what is gone is no error."""

    @abstractmethod
    def touch(self, path: str) -> None:
        """Set a file's time to now, where the place and its permissions let that be."""

    @abstractmethod
    def close(self) -> None:
        """End connections; the next call makes new ones."""

    def read(self, path: str) -> bytes | None:
        """Return the bytes of a small file, or None where it is not there."""
        return self.read_many([path])[path]
