"""What becomes of an answer: the ids it is, the token that ended it, and what is told about it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dflash_core.config import CompletionSettings
from dflash_core.errors import ServerError, ServerMismatch
from dflash_core.target.loading import Target, read_target_folder
from dflash_core.target.rendering import RenderedPrompt, load_tokenizer
from dflash_core.target.servers.answers import Finished, to_transcript
from dflash_core.target.servers.openai_chat import OpenAIChat
from dflash_core.target.servers.protocol import Answer, Limits
from dflash_core.target.servers.served import _choose, _listed, target_names
from dflash_core.target.servers.sglang import SGLang
from dflash_core.target.servers.source import warnings_of
from dflash_core.target.servers.vllm import VLLM
from dflash_core.target.transcripts import Transcript
from tests.support import tiny

PROMPT = RenderedPrompt(id="a", prompt_ids=(10, 20, 11), messages=(("user", "w20"),))
LIMITS = Limits(max_new_tokens=4, stop_token_ids=(7,))
STOP = tiny.STOP_TOKEN_ID


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("words")
    tiny.write_tiny_target(folder, "llama")
    tiny.add_tokenizer(folder)
    return load_tokenizer(read_target_folder(folder, name="tiny"))


def answer(**changes: Any) -> Answer:
    said: dict[str, Any] = {
        "token_ids": None,
        "text": None,
        "text_has_special_tokens": False,
        "finish_reason": "stop",
        "matched": None,
        "num_completion_tokens": None,
        "num_prompt_tokens": 3,
        "prompt_ids": None,
    }
    return Answer(**(said | changes))


@pytest.mark.parametrize(
    ("said", "ids", "reason", "is_sure"),
    [
        ({"token_ids": (30, STOP)}, (30, STOP), "stop", True),
        ({"token_ids": (30,), "matched": STOP, "num_completion_tokens": 2}, (30, STOP), "stop", True),
        ({"token_ids": (30,), "matched": "<stop>"}, (30, STOP), "stop", True),
        ({"token_ids": (), "num_completion_tokens": 1}, (STOP,), "stop", True),
        ({"token_ids": (30, 31, 32, 33), "finish_reason": "length"}, (30, 31, 32, 33), "length", True),
        ({"token_ids": (30, 31, 32, STOP), "finish_reason": "length"}, (30, 31, 32, STOP), "stop", True),
        ({"token_ids": (30, 31), "finish_reason": "length"}, (30, 31), "length", True),
        ({"token_ids": (30, STOP, 31), "finish_reason": "length"}, (30, STOP), "stop", True),
        ({"token_ids": (30, 31, 32, 33, 34), "finish_reason": "length"}, (30, 31, 32, 33), "length", True),
        ({"text": "w30 w31", "num_completion_tokens": 3}, (30, 31, STOP), "stop", True),
        ({"text": "w30 w31", "num_completion_tokens": 2}, (30, 31, STOP), "stop", True),
        ({"text": "w30 w31"}, (30, 31, STOP), "stop", True),
        ({"text": "w30 w31", "num_completion_tokens": 5}, (30, 31, STOP), "stop", False),
        (
            {"text": "w30 w31 w32", "num_completion_tokens": 4, "finish_reason": "length"},
            (30, 31, 32, STOP),
            "stop",
            False,
        ),
        ({"text": "w30 w31", "num_completion_tokens": 2, "finish_reason": "length"}, (30, 31), "length", True),
        ({"text": "", "num_completion_tokens": 1}, (STOP,), "stop", True),
    ],
    ids=[
        "whole",
        "trimmed and named",
        "trimmed and named as text",
        "trimmed to nothing",
        "at the limit",
        "stopped at the limit",
        "the server's own limit",
        "goes on after it stopped",
        "longer than asked for",
        "text, its stop token counted",
        "text, its stop token not counted",
        "text, nothing counted",
        "text that lost tokens",
        "text that lost its stop token at the limit",
        "text, cut off",
        "no text but the stop token",
    ],
)  # fmt: skip
def test_an_answer_is_the_tokens_that_the_target_emitted(
    tokenizer: Any, said: dict[str, Any], ids: tuple[int, ...], reason: str, is_sure: bool
) -> None:
    finished = to_transcript(answer(**said), PROMPT, tokenizer, LIMITS)
    transcript = finished.transcript
    assert (transcript.response_ids, transcript.stop_reason, finished.is_sure) == (ids, reason, is_sure)
    assert (transcript.id, transcript.prompt_ids) == (PROMPT.id, PROMPT.prompt_ids)
    assert finished.is_retokenised == ("text" in said)


@pytest.mark.parametrize(
    ("said", "kind", "expected"),
    [
        ({"token_ids": ()}, ServerError, "empty completion for prompt 'a' (it counted no tokens)"),
        ({"text": "", "num_completion_tokens": 9}, ServerError, "for prompt 'a' (it counted 9 tokens)"),
        ({"text": "", "finish_reason": "length"}, ServerError, "empty completion"),
        ({}, ServerError, "neither token ids nor text"),
        ({"token_ids": (30,), "num_completion_tokens": 3}, ServerError, "1 token ids for prompt 'a' and counted 3"),
        ({"token_ids": (30,), "finish_reason": "abort"}, ServerError, "'abort', expected stop or length"),
        ({"token_ids": (30,), "matched": 31}, ServerMismatch, "at 31, which is no stop token of the target (7)"),
        ({"token_ids": (30,), "matched": "w9"}, ServerMismatch, "at 'w9', which is no stop token"),
        ({"text": "elsewhere"}, ServerMismatch, "does not come back"),
        ({"token_ids": (30,), "num_prompt_tokens": 4}, ServerMismatch, "as 4 tokens, .* give 3"),
        ({"token_ids": (30,), "prompt_ids": (10, 21, 11)}, ServerMismatch, "as token 21 at place 1, .* give 20"),
        ({"token_ids": (30,), "prompt_ids": (1, 10, 20, 11)}, ServerMismatch, "as 4 tokens, .* give 3"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_what_is_no_continuation_of_the_prompt_is_said(
    tokenizer: Any, said: dict[str, Any], kind: type[Exception], expected: str
) -> None:
    pattern = expected if ".*" in expected else re.escape(expected)
    with pytest.raises(ServerError, match=pattern) as refused:
        to_transcript(answer(**said), PROMPT, tokenizer, LIMITS)
    assert type(refused.value) is kind


def finished(name: str, *, num_tokens: int = 4, reason: str = "length", **changes: bool) -> Finished:
    transcript = Transcript(id=name, prompt_ids=(1,), response_ids=(30,) * num_tokens, stop_reason=reason)
    told = {"is_retokenised": False, "is_sure": True, "is_prompt_checked": True}
    return Finished(transcript=transcript, **(told | changes))


def test_each_doubt_is_one_line_with_the_prompts_it_is_about() -> None:
    assert warnings_of([finished("a"), finished("b", num_tokens=1, reason="stop")], 4) == []
    (unsure,) = warnings_of([finished(f"p{number}", is_sure=False) for number in range(5)], 4)
    assert "5 of 5 answers" in unsure
    assert "(p0, p1, p2 and 2 more)" in unsure
    (unchecked,) = warnings_of([finished("a"), finished("b", is_prompt_checked=False)], 4)
    assert "of 1 prompts (b)" in unchecked
    (short,) = warnings_of([finished("a"), finished("b", num_tokens=3)], 4)
    assert "cut 1 answers off before completions.max_new_tokens = 4 (b)" in short


class TestFormsOfAnswers:
    """Fields as the servers' versions have had them."""

    def test_sglang_has_given_its_reason_as_a_word_and_one_answer_as_a_list(self) -> None:
        old = [{"text": "x", "output_ids": [1, 2], "meta_info": {"finish_reason": "length", "prompt_tokens": 3}}]
        read = SGLang().read(old)
        assert (read.token_ids, read.finish_reason, read.matched) == ((1, 2), "length", None)

    def test_sglangs_untrimmed_text_ends_with_what_stopped_it(self) -> None:
        data = {"text": "w30 END", "meta_info": {"finish_reason": {"type": "stop", "matched": " END"}}}
        assert SGLang().read(data).text == "w30"

    @pytest.mark.parametrize("beside", [True, False], ids=["beside the choices", "in the choice"])
    def test_vllm_gives_the_prompts_ids_in_one_of_two_places(self, beside: bool) -> None:
        ids = {"prompt_token_ids": [10, 20]}
        choice = {"text": "", "token_ids": [1], "finish_reason": "length"} | ({} if beside else ids)
        assert VLLM().read({"choices": [choice]} | (ids if beside else {})).prompt_ids == (10, 20)

    @pytest.mark.parametrize("data", [None, [], "text", 5, {}, {"choices": None}, {"choices": ["x"]}], ids=str)
    def test_what_is_no_answer_is_an_empty_completion(self, data: Any) -> None:
        for protocol in (SGLang(), VLLM(), OpenAIChat(None)):
            with pytest.raises(ServerError, match="returned an empty completion"):
                protocol.read(data)

    @pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "tool_calls"])
    def test_text_that_a_parser_moved_elsewhere_is_not_done_without(self, field: str) -> None:
        choice = {"message": {"content": "4", field: "hm"}, "finish_reason": "stop"}
        with pytest.raises(ServerError, match=f"into `{field}`"):
            OpenAIChat(None).read({"choices": [choice]})


class TestNames:
    def target(self, tmp_path: Path, *parts: str, name: str) -> Target:
        folder = tmp_path.joinpath(*parts)
        tiny.write_tiny_target(folder, "llama")
        return read_target_folder(folder, name=name)

    def test_a_snapshot_of_the_hub_is_known_by_its_repository(self, tmp_path: Path) -> None:
        target = self.target(tmp_path, "models--Qwen--Qwen3-8B", "snapshots", "0123abcd", name="0123abcd")
        assert "qwen3-8b" in target_names(target)
        models = _listed({"data": [{"id": "other"}, {"id": "prod", "root": "Qwen/Qwen3-8B"}]})
        assert _choose(models, None, target) == "prod"

    def test_a_server_that_lists_nothing_must_be_told_what_to_ask_for(self, tmp_path: Path) -> None:
        target = self.target(tmp_path, "m", name="m")
        with pytest.raises(ServerError, match=r"name the one to ask for in completions\.server_model"):
            _choose(_listed(None), None, target)
        assert _choose([], "x", target) == "x"

    @pytest.mark.parametrize("url", ["ftp://h", "h:8000", "http://", "http://user:pw@h", "http://h?key=1", 5], ids=str)
    def test_an_address_is_that_of_a_server_and_holds_no_secret(self, url: Any) -> None:
        with pytest.raises(ValueError, match="base_url"):
            CompletionSettings(base_url=url)
