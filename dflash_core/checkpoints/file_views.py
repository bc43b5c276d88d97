"""Files seen through others: a part of an open one, and one that is opened once its bytes are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from dflash_core.checkpoints.source_base import (
    ByteRange,
    DirEntry,
    FileStat,
    Sink,
    Source,
    SourceFile,
    require_same,
    vanished,
)
from dflash_core.errors import CheckpointNotFound


class FilePart(SourceFile):
    """A range of a file, read as if it were a file of its own."""

    def __init__(self, file: SourceFile, part: ByteRange, *, display: str) -> None:
        super().__init__(file.path, display, replace(file.stat, size=part.size))
        self._file = file
        self._start = part.offset

    def read_ranges(self, ranges: Sequence[ByteRange], sink: Sink) -> None:
        """Read ranges of the part."""
        shifted = [ByteRange(offset=self._start + one.offset, size=one.size) for one in ranges]
        self._file.read_ranges(shifted, lambda offset, data: sink(offset - self._start, data))

    def current_stat(self) -> FileStat:
        """Return what the path holds now, with the size of the part."""
        return replace(self._file.current_stat(), size=self.stat.size)

    def close(self) -> None:
        """Do nothing: the file belongs to whoever opened it."""


class LazyFile(SourceFile):
    """A file known from a listing; it is opened at the first read, and closed by the stack."""

    def __init__(self, source: Source, entry: DirEntry, stack: ExitStack) -> None:
        if entry.stat is None:
            raise CheckpointNotFound(f"{source.url_of(entry.path)} is a link that leads nowhere")
        super().__init__(entry.path, source.url_of(entry.path), entry.stat)
        self._source = source
        self._stack = stack
        self._file: SourceFile | None = None

    def read_ranges(self, ranges: Sequence[ByteRange], sink: Sink) -> None:
        """Read ranges, opening the file first where that was not done yet.

        Raises:
            CheckpointChanged: the file is another one than was listed.
            CheckpointVanished: it is gone.
        """
        self._opened().read_ranges(ranges, sink)

    def current_stat(self) -> FileStat:
        """Return what the path holds now, asked anew."""
        return self._source.stat(self.path)

    def close(self) -> None:
        """Close the file if it was opened."""
        if self._file is not None:
            self._file.close()

    def _opened(self) -> SourceFile:
        if self._file is None:
            try:
                file = self._stack.enter_context(self._source.open(self.path))
            except CheckpointNotFound as error:
                raise vanished(self.display) from error
            # Stores tell times more or less exactly in listings than of single files.
            require_same(replace(self.stat, mtime_ns=file.stat.mtime_ns), file.stat, self.display)
            self._file = file
        return self._file
