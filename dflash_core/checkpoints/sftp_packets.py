"""The packets of SFTP version 3 that a reader needs, and no other.

A packet is its length, its kind, and what follows; every number is big-endian. The kinds that write
(open with any flag but read, write, setstat, remove, mkdir, rename, ...) do not exist here, so nothing
in this project can send one. Source: draft-ietf-secsh-filexfer-02; OpenSSH `PROTOCOL` for the limits.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from dflash_core.checkpoints.read_ahead import file_stat
from dflash_core.checkpoints.source_base import FileStat

VERSION = 3

# Requests.
INIT = 1
OPEN = 3
CLOSE = 4
READ = 5
FSTAT = 8
OPENDIR = 11
READDIR = 12
REALPATH = 16
STAT = 17
EXTENDED = 200

# Answers.
VERSION_ANSWER = 2
STATUS = 101
HANDLE = 102
DATA = 103
NAME = 104
ATTRS = 105
EXTENDED_ANSWER = 201

# Kinds of STATUS.
STATUS_EOF = 1
STATUS_NO_SUCH_FILE = 2
STATUS_PERMISSION_DENIED = 3
STATUS_FAILURE = 4
STATUS_NO_CONNECTION = 6
STATUS_CONNECTION_LOST = 7

OPEN_READ_ONLY = 1
LIMITS_EXTENSION = b"limits@openssh.com"

HEADER = struct.Struct(">IBI")
"""Length of what follows the length itself, kind, number of the request (in VERSION: the version)."""
DATA_LENGTH = struct.Struct(">I")
MAX_PACKET_BYTES = 1 << 20
"""Far more than any answer to what is asked here; a larger one is no SFTP."""

_HAS_SIZE, _HAS_OWNER, _HAS_MODE, _HAS_TIMES, _HAS_MORE = 0x1, 0x2, 0x4, 0x8, 0x80000000


class MalformedPacket(Exception):
    """Raised when what a host sends is not SFTP."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What to ask, without the number that it will get."""

    kind: int
    payload: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """How a request ended, if not with what it asked for."""

    code: int
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Name:
    """One entry of a folder."""

    name: bytes
    stat: FileStat
    is_link: bool


def packet(kind: int, number: int, payload: bytes = b"") -> bytes:
    """Return the bytes of a packet."""
    return HEADER.pack(len(payload) + 5, kind, number) + payload


def open_for_reading(path: bytes) -> Request:
    """Return the request that opens a file, for reading; there is no other."""
    no_attributes = 0
    return Request(kind=OPEN, payload=_string(path) + struct.pack(">II", OPEN_READ_ONLY, no_attributes))


def close(handle: bytes) -> Request:
    """Return the request that closes a file or folder."""
    return Request(kind=CLOSE, payload=_string(handle))


def read(handle: bytes, offset: int, size: int) -> Request:
    """Return the request for part of a file."""
    return Request(kind=READ, payload=_string(handle) + struct.pack(">QI", offset, size))


def stat_handle(handle: bytes) -> Request:
    """Return the request for size and time of an open file."""
    return Request(kind=FSTAT, payload=_string(handle))


def stat_path(path: bytes) -> Request:
    """Return the request for size, time and kind of a path, links followed."""
    return Request(kind=STAT, payload=_string(path))


def open_folder(path: bytes) -> Request:
    """Return the request that begins to list a folder."""
    return Request(kind=OPENDIR, payload=_string(path))


def read_folder(handle: bytes) -> Request:
    """Return the request for more entries of a folder."""
    return Request(kind=READDIR, payload=_string(handle))


def real_path(path: bytes) -> Request:
    """Return the request that resolves all links of a path."""
    return Request(kind=REALPATH, payload=_string(path))


def limits() -> Request:
    """Return OpenSSH's request for the sizes that a host accepts."""
    return Request(kind=EXTENDED, payload=_string(LIMITS_EXTENSION))


class Answer:
    """Takes the parts of an answer one after the other.

    Raises:
        MalformedPacket: from each method, where the answer ends before what it should hold.
    """

    def __init__(self, kind: int, body: bytes) -> None:
        self.kind = kind
        self._body = body
        self._position = 0

    @property
    def is_empty(self) -> bool:
        """Tell whether everything has been taken."""
        return self._position == len(self._body)

    def number(self) -> int:
        """Take a number of 32 bits."""
        return int(struct.unpack(">I", self._take(4))[0])

    def large_number(self) -> int:
        """Take a number of 64 bits."""
        return int(struct.unpack(">Q", self._take(8))[0])

    def string(self) -> bytes:
        """Take a string: its length, then its bytes."""
        return self._take(self.number())

    def attributes(self) -> FileStat:
        """Take size, mode and time of a file."""
        return self._attributes()[0]

    def names(self) -> list[Name]:
        """Take a list of entries."""
        return [self._name() for _ in range(self.number())]

    def status(self) -> Status:
        """Take the code of a status and its words, which old servers leave out."""
        code = self.number()
        return Status(code=code, message="" if self.is_empty else self.string().decode(errors="replace"))

    def _name(self) -> Name:
        name = self.string()
        self.string()  # the line that `ls -l` would print
        stat, is_link = self._attributes()
        return Name(name=name, stat=stat, is_link=is_link)

    def _attributes(self) -> tuple[FileStat, bool]:
        flags = self.number()
        size = self.large_number() if flags & _HAS_SIZE else None
        if flags & _HAS_OWNER:
            self._take(8)
        mode = self.number() if flags & _HAS_MODE else None
        mtime_s = None
        if flags & _HAS_TIMES:
            self._take(4)
            mtime_s = self.number()
        if flags & _HAS_MORE:
            for _ in range(2 * self.number()):
                self.string()
        return file_stat(size, mode, mtime_s), (mode or 0) & 0o170000 == 0o120000

    def _take(self, size: int) -> bytes:
        end = self._position + size
        if end > len(self._body):
            raise MalformedPacket(f"an answer of kind {self.kind} ends too early")
        taken, self._position = self._body[self._position : end], end
        return taken


def _string(value: bytes) -> bytes:
    return struct.pack(">I", len(value)) + value
