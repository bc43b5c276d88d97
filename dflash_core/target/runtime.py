"""Loading the target into memory, and counting how often it runs.

The count is part of the product: scoring a further checkpoint must not run the target at all, and a
test reads `num_forward_passes` to prove it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dflash_core.errors import DoesNotFit, TargetError
from dflash_core.target.loading import Target, quiet_transformers

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_HEADROOM = 1.2
"""Share above the weights that activations and the allocator need."""

num_forward_passes = 0
"""Forward passes of any target in this process."""


def count_forward_pass(*_: Any) -> None:
    """Count one reading of a sequence by a target."""
    global num_forward_passes
    num_forward_passes += 1


def load_model(target: Target, compute_dtype: str) -> Any:
    """Load the whole target on the CPU, ready for inference.

    Args:
        target: the model folder.
        compute_dtype: `float32` or `bfloat16`.

    Raises:
        DoesNotFit: the weights in that dtype need more memory than is available; nothing was loaded.
        TargetError: transformers cannot read the folder, or a tensor is missing, cut off or of another shape.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    check_memory(target, compute_dtype)
    quiet_transformers()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            target.folder,
            dtype=DTYPES[compute_dtype],
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise TargetError(f"{target.folder} cannot be loaded: {' '.join(str(error).split())[:300]}") from error
    model, found = loaded
    # transformers fills such gaps with random numbers and only warns.
    missing = sorted(found["missing_keys"])
    if missing:
        raise TargetError(
            f"{target.folder} lacks {len(missing)} tensors that its config calls for, first {missing[0]!r}; "
            f"copy it again"
        )
    model.eval()
    model.requires_grad_(False)
    model.register_forward_pre_hook(count_forward_pass)
    return model


def check_memory(target: Target, compute_dtype: str) -> None:
    """Refuse, before anything is loaded, a target that does not fit into the available memory.

    Raises:
        DoesNotFit: with the numbers.
    """
    stored = DTYPES.get(target.config.dtype or "", torch.bfloat16)
    needed = int(target.size_bytes / stored.itemsize * DTYPES[compute_dtype].itemsize * _HEADROOM)
    available = available_memory_bytes()
    if available is not None and needed > available:
        raise DoesNotFit(
            f"target {target.name!r} in {compute_dtype} needs {needed / 2**30:.1f} GiB of memory, "
            f"{available / 2**30:.1f} GiB are available; use a machine with more, or target.compute_dtype: bfloat16"
        )


@contextmanager
def using_threads(number: int) -> Iterator[None]:
    """Have torch compute with so many threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def available_memory_bytes() -> int | None:
    """Return the memory that can be used without swapping, or None where the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        return None
    return None


def decoder_of(model: Any) -> Any:
    """Return the stack of decoder layers of a causal language model: it has `layers` and `norm`.

    Raises:
        TargetError: the model is built in a way that this reader does not know.
    """
    decoder = model.get_decoder()
    if not hasattr(decoder, "layers") or not hasattr(decoder, "norm"):
        raise TargetError(f"{type(model).__name__} has no decoder with `layers` and `norm`; this kind is not supported")
    return decoder
