"""Where the drafter runs, and in which dtype, decided from what is really free."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from dflash_core.drafter.spec import DrafterSpec, expected_shapes
from dflash_core.errors import DoesNotFit, InputError

_MARGIN = 1.2
"""Share above the counted bytes that kernels and the allocator need."""
_WORKING_BYTES = 1 << 30
"""Room for attention scores, logits in slices and context keys and values of one group."""


class Placement(NamedTuple):
    """Device and dtype of the drafter, and why."""

    device: torch.device
    dtype: torch.dtype
    reason: str


def place_drafter(configured: str, spec: DrafterSpec) -> Placement:
    """Choose device and dtype of a drafter.

    Args:
        configured: `auto`, `cuda` or `cpu`.
        spec: facts of the drafter.

    Raises:
        InputError: `cuda` was asked for and there is none.
        DoesNotFit: `cuda` was asked for and the drafter does not fit into its free memory.
    """
    cpu = torch.device("cpu")
    if configured == "cpu":
        return Placement(cpu, torch.float32, "the config says device: cpu")
    if not torch.cuda.is_available():
        if configured == "cuda":
            raise InputError("device = 'cuda', but torch sees no CUDA device; set device: auto or cpu")
        return Placement(cpu, torch.float32, "torch sees no CUDA device")
    device = torch.device("cuda", torch.cuda.current_device())
    dtype = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    needed = drafter_bytes(spec, dtype)
    free, _total = torch.cuda.mem_get_info(device)
    numbers = f"{needed / 2**30:.1f} GiB needed, {free / 2**30:.1f} GiB free on {torch.cuda.get_device_name(device)}"
    if needed <= free:
        return Placement(device, dtype, numbers)
    if configured == "cuda":
        raise DoesNotFit(f"the drafter does not fit: {numbers}; free the GPU, or set device: cpu")
    return Placement(cpu, torch.float32, f"the GPU is too full: {numbers}")


def drafter_bytes(spec: DrafterSpec, dtype: torch.dtype) -> int:
    """Return the memory that scoring needs on the device: weights, the head and working room."""
    weights = sum(math.prod(shape) for shape in expected_shapes(spec).values())
    num_elements = weights + spec.vocab_size * spec.hidden_size
    return int(num_elements * dtype.itemsize * _MARGIN) + _WORKING_BYTES
