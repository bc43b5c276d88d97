"""The demo's prompts: four datasets, half of each kept from the stand-in trainer."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import examples

ROWS = [json.loads(line) for line in (Path(examples.__file__).parent / "prompts.jsonl").read_text("utf-8").splitlines()]


def test_each_of_four_datasets_is_half_trained_on_and_half_never_seen() -> None:
    assert Counter((row["dataset"], row["group"]) for row in ROWS) == {
        (dataset, group): 3
        for dataset in ("chat", "code", "math", "languages")
        for group in ("trained on", "never seen")
    }


def test_ids_and_prompts_are_unique_and_say_something() -> None:
    assert all(set(row) == {"id", "dataset", "group", "prompt"} for row in ROWS)
    assert len({row["id"] for row in ROWS}) == len(ROWS)
    assert len({row["prompt"].casefold() for row in ROWS}) == len(ROWS)
    assert all(len(row["prompt"].split()) >= 5 for row in ROWS)
    assert all(row["id"].startswith(row["dataset"] + "-") for row in ROWS)
