"""The prompts of one checkpoint that are worth reading: where it does best and worst, and where it lost most."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import duckdb
import polars

NUM_PER_KIND = 3
"""So many best, so many worst and so many lost prompts of a checkpoint."""
TEXT_LENGTH = 600
"""Characters of a prompt or answer that the page shows."""

_TEXTS = f"""
    SELECT
        prompt_id, num_prompt_tokens, num_response_tokens, stop_reason,
        left(prompt_text, {TEXT_LENGTH}), length(prompt_text),
        left(response_text, {TEXT_LENGTH}), length(response_text)
    FROM prompts WHERE transcripts_digest = ? AND list_contains(?, prompt_id)
"""
_WALKS = """
    SELECT
        prompt_id, list(anchor_index ORDER BY walk_step), list(num_drafted ORDER BY walk_step),
        list(num_accepted_drafts ORDER BY walk_step)
    FROM blocks WHERE is_on_walk AND evaluation_id = ? AND list_contains(?, prompt_id)
    GROUP BY prompt_id
"""


class WalkStep(NamedTuple):
    """One verification step of the serving walk."""

    anchor_index: int
    num_drafted: int
    num_accepted: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownPrompt:
    """One prompt and what the checkpoint did there."""

    prompt_id: str
    kind: str
    """Why it is shown: `best`, `worst` or `lost`, most against the baseline."""
    dataset: str
    tau: float
    tau_baseline: float | None
    num_steps: int
    num_prompt_tokens: int
    num_response_tokens: int
    stop_reason: str
    prompt_text: str
    response_text: str
    """Both cut to `TEXT_LENGTH` characters, with an ellipsis."""
    walk: tuple[WalkStep, ...]
    """Its verification steps, as they were stored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptList:
    """The prompts of one checkpoint that are shown."""

    evaluation_id: str
    role: str
    """`best`, `latest` or `best and latest`."""
    run: str
    step: int | None
    url: str
    block_size: int | None
    transcripts_digest: str | None
    prompts: tuple[ShownPrompt, ...]

    def command(self, prompt_id: str) -> str:
        """Return what a person types to see the drafts of one prompt."""
        selector = self.run if self.step is None else f"{self.run}:{self.step}"
        return shlex.join(["dflash-eval", "show", selector, prompt_id])


def read_prompt_lists(
    connection: duckdb.DuckDBPyConnection,
    prompts: polars.DataFrame,
    best: Sequence[Mapping[str, Any]],
    latest: Mapping[str, Any] | None,
    baseline: Mapping[str, Any] | None,
) -> tuple[PromptList, ...]:
    """Return the prompts to show of the latest and the best checkpoint, the latest first.

    Args:
        connection: to the database.
        prompts: counts per evaluation and prompt, as `StepCounts.prompts`.
        best: the row of the best checkpoint, or nothing.
        latest: the row of the latest one, or None.
        baseline: what losses are counted against, or None.
    """
    roles: dict[str, tuple[str, Mapping[str, Any]]] = {}
    for role, row in (*(("latest", row) for row in [latest] if row is not None), *(("best", row) for row in best)):
        found = roles.get(row["evaluation_id"])
        roles[row["evaluation_id"]] = ("best and latest" if found else role, row)
    return tuple(_read_list(connection, prompts, role, row, baseline) for role, row in roles.values())


def _read_list(
    connection: duckdb.DuckDBPyConnection,
    prompts: polars.DataFrame,
    role: str,
    row: Mapping[str, Any],
    baseline: Mapping[str, Any] | None,
) -> PromptList:
    has_baseline = baseline is not None and baseline["evaluation_id"] != row["evaluation_id"]
    taus = _taus(prompts, row["evaluation_id"], baseline["evaluation_id"] if baseline and has_baseline else None)
    chosen = _choose(taus, has_baseline=has_baseline)
    ids = [found["prompt_id"] for found in chosen]
    texts = {
        prompt_id: values
        for prompt_id, *values in connection.execute(_TEXTS, [row["transcripts_digest"], ids]).fetchall()
    }
    walks = {
        prompt_id: tuple(WalkStep(*step) for step in zip(*columns, strict=True))
        for prompt_id, *columns in connection.execute(_WALKS, [row["evaluation_id"], ids]).fetchall()
    }
    return PromptList(
        role=role,
        **{name: row[name] for name in ("evaluation_id", "run", "step", "url", "block_size", "transcripts_digest")},
        prompts=tuple(_shown(found, texts[found["prompt_id"]], walks[found["prompt_id"]]) for found in chosen),
    )


def _taus(prompts: polars.DataFrame, evaluation_id: str, baseline_id: str | None) -> polars.DataFrame:
    """Return one row per prompt, the lowest tau first."""
    tau = polars.col("num_emitted_tokens") / polars.col("num_verification_steps")
    with_tau = prompts.with_columns(tau=tau)
    base = with_tau.filter(polars.col("evaluation_id") == polars.lit(baseline_id, polars.String)).select(
        "prompt_id", tau_baseline="tau"
    )
    return (
        with_tau.filter(evaluation_id=evaluation_id)
        .join(base, on="prompt_id", how="left")
        .with_columns(lost=polars.col("tau_baseline") - polars.col("tau"))
        .sort("tau", "prompt_id")
    )


def _choose(taus: polars.DataFrame, *, has_baseline: bool) -> list[dict[str, Any]]:
    """Return the worst, the most lost and the best prompts; each once."""
    num_worst = min(NUM_PER_KIND, (taus.height + 1) // 2)
    num_best = min(NUM_PER_KIND, taus.height - num_worst)
    worst = taus.head(num_worst).with_columns(kind=polars.lit("worst"))
    best = taus.tail(num_best).reverse().with_columns(kind=polars.lit("best"))
    taken = [*worst["prompt_id"], *best["prompt_id"]]
    lost = taus.filter((polars.col("lost") > 0) & ~polars.col("prompt_id").is_in(taken)) if has_baseline else taus[:0]
    lost = lost.sort("lost", "prompt_id", descending=[True, False]).head(NUM_PER_KIND)
    return polars.concat([worst, lost.with_columns(kind=polars.lit("lost")), best]).to_dicts()


def _shown(found: Mapping[str, Any], text: Sequence[Any], walk: tuple[WalkStep, ...]) -> ShownPrompt:
    num_prompt_tokens, num_response_tokens, stop_reason, prompt, prompt_length, response, response_length = text
    return ShownPrompt(
        prompt_id=found["prompt_id"],
        kind=found["kind"],
        dataset=found["dataset"],
        tau=found["tau"],
        tau_baseline=found["tau_baseline"],
        num_steps=found["num_verification_steps"],
        num_prompt_tokens=num_prompt_tokens,
        num_response_tokens=num_response_tokens,
        stop_reason=stop_reason,
        prompt_text=prompt + ("…" if prompt_length > TEXT_LENGTH else ""),
        response_text=response + ("…" if response_length > TEXT_LENGTH else ""),
        walk=walk,
    )
