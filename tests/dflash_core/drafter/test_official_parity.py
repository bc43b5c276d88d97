"""Our walks against PyPI `dflash` 0.1.0, block by block, in fp32: the official loop is the oracle."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dflash.model as official
import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config

from dflash_core.drafter.head import Head
from dflash_core.drafter.model import Drafter
from dflash_core.drafter.scoring import score_transcripts
from dflash_core.drafter.spec import DrafterSpec
from dflash_core.store import Store
from dflash_core.target.head import load_embedding_and_head
from dflash_core.target.hidden_states import HiddenStates, extract_hidden_states
from dflash_core.target.loading import Target
from dflash_core.target.runtime import load_model
from dflash_core.target.transcripts import RenderedPrompt, Transcript, generate
from tests.support import tiny

MAX_NEW_TOKENS = 60


@dataclass
class Scene:
    """A tiny target, what it wrote, and drafters of several strengths."""

    target: Target
    model: Any
    transcripts: list[Transcript]
    stop_token_id: int
    states: HiddenStates
    config: dict[str, Any]
    spec: DrafterSpec
    weights: dict[int, dict[str, Tensor]]
    """Training steps to weights."""


@pytest.fixture(autouse=True)
def _host_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(official, "_cuda_time", time.perf_counter)


def make_scene(folder: Path, family: str, strengths: Sequence[int], **changes: Any) -> Scene:
    target = tiny.write_tiny_target(folder / "target", family)
    model = load_model(target, "float32")
    generator = torch.Generator().manual_seed(1)
    prompts = [
        RenderedPrompt(
            id=f"p{number}", prompt_ids=tuple(torch.randint(8, 150, (9 + 4 * number,), generator=generator).tolist())
        )
        for number in range(4)
    ]
    unstopped = generate(model, prompts, stop_token_ids=[], max_new_tokens=MAX_NEW_TOKENS, batch_size=4)
    stop = _stop_inside(unstopped)
    transcripts = generate(model, prompts, stop_token_ids=[stop], max_new_tokens=MAX_NEW_TOKENS, batch_size=4)
    config = tiny.draft_config(target, **changes)
    spec, weights = tiny.random_weights(config, target)
    dtypes = {"compute_dtype": "float32", "store_dtype": "float32"}
    states = extract_hidden_states(Store(folder / "store"), target, transcripts, spec.target_layer_ids, **dtypes)
    # One transcript is never trained on, so that weak blocks occur beside whole ones.
    trained = tiny.train_drafter(spec, weights, target, transcripts[:-1], states, snapshots=strengths)
    return Scene(target, model, transcripts, stop, states, config, spec, trained)


def _stop_inside(transcripts: list[Transcript]) -> int:
    """Choose a token to stop at: late in one of the trained-on texts and absent from another."""
    texts = [transcript.response_ids for transcript in transcripts[:-1]]
    return next(
        token
        for text in texts
        for place, token in enumerate(text)
        if place >= 15 and token not in text[:place] and not all(token in other for other in texts)
    )


def our_walks(scene: Scene, steps: int, *, anchors: str, block_size: int | None = None) -> dict[str, list[int]]:
    embedding, head = load_embedding_and_head(scene.target)
    drafter = Drafter(scene.spec, scene.weights[steps], embedding, device=torch.device("cpu"), dtype=torch.float32)
    rows = score_transcripts(
        drafter,
        Head(head, drafter),
        scene.transcripts,
        lambda index: tiny.features_of(scene.spec, scene.transcripts, scene.states, index),
        scene.states.load_margins(),
        block_size=block_size or scene.spec.block_size,
        max_new_tokens=MAX_NEW_TOKENS,
        anchors=anchors,
    )
    walks: dict[str, list[int]] = {transcript.id: [] for transcript in scene.transcripts}
    for row in sorted((row for row in rows if row["is_on_walk"]), key=lambda row: row["walk_step"]):
        walks[row["prompt_id"]].append(row["num_emitted_tokens"])
    return walks


def official_run(scene: Scene, steps: int, transcript: Transcript, block_size: int | None = None) -> Any:
    facts = {key: value for key, value in scene.config.items() if key not in ("architectures", "model_type")}
    drafter = official.DFlashDraftModel(Qwen3Config(**facts)).eval()
    drafter.load_state_dict(scene.weights[steps], strict=True)
    return official.dflash_generate(
        drafter,
        scene.model,
        torch.tensor([transcript.prompt_ids]),
        MAX_NEW_TOKENS,
        [scene.stop_token_id],
        block_size=block_size,
        return_stats=True,
    )


@pytest.fixture(scope="module", params=["qwen3"])
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    torch.set_num_threads(1)
    return make_scene(tmp_path_factory.mktemp(request.param), request.param, [0, 30, 60, 160])


@pytest.mark.parametrize("steps", [0, 30, 60, 160])
def test_walks_equal_the_official_acceptance_lengths(scene: Scene, steps: int) -> None:
    walks = our_walks(scene, steps, anchors="walk")
    for transcript in scene.transcripts:
        result = official_run(scene, steps, transcript)
        assert walks[transcript.id] == result.acceptance_lengths
        emitted = result.output_ids[0, len(transcript.prompt_ids) :].tolist()
        assert emitted == list(transcript.response_ids), "the greedy transcript is what the official loop emits"


@pytest.mark.parametrize("steps", [0, 60, 160])
def test_drafting_at_every_anchor_gives_the_same_walk(scene: Scene, steps: int) -> None:
    assert our_walks(scene, steps, anchors="all") == our_walks(scene, steps, anchors="walk")


def test_the_scene_is_worth_its_name(scene: Scene) -> None:
    """Every count from one emitted token to a whole block occurs, and both ways to end."""
    walks_of = [our_walks(scene, steps, anchors="walk") for steps in scene.weights]
    lengths = {length for walks in walks_of for walk in walks.values() for length in walk}
    assert lengths == set(range(1, scene.spec.block_size + 1))
    assert {transcript.stop_reason for transcript in scene.transcripts} == {"stop", "length"}
    stopped = [transcript for transcript in scene.transcripts if transcript.stop_reason == "stop"]
    walks = our_walks(scene, 160, anchors="walk")
    assert any(walks[transcript.id] and walks[transcript.id][-1] > 1 for transcript in stopped), "a stop inside a block"


@pytest.mark.parametrize("block_size", [1, 2, 5])
def test_shorter_blocks_than_trained_equal_the_official_ones(scene: Scene, block_size: int) -> None:
    walks = our_walks(scene, 160, anchors="walk", block_size=block_size)
    for transcript in scene.transcripts[:2]:
        assert walks[transcript.id] == official_run(scene, 160, transcript, block_size).acceptance_lengths
