"""What this machine's CPU computes well, and with how many threads; told without torch."""

from __future__ import annotations

import os
from pathlib import Path

from dflash_core.target.loading import Target

ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Dtypes that states are computed and stored in, with the bytes of one number; `runtime.DTYPES` has torch's own."""
BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})
"""CPU flags that make bf16 products fast."""


def cpu_dtype(configured: str, target: Target) -> str:
    """Resolve `target.compute_dtype`: auto is bfloat16 only where the CPU computes it and the target stores it.

    A bf16 matrix product without bf16 instructions was 148 times slower than fp32.
    """
    if configured != "auto":
        return configured
    has_bf16 = bool(BF16_FLAGS & cpu_flags())
    return "bfloat16" if has_bf16 and target.config.dtype == "bfloat16" else "float32"


def cpu_flags() -> frozenset[str]:
    """Return the instruction set flags of this machine's CPU; empty where the system does not say."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name.strip() in ("flags", "Features"):
                    return frozenset(value.split())
    except OSError:
        pass
    return frozenset()


def host_threads(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the threads that this process may keep busy: its CPUs, fewer where a container limits their time."""
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = (cgroup / "cpu.max").read_text(encoding="ascii").split()[:2]
        threads = min(threads, max(1, -(-int(quota) // int(period))))
    except (OSError, ValueError):
        pass  # no container, or one without a limit, which says `max`
    return threads
