"""Every checkpoint of a section against its baseline, and which of them cannot be told from the best.

Differences are paired over the prompts that both have, with the intervals of `compare`. Intervals of single
datasets and groups take fewer resamples: a report of a hundred checkpoints asks for hundreds of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars
from numpy.typing import NDArray

from dflash_core.acceptance import statistics
from dflash_core.acceptance.ranking import told_from_best
from dflash_core.results.report_steps import SliceKey

NUM_SLICE_RESAMPLES = 1000
_ALL: SliceKey = ("all", "all")


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Pooled tau of a checkpoint minus that of the baseline, on the prompts that both have."""

    value: float
    low: float | None
    high: float | None
    num_prompts: int
    word: str | None
    """Why there is no interval."""


def differences(
    prompts: polars.DataFrame, baseline_id: str, slices: Sequence[SliceKey]
) -> dict[tuple[str, SliceKey], Difference]:
    """Return (evaluation, part of the prompts) to its difference; nothing for the baseline or without a shared prompt.

    Args:
        prompts: counts per evaluation and prompt, as `StepCounts.prompts`.
        baseline_id: the evaluation that the others are compared with.
        slices: the parts of the prompts to compare on.
    """
    counts = ("num_emitted_tokens", "num_verification_steps")
    base = prompts.filter(polars.col("evaluation_id") == baseline_id).select("prompt_id", *counts)
    paired = prompts.filter(polars.col("evaluation_id") != baseline_id).join(base, on="prompt_id", suffix="_base")
    found = {}
    for (evaluation_id,), rows in paired.partition_by("evaluation_id", as_dict=True).items():
        columns = rows.select(*(name + suffix for suffix in ("_base", "") for name in counts)).to_numpy().T
        clusters = np.array([statistics.conversation_of(prompt_id) for prompt_id in rows["prompt_id"]], dtype=object)
        for kind, name in slices:
            is_in = _is_in(rows, kind, name)
            if is_in.any():
                difference = _difference(columns[:, is_in], clusters[is_in], is_all=kind == "all")
                found[str(evaluation_id), (kind, name)] = difference
    return found


def labels_not_told(prompts: polars.DataFrame, evaluation_ids: Sequence[str]) -> frozenset[str]:
    """Return the evaluations that no other leads by more than chance, on the prompts that all have.

    Empty where there is nothing to tell: fewer than two evaluations, or no two prompts (conversations) in common.
    """
    if len(evaluation_ids) < 2:
        return frozenset()
    chosen = prompts.filter(polars.col("evaluation_id").is_in(list(evaluation_ids)))
    units = {prompt_id: statistics.conversation_of(prompt_id) for prompt_id in chosen["prompt_id"].unique()}
    is_shared = polars.col("evaluation_id").n_unique().over("prompt_id") == len(evaluation_ids)
    sums = (
        chosen.filter(is_shared)
        .with_columns(unit=polars.col("prompt_id").replace_strict(units, return_dtype=polars.String))
        .group_by("evaluation_id", "unit")
        .agg(polars.col("num_emitted_tokens", "num_verification_steps").sum())
        .sort("evaluation_id", "unit")
    )
    ordered = sorted(evaluation_ids)
    num_units = sums["unit"].n_unique()
    if num_units < 2:
        return frozenset()
    emitted, steps = (
        sums[name].to_numpy().reshape(len(ordered), num_units)
        for name in ("num_emitted_tokens", "num_verification_steps")
    )
    told = told_from_best(emitted, steps)
    return frozenset(name for name, is_told in zip(ordered, told, strict=True) if not is_told)


def _is_in(rows: polars.DataFrame, kind: str, name: str) -> NDArray[np.bool_]:
    """Tell of each prompt whether it is in a part."""
    if kind == "all":
        return np.ones(rows.height, dtype=np.bool_)
    is_in: NDArray[np.bool_] = rows["dataset" if kind == "dataset" else "prompt_group"].to_numpy() == name
    return is_in


def _difference(columns: NDArray[np.int64], clusters: NDArray[np.object_], *, is_all: bool) -> Difference:
    found = statistics.paired_difference(
        *columns,
        clusters=list(clusters),
        num_resamples=statistics.DEFAULT_NUM_RESAMPLES if is_all else NUM_SLICE_RESAMPLES,
    )
    has_interval = not math.isnan(found.ci_low)
    return Difference(
        value=found.difference,
        low=found.ci_low if has_interval else None,
        high=found.ci_high if has_interval else None,
        num_prompts=found.num_prompts,
        word=found.word,
    )
