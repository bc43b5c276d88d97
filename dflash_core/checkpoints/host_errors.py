"""What both ways over SSH say when something fails, and how often they come back after a drop.

One wording for both: whoever reads a message need not know which of the two was at work.
"""

from __future__ import annotations

from collections.abc import Callable

from dflash_core.config import HostSettings
from dflash_core.errors import CheckpointError, CheckpointNotFound, HostError, HostKeyUnknown, HostUnreachable
from dflash_core.ssh import DEFAULT_PORT, SshAddress

RECONNECT_WAITS_S = (0.2, 1.0, 3.0)
PROGRESS_BYTES = 256 << 20
"""A drop after this much progress counts as a new one, with all its tries."""
CLOSE_TIMEOUT_S = 2.0
KEEPALIVE_S = 15


class ReceiverError(Exception):
    """Carries an error of whoever takes the data past the handling of network errors."""

    def __init__(self, cause: Exception) -> None:
        super().__init__()
        self.cause = cause


class Patience:
    """Says how long to wait before the next try after a dropped connection, and when to stop trying."""

    def __init__(self, progress: Callable[[], int]) -> None:
        """Begin with all tries.

        Args:
            progress: says how many bytes have been received so far.
        """
        self._progress = progress
        self._seen = progress()
        self._tries = 0

    def next_wait_s(self) -> float | None:
        """Return the seconds to wait before the next try; None: there is none left."""
        if self._progress() - self._seen >= PROGRESS_BYTES:
            self._tries = 0
        if self._tries == len(RECONNECT_WAITS_S):
            return None
        self._seen = self._progress()
        self._tries += 1
        return RECONNECT_WAITS_S[self._tries - 1]


class HostMessages:
    """The errors of one host, in words that say what to do."""

    def __init__(self, address: SshAddress, settings: HostSettings) -> None:
        self._address = address
        self._endpoint = address.endpoint
        self._known_hosts = settings.known_hosts
        self._timeout_s = settings.timeout_s

    def no_known_hosts_file(self) -> HostKeyUnknown:
        """Return the error for a file of known hosts that is not there."""
        return HostKeyUnknown(f"there is no known_hosts file at {self._known_hosts!r}; {self._key_advice()}")

    def unknown_key(self) -> HostKeyUnknown:
        """Return the error for a host key that is not the known one, or not known at all."""
        return HostKeyUnknown(f"the host key of {self._endpoint} is not in {self._known_hosts!r}; {self._key_advice()}")

    def refused_login(self, reason: str) -> HostUnreachable:
        """Return the error for a login that was refused."""
        return HostUnreachable(f"{self._endpoint} refused the login: {reason}; check the user and identity_file")

    def no_such_host(self) -> HostUnreachable:
        """Return the error for a name that leads nowhere."""
        return HostUnreachable(f"no host is called {self._address.host!r}; check the URL and ~/.ssh/config")

    def no_answer(self) -> HostUnreachable:
        """Return the error for a host that is silent while a connection is made."""
        return HostUnreachable(f"{self._endpoint} gave no answer within {self._timeout_s:g} s; is it up?")

    def cannot_connect(self, detail: str) -> HostUnreachable:
        """Return the error for a connection that failed in any other way."""
        return HostUnreachable(f"cannot connect to {self._endpoint}: {detail}; check that it is up and offers SFTP")

    def gave_up(self, error: BaseException, path: str) -> HostError:
        """Return the error for a link that kept breaking; a failed connection speaks for itself."""
        if isinstance(error, HostError):
            return error
        silent = f"no answer within {self._timeout_s:g} s"
        reason = silent if isinstance(error, TimeoutError) else str(error) or "cut off"
        return HostUnreachable(
            f"lost {self._endpoint} while reading {path!r}, also after {len(RECONNECT_WAITS_S)} reconnects: "
            f"{reason}; try again when the link holds"
        )

    def not_found(self, path: str) -> CheckpointNotFound:
        """Return the error for a path that leads nowhere."""
        return CheckpointNotFound(f"nothing lies at {path!r} on {self._endpoint}; check the path")

    def not_permitted(self, path: str) -> CheckpointError:
        """Return the error for a path that this user may not read."""
        return CheckpointError(f"{self._endpoint} does not let this user read {path!r}; check its permissions")

    def failed(self, path: str, detail: str) -> CheckpointError:
        """Return the error for a request that the host could not serve."""
        return CheckpointError(f"{self._endpoint} failed to read {path!r}: {detail}; look there")

    def _key_advice(self) -> str:
        port = self._address.port or DEFAULT_PORT
        return (
            f"add the key with `ssh-keyscan -p {port} {self._address.host}` after comparing its fingerprint, "
            "or log in once with ssh, or set known_hosts of that host"
        )
