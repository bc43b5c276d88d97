"""A served target: every protocol gives the target's own transcripts, and every misbehaviour is one line."""

from __future__ import annotations

import dataclasses
import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from dflash_core import progress
from dflash_core.config import CompletionSettings
from dflash_core.errors import ConfigError, PromptError, ServerMismatch
from dflash_core.store import Artifact
from dflash_core.target.loading import Target
from dflash_core.target.rendering import Rendering
from dflash_core.target.servers import client
from dflash_core.target.servers.source import ServerSource
from dflash_core.target.transcripts import LocalSource, read_transcripts, transcripts_key
from tests.dflash_core.target.servers.served_prompts import MAX_NEW_TOKENS, PROMPTS, ask, rendered
from tests.support.served_transcripts import APIS, Start, refusal, write

pytestmark = pytest.mark.usefixtures("impatient")


class TestAnswers:
    @pytest.mark.parametrize("api", APIS)
    @pytest.mark.parametrize("how", [{}, {"trims_stop": True}, {"gives_ids": False}], ids=["whole", "trimmed", "text"])
    def test_every_protocol_gives_what_the_target_itself_writes(
        self, target: Target, local: Artifact, start: Start, tmp_path: Path, api: str, how: dict[str, Any]
    ) -> None:
        server = start(api, **how)
        artifact = write(target, server, tmp_path)
        expected = read_transcripts(local)
        assert read_transcripts(artifact) == expected
        assert {t.stop_reason for t in expected} == {"stop", "length"}, "both ways to end occur"
        assert artifact.meta["digest"] == local.meta["digest"]
        assert artifact.meta["warnings"] == []
        assert artifact.meta["server"] == {"api": api, "model": "target", "sampling": {"temperature": 0}}
        is_text = api == "openai" or "gives_ids" in how
        assert artifact.meta["num_retokenised"] == (len(expected) if is_text else 0)
        assert artifact.meta["rendering_check"] == ("prompt_tokens" if api == "openai" else "template")
        assert (artifact.meta["source"], artifact.meta["sampling"]) == ("server", "greedy")
        assert len(server.asked) == len(expected)

    @pytest.mark.parametrize("api", APIS)
    def test_greedy_is_asked_for_whatever_the_model_is_set_to(
        self, target: Target, start: Start, tmp_path: Path, api: str
    ) -> None:
        server = start(api)
        write(target, server, tmp_path)
        for body in server.asked:
            settings = body.get("sampling_params", body)
            assert settings["temperature"] == 0
            assert settings.get("max_tokens", settings.get("max_new_tokens")) == MAX_NEW_TOKENS
            assert settings["frequency_penalty"] == 0
            if api != "openai":
                assert settings["repetition_penalty"] == 1
                assert settings["stop_token_ids"] == list(rendered(target).stop_token_ids)

    def test_a_stop_token_that_is_not_named_is_the_only_one_there_is(
        self, target: Target, local: Artifact, start: Start, tmp_path: Path
    ) -> None:
        server = start("sglang", trims_stop=True, names_stop=False)
        assert read_transcripts(write(target, server, tmp_path)) == read_transcripts(local)

    def test_a_stop_token_that_could_be_any_of_several_is_not_guessed(
        self, target: Target, start: Start, tmp_path: Path
    ) -> None:
        rendering = rendered(target)
        more = dataclasses.replace(rendering, stop_token_ids=(154, 155))
        server = start("sglang", trims_stop=True, names_stop=False)
        with pytest.raises(ServerMismatch, match="does not say which of the stop tokens 154, 155"):
            write(target, server, tmp_path, more)

    def test_a_server_that_ends_where_the_target_does_not_is_refused(
        self, target: Target, start: Start, tmp_path: Path
    ) -> None:
        server = start("sglang", always="set:meta_info.finish_reason=" + json.dumps({"type": "stop", "matched": 99}))
        message = refusal(target, server, tmp_path, ServerMismatch)
        assert "at 99, which is no stop token of the target" in message

    def test_an_answer_that_ends_at_once_is_its_stop_token(self, target: Target, start: Start, tmp_path: Path) -> None:
        (stop,) = rendered(target).stop_token_ids
        for api in APIS:
            server = start(api)
            server.behaviour.continue_ids = lambda _: ([stop], "stop")
            written = read_transcripts(write(target, server, tmp_path / api))
            assert {(t.response_ids, t.stop_reason) for t in written} == {((stop,), "stop")}

    def test_text_with_another_number_of_tokens_than_counted_is_kept_and_told(
        self, target: Target, start: Start, tmp_path: Path
    ) -> None:
        server = start("openai", faults=["set:usage.completion_tokens=5"])
        artifact = write(target, server, tmp_path, rendered(target, [ask(3)]), concurrency=1)
        assert artifact.meta["num_unsure"] == 1
        assert "(p3)" in artifact.meta["warnings"][0]

    def test_without_usage_it_is_said_that_the_prompt_was_not_compared(
        self, target: Target, local: Artifact, start: Start, tmp_path: Path
    ) -> None:
        artifact = write(target, start("openai", gives_usage=False), tmp_path)
        assert read_transcripts(artifact) == read_transcripts(local)
        assert (
            "did not say how many tokens it read of 7 prompts (p0, p1, p2 and 4 more)" in artifact.meta["warnings"][0]
        )

    @pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
    def test_the_address_may_end_in_v1(self, target: Target, start: Start, tmp_path: Path, path: str) -> None:
        server = start("vllm")
        assert write(target, server.url + path, tmp_path).meta["num_transcripts"] == len(PROMPTS)


class TestFailures:
    def test_a_server_that_is_down_is_said_in_one_line(self, target: Target, tmp_path: Path) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{taken.getsockname()[1]}"
            message = refusal(target, url, tmp_path)
        assert message.startswith(f"the server {url} does not answer: ")
        assert "3 attempts" in message

    @pytest.mark.parametrize("fault", ["status:500", "status:503", "status:429", "drop", "truncated", "half_json"])
    @pytest.mark.parametrize("api", APIS)
    def test_what_may_pass_is_asked_again(
        self, target: Target, local: Artifact, start: Start, tmp_path: Path, api: str, fault: str
    ) -> None:
        server = start(api, faults=[fault, fault])
        assert read_transcripts(write(target, server, tmp_path, concurrency=1)) == read_transcripts(local)
        assert len(server.asked) == len(PROMPTS) + 2

    @pytest.mark.parametrize(
        ("fault", "expected"),
        [
            ("status:500", "answered with status 500"),
            ("status:400", "refused /generate with status 400"),
            ("status:307", "refused /generate with status 307"),
            ("truncated", "broke off"),
            ("half_json", "cut off or not JSON"),
            ("drop", "broke off"),
            ("empty", "returned an empty completion for prompt 'p"),
            ("no_choice", "returned an empty completion"),
            ("set:output_ids=[40]", "the completion is cut off"),
            ('set:meta_info.finish_reason={"type": "abort", "message": "out of memory"}', "'abort: out of memory'"),
            ("set:meta_info.finish_reason=null", "the finish reason None"),
        ],
        ids=lambda value: value[:30],
    )
    def test_what_does_not_pass_is_said_and_what_is_finished_is_kept(
        self, target: Target, start: Start, tmp_path: Path, fault: str, expected: str
    ) -> None:
        server = start("sglang", faults=["", "", *[fault] * 3])
        message = refusal(target, server, tmp_path, concurrency=1)
        assert expected in message
        assert "2 of 7 transcripts are kept" in message
        before = len(server.asked)
        server.behaviour.faults.clear()
        assert write(target, server, tmp_path).meta["num_transcripts"] == 7
        assert len(server.asked) - before == 5, "only those that were missing"
        assert not list((tmp_path / "unfinished").iterdir())

    @pytest.mark.parametrize("api", ["vllm", "openai"])
    @pytest.mark.parametrize("fault", ["empty", "no_choice"])
    def test_an_empty_completion_is_none(
        self, target: Target, start: Start, tmp_path: Path, api: str, fault: str
    ) -> None:
        assert "returned an empty completion" in refusal(target, start(api, always=fault), tmp_path)

    @pytest.mark.parametrize("fault", ["slow:5", "trickle:0.05"])
    def test_a_slow_server_is_waited_for_twice(self, target: Target, start: Start, tmp_path: Path, fault: str) -> None:
        server = start("vllm", always=fault)
        begin = time.monotonic()
        message = refusal(target, server, tmp_path, timeout_s=0.3, concurrency=1)
        assert "gave no answer within completions.timeout_s = 0.3 s (/v1/completions, 2 attempts)" in message
        assert time.monotonic() - begin < 3
        assert len(server.asked) == 2

    def test_a_server_that_hangs_is_told_before_a_completion_would_be(
        self, target: Target, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(client, "QUICK_S", 0.2)
        message = refusal(target, start("vllm", models_delay_s=2.0), tmp_path)
        assert "gave no answer within 0.2 s (/v1/models, 2 attempts)" in message

    def test_a_server_that_parses_thinking_out_of_the_text_is_told_apart(
        self, target: Target, start: Start, tmp_path: Path
    ) -> None:
        server = start("openai", always="set:choices.0.message.content=null")
        assert "where a parser takes thinking or tool calls out of the text" in refusal(target, server, tmp_path)
        server.behaviour.always = 'set:choices.0.message.reasoning_content="w20"'
        assert "took a part of the completion out of its text" in refusal(target, server, tmp_path)

    def test_text_that_the_tokenizer_cannot_have_written_is_refused(
        self, target: Target, start: Start, tmp_path: Path
    ) -> None:
        server = start("openai", always='set:choices.0.message.content="hello there"')
        message = refusal(target, server, tmp_path, ServerMismatch)
        assert "does not come back from the target's tokenizer" in message


class TestHowItIsAsked:
    def test_no_more_requests_are_under_way_than_allowed(self, target: Target, start: Start, tmp_path: Path) -> None:
        server = start("vllm", delay_s=0.05)
        rendering = rendered(target, [ask(number) for number in range(12)])
        write(target, server, tmp_path, rendering, concurrency=3)
        assert server.max_at_once == 3

    def test_progress_rises_to_the_number_of_prompts(self, target: Target, start: Start, tmp_path: Path) -> None:
        told: list[tuple[str, float, float]] = []
        with progress.listening(lambda *report: told.append(report)):
            write(target, start("vllm"), tmp_path, concurrency=2)
        done = [count for _, count, _ in told]
        assert done == sorted(done)
        assert {(stage, total) for stage, _, total in told} == {("transcripts", 7)}
        assert done[-1] == 7

    def test_the_key_comes_from_the_environment_and_is_written_nowhere(
        self, target: Target, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server = start("vllm", key="sk-very-secret")
        message = refusal(target, server, tmp_path)
        assert "status 401" in message
        assert "completions.api_key_env" in message
        monkeypatch.setenv("MY_KEY", "sk-very-secret")
        server.behaviour.always = "status:400"
        message = refusal(target, server, tmp_path, api_key_env="MY_KEY")
        assert "key Bearer ***" in message
        assert "very-secret" not in message
        server.behaviour.always = ""
        write(target, server, tmp_path, api_key_env="MY_KEY")
        assert all(headers["Authorization"] == "Bearer sk-very-secret" for headers in server.headers[1:])
        for path in tmp_path.rglob("*"):
            assert not path.is_file() or b"very-secret" not in path.read_bytes()

    def test_a_key_that_is_not_set_is_named(self, target: Target, start: Start, tmp_path: Path) -> None:
        message = refusal(target, start("vllm"), tmp_path, ConfigError, api_key_env="NOT_SET_ANYWHERE")
        assert "'NOT_SET_ANYWHERE'" in message

    def test_a_server_needs_an_address(self) -> None:
        with pytest.raises(ConfigError, match=r"needs completions\.base_url"):
            ServerSource(settings=CompletionSettings(source="server"))

    def test_ids_of_a_prompt_are_not_for_a_chat_endpoint(self, target: Target, start: Start, tmp_path: Path) -> None:
        rendering = rendered(target, [ask(0, prompt_ids=(20, 21, 22))])
        for api in ("sglang", "vllm"):
            server = start(api)
            written = read_transcripts(write(target, server, tmp_path / api, rendering))
            assert written[0].prompt_ids == (20, 21, 22)
        with pytest.raises(PromptError, match="'p0' is given as `prompt_ids`"):
            write(target, start("openai"), tmp_path / "openai", rendering)


class TestKey:
    def key(self, target: Target, rendering: Rendering | None = None, **changes: Any) -> str:
        settings = {"source": "server", "base_url": "http://a"} | changes
        source = ServerSource(settings=CompletionSettings(**settings))
        return transcripts_key(target, rendering or rendered(target), source, max_new_tokens=MAX_NEW_TOKENS)

    @pytest.mark.parametrize("changes", [{"api": "vllm"}, {"server_model": "m"}], ids=["api", "model"])
    def test_it_changes_with_who_writes(self, target: Target, changes: dict[str, Any]) -> None:
        assert self.key(target, **changes) != self.key(target)

    @pytest.mark.parametrize(
        "changes",
        [{"base_url": "http://b:9"}, {"concurrency": 1}, {"timeout_s": 3.0}, {"api_key_env": "K"}, {"batch_size": 2}],
        ids=["address", "concurrency", "patience", "key", "local batch"],
    )
    def test_how_it_is_reached_does_not_count(self, target: Target, changes: dict[str, Any]) -> None:
        assert self.key(target, **changes) == self.key(target)

    def test_it_is_not_the_local_ones(self, target: Target) -> None:
        local = LocalSource(batch_size=24, compute_dtype="float32")
        assert self.key(target) != transcripts_key(target, rendered(target), local, max_new_tokens=MAX_NEW_TOKENS)

    def test_a_text_of_a_later_turn_counts(self, target: Target) -> None:
        other = [*PROMPTS[:-1], ask(6, "w33", follows="p5")]
        assert self.key(target, rendered(target, other)) != self.key(target)

    def test_a_finished_set_needs_no_server(self, target: Target, start: Start, tmp_path: Path) -> None:
        write(target, start("vllm"), tmp_path)
        assert not write(target, "http://127.0.0.1:1", tmp_path).was_built
