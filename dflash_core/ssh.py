"""One reading of `ssh://` URLs and of the settings that go with them.

A URL on a configured host (same user, host and port) takes that host's settings, so that a
checkpoint's address typed by hand is read with the same known_hosts file and rate limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

from dflash_core.config import HostSettings
from dflash_core.errors import InputError

SSH_SCHEMES = ("ssh", "sftp")
DEFAULT_PORT = 22
# The client's order decides; asyncssh offers chacha20 first, which costs twice the CPU of GCM.
CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "chacha20-poly1305@openssh.com", "aes128-ctr")


@dataclass(frozen=True, kw_only=True, slots=True)
class SshAddress:
    """The parts of an `ssh://` URL."""

    host: str
    port: int | None
    user: str | None
    path: str
    """Absolute path on the host; empty when the URL has none."""

    @property
    def endpoint(self) -> str:
        """`user@host:port` as shown to people; never a password."""
        user = f"{self.user}@" if self.user else ""
        return f"{user}{self.host}:{self.port or DEFAULT_PORT}"


def is_ssh_url(url: str) -> bool:
    """Tell whether a path or URL lies on an SSH host."""
    return url.partition("://")[0] in SSH_SCHEMES and "://" in url


def parse_ssh_url(url: str) -> SshAddress:
    """Split an `ssh://` URL.

    A `?` or `#` belongs to the path, as it may to the name of a folder; `%20` and the like are decoded.

    Raises:
        InputError: it has no host, a port that is no port, or a password (use a key instead).
    """
    scheme, _, rest = url.partition("://")
    netloc, slash, path = rest.partition("/")
    user, _, place = netloc.rpartition("@")
    if ":" in user:
        raise InputError(f"a password in the URL of {place!r} would end up in logs; log in with a key instead")
    try:
        parts = urlsplit(f"{scheme}://{place}")
        port = parts.port
    except ValueError as error:
        raise InputError(f"{place!r} is not a host and a port number; write ssh://user@host:port/path") from error
    if not parts.hostname:
        raise InputError(f"no host in {url!r}; write ssh://user@host:port/path")
    return SshAddress(host=parts.hostname, port=port, user=unquote(user) or None, path=unquote(slash + path))


def settings_for(url: str, hosts: Mapping[str, HostSettings]) -> HostSettings:
    """Return the settings of the configured host that a URL lies on, else the defaults."""
    address = parse_ssh_url(url)
    for host in hosts.values():
        if not is_ssh_url(host.url):
            continue
        known = parse_ssh_url(host.url)
        if (known.host, known.port or DEFAULT_PORT, known.user) == (
            address.host,
            address.port or DEFAULT_PORT,
            address.user,
        ):
            return host
    return HostSettings(url=url)


def connect_options(address: SshAddress, settings: HostSettings) -> dict[str, Any]:
    """Return keyword arguments for `asyncssh.connect` (and for sshfs, which passes them on).

    `known_hosts` is always present: left out, sshfs would accept any host key.
    """
    options: dict[str, Any] = {
        "known_hosts": settings.known_hosts,
        "encryption_algs": list(CIPHERS),
        "connect_timeout": settings.timeout_s,
        "login_timeout": settings.timeout_s,
    }
    if address.port is not None:
        options["port"] = address.port
    if address.user is not None:
        options["username"] = address.user
    if settings.identity_file is not None:
        options["client_keys"] = [settings.identity_file]
    return options
