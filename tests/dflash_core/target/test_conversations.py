"""Conversations: every turn comes after the target's own answers, and the template decides what stays of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_core import progress
from dflash_core.errors import PromptError
from dflash_core.store import Store
from dflash_core.target.loading import Target, read_target_folder
from dflash_core.target.prompts import Prompt
from dflash_core.target.rendering import Rendering, render_prompts
from dflash_core.target.runtime import load_model
from dflash_core.target.transcripts import (
    LocalSource,
    Transcript,
    read_transcripts,
    transcripts_key,
    write_transcripts,
)
from tests.support import tiny

MAX_NEW_TOKENS = 5
LOCAL = LocalSource(batch_size=2, compute_dtype="float32")
# As Qwen3's: thinking of earlier answers is dropped, and where it is off an empty block stands in its place.
THINKING = (
    "{% for message in messages %}w10 "
    "{% if message['role'] == 'assistant' %}{{ message['content'].split('w90')[-1] }}"
    "{% else %}{{ message['content'] }}{% endif %} {% endfor %}w11"
    "{% if enable_thinking is defined and not enable_thinking %} w89 w90{% endif %}"
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("turns") / "target"
    tiny.write_tiny_target(folder, "llama", seed=3)
    tiny.add_tokenizer(folder)
    return read_target_folder(folder, name="tiny")


def turn(name: str, text: str, follows: str | None = None, **keys: Any) -> Prompt:
    return Prompt(
        **({"id": name, "dataset": "d", "group": None, "messages": (("user", text),), "follows": follows} | keys)
    )


PROMPTS = (
    turn("a#1", "w20 w21"),
    turn("a#2", "w22", "a#1"),
    turn("a#3", "w23 w24 w25", "a#2"),
    turn("b", "w30"),
    turn("c#1", "w40 w41 w42"),
    turn("c#2", "w43", "c#1"),
)


def rendered(
    target: Target, prompts: tuple[Prompt, ...] = PROMPTS, *, thinking: bool = False, max_new_tokens: int = 5
) -> Rendering:
    return render_prompts(target, prompts, thinking=thinking, max_new_tokens=max_new_tokens)


def written(target: Target, folder: Path, rendering: Rendering) -> list[Transcript]:
    return read_transcripts(write_transcripts(Store(folder), target, rendering, LOCAL, max_new_tokens=MAX_NEW_TOKENS))


def greedy(model: Any, prompt: tuple[int, ...]) -> tuple[int, ...]:
    text = list(prompt)
    with torch.inference_mode():
        while len(text) < len(prompt) + MAX_NEW_TOKENS:
            text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
            if text[-1] == tiny.STOP_TOKEN_ID:
                break
    return tuple(text[len(prompt) :])


def with_template(target: Target, template: str, folder: Path) -> Target:
    own = Path(shutil.copytree(target.folder, folder / "target"))
    (own / "chat_template.jinja").write_text(template)
    path = own / "tokenizer_config.json"
    data = json.loads(path.read_text())
    data.pop("chat_template", None)
    path.write_text(json.dumps(data))
    return read_target_folder(own, name="tiny")


def test_a_later_turn_holds_the_earlier_answers(target: Target, tmp_path: Path) -> None:
    model = load_model(target, "float32")
    transcripts = written(target, tmp_path, rendered(target))
    assert [t.id for t in transcripts] == [prompt.id for prompt in PROMPTS], "in the order of the file"
    of_id = {t.id: t for t in transcripts}
    answers = {name: [token for token in t.response_ids if token != tiny.STOP_TOKEN_ID] for name, t in of_id.items()}
    first, second = answers["a#1"], answers["a#2"]
    assert of_id["a#1"].prompt_ids == (10, 20, 21, 11)
    assert of_id["a#2"].prompt_ids == (10, 20, 21, 10, *first, 10, 22, 11)
    assert of_id["a#3"].prompt_ids == (10, 20, 21, 10, *first, 10, 22, 10, *second, 10, 23, 24, 25, 11)
    assert of_id["c#2"].prompt_ids == (10, 40, 41, 42, 10, *answers["c#1"], 10, 43, 11)
    for transcript in transcripts:
        assert transcript.response_ids == greedy(model, transcript.prompt_ids)


def test_progress_rises_over_all_turns(target: Target, tmp_path: Path) -> None:
    told: list[tuple[str, float, float]] = []
    with progress.listening(lambda *report: told.append(report)):
        written(target, tmp_path, rendered(target))
    done = [count for _, count, _ in told]
    assert done == sorted(done)
    assert {total for _, _, total in told} == {6 * MAX_NEW_TOKENS}
    assert done[-1] == 6 * MAX_NEW_TOKENS


@pytest.mark.parametrize("thinking", [True, False])
def test_the_template_decides_what_stays_of_an_answer(target: Target, tmp_path: Path, thinking: bool) -> None:
    """An earlier answer's thinking goes, and the empty block of a switched-off one stands before each answer only."""
    own = with_template(target, THINKING, tmp_path)
    rendering = rendered(own, PROMPTS[:2], thinking=thinking)
    first, second = written(own, tmp_path / "store", rendering)
    ending = () if thinking else (89, 90)
    answer = tuple(token for token in first.response_ids if token != tiny.STOP_TOKEN_ID)
    kept = answer[len(answer) - answer[::-1].index(90) :] if 90 in answer else answer
    assert first.prompt_ids == (10, 20, 21, 11, *ending)
    assert second.prompt_ids == (10, 20, 21, 10, *kept, 10, 22, 11, *ending)


def test_thinking_on_and_off_are_two_renderings(target: Target, tmp_path: Path) -> None:
    own = with_template(target, THINKING, tmp_path)
    keys = {
        transcripts_key(own, rendered(own, PROMPTS[:2], thinking=thinking), LOCAL, max_new_tokens=5)
        for thinking in (True, False)
    }
    assert len(keys) == 2
    plain = [rendered(target, PROMPTS[:2], thinking=thinking) for thinking in (True, False)]
    assert plain[0].prompts == plain[1].prompts, "this template does not look at the flag"


class TestKey:
    """What will decide the ids of later turns counts, for they are not known yet."""

    def key(self, target: Target, *prompts: Prompt) -> str:
        return transcripts_key(target, rendered(target, prompts), LOCAL, max_new_tokens=MAX_NEW_TOKENS)

    def test_the_text_of_a_later_turn_counts(self, target: Target) -> None:
        assert self.key(target, PROMPTS[0], turn("a#2", "w29", "a#1")) != self.key(target, *PROMPTS[:2])
        assert self.key(target, PROMPTS[0]) != self.key(target, *PROMPTS[:2])

    def test_the_template_counts_where_there_are_later_turns(self, target: Target, tmp_path: Path) -> None:
        """The first turn has the same ids under both."""
        template = json.loads((target.folder / "tokenizer_config.json").read_text()).get("chat_template")
        if template is None:
            template = (target.folder / "chat_template.jinja").read_text()
        own = with_template(target, template + "{# the same #}", tmp_path)
        assert self.key(own, *PROMPTS[:2]) != self.key(target, *PROMPTS[:2])
        assert self.key(own, PROMPTS[0]) == self.key(target, PROMPTS[0])

    def test_local_transcripts_of_single_turns_keep_the_key_they_always_had(self) -> None:
        """Recorded with the first version: stored transcripts must not be written anew."""

        class _Target:
            identity = "an identity"

        rendering = Rendering(
            prompts=tuple(render for render in (_rendered("a", (10, 20)), _rendered("b", (10, 21)))),
            template_digest="t",
            tokenizer_digest="k",
            stop_token_ids=(7, 9),
            thinking=False,
        )
        source = LocalSource(batch_size=2, compute_dtype="float32")
        key = transcripts_key(_Target, rendering, source, max_new_tokens=8)  # type: ignore[arg-type]
        assert key == "550f63d3a8792ede174c3abb84ee24a4"


def _rendered(name: str, ids: tuple[int, ...]) -> Any:
    from dflash_core.target.transcripts import RenderedPrompt

    return RenderedPrompt(id=name, prompt_ids=ids, messages=(("user", "whatever it was"),))


class TestLength:
    def test_a_conversation_that_may_not_fit_is_refused_before_anything_is_written(self, target: Target) -> None:
        """12 known tokens and three answers of up to 167 need 513 of 512."""
        assert target.config.max_position_embeddings == 512
        prompts = (turn("a#1", "w20 w21"), turn("a#2", "w22", "a#1"), turn("a#3", "w23", "a#2"))
        rendered(target, prompts, max_new_tokens=166)
        with pytest.raises(PromptError) as refused:
            rendered(target, prompts, max_new_tokens=168)
        message = str(refused.value)
        assert "'a#3' has" in message
        assert "and 2 answers before it" in message
        assert "512 of the target's context" in message

    def test_a_template_that_refuses_a_later_turn_says_so_at_once(self, target: Target, tmp_path: Path) -> None:
        own = with_template(
            target,
            "{% if messages | length > 1 %}{{ raise_exception('one message only') }}{% endif %}w10",
            tmp_path,
        )
        with pytest.raises(PromptError, match="refuses prompt 'a#2': one message only"):
            rendered(own, PROMPTS[:2])


class TestGivenIds:
    def test_ids_of_the_file_stand_for_the_rendering(self, target: Target, tmp_path: Path) -> None:
        prompts = (turn("a#1", "w20", prompt_ids=(50, 51)), turn("a#2", "w22", "a#1"))
        first, second = written(target, tmp_path, rendered(target, prompts))
        assert first.prompt_ids == (50, 51)
        answer = [token for token in first.response_ids if token != tiny.STOP_TOKEN_ID]
        assert second.prompt_ids == (10, 20, 10, *answer, 10, 22, 11), "later turns are rendered from the texts"

    def test_an_id_beyond_the_vocabulary_names_the_line(self, target: Target) -> None:
        prompt = turn("a", "w20", prompt_ids=(50, 160), where="p.jsonl:3")
        with pytest.raises(PromptError, match=r"p\.jsonl:3: `prompt_ids` holds 160, .* ends at 159"):
            rendered(target, (prompt,))
