r"""Train a small drafter on the target's own continuations and save it as a real run does.

    python -m examples.stand_in_run.train --transcripts transcripts.jsonl --hidden hidden/ \
        --embedding embedding.safetensors --out runs/stand_in

It plays the training box of a long run. Its checkpoints are `step_N/checkpoint.pt`, one `torch.save`
dict each, written in place, with weights, frozen embedding and head, optimizer, arguments and random
states in one file.

The transcripts are few and the drafter learns them by heart. That is the point: within minutes tau
rises on the prompts it was trained on, and hardly on those it never saw.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from pathlib import Path

import numpy as np
import torch

from dflash_core.errors import DFlashEvalError, InputError, one_line
from examples.stand_in_run.checkpoint import save_checkpoint
from examples.stand_in_run.data import TrainingData, draw_batch, read_training_data
from examples.stand_in_run.loss import draft_loss, position_weights
from examples.stand_in_run.model import DraftConfig, Drafter, read_draft_config

BETAS = (0.9, 0.95)
MAX_GRADIENT_NORM = 1.0
LAST_LR_FRACTION = 0.1
"""The learning rate falls along a cosine to this part of its highest value."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    try:
        train(parse_arguments(arguments))
    except DFlashEvalError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return error.exit_status
    return 0


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; what it says is stored in every checkpoint as `args`."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.stand_in_run.train",
        description="Train a small drafter on the target's own continuations and save it as a real run does.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--transcripts", type=Path, required=True, help="JSON lines with id, group, prompt_ids, response_ids")
    add("--hidden", type=Path, required=True, help="folder of layer_NNNN.safetensors, one tensor `hidden` each")
    add("--embedding", type=Path, required=True, help="safetensors file with the tensor `weight`: embedding and head")
    add("--config", type=Path, default=Path(__file__).parent / "draft_config.json", help="draft config of the drafter")
    add("--out", type=Path, required=True, help="folder of the run; step_N/checkpoint.pt appear in it")
    add("--group", default="trained on", help="train on the transcripts of this group")
    add("--steps", type=int, default=360, help="training steps")
    add("--save-every", type=int, default=60, help="steps between two saves; the untrained step 0 is saved too")
    add("--transcripts-per-step", type=int, default=6, help="transcripts in a step")
    add("--anchors", type=int, default=4, help="anchors of each transcript in a step")
    add("--lr", type=float, default=1.5e-3, help="highest learning rate of AdamW")
    add("--warmup-steps", type=int, default=30, help="steps in which the learning rate rises")
    add("--loss-decay", type=float, default=4.0, help="draft position p weighs exp(-(p - 1) / this)")
    add("--random-tokens", type=int, default=2048, help="sample of the vocabulary in the loss; 0 takes all of it")
    add("--threads", type=int, default=1, help="CPU threads")
    add("--seed", type=int, default=0, help="seed of weights, batches and samples")
    return parser.parse_args(arguments)


def train(args: argparse.Namespace) -> list[float]:
    """Train as the arguments say, saving on the way.

    Returns:
        The loss of each step, in nats.

    Raises:
        InputError: an input is missing, unreadable, or does not fit the others.
    """
    for name in ("steps", "save_every", "transcripts_per_step", "anchors", "warmup_steps", "threads"):
        if getattr(args, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} is {getattr(args, name)}, expected at least 1")
    torch.set_num_threads(args.threads)
    _seed_all(args.seed)
    config = read_draft_config(args.config)
    data = read_training_data(args.transcripts, args.hidden, args.embedding, group=args.group, config=config)
    args = argparse.Namespace(**vars(args), **_facts_of(config))
    drafter = Drafter(config)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=args.lr, betas=BETAS, weight_decay=0.0, foreach=True)
    num_weights = sum(parameter.numel() for parameter in drafter.parameters())
    print(f"{num_weights:,} weights, {len(data.transcripts)} transcripts of group {args.group!r}", flush=True)
    losses: list[float] = []
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    for step in range(args.steps + 1):
        if step > 0:
            for group in optimizer.param_groups:
                group["lr"] = args.lr * lr_factor(step, warmup_steps=args.warmup_steps, steps=args.steps)
            losses.append(_train_step(drafter, optimizer, data, args))
        if step % args.save_every == 0 or step == args.steps:
            _report(losses, step, args, wall_s=time.perf_counter() - began_s, cpu_s=time.process_time() - began_cpu_s)
            epoch = step * args.transcripts_per_step // len(data.transcripts)
            save_checkpoint(
                args.out,
                step=step,
                epoch=epoch,
                drafter=drafter,
                embedding_VD=data.embedding_VD,
                optimizer=optimizer,
                args=args,
            )
    return losses


def lr_factor(step: int, *, warmup_steps: int, steps: int) -> float:
    """Return the part of the highest learning rate that step 1..steps uses."""
    if step < warmup_steps:
        return step / warmup_steps
    progress = (step - warmup_steps) / max(1, steps - warmup_steps)
    return LAST_LR_FRACTION + (1 - LAST_LR_FRACTION) * (1 + math.cos(math.pi * progress)) / 2


def _train_step(
    drafter: Drafter, optimizer: torch.optim.Optimizer, data: TrainingData, args: argparse.Namespace
) -> float:
    """Draft from a batch of anchors, move the weights once, and return the loss before."""
    batch = draw_batch(
        data.transcripts,
        num_transcripts=args.transcripts_per_step,
        num_anchors=args.anchors,
        config=drafter.config,
    )
    hidden_BAKD = drafter(batch.features_BTF, data.embedding_VD[batch.block_ids_BAK], batch.anchor_positions_BA)
    weights_P = position_weights(args.block_size, decay=args.loss_decay)
    loss = draft_loss(
        hidden_BAKD[:, :, 1:].flatten(0, 2),
        batch.reference_ids_BAP.flatten(),
        (weights_P * batch.exists_BAP).flatten(),
        embedding_VD=data.embedding_VD,
        known_tokens_U=data.known_tokens_U,
        num_random=args.random_tokens,
    )
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(drafter.parameters(), MAX_GRADIENT_NORM)
    optimizer.step()
    return loss.item()


def _facts_of(config: DraftConfig) -> dict[str, object]:
    return {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
    }


def _seed_all(seed: int) -> None:
    """Seed the three global generators, whose states the checkpoints carry."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _report(losses: list[float], step: int, args: argparse.Namespace, *, wall_s: float, cpu_s: float) -> None:
    recent = losses[-args.save_every :]
    loss = f"loss {sum(recent) / len(recent):.3f}, " if recent else ""
    left = f", {wall_s / step * (args.steps - step):.0f} s left" if step else ""
    print(f"step {step}/{args.steps}: {loss}{wall_s:.0f} s, {cpu_s:.0f} CPU s{left}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
