"""What is expected to be scored before the transcripts are read: an upper bound, also of conversations."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_core.drafter_workload import expected_workload
from dflash_core.target.prompts import Prompt
from dflash_core.target.rendering import RenderedPrompt, Rendering

META = {"max_new_tokens": 100, "num_tokens": 5000, "num_transcripts": 3}


def rendering(*lengths: int, later: tuple[Prompt, ...] = ()) -> Rendering:
    prompts = tuple(RenderedPrompt(id=f"p{number}", prompt_ids=(1,) * length) for number, length in enumerate(lengths))
    return Rendering(
        prompts=prompts, template_digest="", tokenizer_digest="", stop_token_ids=(2,), thinking=False, later=later
    )


def turn(name: str, follows: str, text: str, **more: Any) -> Prompt:
    return Prompt(id=name, dataset="d", group=None, messages=(("user", text),), follows=follows, **more)


def longest(found: Rendering, **meta: int) -> int:
    facts: dict[str, Any] = {"block_size": 4, "extras": {}, "has_own_head": True, "store_dtype": "bfloat16"}
    return expected_workload(found, META | meta, **facts).longest_tokens


def test_a_text_is_its_prompt_and_the_longest_answer() -> None:
    assert longest(rendering(20, 700, 3)) == 800


def test_no_text_is_longer_than_all_together() -> None:
    assert longest(rendering(20, 700, 3), num_tokens=730) == 730


def test_a_later_turn_holds_those_before_it_their_answers_and_its_own_words() -> None:
    turns = (turn("a", "p0", "x" * 300), turn("b", "a", "\u00e4" * 10))
    first, second = 20 + 100, 300 + 64 + 100
    assert longest(rendering(20, 30, later=turns[:1])) == first + second
    assert longest(rendering(20, 30, later=turns)) == first + second + 2 * 10 + 64 + 100


def test_a_later_turn_given_as_ids_is_as_long_as_they_are() -> None:
    assert longest(rendering(20, later=(turn("a", "p0", "x", prompt_ids=(1,) * 900),))) == 1000


@pytest.mark.parametrize(
    ("extras", "is_held"), [({}, False), ({"recall_ks": [1]}, False), ({"temperatures": [1.0]}, True)]
)
def test_the_targets_head_is_held_beside_an_own_one_for_temperatures_alone(
    extras: dict[str, Any], is_held: bool
) -> None:
    for has_own_head in (True, False):
        found = expected_workload(
            rendering(5), META, block_size=4, extras=extras, has_own_head=has_own_head, store_dtype="float32"
        )
        assert found.is_target_head_held == (is_held and has_own_head)
        assert (found.most_anchors, found.num_transcripts, found.stored_itemsize) == (99, 3, 4)
