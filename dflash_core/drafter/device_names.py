"""The GPU that a drafter would run on: its name, so that processes can take turns on it, and what is left for them."""

from __future__ import annotations

import torch


def gpu_name(configured: str) -> str | None:
    """Return the GPU's name, the same in every process whatever it calls that GPU, or None without one.

    Args:
        configured: `auto`, `cuda` or `cpu`.
    """
    if configured == "cpu" or not torch.cuda.is_available():
        return None
    # Indices are each process's own (CUDA_VISIBLE_DEVICES).
    return f"gpu-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


def give_back_unused() -> None:
    """Give back what torch holds of a GPU without using it: to the next process it would be taken."""
    torch.cuda.empty_cache()
