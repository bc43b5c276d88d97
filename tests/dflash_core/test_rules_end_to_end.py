"""Drafters of every rule from their checkpoints to the record, and their drafts token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_core.config import Config
from dflash_core.drafts import DraftedPrompt, draft_prompt
from dflash_core.results.checks import check_record
from dflash_core.target.loading import read_target_folder
from tests.golden import tiny_qwen3 as golden
from tests.support import official as scenes
from tests.support import tiny
from tests.support.direct import Evaluated, evaluate_directly
from tests.support.official import SELECTOR

CONFIDENT = {"enable_confidence_head": True, "confidence_head_with_markov": True}
DSPARK = {"projector_type": "dspark", "markov_rank": 6}
# Name to nested settings and settings of the top level.
DRAFTERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dflash2": (SELECTOR, {}),
    "vanilla": (DSPARK | {"markov_head_type": "vanilla"} | CONFIDENT, {}),
    "rnn, same position": (DSPARK | {"markov_head_type": "rnn"}, {"sample_from_anchor": False}),
    "gated, reduced": (DSPARK | {"markov_head_type": "gated"}, {"draft_vocab_size": 120}),
    "jetspec": ({"causal_head": True, "draft_shift": True}, {}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rules")


@pytest.fixture(scope="module")
def config(folder: Path) -> Config:
    return golden.make_config(folder)


def write(folder: Path, name: str) -> Path:
    """Save a drafter that repeats its anchor, with the parts of its rule at random beside it."""
    nested, changes = DRAFTERS[name]
    target = read_target_folder(folder / "target", name="tiny-qwen3")
    draft_config = scenes.z_lab_config(target, nested=nested, num_key_value_heads=4, **changes)
    weights = scenes.random_tensors(draft_config, target)
    backbone = {
        key: tensor for key, tensor in weights.items() if key.startswith(("layers.", "fc.", "hidden_norm", "norm"))
    }
    weights |= {key: tensor for key, tensor in golden.repeating(backbone).items() if "_conv." not in key}
    generator = torch.Generator().manual_seed(5)
    if "enable_confidence_head" in nested:
        weights["confidence_head.proj.weight"] = 0.1 * torch.randn(1, 64 + 6, generator=generator)
        weights["confidence_head.proj.bias"] = torch.randn(1, generator=generator)
    if "draft_vocab_size" in changes:
        kept = torch.tensor([token for token in range(tiny.VOCAB) if token % 4 != 1])
        weights["d2t"] = kept - torch.arange(len(kept))
        weights["lm_head.weight"] = torch.randn(len(kept), 64, generator=generator)
    return tiny.write_drafter(folder / "runs" / f"step_{10 + list(DRAFTERS).index(name)}", draft_config, weights)


@pytest.fixture(scope="module", params=DRAFTERS)
def evaluated(folder: Path, config: Config, request: pytest.FixtureRequest) -> tuple[str, Path, Evaluated]:
    checkpoint = write(folder, request.param)
    return request.param, checkpoint, evaluate_directly(config, checkpoint)


@pytest.fixture(scope="module")
def shown(config: Config, evaluated: tuple[str, Path, Evaluated]) -> dict[str, DraftedPrompt]:
    _, checkpoint, scored = evaluated
    ids = [prompt.prompt_id for prompt in scored.record.prompts]
    return {prompt_id: draft_prompt(config, str(checkpoint), prompt_id) for prompt_id in ids}


def test_the_record_can_be_stored_and_says_by_which_rules_it_was_made(evaluated: tuple[str, Path, Evaluated]) -> None:
    name, _, scored = evaluated
    record = scored.record
    check_record(record)
    is_shifted = name in ("vanilla", "gated, reduced")
    assert record.num_drafts == (8 if is_shifted else 7)
    start = "anchor-shifted" if is_shifted else "shifted" if name == "jetspec" else "same position"
    assert record.spec["row_alignment"].startswith(start)
    assert ("drafted whole" in record.spec["counting_rule"]) == is_shifted
    assert ("confidence_rule" in record.spec) == (name == "vanilla")
    assert record.blocks is not None
    assert record.blocks["num_drafted"].max() == record.num_drafts
    if name in ("dflash2", "rnn, same position", "jetspec"):
        assert (record.blocks["num_accepted_drafts"] > 0).any(), "it repeats its anchor, which is right now and then"


def test_the_drafts_shown_are_those_that_were_scored(
    evaluated: tuple[str, Path, Evaluated], shown: dict[str, DraftedPrompt]
) -> None:
    _, _, scored = evaluated
    blocks = scored.record.blocks
    assert blocks is not None
    for prompt_id, drafted in shown.items():
        rows = blocks.filter((blocks["prompt_id"] == prompt_id) & blocks["is_on_walk"]).sort("walk_step")
        expected = rows.select("anchor_index", "num_accepted_drafts", "num_drafted", "num_emitted_tokens").rows()
        found = [
            (
                block.anchor_index,
                len(block.accepted),
                len(block.accepted) + len(block.rejected),
                len(block.accepted) + (block.bonus is not None),
            )
            for block in drafted.blocks
        ]
        assert found == expected


def test_confidences_are_shown_where_a_head_gives_them(
    evaluated: tuple[str, Path, Evaluated], shown: dict[str, DraftedPrompt]
) -> None:
    name, _, _ = evaluated
    blocks = [block for drafted in shown.values() for block in drafted.blocks]
    if name != "vanilla":
        assert {block.confidences for block in blocks} == {()}
        return
    assert all(len(block.confidences) == len(block.accepted) + len(block.rejected) for block in blocks)
    numbers = {number for block in blocks for number in block.confidences}
    assert len(numbers) > 20
    assert all(0 < number < 1 for number in numbers)
