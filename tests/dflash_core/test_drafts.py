"""The drafts shown token by token are those that were scored."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_core.config import Config, parse_config
from dflash_core.drafts import DraftedPrompt, draft_prompt
from dflash_core.errors import InputError
from dflash_core.store import Store
from dflash_core.target import runtime
from tests.golden import tiny_qwen3 as golden
from tests.support.direct import Evaluated, evaluate_directly


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drafts")


@pytest.fixture(scope="module")
def config(folder: Path) -> Config:
    return golden.make_config(folder)


@pytest.fixture(scope="module")
def checkpoint(folder: Path, config: Config) -> str:
    """Return the drafter that repeats its anchor: it is right now and then, for whole blocks at times."""
    return str(folder / "runs" / "step_2")


@pytest.fixture(scope="module")
def evaluated(config: Config, checkpoint: str) -> Evaluated:
    return evaluate_directly(config, checkpoint)


def with_drafter(config: Config, **drafter: object) -> Config:
    return parse_config(config.model_dump() | {"drafter": drafter}, where="test")


@pytest.fixture(scope="module")
def shown(config: Config, checkpoint: str, evaluated: Evaluated) -> dict[str, DraftedPrompt]:
    return {prompt.prompt_id: draft_prompt(config, checkpoint, prompt.prompt_id) for prompt in evaluated.record.prompts}


def test_the_steps_are_those_of_the_scored_walk(shown: dict[str, DraftedPrompt], evaluated: Evaluated) -> None:
    assert evaluated.record.blocks is not None
    for prompt_id, drafted in shown.items():
        rows = evaluated.record.blocks.filter(
            (evaluated.record.blocks["prompt_id"] == prompt_id) & evaluated.record.blocks["is_on_walk"]
        ).sort("walk_step")
        scored = rows.select("anchor_index", "num_accepted_drafts", "num_drafted", "num_emitted_tokens").rows()
        assert [
            (
                block.anchor_index,
                len(block.accepted),
                len(block.accepted) + len(block.rejected),
                len(block.accepted) + (block.bonus is not None),
            )
            for block in drafted.blocks
        ] == scored


def test_accepted_drafts_and_bonus_tokens_are_the_response(shown: dict[str, DraftedPrompt]) -> None:
    for drafted in shown.values():
        response = drafted.response.split()
        told = [drafted.blocks[0].anchor]
        for block in drafted.blocks:
            assert block.anchor == response[block.anchor_index] == told[-1]
            told += [*block.accepted, *([block.bonus] if block.bonus is not None else [])]
        assert told == response


def test_a_rejected_draft_is_not_what_the_target_says(shown: dict[str, DraftedPrompt]) -> None:
    some_rejected = some_bonus_missing = False
    for drafted in shown.values():
        for block in drafted.blocks:
            if block.rejected and block.bonus is not None:
                assert block.rejected[0] != block.bonus
                some_rejected = True
            some_bonus_missing |= block.bonus is None
    assert some_rejected
    assert some_bonus_missing, "a text that ends inside an accepted block has no bonus"


def test_this_drafter_repeats_its_anchor(shown: dict[str, DraftedPrompt]) -> None:
    for drafted in shown.values():
        for block in drafted.blocks:
            assert set(block.accepted + block.rejected) == {block.anchor}


def test_the_first_prompt_is_shown_unless_one_is_named(
    config: Config, checkpoint: str, shown: dict[str, DraftedPrompt], evaluated: Evaluated
) -> None:
    before = runtime.num_forward_passes
    assert draft_prompt(config, checkpoint, None) == shown["p0"]
    assert shown["p3"].prompt == evaluated.record.prompts[3].prompt_text
    assert runtime.num_forward_passes == before, "the target does not run"


def test_an_unknown_prompt_is_an_error_that_lists_them(config: Config, checkpoint: str, evaluated: Evaluated) -> None:
    with pytest.raises(InputError, match="no prompt 'p9'; there are: p0, p1, p2, p3, p4, p5"):
        draft_prompt(config, checkpoint, "p9")


def test_shorter_blocks_are_shown_as_asked(config: Config, checkpoint: str, evaluated: Evaluated) -> None:
    drafted = draft_prompt(with_drafter(config, block_size=3), checkpoint, "p1")
    sizes = {len(block.accepted) + len(block.rejected) for block in drafted.blocks}
    assert max(sizes) == 2
    short = evaluate_directly(with_drafter(config, block_size=3), checkpoint).walks()["p1"]
    assert [len(block.accepted) + (block.bonus is not None) for block in drafted.blocks] == short


def test_what_was_not_evaluated_yet_says_what_to_run(
    config: Config, folder: Path, evaluated: Evaluated, tmp_path: Path
) -> None:
    for settings, checkpoint in (
        (config, str(folder / "runs" / "step_1")),
        (config.model_copy(update={"store": str(tmp_path)}), str(folder / "runs" / "step_2")),
    ):
        with pytest.raises(InputError, match=f"run: dflash-eval evaluate {checkpoint}"):
            draft_prompt(settings, checkpoint, None)
    assert [path.name for path in Store(tmp_path).root.iterdir()] == ["renderings"], "no artifact"
