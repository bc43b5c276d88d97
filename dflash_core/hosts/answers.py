"""Reads what `questions.probe_script` answered; any text at all gives facts or their absence, never an error."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dflash_core.hosts.model_folders import FolderAnswer, describe_folder
from dflash_core.hosts.report import CPU_FLAGS, GPU, Disk, HostFacts
from dflash_core.hosts.wording import printable

_KIB = 1024
_NUMBER = re.compile(r"[0-9]{1,18}")
_DECIMAL = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
_DF_SIZES = re.compile(r"\s([0-9]{1,18})\s+[0-9]+\s+(-?[0-9]{1,18})\s+[0-9]+%\s")
_MOST_NOTES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a host wrote, read as far as it goes."""

    facts: HostFacts
    has_begun: bool
    """False: this is no answer to our questions at all."""
    is_complete: bool
    """False: it was cut off before its end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """What `/proc/meminfo` says, in bytes."""

    ram_total_bytes: int | None
    ram_available_bytes: int | None
    swap_total_bytes: int | None
    swap_free_bytes: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Cpu:
    """What `/proc/cpuinfo` says."""

    model: str | None
    threads: int
    flags: tuple[str, ...] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Section:
    name: str
    lines: list[str]

    def values(self) -> dict[str, str]:
        """Return the section's `key value` lines; of a key that comes twice, the first."""
        pairs: dict[str, str] = {}
        for line in self.lines:
            key, _, value = line.partition(" ")
            pairs.setdefault(key, value)
        return pairs


def read_answer(text: str) -> Answer:
    """Read the answer of `questions.probe_script`, whole, cut off or something else altogether."""
    sections = list(_split_sections(text))
    names = [section.name for section in sections]
    if "begin" not in names:
        return Answer(facts=HostFacts(), has_begun=False, is_complete=False)
    sections = sections[names.index("begin") :]
    first: dict[str, _Section] = {}
    for section in sections:
        first.setdefault(section.name, section)

    def lines_of(name: str) -> list[str]:
        return first[name].lines if name in first else []

    memory = within_container(read_meminfo(lines_of("memory")), _Section(name="", lines=lines_of("cgroup")).values())
    cpu = read_cpuinfo(lines_of("cpu"))
    python = _Section(name="", lines=lines_of("python")).values()
    gpus, notes = read_gpus(lines_of("gpus"))
    facts = HostFacts(
        system=_first_text(lines_of("system")),
        gpus=gpus,
        ram_total_bytes=memory.ram_total_bytes,
        ram_available_bytes=memory.ram_available_bytes,
        swap_total_bytes=memory.swap_total_bytes,
        swap_free_bytes=memory.swap_free_bytes,
        disks=tuple(_read_disk(section) for section in sections if section.name == "disk"),
        cpu_model=cpu.model,
        threads=next((number for line in lines_of("threads") if (number := _whole(line))), None),
        cpu_flags=cpu.flags,
        load_1min=read_load(lines_of("load")),
        python=printable(python.get("python")),
        torch=printable(python.get("torch")),
        torch_cuda=printable(python.get("torch_cuda")),
        models=tuple(describe_folder(folder) for folder in _read_folders(sections)),
        notes=(*notes, *([note] if (note := printable(python.get("note"))) else [])),
    )
    return Answer(facts=facts, has_begun=True, is_complete="end" in first)


def read_meminfo(lines: Iterable[str]) -> Memory:
    """Read `/proc/meminfo`, whose kB are 1024 bytes."""
    kib: dict[str, int] = {}
    for line in lines:
        found = re.fullmatch(r"(\w+):\s+([0-9]{1,15}) kB\s*", line)
        if found:
            kib[found[1]] = int(found[2])

    def size(name: str) -> int | None:
        return kib[name] * _KIB if name in kib else None

    return Memory(
        ram_total_bytes=size("MemTotal"),
        ram_available_bytes=size("MemAvailable"),
        swap_total_bytes=size("SwapTotal"),
        swap_free_bytes=size("SwapFree"),
    )


def read_cpuinfo(lines: Iterable[str]) -> Cpu:
    """Read `/proc/cpuinfo`, or its first processor alone."""
    values: dict[str, str] = {}
    threads = 0
    for line in lines:
        key, colon, value = line.partition(":")
        if colon:
            threads += key.strip() == "processor"
            values.setdefault(key.strip(), value.strip())
    flags = values.get("flags", values.get("Features"))
    return Cpu(
        model=printable(values.get("model name")),
        threads=threads,
        flags=None if flags is None else tuple(flag for flag in CPU_FLAGS if flag in flags.split()),
    )


def read_load(lines: Iterable[str]) -> float | None:
    """Return the first figure of `/proc/loadavg`: processes that wanted to run, over a minute."""
    for line in lines:
        figure = line.split(" ")[0]
        if _DECIMAL.fullmatch(figure):
            return float(figure)
    return None


def read_gpus(lines: Iterable[str]) -> tuple[tuple[GPU, ...], list[str]]:
    """Return the GPUs that `nvidia-smi` listed, and what else it said."""
    gpus: list[GPU] = []
    notes: list[str] = []
    for line in lines:
        fields = [field.strip() for field in line.split(",")]
        index = _whole(fields[0])
        if index is not None and len(fields) >= 5:
            capability = fields[5] if len(fields) > 5 and re.fullmatch(r"[0-9]{1,3}\.[0-9]{1,3}", fields[5]) else None
            gpus.append(
                GPU(
                    index=index,
                    name=printable(fields[1]) or "unnamed",
                    memory_total_mib=_whole(fields[2]),
                    memory_used_mib=_whole(fields[3]),
                    driver=printable(fields[4]),
                    compute_capability=capability,
                )
            )
        elif (text := printable(line)) is not None and len(notes) < _MOST_NOTES:
            notes.append(f"nvidia-smi: {text}")
    return tuple(gpus), notes


def _split_sections(text: str) -> Iterator[_Section]:
    """Yield the sections; a line outside every section (a login's greeting) is passed over."""
    section: _Section | None = None
    for line in text.split("\n"):
        if re.fullmatch(r"@[a-z_]+", line):
            if section is not None:
                yield section
            section = _Section(name=line[1:], lines=[])
        elif section is not None and line.startswith("|"):
            section.lines.append(line[1:])
    if section is not None:
        yield section


def within_container(memory: Memory, cgroup: dict[str, str]) -> Memory:
    """Lower the RAM to what a container's limit leaves, where there is one below the machine's own."""
    limit = _whole(cgroup.get("memory.max", cgroup.get("memory.limit_in_bytes", "")))
    if limit is None or memory.ram_total_bytes is None or limit >= memory.ram_total_bytes:
        return memory
    used = _whole(cgroup.get("memory.current", cgroup.get("memory.usage_in_bytes", "")))
    available = memory.ram_available_bytes
    if used is not None:
        # File pages count as used but are given up as soon as somebody needs the memory.
        cache = sum(_whole(cgroup.get(name, "")) or 0 for name in ("inactive_file", "active_file"))
        left = max(limit - max(used - cache, 0), 0)
        available = left if available is None else min(available, left)
    return Memory(
        ram_total_bytes=limit,
        ram_available_bytes=available,
        swap_total_bytes=memory.swap_total_bytes,
        swap_free_bytes=memory.swap_free_bytes,
    )


def _read_disk(section: _Section) -> Disk:
    values = section.values()
    sizes = next((found for line in reversed(section.lines) if (found := _DF_SIZES.search(line))), None)
    return Disk(
        path=_path(values.get("path")),
        is_present=values.get("kind") == "present",
        total_bytes=int(sizes[1]) * _KIB if sizes else None,
        free_bytes=max(int(sizes[2]), 0) * _KIB if sizes else None,
    )


def _read_folders(sections: Iterable[_Section]) -> list[FolderAnswer]:
    """Gather each model's sections: its listing, then its two texts or why they are not there."""
    folders: list[FolderAnswer] = []
    for section in sections:
        if section.name == "model":
            folders.append(_read_listing(section))
        elif not folders:
            continue
        elif section.name == "config":
            folders[-1].config_text = "\n".join(section.lines)
        elif section.name == "index":
            folders[-1].index_text = "\n".join(section.lines)
        elif section.name in ("config_problem", "index_problem"):
            name = "config.json" if section.name == "config_problem" else "the index of the shards"
            folders[-1].problems.append(f"{name} {_first_text(section.lines) or 'cannot be read'}")
    return folders


def _read_listing(section: _Section) -> FolderAnswer:
    values = section.values()
    folder = FolderAnswer(path=_path(values.get("path")), kind=values.get("kind", "absent"))
    for line in section.lines:
        word, _, rest = line.partition(" ")
        size, _, name = rest.partition(" ")
        if word == "file" and (size_bytes := _whole(size)) is not None:
            folder.sizes[name] = size_bytes
        elif word == "broken":
            folder.broken_links.append(rest)
    folder.is_cut = "cut" in section.lines
    return folder


def _path(text: str | None) -> str:
    """Return a path as it was asked for, with its spaces, but fit for one line of a terminal."""
    return "".join(char if char.isprintable() else "?" for char in text or "?")


def _first_text(lines: Iterable[str]) -> str | None:
    return next((text for line in lines if (text := printable(line)) is not None), None)


def _whole(text: str) -> int | None:
    """Return a whole number; `[N/A]` and all else is None."""
    return int(text) if _NUMBER.fullmatch(text.strip()) else None
