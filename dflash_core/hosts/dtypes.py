"""Which dtype a machine computes fast, and why: the choice with the clause that explains it."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_core.hosts.report import BF16_FLAGS, GPU, HostReport

_BF16_CAPABILITY = (8, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenDtype:
    """A dtype and why it was chosen."""

    name: str
    why: str


def choose_cpu_dtype(report: HostReport, stored: str | None, configured: str = "auto") -> ChosenDtype:
    """Choose the dtype for a CPU: bfloat16 only where the CPU computes it and the model is stored in it.

    Args:
        report: the host.
        stored: the model's own dtype; None where that is not known.
        configured: `auto`, or the dtype that the user wants.
    """
    if configured != "auto":
        return ChosenDtype(name=configured, why=f"{configured} because the config says so")
    flags = report.facts.cpu_flags
    if flags is None:
        return ChosenDtype(name="float32", why="float32 because its CPU does not list its instructions")
    fast = [flag for flag in BF16_FLAGS if flag in flags]
    if not fast:
        return ChosenDtype(
            name="float32", why=f"float32 because its CPU has no bf16 instructions ({', '.join(BF16_FLAGS)})"
        )
    if stored != "bfloat16":
        return ChosenDtype(name="float32", why=f"float32 because the model is stored in {stored or 'an unknown dtype'}")
    return ChosenDtype(name="bfloat16", why=f"bfloat16 because its CPU has {fast[-1]}")


def choose_cuda_dtype(gpu: GPU) -> ChosenDtype:
    """Choose the dtype for a GPU: bfloat16 from compute capability 8.0 (Ampere) on."""
    if gpu.compute_capability is None:
        return ChosenDtype(name="float32", why="float32 because its compute capability is not known")
    major, _, minor = gpu.compute_capability.partition(".")
    if (int(major), int(minor)) >= _BF16_CAPABILITY:
        return ChosenDtype(name="bfloat16", why=f"bfloat16 because its compute capability is {gpu.compute_capability}")
    return ChosenDtype(
        name="float32", why=f"float32 because its compute capability, {gpu.compute_capability}, is below 8.0"
    )
