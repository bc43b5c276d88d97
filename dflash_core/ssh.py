"""One reading of `ssh://` URLs and of the settings that go with them.

A URL on a configured host (same user, host and port) takes that host's settings, so that a
checkpoint's address typed by hand is read with the same known_hosts file and rate limit.
"""

from __future__ import annotations

import math
import os
import pwd
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from dflash_core.config import HostSettings
from dflash_core.errors import InputError

SSH_SCHEMES = ("ssh", "sftp")
DEFAULT_PORT = 22
# The client's order decides; asyncssh offers chacha20 first, which costs twice the CPU of GCM.
GCM_CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com")
CIPHERS = (*GCM_CIPHERS, "chacha20-poly1305@openssh.com", "aes128-ctr")
SERVER_ALIVE_S = 15
# What ssh itself allows since 9.6: these words may end up in a ProxyCommand, which a shell runs.
_PLAIN_HOST = re.compile(r"(?!-)[^\s'`\"$\\;&<>|(){}/@]+")
_PLAIN_USER = re.compile(r"(?!-)[^'`\";&<>|(){}\x00-\x1f]+(?<!\\)")


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
    # As it was typed, not in lower case: the aliases of ~/.ssh/config know the difference.
    begin = max(0, place.lower().find(parts.hostname))
    host = place[begin : begin + len(parts.hostname)]
    return SshAddress(
        host=host, port=port, user=unquote(user) or None, path=unquote(slash + path, errors="surrogateescape")
    )


def settings_for(url: str, hosts: Mapping[str, HostSettings]) -> HostSettings:
    """Return the settings of the configured host that a URL lies on, else the defaults."""
    address = parse_ssh_url(url)
    for host in hosts.values():
        if not is_ssh_url(host.url):
            continue
        known = parse_ssh_url(host.url)
        if (known.host.lower(), known.port or DEFAULT_PORT, known.user) == (
            address.host.lower(),
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


def openssh_command(address: SshAddress, settings: HostSettings) -> list[str]:
    """Return the command that starts an SFTP session over the pipes of the user's own OpenSSH client.

    `~/.ssh/config`, agent, hardware keys and jump hosts are honoured, because it is the client that
    the user logs in with by hand; a master connection of theirs is used but never started. Nothing
    is forwarded, no shell is asked for, nobody is asked for a password, and no file is written.

    Raises:
        InputError: host or user would be read as something else on a command line.
    """
    if not _PLAIN_HOST.fullmatch(address.host):
        raise InputError(f"{address.host!r} is not the name of a host; write ssh://user@host:port/path")
    if address.user is not None and not _PLAIN_USER.fullmatch(address.user):
        raise InputError(f"{address.user!r} is not the name of a user; write ssh://user@host:port/path")
    options = {
        "BatchMode": "yes",
        "Ciphers": "^" + ",".join(GCM_CIPHERS),
        "ClearAllForwardings": "yes",
        "Compression": "no",
        "ConnectTimeout": str(max(1, math.ceil(settings.timeout_s))),
        "ControlMaster": "no",
        "ForwardAgent": "no",
        "ForwardX11": "no",
        "LogLevel": "INFO",  # the reasons for a lost connection are told at this level
        "PermitLocalCommand": "no",
        "RemoteCommand": "none",
        "RequestTTY": "no",
        "ServerAliveInterval": str(SERVER_ALIVE_S),
        "Tunnel": "no",
        "UpdateHostKeys": "no",
        **_host_key_options(settings),
    }
    if address.port is not None:
        options["Port"] = str(address.port)
    if address.user is not None:
        options["User"] = address.user
    if settings.identity_file is not None:
        options |= {"IdentityFile": _quoted(settings.identity_file), "IdentitiesOnly": "yes"}
    words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    return ["ssh", *words, "-s", "--", address.host, "sftp"]


def _host_key_options(settings: HostSettings) -> dict[str, str]:
    """Return how the host key is checked; the default file leaves its place to the user's own configuration."""
    if settings.known_hosts is None:
        nowhere = {"UserKnownHostsFile": "/dev/null", "GlobalKnownHostsFile": "/dev/null"}
        return {"StrictHostKeyChecking": "no", **nowhere}
    options = {"StrictHostKeyChecking": "yes"}
    if Path(settings.known_hosts) != Path(_login_home(), ".ssh", "known_hosts"):
        options |= {"UserKnownHostsFile": _quoted(settings.known_hosts), "GlobalKnownHostsFile": "/dev/null"}
    return options


def _login_home() -> str:
    """Return the home folder that ssh goes by; it does not look at HOME."""
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return str(Path.home())


def _quoted(path: str) -> str:
    """Return a path as one word of ssh's configuration, `%` and quotes taken literally."""
    escaped = str(Path(path).absolute()).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'
