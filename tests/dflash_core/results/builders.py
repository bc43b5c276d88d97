"""Evaluations for the tests: simulated drafts on every anchor of short transcripts, and their walk."""

import dataclasses
from datetime import UTC, datetime, timedelta

import numpy as np
import polars

from dflash_core.results.records import (
    BLOCK_SCHEMA,
    EXTRA_SCHEMAS,
    CheckpointRecord,
    EvaluationRecord,
    Extras,
    PromptRecord,
)

DATASETS = ("chat", "code", "math")
FIRST_START = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


def make_prompts(num_prompts: int = 9) -> tuple[PromptRecord, ...]:
    return tuple(
        PromptRecord(
            prompt_id=f"prompt-{place}",
            dataset=DATASETS[place % len(DATASETS)],
            group="trained on" if place % 2 else "held out",
            num_prompt_tokens=10 + place,
            num_response_tokens=20 + 5 * place,
            stop_reason="stop" if place % 3 else "length",
            prompt_text=f"question {place}",
            response_text=f"answer {place}",
        )
        for place in range(num_prompts)
    )


def make_blocks(
    prompts: tuple[PromptRecord, ...], *, block_size: int, quality: float, seed: int, walk_only: bool = False
) -> polars.DataFrame:
    """Draft from every anchor; each draft is right with the given probability, less on later prompts."""
    generator = np.random.default_rng(seed)
    rows = []
    for place, prompt in enumerate(prompts):
        next_on_walk, walk_step = 0, 0
        for anchor in range(prompt.num_response_tokens - 1):
            remaining = prompt.num_response_tokens - 1 - anchor
            available = min(block_size - 1, remaining)
            is_right = generator.random(block_size - 1) < quality * (1 - 0.3 * place / len(prompts))
            accepted = int(min(np.cumprod(is_right).sum(), available))
            is_on_walk = anchor == next_on_walk
            row = {
                "prompt_id": prompt.prompt_id,
                "anchor_index": anchor,
                "walk_step": walk_step if is_on_walk else None,
                "is_on_walk": is_on_walk,
                "num_drafted": block_size - 1,
                "num_available": available,
                "num_accepted_drafts": accepted,
                "num_emitted_tokens": min(accepted + 1, remaining),
                "is_near_tie": bool(generator.random() < 0.1),
                "miss_rank": None if accepted == available else int(generator.integers(2, 50)),
            }
            if is_on_walk:
                next_on_walk, walk_step = anchor + row["num_emitted_tokens"], walk_step + 1
            if is_on_walk or not walk_only:
                rows.append(row)
    return polars.DataFrame(rows, schema=BLOCK_SCHEMA)


def make_record(
    evaluation_id: str = "eval-a",
    *,
    run: str = "run-a",
    step: int | None = 100,
    quality: float = 0.6,
    seed: int = 0,
    block_size: int = 4,
    minutes: int = 0,
    prompts: tuple[PromptRecord, ...] | None = None,
    walk_only: bool = False,
    **changes: object,
) -> EvaluationRecord:
    prompts = make_prompts() if prompts is None else prompts
    record = EvaluationRecord(
        evaluation_id=evaluation_id,
        checkpoint=make_checkpoint(f"checkpoint of {evaluation_id}", run=run, step=step),
        status="done",
        error=None,
        spec={
            "target_dtype": "float32",
            "thinking": False,
            "chat_template_digest": "c0ffee" * 8,
            "verification_rule": "greedy",
            "counting_rule": "bonus counted, cut at the stop token",
            "row_alignment": "same position",
            "metrics_version": 1,
            "extraction_version": 1,
            "packages": {"torch": "2.13.0"},
        },
        target="SmolLM2-135M-Instruct",
        block_size=block_size,
        device="cpu",
        dtype="float32",
        transcripts_digest="d1" * 16,
        started_at=FIRST_START + timedelta(minutes=minutes),
        seconds={"stream_checkpoint": 0.5, "run_drafter": 2.25},
        cached={"stream_checkpoint": False, "run_drafter": False},
        bytes_read=20_500_000,
        prompts=prompts,
        blocks=make_blocks(prompts, block_size=block_size, quality=quality, seed=seed, walk_only=walk_only),
    )
    return dataclasses.replace(record, **changes)


def make_extras(
    prompts: tuple[PromptRecord, ...] | None = None,
    *,
    budgets: tuple[int, ...] = (4, 16),
    block_sizes: tuple[int, ...] = (2, 3),
    num_drafts: int = 3,
) -> Extras:
    """Return extras of every kind whose counts fit together; larger budgets and blocks get further."""
    prompts = make_prompts() if prompts is None else prompts
    sweep, recall, trees, sampled = [], [], [], []
    for place, prompt in enumerate(prompts):
        for size in block_sizes:
            sweep.append(
                {"prompt_id": prompt.prompt_id, "block_size": size, "method": "redrafted"} | _walk(prompt, size)
            )
        for budget in budgets:
            trees.append({"prompt_id": prompt.prompt_id, "budget": budget} | _walk(prompt, 2 + budget // 4))
        for position in range(1, num_drafts + 1):
            for k in (1, 2, 4, 8, 16):
                reached = (10 + place) // position
                both = min(reached, k + place // 3)
                counts = (20, min(20, both + 2), reached, both)
                recall.append((prompt.prompt_id, position, k, *counts))
        for temperature in (0.5, 1.0):
            for rule in ("one_hot", "sampled"):
                first = 4.0 + place / 8 + temperature
                sums = (8, 20, 7, first, first * 1.75, first * 1.25)
                sampled.append((prompt.prompt_id, temperature, rule, *sums))
    return Extras(
        sweep=polars.DataFrame(sweep, schema=EXTRA_SCHEMAS["sweep"]),
        recall=polars.DataFrame(recall, schema=EXTRA_SCHEMAS["recall"], orient="row"),
        trees=polars.DataFrame(trees, schema=EXTRA_SCHEMAS["trees"]),
        sampled=polars.DataFrame(sampled, schema=EXTRA_SCHEMAS["sampled"], orient="row"),
    )


def _walk(prompt: PromptRecord, tokens_per_step: int) -> dict[str, int]:
    emitted = prompt.num_response_tokens - 1
    steps = -(-emitted // tokens_per_step)
    return {
        "num_verification_steps": steps,
        "num_accepted_drafts": emitted - steps,
        "num_emitted_tokens": emitted,
    }


def make_checkpoint(checkpoint_id: str, *, run: str = "run-a", step: int | None = 100) -> CheckpointRecord:
    name = "published" if step is None else f"step_{step}"
    return CheckpointRecord(
        checkpoint_id=checkpoint_id,
        run=run,
        step=step,
        url=f"ssh://me@train-box:2222/data/{run}/{name}/checkpoint.pt",
        layout="torch_zip",
        identity="crc-" + checkpoint_id,
        weights_sha256="ab" * 32,
        bytes_total=100_000_000,
        bytes_wanted=20_000_000,
    )


def make_failed(
    evaluation_id: str = "eval-f",
    *,
    error: str = "the file is cut off",
    minutes: int = 0,
    step: int | None = 100,
    status: str = "failed",
) -> EvaluationRecord:
    return make_record(
        evaluation_id,
        step=step,
        minutes=minutes,
        status=status,
        error=error,
        blocks=None,
        prompts=(),
        transcripts_digest=None,
        seconds={"stream_checkpoint": 0.1},
        cached={},
    )
