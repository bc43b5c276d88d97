"""Rows of `sweep`, `recall`, `trees` and `sampled` out of the counts per prompt: polars, no database.

Counts and sums add up over the prompts of a slice; every ratio is made from the added ones.
"""

from __future__ import annotations

from collections.abc import Iterable

import polars

from dflash_core.results.records import EXTRA_SCHEMAS, PromptRecord
from dflash_core.results.slices import Slice, slices

_SETTINGS = {
    "sweep": ("block_size", "method"),
    "recall": ("draft_position", "k"),
    "trees": ("budget",),
    "sampled": ("temperature", "rule"),
}
"""What tells the rows of one slice apart."""


def _ratio(numerator: str, denominator: str) -> polars.Expr:
    """Return a ratio of two columns of sums, NULL where there is nothing to divide by."""
    return polars.when(polars.col(denominator) > 0).then(polars.col(numerator) / polars.col(denominator))


_TAUS = {"tau_pooled": _ratio("num_emitted_tokens", "num_verification_steps")}
_RATIOS: dict[str, dict[str, polars.Expr]] = {
    "sweep": _TAUS,
    "trees": _TAUS,
    "recall": {
        "recall_teacher_forced": _ratio("num_recalled", "num_blocks"),
        "recall_conditional": _ratio("num_reached_recalled", "num_reached"),
    },
    "sampled": {
        "first_acceptance": _ratio("sum_first_acceptance", "num_with_drafts"),
        "expected_accepted_teacher_forced": _ratio("sum_expected_accepted", "num_blocks"),
        "expected_accepted_at_least": _ratio("sum_accepted_on_transcript", "num_blocks"),
    },
}
_HAS_STEPS = polars.col("num_verification_steps") > 0
# Of walks: prompts with a step, and the mean of their own taus.
_OF_PROMPTS = (
    _HAS_STEPS.sum().cast(polars.Int64).alias("num_prompts"),
    (polars.col("num_emitted_tokens") / polars.col("num_verification_steps"))
    .filter(_HAS_STEPS)
    .mean()
    .alias("tau_prompt_mean"),
)


def aggregate_extra(name: str, frame: polars.DataFrame, prompts: Iterable[PromptRecord]) -> polars.DataFrame:
    """Return the rows of one table, without `evaluation_id`.

    Args:
        name: of the extra, which is that of its table.
        frame: its counts per prompt, in the columns of `records.EXTRA_SCHEMAS`.
        prompts: those that the evaluation was made on.
    """
    parts = [_aggregate(name, part) for part in slices(frame, prompts)]
    return polars.concat(parts)


def _aggregate(name: str, part: Slice) -> polars.DataFrame:
    settings = _SETTINGS[name]
    counts = [column for column in EXTRA_SCHEMAS[name] if column not in ("prompt_id", *settings)]
    of_prompts = _OF_PROMPTS if "num_verification_steps" in counts else ()
    added = part.rows.group_by(settings).agg(polars.col(counts).sum(), *of_prompts).sort(settings)
    place = [polars.lit(value).alias(column) for column, value in part.place.items()]
    return added.with_columns(*place, *(ratio.alias(column) for column, ratio in _RATIOS[name].items()))
