"""Files of an SSH host, read by whichever of two clients suits the link.

`transport: auto` begins with the user's own `ssh`, which logs in wherever they can and is as fast as
`scp` on a short link. Its window of 2 MiB makes it slow on a long one: so when much is to be read and
a round trip takes 20 ms or more, that connection is closed and asyncssh goes on, with a window of
32 MiB. Should asyncssh not get in (a hardware key, an exotic configuration), ssh comes back and stays.
There is never more than one connection.

What ssh refuses stays refused: a host key that it does not know, a login or a host that it cannot
reach are not tried again with another client, which knows the same keys, would count as one more
failed login, and must not get around a check. Only where no ssh runs at all (none is installed, or
this user has no entry in the password file) does asyncssh begin.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from dflash_core.checkpoints.openssh_session import OpenSshSession, SshUnusable
from dflash_core.checkpoints.openssh_source import OpenSshSource
from dflash_core.checkpoints.read_ahead import path_of, url_of
from dflash_core.checkpoints.source_base import (
    ByteRange,
    DirEntry,
    FileStat,
    RateLimit,
    Sink,
    Source,
    SourceFile,
    require_same,
    vanished,
)
from dflash_core.config import HostSettings
from dflash_core.errors import CheckpointNotFound, HostError
from dflash_core.ssh import SshAddress

LARGE_READ_BYTES = 8_000_000
"""What has been read and what is due together: from here on the rate matters more than another login's second."""
LONG_ROUND_TRIP_S = 0.020


class SshSource(Source):
    """Files of one SSH host, over one connection at a time."""

    def __init__(self, address: SshAddress, settings: HostSettings) -> None:
        """Connect.

        Raises:
            HostKeyUnknown: the host's key is not in the known_hosts file.
            HostUnreachable: it does not answer, or refuses the login.
        """
        super().__init__()
        self.generation = 0
        """Counts changes of the client; files of an earlier one must be opened again."""
        self._address = address
        self._settings = settings
        self._limit = RateLimit(settings.max_read_mb_s)
        self._may_change = settings.transport == "auto"
        self._client: Source = self._first_client()

    def __enter__(self) -> SshSource:
        return self

    @property
    def transport(self) -> str:
        """Who carries the session now: `openssh` or `asyncssh`."""
        return "openssh" if isinstance(self._client, OpenSshSource) else "asyncssh"

    def path_of(self, url: str) -> str:
        """Return the path in a URL; without one, the login's own folder."""
        return path_of(url)

    def url_of(self, path: str) -> str:
        """Return the URL of a path on this host."""
        return url_of(self._address, path)

    def stat(self, path: str) -> FileStat:
        """Return what lies at a path, links followed."""
        return self._client.stat(path)

    def list_dir(self, path: str) -> list[DirEntry]:
        """Return the entries of a folder, sorted by name."""
        return self._client.list_dir(path)

    def list_dirs(self, paths: Sequence[str]) -> dict[str, list[DirEntry]]:
        """Return the entries of several folders, asked for at once; one that is gone has none."""
        return self._client.list_dirs(paths)

    def realpath(self, path: str) -> str:
        """Return the path with all links resolved, by the host."""
        return self._client.realpath(path)

    def open(self, path: str) -> SourceFile:
        """Open a file for reading."""
        return SshFile(self, path)

    def open_now(self, path: str) -> SourceFile:
        """Open a file with the client of this moment."""
        return self._client.open(path)

    def prepare_for(self, num_bytes: int) -> None:
        """Change the client if that pays for a read of so many bytes over this link."""
        if not self._may_change or not isinstance(self._client, OpenSshSource):
            return
        if self.bytes_read + num_bytes < LARGE_READ_BYTES:
            return
        if self._client.session.measure_round_trip(".") < LONG_ROUND_TRIP_S:
            return
        self._may_change = False  # once; a client that is slower than hoped is no reason to log in again
        self._client.session.disconnect()
        try:
            client = self._asyncssh()
        except HostError:
            return  # ssh comes back with the next request, and stays
        self._client.close()
        self._client = client
        self.generation += 1

    def close(self) -> None:
        """End the connection."""
        self._client.close()

    def _first_client(self) -> Source:
        if self._settings.transport == "asyncssh":
            return self._asyncssh()
        if self._settings.transport == "auto" and shutil.which("ssh") is None:
            return self._asyncssh()
        try:
            return self._openssh()
        except SshUnusable:
            if self._settings.transport == "openssh":
                raise
            return self._asyncssh()

    def _openssh(self) -> Source:
        return OpenSshSource(OpenSshSession(self._address, self._settings), limit=self._limit, counter=self)

    def _asyncssh(self) -> Source:
        # Here and not above: it takes a third of a second to import, and is seldom needed.
        from dflash_core.checkpoints.sftp_session import SftpSession
        from dflash_core.checkpoints.sftp_source import SftpSource

        return SftpSource(SftpSession(self._address, self._settings), limit=self._limit, counter=self)


class SshFile(SourceFile):
    """A file open for reading on an SSH host, with whichever client the source has."""

    def __init__(self, source: SshSource, path: str) -> None:
        self._source = source
        self._file = source.open_now(path)
        self._generation = source.generation
        super().__init__(path, self._file.display, self._file.stat)

    def read_ranges(self, ranges: Sequence[ByteRange], sink: Sink) -> None:
        """Read ranges, many blocks at a time, and hand them to `sink` in order."""
        self._source.prepare_for(sum(part.size for part in ranges))
        if self._generation != self._source.generation:
            self._open_again()
        self._file.read_ranges(ranges, sink)

    def current_stat(self) -> FileStat:
        """Return what the path holds now, asked anew."""
        return self._source.stat(self.path)

    def close(self) -> None:
        """Close the file, unless its connection is gone."""
        self._file.close()

    def _open_again(self) -> None:
        """Open the file with the client that took over, and check that it is the same one."""
        self._file.close()
        try:
            self._file, self._generation = self._source.open_now(self.path), self._source.generation
        except CheckpointNotFound as error:
            raise vanished(self.display) from error
        require_same(self.stat, self._file.stat, self.display)
