"""Databases that reports are made of: an ordinary one, with names that would like to be code, and odd ones."""

import dataclasses
from datetime import UTC, datetime
from pathlib import Path

from dflash_core.results.connection import writing
from dflash_core.results.database import write_evaluation
from tests.dflash_core.results.builders import make_extras, make_failed, make_prompts, make_record

NOW = datetime(2026, 3, 2, 8, 30, tzinfo=UTC)
EVIL = "<script>window.owned=1</script><!-- \"'&<b>\u2028"
EVIL_LINK = '<a href="javascript:window.owned=2">click</a>'
EVIL_DATASET = "<img src=x onerror=window.owned=3>"
EVIL_TEXT = "</script><script>window.owned=4</script> ]]> {{7*7}} ${7*7} %{y}"


def make_scene(path: Path) -> Path:
    """Write two runs, a published drafter, extras, other conditions, failures and a vanished checkpoint."""
    prompts = tuple(
        dataclasses.replace(
            prompt,
            dataset=EVIL_DATASET if prompt.dataset == "math" else prompt.dataset,
            prompt_text=f"question {place} {EVIL_TEXT}",
            response_text=f"answer {place} {EVIL}",
        )
        for place, prompt in enumerate(make_prompts(24))
    )
    shared = {"prompts": prompts, "block_size": 8}
    for place, quality in enumerate((0.2, 0.5, 0.8, 0.7)):
        step = 100 * (place + 1)
        extras = {"extras": make_extras(prompts[:9], num_drafts=7)} if place > 1 else {}
        record = make_record(f"eval-{step}", step=step, quality=quality, seed=place, minutes=place, **shared, **extras)
        write_evaluation(path, record)
    write_evaluation(path, make_record("eval-evil", run=EVIL, step=100, quality=0.4, seed=9, **shared))
    write_evaluation(path, make_record("eval-link", run=EVIL_LINK, step=150, quality=0.3, seed=7, **shared))
    write_evaluation(path, make_record("eval-published", run="published", step=None, quality=0.6, seed=8, **shared))
    write_evaluation(path, make_record("eval-other", transcripts_digest="other prompts", seed=5, minutes=-9))
    write_evaluation(path, make_failed("eval-failed", step=500, error=f"cut off: {EVIL}", minutes=9))
    write_evaluation(path, make_failed("eval-gone", step=600, status="vanished", error=f"gone: {EVIL}", minutes=9))
    # Failed, then vanished: the last word counts. Vanished, then scored at that address: no news.
    write_evaluation(path, make_failed("eval-lost-before", step=600, error="was cut off", minutes=8))
    write_evaluation(path, make_failed("eval-back", step=100, status="vanished", error="was away", minutes=-1))
    # No news any more: a failure at the address of what was scored later, and one before a newer failure.
    write_evaluation(path, make_failed("eval-mended", error="was down", minutes=-1))
    write_evaluation(path, make_failed("eval-failed-before", step=500, error="was asleep", minutes=8))
    return path


def make_many(path: Path, num_checkpoints: int = 100) -> Path:
    """Write one evaluation and copy it, step by step: a long run."""
    write_evaluation(path, make_record("eval-0", step=0, quality=0.5, prompts=make_prompts(6)))
    copies = f"range(1, {num_checkpoints}) AS copies(n)"
    with writing(path) as connection:
        for table, changes in {
            "checkpoints": "'checkpoint-' || n AS checkpoint_id, 1000 * n AS step, url || n AS url",
            "evaluations": "'eval-' || n AS evaluation_id, 'checkpoint-' || n AS checkpoint_id",
            "acceptance": "'eval-' || n AS evaluation_id, least(4, tau_pooled + n * 0.004) AS tau_pooled",
            "survival": "'eval-' || n AS evaluation_id",
            "blocks": "'eval-' || n AS evaluation_id",
        }.items():
            columns = [name for name, *_ in connection.execute(f"DESCRIBE {table}").fetchall()]
            changed = [change.rsplit(" ", 1)[1] for change in changes.split(", ") if " AS " in change]
            kept = ", ".join(name for name in columns if name not in changed)
            connection.execute(
                f"INSERT INTO {table} BY NAME SELECT {kept}, {changes} FROM (FROM {table}) AS originals, {copies}"
            )
    return path


def make_odd(folder: Path) -> dict[str, Path]:
    """Write databases that a report must say something sensible of; returns what each is to its path."""
    one, two = make_prompts(1), make_prompts(2)
    too_short = tuple(dataclasses.replace(prompt, num_response_tokens=1) for prompt in two)
    long = "a-very-long-name-" * 18
    long_prompts = tuple(dataclasses.replace(prompt, dataset=long, prompt_id=long + prompt.prompt_id) for prompt in two)
    records = {
        "empty": [],
        "single checkpoint": [make_record()],
        "single prompt": [make_record("eval-a", prompts=one), make_record("eval-b", step=200, prompts=one, seed=1)],
        "no steps": [make_record(prompts=too_short)],
        "without margins": [make_record(prompts=two)],
        "long names": [make_record("eval-a", run=long, prompts=long_prompts), make_failed(error=long)],
        "failures alone": [make_failed()],
        "vanished alone": [make_failed(status="vanished", error="rotated away")],
    }
    paths = {}
    for name, found in records.items():
        paths[name] = folder / f"{name.replace(' ', '-')}.duckdb"
        with writing(paths[name]):
            pass
        for record in found:
            write_evaluation(paths[name], record)
    with writing(paths["without margins"]) as connection:
        connection.execute(
            "UPDATE acceptance SET ci_low = NULL, ci_high = NULL, num_near_ties = NULL, tau_without_near_ties = NULL, "
            "num_prompts_without_near_ties = NULL, num_emitted_without_near_ties = NULL, "
            "tau_prompt_mean_without_near_ties = NULL"
        )
    return paths
