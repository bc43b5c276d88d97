"""Rows of `acceptance` and `survival` out of the blocks of one evaluation: polars, no database.

Only blocks on the serving walk count, except for `tau_all_anchors` and `num_anchors`. Everything
here can be recomputed from the table `blocks` by SQL; results/README.md has the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import polars

from dflash_core.acceptance import statistics
from dflash_core.acceptance.statistics import FloatArray
from dflash_core.results.records import PromptRecord
from dflash_core.results.slices import slices

ACCEPTANCE_SCHEMA: dict[str, Any] = {
    "slice": polars.String,
    "dataset": polars.String,
    "num_prompts": polars.Int64,
    "num_verification_steps": polars.Int64,
    "num_drafted_tokens": polars.Int64,
    "num_accepted_drafts": polars.Int64,
    "num_emitted_tokens": polars.Int64,
    "num_full_blocks": polars.Int64,
    "num_near_ties": polars.Int64,
    "num_anchors": polars.Int64,
    "tau_pooled": polars.Float64,
    "ci_low": polars.Float64,
    "ci_high": polars.Float64,
    "tau_prompt_mean": polars.Float64,
    "tau_all_anchors": polars.Float64,
    "num_prompts_without_near_ties": polars.Int64,
    "num_emitted_without_near_ties": polars.Int64,
    "tau_without_near_ties": polars.Float64,
    "tau_prompt_mean_without_near_ties": polars.Float64,
    "acceptance_rate": polars.Float64,
    "share_full_blocks": polars.Float64,
}
SURVIVAL_SCHEMA: dict[str, Any] = {
    "slice": polars.String,
    "dataset": polars.String,
    "draft_position": polars.Int64,
    "num_blocks": polars.Int64,
    "num_available": polars.Int64,
    "num_survived": polars.Int64,
    "survival": polars.Float64,
    "conditional_acceptance": polars.Float64,
}


class Aggregates(NamedTuple):
    """Rows of the two tables, without `evaluation_id`."""

    acceptance: polars.DataFrame
    survival: polars.DataFrame


def aggregate(
    blocks: polars.DataFrame, prompts: Iterable[PromptRecord], *, num_drafts: int, has_all_anchors: bool
) -> Aggregates:
    """Return acceptance and survival of all prompts, of each dataset and of each group.

    Args:
        blocks: rows of `BLOCK_SCHEMA`.
        prompts: the prompts they belong to.
        num_drafts: tokens that a whole block drafts.
        has_all_anchors: the blocks hold every anchor of the transcripts, not the walk's alone.
    """
    acceptance: list[dict[str, Any]] = []
    survival: list[dict[str, Any]] = []
    for part in slices(blocks, prompts):
        on_walk = part.rows.filter("is_on_walk")
        acceptance.append(part.place | _acceptance(part.rows, on_walk, num_drafts, has_all_anchors=has_all_anchors))
        survival.extend(part.place | row for row in _survival(on_walk, num_drafts))
    return Aggregates(
        polars.DataFrame(acceptance, schema=ACCEPTANCE_SCHEMA), polars.DataFrame(survival, schema=SURVIVAL_SCHEMA)
    )


def number_or_none(value: float) -> float | None:
    """Return a measured number, or None for the NaN that stands for "not measured"."""
    return None if math.isnan(value) else value


def _acceptance(
    blocks: polars.DataFrame, on_walk: polars.DataFrame, num_drafts: int, *, has_all_anchors: bool
) -> dict[str, Any]:
    counts = _counts_per_prompt(on_walk)
    # Turns of one conversation are drawn together; their ids are in the order of the counts.
    clusters = [statistics.conversation_of(name) for name in sorted(set(on_walk["prompt_id"]))]
    interval = statistics.bootstrap_interval(*counts, clusters=clusters, highest=num_drafts + 1)
    num_steps = on_walk.height
    num_drafted = int(on_walk["num_drafted"].sum())
    num_accepted = int(on_walk["num_accepted_drafts"].sum())
    num_full = int((on_walk["num_accepted_drafts"] == num_drafts).sum())
    return {
        "num_prompts": len(counts.emitted_N),
        "num_verification_steps": num_steps,
        "num_drafted_tokens": num_drafted,
        "num_accepted_drafts": num_accepted,
        "num_emitted_tokens": int(on_walk["num_emitted_tokens"].sum()),
        "num_full_blocks": num_full,
        "num_anchors": blocks.height,
        "tau_pooled": number_or_none(statistics.tau_pooled(*counts)),
        "ci_low": number_or_none(interval.low),
        "ci_high": number_or_none(interval.high),
        "tau_prompt_mean": number_or_none(statistics.tau_prompt_mean(*counts)),
        "tau_all_anchors": _mean_emitted(blocks) if has_all_anchors else None,
        "acceptance_rate": _ratio(num_accepted, num_drafted),
        "share_full_blocks": _ratio(num_full, num_steps),
    } | _without_near_ties(on_walk)


class _Counts(NamedTuple):
    """Tokens and steps of each prompt that has a step."""

    emitted_N: FloatArray
    steps_N: FloatArray


def _counts_per_prompt(steps: polars.DataFrame) -> _Counts:
    emitted = polars.col("num_emitted_tokens").sum()
    per_prompt = steps.group_by("prompt_id").agg(emitted, num_steps=polars.len()).sort("prompt_id")
    return _Counts(per_prompt["num_emitted_tokens"].to_numpy(), per_prompt["num_steps"].to_numpy())


def _without_near_ties(on_walk: polars.DataFrame) -> dict[str, Any]:
    """Return how many steps a near-tie decided and both taus of the others; all NULL where margins are not known.

    The walk stays the one that was walked: flagged steps are left out of the sums, nothing is walked anew.
    """
    if on_walk["is_near_tie"].null_count():
        return {}
    rest = on_walk.filter(~polars.col("is_near_tie"))
    counts = _counts_per_prompt(rest)
    return {
        "num_near_ties": on_walk.height - rest.height,
        "num_prompts_without_near_ties": len(counts.emitted_N),
        "num_emitted_without_near_ties": int(rest["num_emitted_tokens"].sum()),
        "tau_without_near_ties": number_or_none(statistics.tau_pooled(*counts)),
        "tau_prompt_mean_without_near_ties": number_or_none(statistics.tau_prompt_mean(*counts)),
    }


def _mean_emitted(blocks: polars.DataFrame) -> float | None:
    return _ratio(int(blocks["num_emitted_tokens"].sum()), blocks.height)


def _ratio(numerator: int, denominator: int) -> float | None:
    return numerator / denominator if denominator else None


def _survival(on_walk: polars.DataFrame, num_drafts: int) -> Iterator[dict[str, Any]]:
    num_blocks = on_walk.height
    num_before = num_blocks
    for position in range(1, num_drafts + 1):
        num_survived = int((on_walk["num_accepted_drafts"] >= position).sum())
        yield {
            "draft_position": position,
            "num_blocks": num_blocks,
            "num_available": int((on_walk["num_available"] >= position).sum()),
            "num_survived": num_survived,
            "survival": _ratio(num_survived, num_blocks),
            "conditional_acceptance": _ratio(num_survived, num_before),
        }
        num_before = num_survived
