"""One way to read files where they lie: this machine, an SSH host (SFTP only), any fsspec URL.

fsspec URLs are read by `cat_file(path, start, end)`. `ssh://` never goes through fsspec: the range
reads of sshfs return whole files.
"""

from __future__ import annotations

from collections.abc import Mapping

from dflash_core.checkpoints.fsspec_source import FsspecSource
from dflash_core.checkpoints.local_source import LocalSource
from dflash_core.checkpoints.source_base import RateLimit, Source, SourceFile
from dflash_core.checkpoints.ssh_source import SshSource
from dflash_core.config import HostSettings
from dflash_core.ssh import is_ssh_url, parse_ssh_url, settings_for

__all__ = ["Source", "SourceFile", "open_source"]


def open_source(url: str, hosts: Mapping[str, HostSettings]) -> Source:
    """Open the place that a path or URL lies on, with the settings of the configured host.

    Raises:
        HostKeyUnknown: an SSH host's key is not in its known_hosts file.
        HostUnreachable: it does not answer, or refuses the login.
        InputError: the URL is malformed, or its scheme is not known here.
    """
    if is_ssh_url(url):
        return SshSource(parse_ssh_url(url), settings_for(url, hosts))
    limits = [host.max_read_mb_s for host in hosts.values() if host.url == "local"]
    limit = RateLimit(limits[0] if limits else None)
    if "://" not in url or url.startswith("file://"):
        return LocalSource(limit)
    return FsspecSource(url, limit)
