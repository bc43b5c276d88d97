"""From what `store` in the configuration says to a store: a local folder, or a shared one with its mirror."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from dflash_core.config import Config, HostSettings
from dflash_core.errors import ConfigError
from dflash_core.ssh import DEFAULT_PORT, SshAddress, is_ssh_url, parse_ssh_url, settings_for
from dflash_core.store import Store, digest
from dflash_core.store_files import RemoteFiles
from dflash_core.store_remote import RemoteStore

_READ_ONLY_SCHEMES = {"http", "https", "data", "github", "git", "zip", "tar", "libarchive", "reference"}
_opened: dict[tuple[int, str, str], RemoteFiles] = {}
_guard = threading.Lock()


def store_of(config: Config) -> Store:
    """Return the configured store; nothing is sent or written yet.

    Raises:
        ConfigError: it lies on a host that is only ever read, or at a place that cannot be written to.
    """
    return open_store(config.store, config.hosts, mirror=config.store_mirror)


def open_store(url: str, hosts: Mapping[str, HostSettings], *, mirror: str) -> Store:
    """Return the store at a folder or URL.

    Args:
        url: a local folder, `file://`, `ssh://user@host:port/folder`, or any URL of fsspec that can be written to.
        hosts: configured hosts, for their known_hosts and identity files.
        mirror: local folder under which the mirrors of remote stores lie.

    Raises:
        ConfigError: it lies on a host that is only ever read, or the URL names no folder.
        InputError: the URL is malformed.
    """
    if "://" not in url or url.startswith("file://"):
        return Store(url)
    url, scheme = url.rstrip("/"), url.partition("://")[0]
    if scheme in _READ_ONLY_SCHEMES:
        raise ConfigError(f"store: nothing can be written to {scheme}://; give a folder, ssh://, s3:// or the like")
    folder = Path(mirror).expanduser() / digest("store", url)[:16]
    if is_ssh_url(url):
        address, settings = _ssh_place(url, hosts)
        name = settings.model_dump_json()
        return RemoteStore(url, folder, lambda: _shared(url, name, lambda: _ssh_files(url, address, settings)))
    limits = [host.max_read_mb_s for host in hosts.values() if host.url == "local"]
    limit = limits[0] if limits else None
    return RemoteStore(url, folder, lambda: _shared(url, str(limit), lambda: _fsspec_files(url, limit)))


def close_connections() -> None:
    """End the connections to all stores; the next use makes new ones."""
    with _guard:
        opened = [files for (process, *_), files in _opened.items() if process == os.getpid()]
        _opened.clear()
    for files in opened:
        files.close()


def _ssh_place(url: str, hosts: Mapping[str, HostSettings]) -> tuple[SshAddress, HostSettings]:
    address = parse_ssh_url(url)
    if len(address.path) < 2:
        raise ConfigError(f"store = {url!r} names no folder; write ssh://user@host:port/folder")
    for name, host in hosts.items():
        # Whoever logs in: a machine that is only ever read gets no store.
        if host.read_only and is_ssh_url(host.url) and _machine(parse_ssh_url(host.url)) == _machine(address):
            raise ConfigError(
                f"store = {url!r} lies on the host {name!r}, which is configured read_only: true; "
                "put the store elsewhere, or allow writing there"
            )
    return address, settings_for(url, hosts)


def _machine(address: SshAddress) -> tuple[str, int]:
    return address.host.lower(), address.port or DEFAULT_PORT


def _ssh_files(url: str, address: SshAddress, settings: HostSettings) -> RemoteFiles:
    from dflash_core.store_sftp import SftpFiles

    return SftpFiles(url, address, settings)


def _fsspec_files(url: str, max_read_mb_s: float | None) -> RemoteFiles:
    from dflash_core.store_fsspec import FsspecFiles

    return FsspecFiles(url, max_read_mb_s=max_read_mb_s)


def _shared(url: str, settings: str, make: Callable[[], RemoteFiles]) -> RemoteFiles:
    """Return this process's one connection to a place: stores are made anew for every stage."""
    with _guard:
        name = (os.getpid(), url, settings)
        if name not in _opened:
            if not any(process == os.getpid() for process, *_ in _opened):
                atexit.register(close_connections)
            _opened[name] = make()
        return _opened[name]
