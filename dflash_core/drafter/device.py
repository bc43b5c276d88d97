"""Where the drafter runs, in which dtype and how much at once, decided from what is really free."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dflash_core.drafter.cuda_presence import may_have_cuda
from dflash_core.drafter.footprint import Footprint, Workload
from dflash_core.drafter.memory import MemoryPlan, plan_memory
from dflash_core.drafter.spec import DrafterSpec
from dflash_core.errors import DoesNotFit, InputError
from dflash_core.hosts.own_memory import own_free_bytes

if TYPE_CHECKING:
    import torch

_CUDA_RUNTIME_BYTES = 512 << 20
"""What CUDA's libraries load and reserve for themselves at their first use; the context is there already."""
_CPU_RUNTIME_BYTES = 64 << 20
_ASSUMED_TOKENS = 4096


class Placement(NamedTuple):
    """Device and dtype of the drafter, and why."""

    device: str
    """`cuda`, which is the process's current one, or `cpu`."""
    dtype: str
    reason: str


def place_drafter(configured: str, spec: DrafterSpec, work: Workload | None = None) -> Placement:
    """Choose device and dtype of a drafter: a GPU in bf16 where a plan fits its free memory, else the CPU in float32.

    float32 is what a CPU computes fast whatever its instructions are, and exact.

    Args:
        configured: `auto`, `cuda` or `cpu`.
        spec: facts of the drafter.
        work: what is to be scored; upper bounds do. None is one transcript of a few thousand tokens.

    Raises:
        InputError: `cuda` was asked for and there is none.
        DoesNotFit: `cuda` was asked for and not even one block at a time fits into its free memory.
    """
    if configured == "cpu":
        return Placement("cpu", "float32", "the config says device: cpu")
    if not _sees_cuda():
        if configured == "cuda":
            raise InputError("device = 'cuda', but torch sees no CUDA device; set device: auto or cpu")
        return Placement("cpu", "float32", "torch sees no CUDA device")
    import torch

    device = torch.device("cuda", torch.cuda.current_device())
    dtype = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    plan = _plan(device, dtype, spec, work)
    if plan.fits:
        return Placement(device.type, str(dtype).removeprefix("torch."), f"{plan.text()} on {_name(device)}")
    if configured == "cuda":
        raise _does_not_fit(plan, device)
    return Placement("cpu", "float32", f"the GPU is too full: {plan.text()} on {_name(device)}")


def plan_scoring(device: torch.device, dtype: torch.dtype, spec: DrafterSpec, work: Workload) -> MemoryPlan:
    """Return how much to hold at once on a device, from what is free there now.

    Args:
        device: a GPU or the CPU.
        dtype: of the computation.
        spec: facts of the drafter, which is not loaded yet.
        work: what is scored.

    Raises:
        DoesNotFit: not even one block at a time fits; with the numbers of each part.
    """
    plan = _plan(device, dtype, spec, work)
    if not plan.fits:
        raise _does_not_fit(plan, device)
    return plan


def free_bytes(device: torch.device) -> int | None:
    """Return the free memory of a device; None where the system does not say.

    What torch itself holds of a GPU without using it counts as free: it is left of what was scored before.
    """
    if device.type != "cuda":
        return own_free_bytes()
    import torch

    free, _total = torch.cuda.mem_get_info(device)
    return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _sees_cuda() -> bool:
    """Tell what torch tells, without loading it where there is nothing to ask."""
    if not may_have_cuda():
        return False
    import torch

    return torch.cuda.is_available()


def _plan(device: torch.device, dtype: torch.dtype, spec: DrafterSpec, work: Workload | None) -> MemoryPlan:
    on_host = device.type != "cuda"
    footprint = Footprint(spec, work or _assumed(spec), itemsize=dtype.itemsize, on_host=on_host)
    runtime_bytes = _CPU_RUNTIME_BYTES if on_host else _CUDA_RUNTIME_BYTES
    return plan_memory(footprint, free_bytes(device), runtime_bytes=runtime_bytes)


def _assumed(spec: DrafterSpec) -> Workload:
    return Workload(
        block_size=spec.block_size,
        longest_tokens=_ASSUMED_TOKENS,
        num_tokens=_ASSUMED_TOKENS,
        num_transcripts=1,
        most_anchors=_ASSUMED_TOKENS,
    )


def _does_not_fit(plan: MemoryPlan, device: torch.device) -> DoesNotFit:
    advice = "free memory, or take a machine with more" if device.type == "cpu" else "free the GPU, or set device: cpu"
    return DoesNotFit(f"the drafter does not fit, even one block at a time: {plan.text()} on {_name(device)}; {advice}")


def _name(device: torch.device) -> str:
    import torch

    return "this machine" if device.type == "cpu" else str(torch.cuda.get_device_name(device))
