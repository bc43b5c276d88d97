"""The ways to choose prompts that every aggregate is made for: all, each dataset, each group."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import polars

from dflash_core.results.records import ALL, PromptRecord


class Slice(NamedTuple):
    """One way to choose prompts, and their rows."""

    kind: str
    name: str
    rows: polars.DataFrame

    @property
    def place(self) -> dict[str, str]:
        """Return the columns that name it in a table."""
        return {"slice": self.kind, "dataset": self.name}


def slices(rows: polars.DataFrame, prompts: Iterable[PromptRecord]) -> Iterator[Slice]:
    """Yield the rows of all prompts, of each dataset and of each group.

    Args:
        rows: with a column `prompt_id`.
        prompts: those that the rows belong to.
    """
    prompts = list(prompts)
    yield Slice(ALL, ALL, rows)
    for name in sorted({prompt.dataset for prompt in prompts}):
        yield Slice("dataset", name, _of_prompts(rows, [p.prompt_id for p in prompts if p.dataset == name]))
    for name in sorted({prompt.group for prompt in prompts if prompt.group is not None}):
        yield Slice("group", name, _of_prompts(rows, [p.prompt_id for p in prompts if p.group == name]))


def _of_prompts(rows: polars.DataFrame, prompt_ids: list[str]) -> polars.DataFrame:
    return rows.filter(polars.col("prompt_id").is_in(prompt_ids))
