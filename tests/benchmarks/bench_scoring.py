"""Time per further checkpoint on the demo's target: our whole work against the official loop, walks compared.

Ours is what a further checkpoint costs once the target's part is in the store: read its index, stream the
drafter from its mixed file, load it, score it, store the rows. The official loop is timed from prompt to last
token, target and drafter already in memory.
"""

from __future__ import annotations

import json
import shutil
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dflash.model as official
import polars
import pytest
import torch
from transformers import Qwen3Config

from dflash_core import evaluation, stages
from dflash_core.config import Config
from dflash_core.drafter_reading import read_drafter
from dflash_core.store import Store
from dflash_core.target import transcripts as written
from dflash_core.target.runtime import load_model
from examples.stand_in_run.checkpoint import WEIGHTS_PREFIX
from tests.benchmarks.demo_run import DRAFT_CONFIG, MAX_NEW_TOKENS, STRONG, WEAK, DemoRun
from tests.benchmarks.measuring import Seconds, median, show, timed

ROUNDS = 3
OFFICIAL_ROUND = 1
"""The round in which the official loop runs too, amid ours: once, since it takes minutes."""
GOALS = {WEAK: 25, STRONG: 12}
"""How many times less than the official loop the walk mode shall take (DESIGN: what it is measured against)."""


@pytest.mark.parametrize("step", [WEAK, STRONG], ids=["weak", "strong"])
def test_a_further_checkpoint_against_the_official_loop(
    demo_run: DemoRun, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(official, "_cuda_time", time.perf_counter)
    checkpoint = demo_run.checkpoint(step)
    config = demo_run.config()
    plan = stages.plan_target(config)
    transcripts = stages.read_transcripts(config, plan)
    model, drafter = load_model(plan.target, "float32"), official_drafter(checkpoint)
    stop = list(plan.rendering.stop_token_ids)
    _forget(demo_run)
    _further_checkpoint(config, checkpoint)  # the first one also pays for imports
    taken: dict[str, list[Seconds]] = {"walk": [], "all": [], "official": []}
    parts: list[dict[str, float]] = []
    found: dict[str, dict[str, list[int]]] = {}
    for number in range(ROUNDS):
        for anchors in ("walk", "all"):
            _forget(demo_run)
            (found[anchors], seconds_of), seconds = timed(
                partial(_further_checkpoint, demo_run.config(anchors), checkpoint)
            )
            taken[anchors].append(seconds)
            if anchors == "walk":
                parts.append(seconds_of)
        if number == OFFICIAL_ROUND:
            found["official"], seconds = timed(lambda: official_walks(drafter, model, transcripts, stop))
            taken["official"].append(seconds)
    assert found["walk"] == found["all"] == found["official"], "block by block"
    _show(step, taken, found["official"], {name: min(part[name] for part in parts) for name in parts[0]})


def _show(step: int, taken: dict[str, list[Seconds]], walks: dict[str, list[int]], parts: dict[str, float]) -> None:
    blocks = [length for walk in walks.values() for length in walk]
    peer = median(taken["official"])
    rows = []
    for name, what in (("walk", "ours, walk"), ("all", "ours, all anchors"), ("official", "official loop")):
        ours = median(taken[name])
        rows.append({
            "what": what,
            "wall s": ours.wall,
            "CPU s": ours.cpu,
            "times less (wall)": peer.wall / ours.wall,
            "times less (CPU)": peer.cpu / ours.cpu,
            "goal": GOALS[step] if name == "walk" else "",
        })  # fmt: skip
    show(
        f"Time per further checkpoint, drafter of step {step}",
        rows,
        f"{len(walks)} prompts, {len(blocks)} blocks, tau {sum(blocks) / len(blocks):.2f}; walks equal block by block",
        f"medians of {ROUNDS} rounds of ours, the official loop once amid them; of the walk, at best: "
        + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in parts.items()),
    )


def _further_checkpoint(config: Config, checkpoint: Path) -> tuple[dict[str, list[int]], dict[str, float]]:
    """Score a checkpoint by the stages; return its walks, and the wall seconds of each part."""
    clock = [time.perf_counter()]
    inspection = evaluation.inspect(str(checkpoint), config)
    plan = stages.plan_target(config)
    spec = read_drafter(inspection, config, plan.target.config)
    clock.append(time.perf_counter())
    key = stages.drafter_key(inspection, config)
    streamed = stages.stream_drafter(str(checkpoint), config, inspection.ref.identity, key)
    clock.append(time.perf_counter())
    store = Store(config.store)
    of_target = store.find(written.KIND, plan.transcripts_key)
    assert of_target is not None
    facts = evaluation.evaluation_spec(config, plan, of_target.meta, spec, streamed["meta"]["weights_sha256"])
    blocks = stages.run_drafter(config, facts, streamed["key"], spec)
    clock.append(time.perf_counter())
    assert blocks["was_built"]
    artifact = store.find(stages.BLOCKS_KIND, blocks["key"])
    assert artifact is not None
    walks = _walks(polars.read_parquet(artifact.file(stages.BLOCKS_NAME)))
    names = ("inspect and plan", "stream", "run the drafter")
    return walks, {name: end - begin for name, begin, end in zip(names, clock, clock[1:], strict=False)}


def _walks(blocks: polars.DataFrame) -> dict[str, list[int]]:
    walks: dict[str, list[int]] = {}
    for row in blocks.filter("is_on_walk").sort("prompt_id", "walk_step").iter_rows(named=True):
        walks.setdefault(row["prompt_id"], []).append(row["num_emitted_tokens"])
    return walks


def _forget(run: DemoRun) -> None:
    """Remove what the store holds of drafters, so that they are new to it."""
    for kind in (stages.DRAFTER_KIND, stages.BLOCKS_KIND):
        shutil.rmtree(run.folder / "store" / kind, ignore_errors=True)


def official_drafter(checkpoint: Path) -> Any:
    """Return the official model with a checkpoint's weights."""
    facts = json.loads(DRAFT_CONFIG.read_text(encoding="utf-8"))
    facts = {key: value for key, value in facts.items() if key not in ("architectures", "model_type")}
    drafter = official.DFlashDraftModel(Qwen3Config(**facts)).eval()
    saved = torch.load(checkpoint / "checkpoint.pt", weights_only=False)["model_state_dict"]
    weights = {name.removeprefix(WEIGHTS_PREFIX): tensor for name, tensor in saved.items() if WEIGHTS_PREFIX in name}
    drafter.load_state_dict(weights, strict=True)
    return drafter


def official_walks(drafter: Any, model: Any, transcripts: list[Any], stop: list[int]) -> dict[str, list[int]]:
    """Return the official acceptance lengths of every prompt."""
    walks = {}
    for transcript in transcripts:
        result: SimpleNamespace = official.dflash_generate(
            drafter, model, torch.tensor([transcript.prompt_ids]), MAX_NEW_TOKENS, stop, return_stats=True
        )
        walks[transcript.id] = result.acceptance_lengths
    return walks
