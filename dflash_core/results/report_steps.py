"""Steps of the serving walks, counted by what the report draws them against: one pass over `blocks`, no row by row.

Two frames come out of the database, both small whatever its size: steps by evaluation, kind of prompt, place and
tokens emitted; and sums by evaluation and prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import duckdb
import polars

FIRST_BIN_TOKENS = 16
"""Places are counted in bins of [0, 16), [16, 32), [32, 64), ...: each twice as wide as all before it."""

SliceKey = tuple[str, str]
"""Kind (`all`, `dataset`, `group`) and name of a part of the prompts."""

_BIN = f"CASE WHEN {{0}} < {FIRST_BIN_TOKENS} THEN 0 ELSE CAST(floor(log2({{0}})) AS INTEGER) - 3 END"
_STEPS = f"""
    SELECT
        evaluation_id, dataset, prompt_group, num_emitted_tokens,
        {_BIN.format("anchor_index")} AS answer_bin,
        {_BIN.format("(num_prompt_tokens + anchor_index)")} AS context_bin,
        count(*) AS num_steps
    FROM blocks
    JOIN (FROM evaluations WHERE list_contains(?, evaluation_id)) AS evaluations USING (evaluation_id)
    JOIN prompts USING (transcripts_digest, prompt_id)
    WHERE is_on_walk
    GROUP BY ALL
"""
_PROMPTS = """
    SELECT evaluation_id, prompt_id, dataset, prompt_group, num_emitted_tokens, num_verification_steps
    FROM prompt_acceptance WHERE list_contains(?, evaluation_id)
    ORDER BY evaluation_id, prompt_id
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCounts:
    """What is counted of the walks of some evaluations."""

    steps: polars.DataFrame
    """evaluation_id, slice, name, num_emitted_tokens, answer_bin, context_bin, num_steps."""
    prompts: polars.DataFrame
    """evaluation_id, prompt_id, dataset, prompt_group, num_emitted_tokens, num_verification_steps."""

    def of(self, evaluation_ids: Sequence[str]) -> StepCounts:
        """Return what belongs to some of the evaluations."""
        is_in = polars.col("evaluation_id").is_in(list(evaluation_ids))
        return StepCounts(steps=self.steps.filter(is_in), prompts=self.prompts.filter(is_in))

    def by(self, column: str) -> dict[tuple[str, SliceKey], dict[int, tuple[int, int]]]:
        """Return (evaluation, part of the prompts) to value of a column to steps and tokens emitted there."""
        frame = self.steps.group_by("evaluation_id", "slice", "name", column).agg(
            polars.col("num_steps").sum(),
            (polars.col("num_steps") * polars.col("num_emitted_tokens")).sum().alias("num_tokens"),
        )
        found: dict[tuple[str, SliceKey], dict[int, tuple[int, int]]] = {}
        for evaluation_id, kind, name, value, num_steps, num_tokens in frame.iter_rows():
            found.setdefault((evaluation_id, (kind, name)), {})[value] = (num_steps, num_tokens)
        return found


def read_step_counts(connection: duckdb.DuckDBPyConnection, evaluation_ids: Sequence[str]) -> StepCounts:
    """Count the steps of some evaluations, for all prompts, each dataset and each group."""
    steps = polars.DataFrame(connection.sql(_STEPS, params=[list(evaluation_ids)]))
    prompts = polars.DataFrame(connection.sql(_PROMPTS, params=[list(evaluation_ids)]))
    return StepCounts(steps=_in_slices(steps), prompts=prompts)


def bin_name(place: int) -> str:
    """Return the tokens that a bin holds, both ends included.

    >>> [bin_name(place) for place in (0, 1, 2, 6)]
    ['0–15', '16–31', '32–63', '512–1023']
    """
    if place == 0:
        return f"0–{FIRST_BIN_TOKENS - 1}"
    first = FIRST_BIN_TOKENS << (place - 1)
    return f"{first}–{2 * first - 1}"


def _in_slices(steps: polars.DataFrame) -> polars.DataFrame:
    """Return the rows once for all prompts, once for their dataset and once for their group, where they have one."""
    parts = [
        steps.with_columns(slice=polars.lit("all"), name=polars.lit("all")),
        steps.with_columns(slice=polars.lit("dataset"), name=polars.col("dataset")),
        steps.with_columns(slice=polars.lit("group"), name=polars.col("prompt_group")).drop_nulls("name"),
    ]
    return polars.concat([part.drop("dataset", "prompt_group") for part in parts])
