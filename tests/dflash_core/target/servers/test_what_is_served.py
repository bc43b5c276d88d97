"""What a server serves: another model or another template than the target has is refused by both names."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dflash_core.errors import ServerMismatch
from dflash_core.store import Artifact
from dflash_core.target.loading import Target, read_target_folder
from dflash_core.target.transcripts import read_transcripts
from tests.dflash_core.target.servers.served_prompts import ask, rendered
from tests.support.served_transcripts import APIS, Start, refusal, write

pytestmark = pytest.mark.usefixtures("impatient")


class TestWhatIsServed:
    @pytest.mark.parametrize("api", APIS)
    def test_another_model_is_refused_by_both_names(
        self, target: Target, start: Start, tmp_path: Path, api: str
    ) -> None:
        server = start(api, model="Qwen/Qwen3-8B")
        message = refusal(target, server, tmp_path, ServerMismatch)
        assert "serves 'Qwen/Qwen3-8B', target.model is 'target'" in message
        assert "completions.server_model: Qwen/Qwen3-8B" in message
        assert server.asked == []

    @pytest.mark.parametrize(("speaks", "names_owner"), [("sglang", False), ("vllm", False), ("openai", True)])
    @pytest.mark.parametrize("api", ["auto", "configured"])
    def test_what_it_speaks_is_found_out_or_taken_from_the_configuration(
        self, target: Target, start: Start, tmp_path: Path, speaks: str, names_owner: bool, api: str
    ) -> None:
        """SGLang says what it is in a place of its own; without a name vLLM's chat endpoint is as good as any."""
        server = start(speaks, names_owner=names_owner)
        artifact = write(target, server, tmp_path, api="auto" if api == "auto" else speaks)
        expected = "openai" if (api, speaks) == ("auto", "vllm") else speaks
        assert artifact.meta["server"]["api"] == expected
        assert ("messages" in server.asked[0]) == (expected == "openai")

    def test_another_name_of_the_target_may_be_given(self, target: Target, start: Start, tmp_path: Path) -> None:
        server = start("vllm", model="prod")
        assert write(target, server, tmp_path, server_model="prod").meta["server"]["model"] == "prod"
        assert {body["model"] for body in server.asked} == {"prod"}
        message = refusal(target, server, tmp_path, ServerMismatch, server_model="other")
        assert "serves 'prod', not completions.server_model = 'other'" in message

    @pytest.mark.parametrize("name", ["/models/target", "org/Target", "target@main", "target.gguf"])
    def test_paths_hub_ids_and_revisions_are_names_of_it(
        self, target: Target, start: Start, tmp_path: Path, name: str
    ) -> None:
        assert write(target, start("openai", model=name), tmp_path).meta["server"]["model"] == name

    def test_a_server_that_answers_as_another_model_is_refused(
        self, target: Target, start: Start, tmp_path: Path
    ) -> None:
        server = start("openai", always='set:model="other"')
        assert "answered as 'other' when 'target' was asked for" in refusal(target, server, tmp_path, ServerMismatch)

    def test_a_server_that_changed_while_it_was_asked_leaves_nothing(
        self, target: Target, start: Start, tmp_path: Path
    ) -> None:
        server = start("sglang")
        inner = server.behaviour.continue_ids

        def change(prompt: Sequence[int]) -> tuple[list[int], str]:
            server.behaviour.api = "vllm"
            return inner(prompt)

        server.behaviour.continue_ids = change
        message = refusal(target, server, tmp_path, ServerMismatch)
        assert "was 'target' (sglang) at first and is 'target' (vllm) now" in message
        assert not list((tmp_path / "unfinished").rglob("*.jsonl"))

    @pytest.mark.parametrize("api", ["sglang", "vllm"])
    def test_another_template_is_refused_with_both_numbers(
        self, target: Target, start: Start, tmp_path: Path, api: str
    ) -> None:
        server = start(api)
        template = server.behaviour.tokenizer.chat_template
        server.behaviour.tokenizer.chat_template = "w12 " + template
        message = refusal(target, server, tmp_path, ServerMismatch, concurrency=1)
        assert "reads prompt 'p0' as 6 tokens, the target's tokenizer and template give 5" in message
        server.behaviour.tokenizer.chat_template = template.replace("w11", "w12")
        message = refusal(target, server, tmp_path, ServerMismatch, concurrency=1)
        assert "as token 12 at place 4, the target's tokenizer and template give 11" in message
        assert server.asked == []

    def test_another_template_of_a_chat_endpoint_is_refused_with_both_numbers(
        self, target: Target, start: Start, tmp_path: Path
    ) -> None:
        server = start("openai")
        server.behaviour.tokenizer.chat_template = "w12 " + server.behaviour.tokenizer.chat_template
        message = refusal(target, server, tmp_path, ServerMismatch, concurrency=1)
        assert "as 6 tokens, the target's tokenizer and template give 5" in message

    @pytest.mark.parametrize("api", APIS)
    def test_a_prompt_that_the_server_counts_differently_is_refused(
        self, target: Target, start: Start, tmp_path: Path, api: str
    ) -> None:
        server = start(api, prompt_tokens_off=1, gives_ids=False)
        assert "as 6 tokens, the target's tokenizer and template give 5" in refusal(
            target, server, tmp_path, ServerMismatch, concurrency=1
        )

    @pytest.mark.parametrize(
        ("how", "kind"),
        [({"tokenize_takes_messages": False}, "tokenizer"), ({"has_tokenize": False}, "none")],
        ids=["text only", "no tokenize"],
    )
    def test_what_an_older_server_can_compare_is_recorded(
        self, target: Target, local: Artifact, start: Start, tmp_path: Path, how: dict[str, Any], kind: str
    ) -> None:
        artifact = write(target, start("sglang", **how), tmp_path)
        assert artifact.meta["rendering_check"] == kind
        assert read_transcripts(artifact) == read_transcripts(local)

    @pytest.mark.parametrize("thinking", [True, False])
    def test_the_thinking_flag_reaches_the_servers_template(
        self, target: Target, start: Start, tmp_path: Path, thinking: bool
    ) -> None:
        own = read_target_folder(Path(shutil.copytree(target.folder, tmp_path / "target")), name="target")
        template = "{{ messages[-1]['content'] }} {% if enable_thinking %}w12{% else %}w13 w14{% endif %}"
        (own.folder / "chat_template.jinja").write_text(template)
        server = start("openai")
        server.behaviour.tokenizer.chat_template = template
        write(own, server, tmp_path / "store", rendered(own, [ask(0)], thinking))
        assert server.asked[0]["chat_template_kwargs"] == {"enable_thinking": thinking}
        always = start("openai")
        always.behaviour.tokenizer.chat_template = template.replace("enable_thinking", str(not thinking).lower())
        with pytest.raises(ServerMismatch):
            write(own, always, tmp_path / "third", rendered(own, [ask(0)], thinking))
