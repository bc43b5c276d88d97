"""Our walks against PyPI `dflash` 0.1.0 on a real target: SmolLM2-135M-Instruct, in fp32, block by block.

The drafters are those of the stand-in run, trained here on four transcripts until they know them by heart, and
every one is read from its `step_N/checkpoint.pt`: by our stages for us, by `torch.load` for the official loop.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dflash.model as official
import pytest
import torch
from transformers import Qwen3Config

from dflash_core import evaluation, stages
from dflash_core.config import Config, parse_config
from dflash_core.target.runtime import load_model
from dflash_core.target.transcripts import Transcript
from examples.stand_in_run.checkpoint import WEIGHTS_PREFIX
from examples.stand_in_run.train import parse_arguments, train
from flows.demo import _target_file, _trainer_inputs
from tests.support.direct import evaluate_directly

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[3] / "examples"
DRAFT_CONFIG = EXAMPLES / "stand_in_run" / "draft_config.json"
PROMPTS = ("chat-03", "code-02", "math-03", "languages-05")
"""The answer to the last one ends with a stop token within the limit."""
MAX_NEW_TOKENS = 48
BLOCK_SIZE = 8
WEAK, MIDDLE, STRONG = 40, 60, 80
"""Training steps of the drafters that are compared: tau near 1.7, 5 and 7."""

Walks = dict[str, list[int]]


@dataclass
class Scene:
    """The demo's target, what it wrote, a run of checkpoints, and the walks that were already taken."""

    folder: Path
    transcripts: list[Transcript]
    stop_token_ids: tuple[int, ...]
    model: Any
    taken: dict[tuple[int, str], Walks] = field(default_factory=dict)

    def checkpoint(self, step: int) -> Path:
        return self.folder / "run" / f"step_{step}"

    def our_walks(self, step: int, anchors: str = "walk") -> Walks:
        """Stream the drafter out of its checkpoint, run it, and return tokens emitted per verification step."""
        if (step, anchors) not in self.taken:
            scored = evaluate_directly(config_of(self.folder, anchors), self.checkpoint(step))
            assert "transcripts" not in scored.built
            assert "hidden_states" not in scored.built
            self.taken[step, anchors] = scored.walks()
        return self.taken[step, anchors]

    def official_run(self, drafter: Any, transcript: Transcript) -> SimpleNamespace:
        """Let the official loop speculate from the transcript's prompt on."""
        result: SimpleNamespace = official.dflash_generate(
            drafter,
            self.model,
            torch.tensor([transcript.prompt_ids]),
            MAX_NEW_TOKENS,
            list(self.stop_token_ids),
            return_stats=True,
        )
        return result

    def official_drafter(self, step: int) -> Any:
        """Return the official model with the checkpoint's weights, read without any of our code."""
        config = json.loads(DRAFT_CONFIG.read_text())
        facts = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
        drafter = official.DFlashDraftModel(Qwen3Config(**facts)).eval()
        # Our own file of a moment ago: it may run code.
        saved = torch.load(self.checkpoint(step) / "checkpoint.pt", weights_only=False)["model_state_dict"]
        weights = {
            name.removeprefix(WEIGHTS_PREFIX): tensor
            for name, tensor in saved.items()
            if name.startswith(WEIGHTS_PREFIX)
        }
        drafter.load_state_dict(weights, strict=True)
        return drafter


def config_of(folder: Path, anchors: str = "walk") -> Config:
    return parse_config(
        {
            "target": {"model": str(_target_file()), "compute_dtype": "float32"},
            "completions": {"max_new_tokens": MAX_NEW_TOKENS},
            "prompts": str(folder / "prompts.jsonl"),
            "drafter": {"config": str(DRAFT_CONFIG), "anchors": anchors},
            "device": "cpu",
            "store": str(folder / "store"),
        },
        where="test",
    )


def write_prompts(path: Path) -> None:
    """Write the chosen example prompts, all of the group that the stand-in trainer learns from."""
    lines = [json.loads(line) for line in (EXAMPLES / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    chosen = [line | {"group": "trained on"} for line in lines if line["id"] in PROMPTS]
    assert len(chosen) == len(PROMPTS)
    path.write_text("\n".join(json.dumps(line) for line in chosen) + "\n", encoding="utf-8")


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("demo-target")
    write_prompts(folder / "prompts.jsonl")
    config = config_of(folder)
    plan = stages.plan_target(config)
    stages.write_transcripts(config)
    stages.extract_hidden_states(config, evaluation.configured_layers(config, plan))
    inputs = _trainer_inputs(folder, config)
    train(
        parse_arguments([
            *("--transcripts", str(inputs / "transcripts.jsonl"), "--hidden", str(inputs)),
            *("--embedding", str(inputs / "embedding.safetensors"), "--config", str(DRAFT_CONFIG)),
            *("--out", str(folder / "run"), "--steps", str(STRONG), "--save-every", "20", "--seed", "1"),
        ])
    )  # fmt: skip
    yield Scene(
        folder=folder,
        transcripts=stages.read_transcripts(config, plan),
        stop_token_ids=plan.rendering.stop_token_ids,
        model=load_model(plan.target, "float32"),
    )
    shutil.rmtree(folder)  # 2 GB, which pytest would keep for three sessions


@pytest.mark.parametrize("step", [WEAK, MIDDLE, STRONG])
def test_walks_equal_the_official_acceptance_lengths(scene: Scene, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(official, "_cuda_time", time.perf_counter)
    walks, drafter = scene.our_walks(step), scene.official_drafter(step)
    assert set(walks) == set(PROMPTS)
    for transcript in scene.transcripts:
        result = scene.official_run(drafter, transcript)
        emitted = result.output_ids[0, len(transcript.prompt_ids) :].tolist()
        assert emitted == list(transcript.response_ids), f"{transcript.id}: the greedy transcript is what it emits"
        assert walks[transcript.id] == result.acceptance_lengths, transcript.id


@pytest.mark.parametrize("step", [WEAK, STRONG])
def test_drafting_at_every_anchor_gives_the_same_walk(scene: Scene, step: int) -> None:
    assert scene.our_walks(step, "all") == scene.our_walks(step, "walk")


def test_the_drafters_are_worth_comparing(scene: Scene) -> None:
    """From no accepted draft to a whole block everything occurs, and both ways to end."""
    taus = {}
    lengths: set[int] = set()
    for step in (WEAK, MIDDLE, STRONG):
        walk = [length for walk in scene.our_walks(step).values() for length in walk]
        taus[step] = sum(walk) / len(walk)
        lengths |= set(walk)
    assert lengths == set(range(1, BLOCK_SIZE + 1))
    assert 1 < taus[WEAK] < 2.5 < taus[MIDDLE] < taus[STRONG], taus
    assert taus[STRONG] > 5.5, taus
    assert {transcript.stop_reason for transcript in scene.transcripts} == {"stop", "length"}
    (stopped,) = [transcript for transcript in scene.transcripts if transcript.stop_reason == "stop"]
    assert stopped.response_ids[-1] in scene.stop_token_ids
    assert scene.our_walks(STRONG)[stopped.id][-1] > 1, "the stop token lies inside an accepted block"
