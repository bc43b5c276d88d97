"""Probabilities and confidences that are shown, against plain sums over a drafter's own tensors, block by block."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dflash_core import evaluation, stages
from dflash_core.config import Config, parse_config
from dflash_core.drafter.model import Anchors, Drafter
from dflash_core.drafter_reading import read_drafter
from dflash_core.drafts import DraftedBlock, DraftedPrompt, draft_prompt
from dflash_core.store_opening import store_of
from dflash_core.target.head import load_embedding_and_head
from dflash_core.target.loading import read_target_folder
from tests.golden import tiny_qwen3 as golden
from tests.support import official as scenes
from tests.support import tiny
from tests.support.direct import Evaluated, evaluate_directly

RANK, WIDTH = 6, 64
DSPARK = {"projector_type": "dspark", "markov_rank": RANK, "markov_head_type": "gated", "enable_confidence_head": True}
# Name to nested settings and settings of the top level.
DRAFTERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dflash": ({}, {}),
    "dflash2": (scenes.SELECTOR, {}),
    "dspark": (DSPARK | {"confidence_head_with_markov": True}, {}),
    "dspark, reduced": (DSPARK | {"confidence_head_with_markov": True}, {"draft_vocab_size": 120}),
    "dspark, confidence of the row alone": (DSPARK | {"confidence_head_with_markov": False}, {}),
    "dspark, same position": (DSPARK | {"confidence_head_with_markov": True}, {"sample_from_anchor": False}),
}


class Shown(NamedTuple):
    """A drafter that was scored, and one prompt's drafts."""

    name: str
    checkpoint: Path
    weights: dict[str, Tensor]
    evaluated: Evaluated
    drafted: DraftedPrompt


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("odds")


@pytest.fixture(scope="module")
def config(folder: Path) -> Config:
    return golden.make_config(folder)


def write(folder: Path, name: str) -> Path:
    """Save a random drafter, its last norm steep enough that some tokens are likelier than others."""
    nested, changes = DRAFTERS[name]
    target = read_target_folder(folder / "target", name="tiny-qwen3")
    draft_config = scenes.z_lab_config(target, nested=nested, **changes)
    weights = scenes.random_tensors(draft_config, target, seed=3)
    weights["norm.weight"] *= 8.0
    generator = torch.Generator().manual_seed(5)
    if "enable_confidence_head" in nested:
        width = WIDTH + (RANK if nested["confidence_head_with_markov"] else 0)
        weights["confidence_head.proj.weight"] = 0.03 * torch.randn(1, width, generator=generator)
        weights["confidence_head.proj.bias"] = torch.randn(1, generator=generator)
    if "draft_vocab_size" in changes:
        kept = torch.tensor([token for token in range(tiny.VOCAB) if token % 4 != 1])
        weights["d2t"] = kept - torch.arange(len(kept))
        weights["lm_head.weight"] = torch.randn(len(kept), WIDTH, generator=generator)
    return tiny.write_drafter(folder / "runs" / f"step_{20 + list(DRAFTERS).index(name)}", draft_config, weights)


@pytest.fixture(scope="module", params=DRAFTERS)
def shown(folder: Path, config: Config, request: pytest.FixtureRequest) -> Shown:
    checkpoint = write(folder, request.param)
    evaluated = evaluate_directly(config, checkpoint)
    weights = load_file(checkpoint / "model.safetensors")
    return Shown(request.param, checkpoint, weights, evaluated, draft_prompt(config, str(checkpoint), "p1"))


def plain_chances(shown: Shown, hidden_D: Tensor, before: int, head_VD: Tensor) -> Tensor:
    """Return the probability of every token that a row can propose; 0 for the others. In float64, without our head."""
    w = {name: tensor.double() for name, tensor in shown.weights.items()}
    hidden = hidden_D.double()
    scores = (w.get("lm_head.weight", head_VD.double()) @ hidden).tolist()
    if shown.name == "dflash2":
        best = sorted(range(len(scores)), key=lambda token: -scores[token])[: scenes.SELECTOR["selector_top_k"]]
        projected = w["candidate_selector.hidden_projection.weight"] @ hidden
        code = w["candidate_selector.predecessor_codebook"][before] * projected
        scores = [
            score + float(code @ w["candidate_selector.successor_codebook"][token]) if token in best else -math.inf
            for token, score in enumerate(scores)
        ]
    elif shown.name != "dflash":
        code = w["markov_head.markov_w1.weight"][before]
        gate = w["markov_head.gate_proj.weight"] @ torch.cat([hidden, code]) + w["markov_head.gate_proj.bias"]
        bias = w["markov_head.markov_w2.weight"] @ (torch.sigmoid(gate) * code)
        scores = [score + more for score, more in zip(scores, bias.tolist(), strict=True)]
    total = sum(math.exp(score) for score in scores)
    chances = torch.zeros(tiny.VOCAB, dtype=torch.float64)
    for own, score in enumerate(scores):
        chances[own + (int(shown.weights["d2t"][own]) if "d2t" in shown.weights else 0)] = math.exp(score) / total
    return chances


def plain_confidence(shown: Shown, hidden_D: Tensor, before: int) -> float:
    """Return what the trainers' confidence head says of a row: sigmoid(w [h; W1[before]] + b)."""
    weight = shown.weights["confidence_head.proj.weight"].double()[0]
    read = hidden_D.double()
    if len(weight) > WIDTH:
        read = torch.cat([read, shown.weights["markov_head.markov_w1.weight"].double()[before]])
    return 1 / (1 + math.exp(-float(weight @ read) - float(shown.weights["confidence_head.proj.bias"])))


def token_of(word: str) -> int:
    special = {"<pad>": 0, "<bos>": 1, "<unk>": 3, "<stop>": tiny.STOP_TOKEN_ID}
    return special[word] if word in special else int(word.removeprefix("w"))


def rows_of(config: Config, shown: Shown) -> tuple[list[Tensor], Tensor]:
    """Return the rows that draft of every block shown, and the target's head."""
    plan = stages.plan_target(config)
    transcripts = stages.read_transcripts(config, plan)
    spec = read_drafter(evaluation.inspect(str(shown.checkpoint), config), config, plan.target.config)
    states = stages.find_states(
        config, plan, shown.evaluated.manifests["transcripts"]["meta"]["digest"], spec.target_layer_ids
    )
    assert states is not None
    embedding, head = load_embedding_and_head(plan.target)
    drafter = Drafter(spec, shown.weights, embedding, device=torch.device("cpu"), dtype=torch.float32)
    place = [transcript.id for transcript in transcripts].index("p1")
    context = drafter.read_context(tiny.features_of(spec, transcripts, states, place))
    transcript = transcripts[place]
    first = 0 if spec.row_alignment == "anchor_shifted" else 1
    found = []
    for block in shown.drafted.blocks:
        count = len(block.accepted) + len(block.rejected)
        slots = count + first if first else spec.block_size
        anchors = Anchors(
            torch.tensor([len(transcript.prompt_ids) + block.anchor_index]),
            torch.tensor([transcript.response_ids[block.anchor_index]]),
            torch.tensor([slots]),
        )
        ((hidden_KD,),) = drafter.draft_hidden([context], [anchors], spec.block_size)
        found.append(hidden_KD[first : first + count])
    return found, head


def drafts_of(block: DraftedBlock) -> list[int]:
    return [token_of(word) for word in (*block.accepted, *block.rejected)]


def test_probabilities_are_those_of_the_rules_own_scores(config: Config, shown: Shown) -> None:
    rows, head = rows_of(config, shown)
    ranks_checked = 0
    for block, hidden_PD in zip(shown.drafted.blocks, rows, strict=True):
        drafts = drafts_of(block)
        before = [token_of(block.anchor), *drafts]
        chances = [plain_chances(shown, hidden, before[place], head) for place, hidden in enumerate(hidden_PD)]
        assert [int(one.argmax()) for one in chances] == drafts
        assert block.odds is not None
        expected = [float(one[draft]) for one, draft in zip(chances, drafts, strict=True)]
        assert list(block.odds.probabilities) == pytest.approx(expected, abs=1e-4)
        if block.rejected and block.bonus is not None:
            missed = chances[len(block.accepted)]
            chance = float(missed[token_of(block.bonus)])
            assert block.odds.miss_probability == pytest.approx(chance, abs=1e-4)
            if chance > 0:
                assert block.odds.miss_rank == 1 + int((missed > chance).sum())
                ranks_checked += 1
    assert ranks_checked > 2 or shown.name == "dflash2", "its selector's candidates never hold the target's token"
    every = [chance for block in shown.drafted.blocks if block.odds for chance in block.odds.probabilities]
    assert max(every) > 4 / tiny.VOCAB, "not all tokens are alike"
    assert max(every) - min(every) > 0.01, "nor all blocks"


def test_confidences_are_those_of_the_trainers_head(config: Config, shown: Shown) -> None:
    if "dspark" not in shown.name:
        assert {block.confidences for block in shown.drafted.blocks} == {()}
        return
    rows, _ = rows_of(config, shown)
    found = []
    for block, hidden_PD in zip(shown.drafted.blocks, rows, strict=True):
        before = [token_of(block.anchor), *drafts_of(block)]
        expected = [plain_confidence(shown, hidden, before[place]) for place, hidden in enumerate(hidden_PD)]
        assert list(block.confidences) == pytest.approx(expected, abs=1e-5)
        promised, alive = 1.0, 1.0
        for confidence in expected:
            alive *= confidence
            promised += alive
        assert block.expected_tokens == pytest.approx(promised, abs=1e-4)
        found += expected
    assert max(found) - min(found) > 0.2


def test_a_block_without_drafts_has_neither(config: Config, shown: Shown) -> None:
    """Blocks of one slot draft nothing where a row predicts its own position, and one token elsewhere."""
    short = parse_config(config.model_dump() | {"drafter": {"block_size": 1}}, where="test")
    evaluate_directly(short, shown.checkpoint)
    blocks = draft_prompt(short, str(shown.checkpoint), "p1").blocks
    num_drafts = int("dspark" in shown.name and "same position" not in shown.name)
    assert {len(block.accepted) + len(block.rejected) for block in blocks} == {num_drafts}
    for block in blocks:
        assert block.odds is not None
        assert len(block.odds.probabilities) == num_drafts
        assert len(block.confidences) == (num_drafts if "dspark" in shown.name else 0)
        assert block.expected_tokens >= 1
    assert store_of(short).root == store_of(config).root
