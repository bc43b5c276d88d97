"""Transcripts: the target's own greedy text, however it is batched, and what names it."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from dflash_core import progress
from dflash_core.errors import PromptError, TargetError
from dflash_core.store import Store
from dflash_core.target import runtime, transcripts
from dflash_core.target.loading import Target, read_target_folder
from dflash_core.target.prompts import Prompt
from dflash_core.target.rendering import stop_token_ids_of
from dflash_core.target.runtime import load_model
from dflash_core.target.transcripts import (
    LocalSource,
    RenderedPrompt,
    Rendering,
    Transcript,
    generate,
    load_tokenizer,
    read_transcripts,
    render_prompts,
    transcripts_digest,
    transcripts_key,
    write_transcripts,
)
from tests.support import tiny

MAX_NEW_TOKENS = 20
LENGTHS = (9, 3, 14, 5, 1)


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp(request.param) / "target"
    tiny.write_tiny_target(folder, request.param)
    tiny.add_tokenizer(folder)
    return read_target_folder(folder, name="tiny")


@pytest.fixture(scope="module")
def model(target: Target) -> Any:
    return load_model(target, "float32")


@pytest.fixture(scope="module")
def one_target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("one") / "target"
    tiny.write_tiny_target(folder, "qwen3")
    tiny.add_tokenizer(folder)
    return read_target_folder(folder, name="tiny")


@pytest.fixture
def own_target(one_target: Target, tmp_path: Path) -> Target:
    """Return a copy whose files a test may change."""
    return read_target_folder(Path(shutil.copytree(one_target.folder, tmp_path / "target")), name="tiny")


def random_prompts(lengths: Sequence[int] = LENGTHS, seed: int = 3) -> list[RenderedPrompt]:
    generator = torch.Generator().manual_seed(seed)
    return [
        RenderedPrompt(
            id=f"p{number}", prompt_ids=tuple(torch.randint(8, 150, (length,), generator=generator).tolist())
        )
        for number, length in enumerate(lengths)
    ]


def one_by_one(model: Any, prompt: Sequence[int], stop: Sequence[int], max_new_tokens: int) -> list[int]:
    """Return the greedy continuation by the plainest loop: the whole text again for every token, no cache."""
    text = list(prompt)
    with torch.inference_mode():
        while len(text) < len(prompt) + max_new_tokens:
            text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
            if text[-1] in stop:
                break
    return text[len(prompt) :]


def a_stop_inside(responses: Sequence[Sequence[int]]) -> int:
    """Return a token that ends one of the responses early, not at once, and not all of them."""
    return next(
        token
        for response in responses
        for place, token in enumerate(response)
        if place >= 3 and token not in response[:place] and not all(token in other for other in responses)
    )


def ask(number: int = 0, text: str = "w20 w21", **names: Any) -> Prompt:
    return Prompt(**({"id": f"p{number}", "dataset": "d", "group": None, "messages": (("user", text),)} | names))


def rendered(target: Target, *prompts: Prompt, thinking: bool = False, max_new_tokens: int = 8) -> Rendering:
    return render_prompts(target, prompts or (ask(),), thinking=thinking, max_new_tokens=max_new_tokens)


def set_template(target: Target, template: str) -> None:
    (target.folder / "chat_template.jinja").write_text(template)
    path = target.folder / "tokenizer_config.json"
    data = json.loads(path.read_text())
    data.pop("chat_template", None)
    path.write_text(json.dumps(data))


class TestGenerating:
    @pytest.mark.parametrize("batch_size", [1, 2, 5])
    def test_batches_give_what_one_prompt_alone_gives(self, model: Any, batch_size: int) -> None:
        prompts = random_prompts()
        expected = [one_by_one(model, prompt.prompt_ids, [], MAX_NEW_TOKENS) for prompt in prompts]
        stop = a_stop_inside(expected)
        expected = [one_by_one(model, prompt.prompt_ids, [stop], MAX_NEW_TOKENS) for prompt in prompts]
        written = generate(model, prompts, stop_token_ids=[stop], max_new_tokens=MAX_NEW_TOKENS, batch_size=batch_size)
        assert [list(transcript.response_ids) for transcript in written] == expected
        assert [(t.id, t.prompt_ids) for t in written] == [(p.id, p.prompt_ids) for p in prompts], "in the order given"
        assert {t.stop_reason for t in written} == {"stop", "length"}, "both ways to end occur"
        for transcript in written:
            ended = transcript.stop_reason == "stop"
            assert (transcript.response_ids[-1] == stop) == ended, "a stop token belongs to its response"
            assert stop not in transcript.response_ids[:-1]
            assert ended or len(transcript.response_ids) == MAX_NEW_TOKENS
            assert transcript.num_tokens == len(transcript.prompt_ids) + len(transcript.response_ids)

    def test_any_of_several_stop_tokens_ends_a_response(self, model: Any) -> None:
        prompts = random_prompts()
        free = [one_by_one(model, prompt.prompt_ids, [], MAX_NEW_TOKENS) for prompt in prompts]
        stops = [free[0][4], free[2][2]]
        written = generate(model, prompts, stop_token_ids=stops, max_new_tokens=MAX_NEW_TOKENS, batch_size=5)
        for transcript, text in zip(written, free, strict=True):
            places = [place for place, token in enumerate(text) if token in stops]
            end = places[0] + 1 if places else MAX_NEW_TOKENS
            assert list(transcript.response_ids) == text[:end]

    def test_a_stop_token_may_come_first(self, model: Any) -> None:
        prompt = random_prompts()[0]
        (first,) = one_by_one(model, prompt.prompt_ids, [], 1)
        (transcript,) = generate(model, [prompt], stop_token_ids=[first], max_new_tokens=9, batch_size=1)
        assert (transcript.response_ids, transcript.stop_reason) == ((first,), "stop")

    def test_a_stop_token_at_the_limit_is_a_stop(self, model: Any) -> None:
        prompt = random_prompts()[0]
        text = one_by_one(model, prompt.prompt_ids, [], MAX_NEW_TOKENS)
        stop = a_stop_inside([text, []])
        limit = text.index(stop) + 1
        (transcript,) = generate(model, [prompt], stop_token_ids=[stop], max_new_tokens=limit, batch_size=1)
        assert (list(transcript.response_ids), transcript.stop_reason) == (text[:limit], "stop")

    def test_progress_rises_to_the_total(self, model: Any) -> None:
        told: list[tuple[str, float, float]] = []
        with progress.listening(lambda *report: told.append(report)):
            generate(model, random_prompts(), stop_token_ids=[], max_new_tokens=3, batch_size=2)
        assert [stage for stage, _, _ in told] == ["transcripts"] * len(told)
        done = [count for _, count, _ in told]
        assert done == sorted(done)
        assert told[-1][1:] == (15, 15)
        assert len(told) > 5, "told while it works, not at the end alone"

    def test_the_models_own_generation_settings_do_not_leak_in(self, own_target: Target) -> None:
        """Released models ask for sampling and penalties; a transcript is greedy all the same."""
        prompts = random_prompts()
        plain = load_model(own_target, "float32")
        expected = [one_by_one(plain, prompt.prompt_ids, [7], MAX_NEW_TOKENS) for prompt in prompts]
        leaky = {
            "do_sample": True,
            "temperature": 3.0,
            "top_k": 40,
            "repetition_penalty": 5.0,
            "no_repeat_ngram_size": 2,
            "suppress_tokens": [expected[0][0]],
            "min_new_tokens": 6,
            "max_new_tokens": 8,
            "eos_token_id": [expected[1][2]],
            "num_beams": 3,
            "forced_eos_token_id": 9,
        }
        (own_target.folder / "generation_config.json").write_text(json.dumps(leaky))
        model = load_model(own_target, "float32")
        assert model.generation_config.repetition_penalty == 5.0, "transformers did read the file"
        leaked = model.generate(torch.tensor([prompts[0].prompt_ids]))[0, len(prompts[0].prompt_ids) :].tolist()
        assert leaked != expected[0][: len(leaked)], "and it would matter"
        written = generate(model, prompts, stop_token_ids=[7], max_new_tokens=MAX_NEW_TOKENS, batch_size=3)
        assert [list(transcript.response_ids) for transcript in written] == expected


class TestRendering:
    def test_the_template_and_the_tokenizer_of_the_target_are_used(self, one_target: Target) -> None:
        prompt = ask(messages=(("user", "w20"), ("assistant", "w21"), ("user", "w22 w23")))
        rendering = rendered(one_target, prompt, ask(1))
        assert [prompt.prompt_ids for prompt in rendering.prompts] == [
            (10, 20, 10, 21, 10, 22, 23, 11),
            (10, 20, 21, 11),
        ]
        assert [prompt.id for prompt in rendering.prompts] == ["p0", "p1"]
        assert rendering.stop_token_ids == (tiny.STOP_TOKEN_ID,)

    @pytest.mark.parametrize(("thinking", "token"), [(True, 12), (False, 13)])
    def test_the_thinking_flag_reaches_the_template(self, own_target: Target, thinking: bool, token: int) -> None:
        set_template(own_target, "{{ messages[0]['content'] }} {% if enable_thinking %}w12{% else %}w13{% endif %}")
        rendering = rendered(own_target, thinking=thinking)
        assert rendering.prompts[0].prompt_ids == (20, 21, token)
        assert rendering.thinking is thinking

    def test_other_templates_and_tokenizers_have_other_digests(self, own_target: Target) -> None:
        before = rendered(own_target)
        set_template(own_target, "w10 {{ messages[0]['content'] }} w11")
        template = rendered(own_target)
        assert template.prompts == before.prompts, "the same ids this time"
        assert template.template_digest != before.template_digest
        assert template.tokenizer_digest == before.tokenizer_digest
        path = own_target.folder / "tokenizer.json"
        path.write_text(path.read_text().replace('"w158"', '"x158"'))
        assert rendered(own_target).tokenizer_digest != before.tokenizer_digest

    def test_a_prompt_that_fits_exactly_is_taken_and_one_token_more_names_it(self, one_target: Target) -> None:
        """The context holds 512 tokens; the template adds two to the 100 of the text."""
        text = " ".join(["w20"] * 100)
        assert one_target.config.max_position_embeddings == 512
        rendered(one_target, ask(0), ask(1, text), max_new_tokens=410)
        with pytest.raises(PromptError) as refused:
            rendered(one_target, ask(0), ask(1, text), max_new_tokens=411)
        message = str(refused.value)
        for part in ("'p1'", "102 tokens", "max_new_tokens = 411", "513", "512"):
            assert part in message

    def test_a_target_without_a_chat_template_is_refused(self, own_target: Target) -> None:
        set_template(own_target, "")
        (own_target.folder / "chat_template.jinja").unlink()
        with pytest.raises(TargetError, match="has no chat template"):
            rendered(own_target)

    def test_a_target_without_a_tokenizer_is_refused(self, target: Target, tmp_path: Path) -> None:
        """For some kinds of model transformers would make up an empty one, and every prompt would be empty."""
        own = read_target_folder(Path(shutil.copytree(target.folder, tmp_path / "target")), name="tiny")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (own.folder / name).unlink()
        with pytest.raises(TargetError, match="has no readable tokenizer") as refused:
            rendered(own)
        assert "\n" not in str(refused.value)

    def test_a_prompt_without_tokens_is_refused(self, own_target: Target) -> None:
        set_template(own_target, "{% if messages[0]['content'] == 'w20' %}w20{% endif %}")
        with pytest.raises(PromptError, match="prompt 'p1' has no tokens"):
            rendered(own_target, ask(0, "w20"), ask(1, "w21"))

    def test_a_prompt_that_the_template_refuses_is_named(self, own_target: Target) -> None:
        set_template(
            own_target,
            "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
            "{{ messages[0]['content'] }}",
        )
        prompt = ask(1, messages=(("system", "w20"), ("user", "w21")))
        with pytest.raises(PromptError, match="refuses prompt 'p1': no system role"):
            rendered(own_target, ask(0), prompt)


class TestStopTokens:
    @pytest.mark.parametrize(
        ("generation", "config", "expected"),
        [
            ({"eos_token_id": [9, 4]}, {"eos_token_id": 7}, (4, 9)),
            ({"eos_token_id": 0}, {"eos_token_id": 7}, (0,)),
            ({}, {"eos_token_id": 5}, (5,)),
            (None, {"eos_token_id": [5, 6]}, (5, 6)),
            ({"eos_token_id": None}, {"eos_token_id": None, "text_config": {"eos_token_id": 8}}, (8,)),
            (None, {"text_config": {"eos_token_id": 8}}, (8,)),
            (None, {}, (tiny.STOP_TOKEN_ID,)),
            (None, {"eos_token_id": None, "text_config": None}, (tiny.STOP_TOKEN_ID,)),
        ],
        ids=["generation list", "token 0", "config", "list", "nested beside null", "nested", "tokenizer", "nulls"],
    )
    def test_they_come_from_generation_config_then_config_then_tokenizer(
        self, own_target: Target, generation: dict[str, Any] | None, config: dict[str, Any], expected: tuple[int, ...]
    ) -> None:
        path = own_target.folder / "config.json"
        data = json.loads(path.read_text())
        data.pop("eos_token_id")
        path.write_text(json.dumps(data | config))
        (own_target.folder / "generation_config.json").unlink(missing_ok=True)
        if generation is not None:
            (own_target.folder / "generation_config.json").write_text(json.dumps(generation))
        assert stop_token_ids_of(own_target, load_tokenizer(own_target)) == expected

    def test_a_target_without_any_is_refused(self, own_target: Target) -> None:
        for name in ("config.json", "tokenizer_config.json"):
            path = own_target.folder / name
            data = json.loads(path.read_text())
            data.pop("eos_token_id", None)
            data.pop("eos_token", None)
            path.write_text(json.dumps(data))
        (own_target.folder / "generation_config.json").unlink(missing_ok=True)
        with pytest.raises(TargetError, match="names no stop token"):
            rendered(own_target)


class TestKey:
    RENDERING = Rendering(
        prompts=(RenderedPrompt(id="a", prompt_ids=(10, 20)), RenderedPrompt(id="b", prompt_ids=(10, 21))),
        template_digest="t",
        tokenizer_digest="k",
        stop_token_ids=(7, 9),
        thinking=False,
    )
    HOW: ClassVar[dict[str, Any]] = {"max_new_tokens": 8, "batch_size": 2, "compute_dtype": "float32"}

    def key(self, target: Target, rendering: Rendering | None = None, **changes: Any) -> str:
        how = self.HOW | changes
        limit = how.pop("max_new_tokens")
        return transcripts_key(target, rendering or self.RENDERING, LocalSource(**how), max_new_tokens=limit)

    def changed(self, **changes: Any) -> Rendering:
        return dataclasses.replace(self.RENDERING, **changes)

    @pytest.mark.parametrize(
        "changes",
        [
            {"prompts": RENDERING.prompts[::-1]},
            {"prompts": RENDERING.prompts[:1]},
            {"prompts": (RenderedPrompt(id="a", prompt_ids=(10, 22)), RENDERING.prompts[1])},
            {"prompts": (RenderedPrompt(id="c", prompt_ids=(10, 20)), RENDERING.prompts[1])},
            {"stop_token_ids": (7,)},
            {"max_new_tokens": 9},
            {"batch_size": 3},
            {"compute_dtype": "bfloat16"},
        ],
        ids=["order", "fewer", "tokens", "id", "stop", "limit", "batch", "dtype"],
    )
    def test_it_changes_with_what_decides(self, one_target: Target, changes: dict[str, Any]) -> None:
        how = {name: value for name, value in changes.items() if name in self.HOW}
        of_rendering = {name: value for name, value in changes.items() if name not in self.HOW}
        assert self.key(one_target, self.changed(**of_rendering), **how) != self.key(one_target)

    def test_it_changes_with_the_target_and_with_the_code(
        self, one_target: Target, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = self.key(one_target)
        assert self.key(dataclasses.replace(one_target, identity="another")) != before
        monkeypatch.setattr(transcripts, "TRANSCRIPTS_VERSION", transcripts.TRANSCRIPTS_VERSION + 1)
        assert self.key(one_target) != before

    @pytest.mark.parametrize(
        "changes",
        [{"template_digest": "u"}, {"tokenizer_digest": "l"}, {"thinking": True}],
        ids=lambda c: next(iter(c)),
    )
    def test_what_gave_the_ids_does_not_count_beside_the_ids(self, one_target: Target, changes: dict[str, Any]) -> None:
        assert self.key(one_target, self.changed(**changes)) == self.key(one_target)

    def test_labels_and_names_of_places_do_not_count(self, one_target: Target) -> None:
        moved = dataclasses.replace(one_target, name="other", folder=Path("/elsewhere"))
        assert self.key(moved) == self.key(one_target)
        plain = rendered(one_target, ask(0, dataset="math"))
        labelled = rendered(one_target, ask(0, dataset="code", group="held out"))
        assert self.key(one_target, plain) == self.key(one_target, labelled)


class TestWriting:
    HOW: ClassVar[tuple[LocalSource]] = (LocalSource(batch_size=2, compute_dtype="float32"),)
    LIMIT: ClassVar[dict[str, int]] = {"max_new_tokens": 8}

    def test_what_is_read_back_is_what_the_target_wrote(self, one_target: Target, tmp_path: Path) -> None:
        rendering = rendered(one_target, ask(0), ask(1, "w30 w31 w32 w33"), ask(2, "w40"))
        store = Store(tmp_path)
        artifact = write_transcripts(store, one_target, rendering, *self.HOW, **self.LIMIT)
        model = load_model(one_target, "float32")
        expected = generate(
            model, rendering.prompts, stop_token_ids=rendering.stop_token_ids, max_new_tokens=8, batch_size=2
        )
        assert read_transcripts(artifact) == expected
        assert artifact.meta["digest"] == transcripts_digest(expected)
        assert artifact.meta["num_transcripts"] == 3
        assert artifact.meta["num_tokens"] == sum(transcript.num_tokens for transcript in expected)
        assert artifact.meta["sampling"] == "greedy"
        assert artifact.key == transcripts_key(one_target, rendering, *self.HOW, **self.LIMIT)

    def test_a_second_time_the_target_does_not_run(self, one_target: Target, tmp_path: Path) -> None:
        rendering = rendered(one_target)
        first = write_transcripts(Store(tmp_path), one_target, rendering, *self.HOW, **self.LIMIT)
        before = runtime.num_forward_passes
        second = write_transcripts(Store(tmp_path), one_target, rendering, *self.HOW, **self.LIMIT)
        assert (first.was_built, second.was_built) == (True, False)
        assert runtime.num_forward_passes == before > 0
        assert read_transcripts(second) == read_transcripts(first)

    @pytest.mark.parametrize(
        "changes",
        [
            {"id": "b"},
            {"prompt_ids": (1, 3)},
            {"response_ids": (3,)},
            {"stop_reason": "length"},
            {"prompt_ids": (1,), "response_ids": (2, 3, 4)},
        ],
        ids=["id", "prompt", "response", "reason", "where the response starts"],
    )
    def test_the_digest_tells_other_transcripts_apart(self, changes: dict[str, Any]) -> None:
        one = Transcript(id="a", prompt_ids=(1, 2), response_ids=(3, 4), stop_reason="stop")
        assert transcripts_digest([dataclasses.replace(one, **changes)]) != transcripts_digest([one])
        assert transcripts_digest([one, one]) != transcripts_digest([one])
