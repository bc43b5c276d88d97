"""Continuations that the prompt file gives: read as they are, ended as the target ends, and named when wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflash_core.errors import PromptError
from dflash_core.store import Artifact, Store
from dflash_core.target.given import FileSource
from dflash_core.target.loading import Target, read_target_folder
from dflash_core.target.prompts import Prompt
from dflash_core.target.rendering import render_prompts
from dflash_core.target.transcripts import read_transcripts, transcripts_key, write_transcripts
from tests.support import tiny

MAX_NEW_TOKENS = 6


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("given") / "target"
    tiny.write_tiny_target(folder, "llama")
    tiny.add_tokenizer(folder)
    return read_target_folder(folder, name="tiny")


def ask(name: str = "a", **keys: Any) -> Prompt:
    data = {"id": name, "dataset": "d", "group": None, "messages": (("user", "w20"),), "where": f"p.jsonl:{name}"}
    return Prompt(**(data | keys))


def write(target: Target, folder: Path, *prompts: Prompt) -> Artifact:
    rendering = render_prompts(target, prompts, thinking=False, max_new_tokens=MAX_NEW_TOKENS)
    source = FileSource(prompts=prompts)
    return write_transcripts(Store(folder), target, rendering, source, max_new_tokens=MAX_NEW_TOKENS)


@pytest.mark.parametrize(
    ("given", "ids", "reason"),
    [
        ({"response_ids": (30, 31)}, (30, 31), "length"),
        ({"response_ids": (30, 7)}, (30, 7), "stop"),
        ({"response_ids": (30, 7, 31)}, (30, 7), "stop"),
        ({"response_ids": (30, 31, 32, 33, 34, 35, 36)}, (30, 31, 32, 33, 34, 35), "length"),
        ({"response": "w30 w31"}, (30, 31), "length"),
        ({"response": "w30 <stop>"}, (30, 7), "stop"),
    ],
    ids=["cut off", "stopped", "goes on after it stopped", "longer than the limit", "text", "text that stops"],
)
def test_an_answer_ends_at_its_first_stop_token_or_at_the_limit(
    target: Target, tmp_path: Path, given: dict[str, Any], ids: tuple[int, ...], reason: str
) -> None:
    artifact = write(target, tmp_path, ask(**given))
    (transcript,) = read_transcripts(artifact)
    assert (transcript.prompt_ids, transcript.response_ids, transcript.stop_reason) == ((10, 20, 11), ids, reason)
    assert (artifact.meta["source"], artifact.meta["sampling"]) == ("file", "given")
    assert artifact.meta["num_retokenised"] == ("response" in given)


def test_a_given_conversation_holds_its_given_answers(target: Target, tmp_path: Path) -> None:
    artifact = write(target, tmp_path, ask("a#1", response="w30 <stop>"), ask("a#2", follows="a#1", response="w31"))
    first, second = read_transcripts(artifact)
    assert first.prompt_ids == (10, 20, 11)
    assert second.prompt_ids == (10, 20, 10, 30, 10, 20, 11)


def test_given_ids_of_prompt_and_answer_are_taken_as_they_are(target: Target, tmp_path: Path) -> None:
    (transcript,) = read_transcripts(write(target, tmp_path, ask(prompt_ids=(50, 51), response_ids=(52,))))
    assert (transcript.prompt_ids, transcript.response_ids) == ((50, 51), (52,))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "p.jsonl:a: prompt 'a' has no `response` and no `response_ids`"),
        ({"response": "no such words"}, "p.jsonl:a: `response` of 'a' does not come back from the target's tokenizer"),
        (
            {"response_ids": (30, 160)},
            "p.jsonl:a: `response_ids` of 'a' holds 160, the target's vocabulary ends",
        ),
    ],
    ids=["missing", "another tokenizer's", "beyond the vocabulary"],
)
def test_an_answer_that_cannot_be_used_names_its_line(
    target: Target, tmp_path: Path, given: dict[str, Any], expected: str
) -> None:
    with pytest.raises(PromptError) as refused:
        write(target, tmp_path, ask("b", response="w30"), ask("a", **given))
    assert str(refused.value).startswith(expected)


def test_other_answers_have_another_key(target: Target) -> None:
    def key(*prompts: Prompt) -> str:
        rendering = render_prompts(target, prompts, thinking=False, max_new_tokens=MAX_NEW_TOKENS)
        return transcripts_key(target, rendering, FileSource(prompts=prompts), max_new_tokens=MAX_NEW_TOKENS)

    one = key(ask(response="w30"))
    assert key(ask(response="w31")) != one
    assert key(ask(response_ids=(30,))) != one
    assert key(ask(response="w30", dataset="other", reference="r", where="elsewhere")) == one
