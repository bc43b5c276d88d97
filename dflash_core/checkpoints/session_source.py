"""What the two SSH sources have in common: one session with one host, whose reads are paced and counted."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from dflash_core.checkpoints.read_ahead import path_of, url_of
from dflash_core.checkpoints.source_base import RateLimit, Source
from dflash_core.ssh import SshAddress


class Session(Protocol):
    """A connection to one host that comes back after it broke."""

    address: SshAddress

    def close(self) -> None:
        """End the connection."""


AnySession = TypeVar("AnySession", bound=Session)


class SessionSource(Source, Generic[AnySession]):
    """Files of one SSH host, read through one session."""

    def __init__(self, session: AnySession, *, limit: RateLimit | None = None, counter: Source | None = None) -> None:
        """Read through a session that is there already; `close` ends it.

        Args:
            session: with the host.
            limit: paces the reads; None does not.
            counter: whose `bytes_read` counts them; None is this source itself.
        """
        super().__init__()
        self.session = session
        self.limit = limit or RateLimit(None)
        self.counter = counter or self

    def path_of(self, url: str) -> str:
        """Return the path in a URL; without one, the login's own folder."""
        return path_of(url)

    def url_of(self, path: str) -> str:
        """Return the URL of a path on this host."""
        return url_of(self.session.address, path)

    def close(self) -> None:
        """End the connection."""
        self.session.close()
