"""What all benchmarks share: clocks, the conditions of a run, and tables in Markdown."""

from __future__ import annotations

import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

PROJECT = Path(__file__).parents[2]
FOLDER = PROJECT / ".benchmarks"
"""What takes minutes to make is kept here; remove the folder to make it anew."""


def num_threads() -> int:
    """Return how many CPU threads both sides of a comparison get: BENCHMARK_THREADS, else 1."""
    return int(os.environ.get("BENCHMARK_THREADS", "1"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Seconds:
    """What one call took."""

    wall: float
    cpu: float
    """CPU time of this process, all threads: what other processes on the machine hardly change."""


def timed(call: Callable[[], T]) -> tuple[T, Seconds]:
    """Run a call and return its result and what it took."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = call()
    return result, Seconds(wall=time.perf_counter() - wall, cpu=time.process_time() - cpu)


def median(rounds: Iterable[Seconds]) -> Seconds:
    """Return the medians of wall and CPU time."""
    taken = list(rounds)
    return Seconds(wall=statistics.median(one.wall for one in taken), cpu=statistics.median(one.cpu for one in taken))


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return `median (least-most)`."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def load_average() -> float:
    """Return how many processes wanted a CPU in the last minute."""
    return os.getloadavg()[0]


def show(title: str, rows: Sequence[dict[str, Any]], *notes: str) -> None:
    """Print a table in Markdown with the conditions under which it came about."""
    columns = list(rows[0])
    lines = [
        f"\n### {title}\n",
        f"| {' | '.join(columns)} |",
        f"|{'---|' * len(columns)}",
        *(f"| {' | '.join(_text(row[column]) for column in columns)} |" for row in rows),
        "",
        *(f"{note}  " for note in notes),
        f"{conditions()}  ",
    ]
    print("\n".join(lines), flush=True)


def conditions(*packages: str) -> str:
    """Return hardware, threads, load and versions in one line."""
    versions = [f"{name} {version(name)}" for name in ("torch", "transformers", "dflash", "asyncssh", *packages)]
    return (
        f"{cpu_name()}, {os.cpu_count()} CPUs, {num_threads()} thread(s) used, load average now "
        f"{load_average():.1f}; Python {platform.python_version()}, {', '.join(versions)}, {openssh_version()}"
    )


def cpu_name() -> str:
    """Return the CPU's model and the flags that decide how fast it multiplies."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    found = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    flags = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "aes") if re.search(rf"\b{flag}\b", text)]
    return f"{found.group(1) if found else platform.machine()} ({' '.join(flags)})"


def openssh_version() -> str:
    """Return the version of the OpenSSH client, or that there is none."""
    try:
        return subprocess.run(["ssh", "-V"], capture_output=True, text=True, check=True).stderr.split(",")[0]
    except (OSError, subprocess.CalledProcessError):
        return "no OpenSSH client"


def _text(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
