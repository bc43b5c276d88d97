"""Evaluations of the size that a long training run leaves: every anchor of every prompt, for many checkpoints."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import numpy as np
import polars
from numpy.typing import NDArray

from dflash_core.results.records import BLOCK_SCHEMA, CheckpointRecord, EvaluationRecord, PromptRecord
from dflash_core.store import digest

BLOCK_SIZE = 16
DATASETS = ("chat", "code", "math", "reasoning", "writing")
TEXT = "The bookshop on the corner opens at nine and closes when the last reader has left. "
"""The texts of prompts and answers are made of this, so that they weigh what real ones do."""
CHARACTERS_PER_TOKEN = 4


def make_prompts(num_prompts: int, num_tokens: int) -> tuple[PromptRecord, ...]:
    """Return prompts whose transcripts all have so many tokens; texts differ in every line."""
    length = num_tokens * CHARACTERS_PER_TOKEN
    return tuple(
        PromptRecord(
            prompt_id=f"{DATASETS[number % len(DATASETS)]}-{number:04}",
            dataset=DATASETS[number % len(DATASETS)],
            group="trained on" if number % 7 else "held out",
            num_prompt_tokens=60 + number % 50,
            num_response_tokens=num_tokens,
            stop_reason="length",
            prompt_text=f"Question {number}: {TEXT * 3}",
            response_text="".join(f"{place * number} {TEXT}" for place in range(length // len(TEXT)))[:length],
        )
        for number in range(num_prompts)
    )


def make_record(number: int, prompts: tuple[PromptRecord, ...], num_checkpoints: int) -> EvaluationRecord:
    """Return the evaluation of checkpoint `number`: better ones later, with less and less to gain."""
    quality = 0.45 + 0.35 * (1 - np.exp(-4 * number / num_checkpoints))
    step = 1000 * (number + 1)
    return EvaluationRecord(
        evaluation_id=digest("benchmark", number),
        checkpoint=CheckpointRecord(
            checkpoint_id=digest("checkpoint", number),
            run="run-a",
            step=step,
            url=f"ssh://me@train-box:22/data/runs/run-a/step_{step}/checkpoint.pt",
            layout="torch_zip",
            identity=digest("identity", number),
            weights_sha256=digest("weights", number),
            bytes_total=17_000_000_000,
            bytes_wanted=3_400_000_000,
        ),
        status="done",
        error=None,
        spec={
            "target_identity": digest("target"),
            "target_dtype": "float32",
            "store_dtype": "bfloat16",
            "thinking": False,
            "chat_template_digest": digest("template"),
            "verification_rule": "greedy",
            "counting_rule": "bonus counted, cut at the stop token",
            "row_alignment": "same position",
            "metrics_version": 1,
            "extraction_version": 1,
            "packages": {"torch": "2.13.0"},
            "anchors": "all",
        },
        target="Qwen3.6-27B",
        block_size=BLOCK_SIZE,
        device="cuda",
        dtype="bfloat16",
        transcripts_digest=digest("transcripts"),
        started_at=datetime(2026, 3, 1, tzinfo=UTC) + timedelta(hours=number),
        seconds={"stream_checkpoint": 41.0, "run_drafter": 63.5},
        cached={"stream_checkpoint": False, "run_drafter": False},
        bytes_read=3_400_000_000,
        prompts=prompts,
        blocks=_blocks(prompts, quality, np.random.default_rng([7, number])),
    )


def _blocks(prompts: tuple[PromptRecord, ...], quality: float, generator: np.random.Generator) -> polars.DataFrame:
    """Draft from every anchor of every prompt and follow the walk; N prompts, A anchors each."""
    num_prompts, num_anchors = len(prompts), prompts[0].num_response_tokens - 1
    # The same prompts are hard for every checkpoint.
    hardness_N = np.random.default_rng(1).normal(0, 0.12, size=num_prompts)
    rate_N = np.clip(quality + hardness_N + generator.normal(0, 0.02, size=num_prompts), 0.05, 0.95)
    remaining_A = num_anchors - np.arange(num_anchors)
    available_A = np.minimum(BLOCK_SIZE - 1, remaining_A)
    drawn_NA = generator.geometric(1 - rate_N[:, None], size=(num_prompts, num_anchors)) - 1
    accepted_NA = np.minimum(drawn_NA, available_A)
    emitted_NA = np.minimum(accepted_NA + 1, remaining_A)
    walk_step_NA = _walk_steps(emitted_NA)
    has_miss_NA = accepted_NA < available_A
    rank_NA = 1 + generator.geometric(0.15, size=accepted_NA.shape)
    shape = accepted_NA.shape
    columns = {
        "prompt_id": np.repeat([prompt.prompt_id for prompt in prompts], num_anchors),
        "anchor_index": np.broadcast_to(np.arange(num_anchors), shape).ravel(),
        "walk_step": walk_step_NA.ravel(),
        "is_on_walk": (walk_step_NA >= 0).ravel(),
        "num_drafted": np.full(num_prompts * num_anchors, BLOCK_SIZE - 1),
        "num_available": np.broadcast_to(available_A, shape).ravel(),
        "num_accepted_drafts": accepted_NA.ravel(),
        "num_emitted_tokens": emitted_NA.ravel(),
        "is_near_tie": (generator.random(shape) < 0.02).ravel(),
        "miss_rank": np.where(has_miss_NA, rank_NA, -1).ravel(),
    }
    frame = polars.DataFrame(columns, schema=BLOCK_SCHEMA)
    return frame.with_columns(
        polars.when(polars.col(name) >= 0).then(polars.col(name)).alias(name) for name in ("walk_step", "miss_rank")
    )


def _walk_steps(emitted_NA: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the walk's step at each anchor, -1 off the walk; all prompts step at once."""
    num_prompts, num_anchors = emitted_NA.shape
    steps_NA = np.full(emitted_NA.shape, -1, dtype=np.int64)
    place_N, step = np.zeros(num_prompts, dtype=np.int64), 0
    alive_M = np.arange(num_prompts)
    while len(alive_M):
        steps_NA[alive_M, place_N[alive_M]] = step
        place_N[alive_M] += emitted_NA[alive_M, place_N[alive_M]]
        alive_M = alive_M[place_N[alive_M] < num_anchors]
        step += 1
    return steps_NA
