"""What can be learned of a host by reading alone: SFTP, no command, no write flag.

Sizes of disks come from the server's `statvfs` extension; memory, CPU and load from the files under
`/proc`, which a server confined to one folder does not show: then those facts are absent.
"""

from __future__ import annotations

import stat
from collections.abc import Sequence

import asyncssh

from dflash_core.hosts.answers import read_cpuinfo, read_load, read_meminfo
from dflash_core.hosts.model_folders import INDEX_NAMES, FolderAnswer, describe_folder
from dflash_core.hosts.questions import LARGEST_CONFIG_BYTES, LARGEST_FOLDER_FILES, LARGEST_INDEX_BYTES
from dflash_core.hosts.report import Disk, HostFacts, Listing, ModelFolder

_BLOCK_BYTES = 32 * 1024
_LARGEST_PROC_BYTES = 4 * 2**20
# How asyncssh says that a path or an extension is not to be had; a broken connection is not among them.
_ABSENT = (
    asyncssh.SFTPNoSuchFile,
    asyncssh.SFTPNoSuchPath,
    asyncssh.SFTPNotADirectory,
    asyncssh.SFTPPermissionDenied,
    asyncssh.SFTPOpUnsupported,
    asyncssh.SFTPFailure,
)


async def read_sftp_facts(
    sftp: asyncssh.SFTPClient, *, folder: str, disks: Sequence[str], models: Sequence[str]
) -> HostFacts:
    """Return what an SFTP server shows.

    Args:
        sftp: an open client; only reads, listings and sizes are asked of it.
        folder: the folder whose entries are counted; empty means where the login lands.
        disks: folders whose disks are of interest.
        models: folders of models.

    Raises:
        asyncssh.Error: the connection broke.
    """
    memory = read_meminfo((await _read_text(sftp, "/proc/meminfo", _LARGEST_PROC_BYTES) or "").splitlines())
    cpu = read_cpuinfo((await _read_text(sftp, "/proc/cpuinfo", _LARGEST_PROC_BYTES) or "").splitlines())
    return HostFacts(
        ram_total_bytes=memory.ram_total_bytes,
        ram_available_bytes=memory.ram_available_bytes,
        swap_total_bytes=memory.swap_total_bytes,
        swap_free_bytes=memory.swap_free_bytes,
        cpu_model=cpu.model,
        threads=cpu.threads or None,
        cpu_flags=cpu.flags,
        load_1min=read_load((await _read_text(sftp, "/proc/loadavg", _LARGEST_PROC_BYTES) or "").splitlines()),
        disks=tuple([await _read_disk(sftp, path) for path in disks]),
        models=tuple([await _read_model(sftp, path) for path in models]),
        folder=Listing(path=folder or ".", num_entries=await _count_entries(sftp, folder or ".")),
    )


async def _read_text(sftp: asyncssh.SFTPClient, path: str, largest_bytes: int) -> str | None:
    """Return a text file, read to its end because files under /proc state no size; None where it cannot be read."""
    parts: list[bytes] = []
    offset = 0
    try:
        async with sftp.open(path, "rb", block_size=0) as file:
            while offset <= largest_bytes and (part := await file.read(_BLOCK_BYTES, offset)):
                parts.append(part if isinstance(part, bytes) else part.encode())
                offset += len(part)
    except _ABSENT:
        return None
    return b"".join(parts).decode("utf-8", errors="replace") if offset <= largest_bytes else None


async def _read_disk(sftp: asyncssh.SFTPClient, path: str) -> Disk:
    try:
        sizes = await sftp.statvfs(path)
    except _ABSENT:
        return Disk(path=path, is_present=await _exists(sftp, path), total_bytes=None, free_bytes=None)
    block = sizes.frsize or sizes.bsize or 0
    return Disk(
        path=path,
        is_present=True,
        total_bytes=(sizes.blocks or 0) * block or None,
        free_bytes=(sizes.bavail or 0) * block if block else None,
    )


async def _exists(sftp: asyncssh.SFTPClient, path: str) -> bool:
    try:
        await sftp.stat(path)
    except _ABSENT:
        return False
    return True


async def _count_entries(sftp: asyncssh.SFTPClient, path: str) -> int | None:
    try:
        return len([name for name in await sftp.listdir(path) if name not in (".", "..")])
    except _ABSENT:
        return None


async def _read_model(sftp: asyncssh.SFTPClient, path: str) -> ModelFolder:
    """Describe a model's folder from its listing and its two small texts."""
    answer = FolderAnswer(path=path)
    try:
        async for entry in sftp.scandir(path):
            name = entry.filename if isinstance(entry.filename, str) else entry.filename.decode("utf-8", "replace")
            if len(answer.sizes) >= LARGEST_FOLDER_FILES:
                answer.is_cut = True
                break
            await _note_file(sftp, answer, name, entry.attrs)
    except asyncssh.SFTPPermissionDenied:
        answer.kind = "denied"
    except _ABSENT:
        answer.kind = "absent"
    if answer.kind == "folder":
        answer.config_text = await _read_listed(sftp, answer, "config.json", LARGEST_CONFIG_BYTES)
        index = next((name for name in INDEX_NAMES if name in answer.sizes), None)
        if index is not None:
            answer.index_text = await _read_listed(sftp, answer, index, LARGEST_INDEX_BYTES)
    return describe_folder(answer)


async def _note_file(sftp: asyncssh.SFTPClient, answer: FolderAnswer, name: str, attrs: asyncssh.SFTPAttrs) -> None:
    """Add a listed file's size; a link counts as what it points to."""
    if attrs.permissions is not None and stat.S_ISLNK(attrs.permissions):
        try:
            attrs = await sftp.stat(f"{answer.path.rstrip('/')}/{name}")
        except _ABSENT:
            answer.broken_links.append(name)
            return
    if attrs.permissions is not None and stat.S_ISREG(attrs.permissions) and attrs.size is not None:
        answer.sizes[name] = attrs.size


async def _read_listed(sftp: asyncssh.SFTPClient, answer: FolderAnswer, name: str, largest_bytes: int) -> str | None:
    """Return a listed file's text; why there is none goes to the folder's problems."""
    if name not in answer.sizes:
        return None
    text = await _read_text(sftp, f"{answer.path.rstrip('/')}/{name}", largest_bytes)
    if text is None:
        answer.problems.append(f"{name} cannot be read or is larger than {largest_bytes} bytes")
    return text
