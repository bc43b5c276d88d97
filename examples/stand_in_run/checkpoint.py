"""Saving as long training runs often do: everything in one `torch.save` dict, written in place."""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

WEIGHTS_PREFIX = "draft_model."


def save_checkpoint(
    run_folder: Path,
    *,
    step: int,
    epoch: int,
    drafter: nn.Module,
    embedding_VD: Tensor,
    optimizer: torch.optim.Optimizer,
    args: argparse.Namespace,
) -> Path:
    """Write `step_N/checkpoint.pt` under the run's folder; the file grows while it is written.

    The dict holds `model_state_dict` (the drafter under `draft_model.`, and frozen copies of the
    target's embedding and head), `optimizer_state_dict`, `epoch`, `step`, `args` and `rng_state`.

    Returns:
        The file.
    """
    weights = {WEIGHTS_PREFIX + name: tensor for name, tensor in drafter.state_dict().items()}
    weights["embed_tokens.weight"] = embedding_VD
    weights["lm_head.weight"] = embedding_VD.clone()
    file = run_folder / f"step_{step}" / "checkpoint.pt"
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(
        {
            "model_state_dict": weights,
            "optimizer_state_dict": optimizer.state_dict(),
            "epoch": epoch,
            "step": step,
            "args": args,
            "rng_state": random_states(),
        },
        file,
    )
    return file


def random_states() -> dict[str, Any]:
    """Return the states of the three global generators, as a trainer stores them to resume."""
    return {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}
