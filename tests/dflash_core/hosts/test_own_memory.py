"""The memory that this process may still take: what `/proc` says, or less where a container limits it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_core.hosts.own_memory import own_free_bytes

MIB = 1 << 20
MEMINFO = "MemTotal:       16384 kB\nMemFree:         1000 kB\nMemAvailable:    8192 kB\n"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
    return root


@pytest.mark.parametrize(
    ("cgroup", "mib"),
    [
        ({}, 8),
        ({"memory.max": "max\n", "memory.current": f"{15 * MIB}\n"}, 8),
        ({"memory.max": f"{12 * MIB}\n", "memory.current": f"{7 * MIB}\n"}, 5),
        (
            {
                "memory.max": f"{12 * MIB}\n",
                "memory.current": f"{7 * MIB}\n",
                "memory.stat": f"anon 1\ninactive_file {2 * MIB}\nactive_file {1 * MIB}\n",
            },
            8,
        ),
        ({"memory/memory.limit_in_bytes": f"{4 * MIB}\n", "memory/memory.usage_in_bytes": f"{1 * MIB}\n"}, 3),
    ],
    ids=["none", "without a limit", "limit", "limit, cache given back", "version 1"],
)
def test_a_containers_limit_lowers_what_the_machine_has(tmp_path: Path, cgroup: dict[str, str], mib: int) -> None:
    files = {"proc/meminfo": MEMINFO} | {f"sys/fs/cgroup/{name}": text for name, text in cgroup.items()}
    assert own_free_bytes(write(tmp_path, files)) == mib * MIB


def test_a_system_that_does_not_say_gives_none(tmp_path: Path) -> None:
    assert own_free_bytes(tmp_path) is None


def test_this_machine_says_something_of_its_own_size() -> None:
    free = own_free_bytes()
    assert free is None or 1 * MIB < free < 1 << 50
