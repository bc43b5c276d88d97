"""Files of an SSH host, read through the user's own OpenSSH client.

As fast as `scp` on a short link, and it logs in wherever `ssh` does. The client's channel has a
window of 2 MiB, which no option changes: on a link of many milliseconds `sftp_source` is faster.
"""

from __future__ import annotations

import posixpath
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from dflash_core.checkpoints import sftp_packets as packets
from dflash_core.checkpoints.openssh_session import OpenSshSession, Refused
from dflash_core.checkpoints.read_ahead import Delivery, Depth, split_blocks
from dflash_core.checkpoints.session_source import SessionSource
from dflash_core.checkpoints.sftp_packets import Answer, MalformedPacket, Name, Request, Status
from dflash_core.checkpoints.source_base import (
    ByteRange,
    DirEntry,
    FileStat,
    Sink,
    SourceFile,
    ended_early,
    require_inside,
    require_same,
    vanished,
)

MAX_PARALLEL_LISTINGS = 16
GONE = (packets.STATUS_NO_SUCH_FILE, packets.STATUS_PERMISSION_DENIED, packets.STATUS_FAILURE)


class OpenSshSource(SessionSource[OpenSshSession]):
    """Files of one SSH host, read through one SFTP session of OpenSSH's client."""

    def stat(self, path: str) -> FileStat:
        """Return what lies at a path, links followed."""
        return self.session.request(packets.stat_path(_encoded(path)), path).attributes()

    def list_dir(self, path: str) -> list[DirEntry]:
        """Return the entries of a folder, sorted by name."""

        def attempt() -> list[DirEntry]:
            listed = self._list_all([path])[0]
            if isinstance(listed, Status):
                raise Refused(listed)
            return listed

        return self.session.persist(attempt, path)

    def list_dirs(self, paths: Sequence[str]) -> dict[str, list[DirEntry]]:
        """Return the entries of several folders, asked for at once; one that is gone has none."""

        def attempt() -> dict[str, list[DirEntry]]:
            found: dict[str, list[DirEntry]] = {}
            for begin in range(0, len(paths), MAX_PARALLEL_LISTINGS):
                some = paths[begin : begin + MAX_PARALLEL_LISTINGS]
                for path, listed in zip(some, self._list_all(some), strict=True):
                    if isinstance(listed, Status) and listed.code not in GONE:
                        raise Refused(listed)
                    found[path] = [] if isinstance(listed, Status) else listed
            return found

        return self.session.persist(attempt, ", ".join(paths[:3]))

    def realpath(self, path: str) -> str:
        """Return the path with all links resolved, by the host."""
        names = self.session.request(packets.real_path(_encoded(path)), path).names()
        return _text(names[0].name) if names else path

    def open(self, path: str) -> SourceFile:
        """Open a file for reading."""
        return OpenSshFile(self, path)

    def _list_all(self, paths: Sequence[str]) -> list[list[DirEntry] | Status]:
        """Return the entries of each folder, or why there are none."""
        answers = self.session.ask_all([packets.open_folder(_encoded(path)) for path in paths])
        handles = [None if isinstance(answer, Status) else answer.string() for answer in answers]
        try:
            names = self._read_folders([handle for handle in handles if handle is not None])
        finally:
            self.session.close_handles([handle for handle in handles if handle is not None], self.session.generation)
        listed: list[list[DirEntry] | Status] = []
        for path, answer in zip(paths, answers, strict=True):
            found = answer if isinstance(answer, Status) else names.pop(0)
            listed.append(found if isinstance(found, Status) else self._entries(path, found))
        return listed

    def _read_folders(self, handles: Sequence[bytes]) -> list[list[Name] | Status]:
        """Return the names in each open folder, or why there are none.

        All are asked on until each has said that there are no more. Some servers look for the folder only now.
        """
        found: dict[bytes, list[Name]] = {handle: [] for handle in handles}
        refused: dict[bytes, Status] = {}
        unfinished = list(found)
        while unfinished:
            answers = self.session.ask_all([packets.read_folder(handle) for handle in unfinished])
            for handle, answer in zip(list(unfinished), answers, strict=True):
                if isinstance(answer, Answer):
                    found[handle] += answer.names()
                    continue
                unfinished.remove(handle)
                if answer.code != packets.STATUS_EOF:
                    refused[handle] = answer
        return [refused.get(handle, found[handle]) for handle in handles]

    def _entries(self, folder: str, names: Sequence[Name]) -> list[DirEntry]:
        """Return a folder's entries, with what the links among them lead to."""
        named = {_text(name.name): name for name in names if name.name not in (b".", b"..")}
        links = [text for text, name in named.items() if name.is_link]
        answers = self.session.ask_all([packets.stat_path(_encoded(posixpath.join(folder, link))) for link in links])
        targets: dict[str, FileStat | None] = {}
        for link, answer in zip(links, answers, strict=True):
            if isinstance(answer, Status) and answer.code not in GONE:
                raise Refused(answer)
            targets[link] = None if isinstance(answer, Status) else answer.attributes()
        return [
            DirEntry(
                name=text,
                path=posixpath.join(folder, text),
                stat=targets[text] if name.is_link else name.stat,
                is_link=name.is_link,
            )
            for text, name in sorted(named.items())
        ]


class OpenSshFile(SourceFile):
    """A file open for reading on an SSH host; it is opened again after a dropped connection."""

    def __init__(self, source: OpenSshSource, path: str) -> None:
        self._source = source
        self._session = source.session
        self._handle: bytes | None = None
        self._generation = 0
        self._first: FileStat | None = None
        self.path, self.display = path, source.url_of(path)
        super().__init__(path, self.display, self._session.persist(self._ensure_open, path))

    def read_ranges(self, ranges: Sequence[ByteRange], sink: Sink) -> None:
        """Read ranges, many blocks at a time, and hand them to `sink` in order."""
        require_inside(ranges, self.stat, self.display)
        delivery = Delivery(ranges, sink)

        def attempt() -> None:
            self._ensure_open()
            assert self._handle is not None
            _Reading(self._source, self, self._handle, delivery).run()

        self._session.persist(attempt, self.path, progress=lambda: delivery.num_bytes)

    def current_stat(self) -> FileStat:
        """Return what the path holds now, asked anew."""
        return self._source.stat(self.path)

    def close(self) -> None:
        """Close the handle, unless its connection is gone."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._session.close_handles([handle], self._generation)

    def _ensure_open(self) -> FileStat:
        """Open the file unless it is open, and check that it is the one opened first."""
        self._session.connect()
        if self._handle is None or self._generation != self._session.generation:
            self._handle = self._open()
            self._generation = self._session.generation
            try:
                stat = self._session.ask(packets.stat_handle(self._handle)).attributes()
                self._first = self._first or stat
                require_same(self._first, stat, self.display)
            except Exception:
                self.close()
                raise
        assert self._first is not None
        return self._first

    def _open(self) -> bytes:
        try:
            return self._session.ask(packets.open_for_reading(_encoded(self.path))).string()
        except Refused as error:
            if self._first is not None and error.status.code == packets.STATUS_NO_SUCH_FILE:
                raise vanished(self.display) from error
            raise


@dataclass(kw_only=True, slots=True)
class _Block:
    """Part of a file on its way: one request at a time is out for it."""

    position: int
    """Offset of the next byte to come."""
    end: int
    parts: list[bytes] = field(default_factory=list)
    """What came before its turn."""


class _Reading:
    """One pass over what is due: requests go out ahead, and answers are passed on in order.

    The answer to the oldest request goes to its receiver as it trickles in, so that it is never
    copied; a host may also answer out of turn, and with less than was asked for.
    """

    def __init__(self, source: OpenSshSource, file: SourceFile, handle: bytes, delivery: Delivery) -> None:
        self._source, self._session = source, source.session
        self._file, self._handle, self._delivery = file, handle, delivery
        self._blocks = split_blocks(delivery.due, max_read_bytes=self._session.max_read_bytes, limit=source.limit)
        self._next = next(self._blocks, None)
        self._may_ask_at: float | None = None
        """When the rate limit lets the next request go; None: not booked yet."""
        self._queue: deque[_Block] = deque()
        self._asked: dict[int, _Block] = {}
        self._depth = Depth(self._session.round_trip_s)
        self._heard_at = time.monotonic()

    def run(self) -> None:
        """Read everything.

        Raises:
            TimeoutError: the host has been silent for too long.
            CheckpointChanged: the file is shorter than it was.
        """
        while self._queue or self._next is not None:
            pause_s = self._ask_ahead()
            if not self._queue:
                time.sleep(pause_s or 0.0)
                self._heard_at = time.monotonic()
            elif self._session.wait(self._session.timeout_s if pause_s is None else pause_s):
                self._take_answer()
            elif time.monotonic() - self._heard_at >= self._session.timeout_s:
                raise TimeoutError

    def _ask_ahead(self) -> float | None:
        """Send what may be sent; return the seconds until more may, or None if an answer must come first."""
        while self._next is not None and len(self._queue) < self._depth.blocks:
            if self._may_ask_at is None:
                self._may_ask_at = time.monotonic() + self._source.limit.reserve(self._next.size)
            pause_s = self._may_ask_at - time.monotonic()
            if pause_s > 0:
                return pause_s
            block = _Block(position=self._next.offset, end=self._next.end)
            self._queue.append(block)
            self._ask(block)
            self._next, self._may_ask_at = next(self._blocks, None), None
        return None

    def _ask(self, block: _Block) -> None:
        request: Request = packets.read(self._handle, block.position, block.end - block.position)
        self._asked[self._session.send(request)] = block

    def _take_answer(self) -> None:
        kind, number, size = self._session.receive_header()
        block = self._asked.pop(number, None)
        if block is None:
            raise MalformedPacket("an answer that nobody asked for")
        if kind != packets.DATA:
            self._refuse(self._session.receive_answer(kind, size), block)
        (num_bytes,) = packets.DATA_LENGTH.unpack(self._session.receive(packets.DATA_LENGTH.size))
        if num_bytes != size - packets.DATA_LENGTH.size or not 0 < num_bytes <= block.end - block.position:
            raise MalformedPacket(f"{num_bytes} bytes where {block.end - block.position} were asked for")
        while num_bytes:
            data = self._session.receive_some(num_bytes)
            num_bytes -= len(data)
            block.position += len(data)
            self._source.counter.bytes_read += len(data)
            if block is self._queue[0]:
                self._delivery.hand_over(data)
            else:
                block.parts.append(data)
        self._session.note_answered()
        if block.position < block.end:
            self._ask(block)
        self._depth.note(size)
        self._pass_on()
        self._heard_at = time.monotonic()

    def _pass_on(self) -> None:
        """Hand over what came before its turn and is due by now, and take off what is complete."""
        while self._queue:
            block = self._queue[0]
            for data in block.parts:
                self._delivery.hand_over(data)
            block.parts.clear()
            if block.position < block.end:
                return
            self._queue.popleft()

    def _refuse(self, answer: Answer | Status, block: _Block) -> None:
        if isinstance(answer, Answer):
            raise MalformedPacket(f"an answer of kind {answer.kind} to a read")
        if answer.code == packets.STATUS_EOF:
            raise ended_early(self._file.display, block.position, self._file.stat)
        raise Refused(answer)


def _encoded(path: str) -> bytes:
    return path.encode(errors="surrogateescape")


def _text(name: bytes) -> str:
    return name.decode(errors="surrogateescape")
