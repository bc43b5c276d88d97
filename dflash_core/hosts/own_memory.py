"""The memory that this process may still take, as the probe reads it of any host: the machine's or its container's."""

from __future__ import annotations

from pathlib import Path

from dflash_core.hosts.answers import read_meminfo, within_container

_CGROUP_FOLDERS = ("sys/fs/cgroup", "sys/fs/cgroup/memory")
_CGROUP_FILES = ("memory.max", "memory.current", "memory.limit_in_bytes", "memory.usage_in_bytes")
_CACHES = ("inactive_file", "active_file")


def own_free_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes of RAM that can be taken without swapping, or None where the system does not say.

    Args:
        root: of the file system that holds `proc` and `sys`.
    """
    meminfo = read_meminfo(_lines(root / "proc/meminfo"))
    cgroup: dict[str, str] = {}
    for folder in _CGROUP_FOLDERS:
        for name in _CGROUP_FILES:
            lines = _lines(root / folder / name)
            if lines:
                cgroup.setdefault(name, lines[0].strip())
        for line in _lines(root / folder / "memory.stat"):
            name, _, value = line.partition(" ")
            if name in _CACHES:
                cgroup.setdefault(name, value.strip())
    return within_container(meminfo, cgroup).ram_available_bytes


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
