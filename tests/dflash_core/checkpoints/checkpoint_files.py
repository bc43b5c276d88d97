"""Checkpoint files as trainers write them, small, with torch.save and safetensors themselves."""

from __future__ import annotations

import argparse
import pathlib
import random
from pathlib import Path
from typing import Any

import numpy
import torch

HIDDEN = 32


def drafter_tensors(
    *, num_layers: int = 2, hidden: int = HIDDEN, dtype: torch.dtype = torch.float32, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Return the tensors of a DFlash drafter under z-lab's names."""
    generator = torch.Generator().manual_seed(seed)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    tensors = {"fc.weight": make(hidden, 3 * hidden), "hidden_norm.weight": make(hidden), "norm.weight": make(hidden)}
    for i in range(num_layers):
        layer = {
            "input_layernorm.weight": make(hidden),
            "post_attention_layernorm.weight": make(hidden),
            "self_attn.q_proj.weight": make(hidden, hidden),
            "self_attn.k_proj.weight": make(hidden // 2, hidden),
            "self_attn.v_proj.weight": make(hidden // 2, hidden),
            "self_attn.o_proj.weight": make(hidden, hidden),
            "self_attn.q_norm.weight": make(8),
            "self_attn.k_norm.weight": make(8),
            "mlp.gate_proj.weight": make(2 * hidden, hidden),
            "mlp.up_proj.weight": make(2 * hidden, hidden),
            "mlp.down_proj.weight": make(hidden, 2 * hidden),
        }
        tensors |= {f"layers.{i}.{name}": tensor for name, tensor in layer.items()}
    return tensors


def dflash2_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what DFlash2 adds to a drafter, the codebooks as embeddings name them."""
    layers = {name.split(".")[1] for name in tensors if name.startswith("layers.")}
    added = {
        "candidate_selector.predecessor_codebook.weight": torch.randn(50, 4),
        "candidate_selector.successor_codebook.weight": torch.randn(50, 4),
        "candidate_selector.hidden_projection.weight": torch.randn(4, HIDDEN),
    }
    for i in layers:
        for conv in ("attention_conv", "mlp_conv"):
            added[f"layers.{i}.{conv}.base_kernel"] = torch.randn(2, 2, HIDDEN)
            added[f"layers.{i}.{conv}.kernel_projection.weight"] = torch.randn(8, HIDDEN)
    return added


def adamw_state(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the state of a real AdamW after one step on these tensors."""
    parameters = [torch.nn.Parameter(tensor.float().clone()) for tensor in tensors.values()]
    optimizer = torch.optim.AdamW(parameters, lr=6e-4)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer.state_dict()


def training_args(**more: Any) -> argparse.Namespace:
    """Return what a trainer's argument parser leaves in a checkpoint."""
    return argparse.Namespace(
        block_size=8,
        target_layer_ids=[1, 14, 27],
        mask_token_id=0,
        output_dir=pathlib.PosixPath("/data/runs/a"),
        seed=numpy.int64(7),
        lr=numpy.float32(0.5),
        dtype=torch.bfloat16,
        name="drafter",
        use_cache=False,
        **more,
    )


def mixed_checkpoint(
    tensors: dict[str, torch.Tensor], *, step: int = 100, key: str = "model_state_dict", vocab: int = 4000
) -> dict[str, Any]:
    """Return the dict of a realistic checkpoint: weights, frozen copies, AdamW, args and random state."""
    hidden = tensors["norm.weight"].numel()
    frozen = {"embed_tokens.weight": torch.randn(vocab, hidden), "lm_head.weight": torch.randn(vocab, hidden)}
    return {
        "epoch": 3,
        "step": step,
        key: {**tensors, **frozen},
        "optimizer_state_dict": adamw_state(tensors),
        "scheduler": {"last_epoch": 3, "_last_lr": [6e-4]},
        "args": training_args(),
        "rng_state": {"python": random.getstate(), "numpy": numpy.random.get_state(), "torch": torch.get_rng_state()},
        "best_loss": numpy.float64(2.5),
    }


def save_mixed(
    path: Path, *, step: int = 100, seed: int = 0, vocab: int = 4000, **sizes: Any
) -> dict[str, torch.Tensor]:
    """Write a realistic checkpoint and return the drafter's tensors in it."""
    tensors = drafter_tensors(seed=seed, **sizes)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(mixed_checkpoint(tensors, step=step, vocab=vocab), path)
    return tensors
