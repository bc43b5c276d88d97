"""A tiny target that is served: it ends some answers early, and its stop token is left out of decoded text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest

from dflash_core.store import Artifact, Store
from dflash_core.target.loading import Target, read_target_folder
from dflash_core.target.rendering import RenderedPrompt, load_tokenizer
from dflash_core.target.runtime import load_model
from dflash_core.target.servers import source as server_source
from dflash_core.target.servers.client import Patience
from dflash_core.target.transcripts import LocalSource, generate, read_transcripts, write_transcripts
from tests.dflash_core.target.servers.served_prompts import MAX_NEW_TOKENS, rendered
from tests.support import tiny
from tests.support.completion_server import Behaviour, CompletionServer
from tests.support.served_transcripts import Start


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("served") / "target"
    # Not a Qwen: of those transformers' server takes thinking out of the text, by a format that this template lacks.
    # This seed's greedy texts hold no special token but the stop token: text could not carry another.
    tiny.write_tiny_target(folder, "llama", seed=3)
    tiny.add_tokenizer(folder)
    target = read_target_folder(folder, name="target")
    model = load_model(target, "float32")
    prompts = [RenderedPrompt(id=p.id, prompt_ids=p.prompt_ids) for p in rendered(target).prompts]
    free = generate(model, prompts, stop_token_ids=[], max_new_tokens=MAX_NEW_TOKENS, batch_size=8)
    # A token that ends an answer in its middle becomes the stop token, and the tokenizer's own end. (A special
    # token is looked for inside words: one of three digits is no part of another.)
    stop = next(
        token
        for transcript in free
        for place, token in enumerate(transcript.response_ids)
        if place >= 3 and token >= 100 and token not in transcript.response_ids[:place]
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [stop]}))
    tokenizer = load_tokenizer(target)
    tokenizer.add_special_tokens({"eos_token": f"w{stop}"})
    tokenizer.save_pretrained(folder)
    return read_target_folder(folder, name="target")


@pytest.fixture(scope="session")
def local(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """What the target itself writes."""
    source = LocalSource(batch_size=8, compute_dtype="float32")
    store = Store(tmp_path_factory.mktemp("local"))
    return write_transcripts(store, target, rendered(target), source, max_new_tokens=MAX_NEW_TOKENS)


@pytest.fixture
def start(target: Target, local: Artifact) -> Iterator[Start]:
    """Start servers that answer as the target does."""
    said = {t.prompt_ids: (list(t.response_ids), t.stop_reason) for t in read_transcripts(local)}
    with ExitStack() as stack:

        def start(api: str, **changes: Any) -> CompletionServer:
            def continue_ids(prompt: Sequence[int]) -> tuple[list[int], str]:
                # Of a prompt that is read wrongly it says anything.
                return said.get(tuple(prompt), ([40] * MAX_NEW_TOKENS, "length"))

            tokenizer = load_tokenizer(target)
            behaviour = Behaviour(api=api, continue_ids=continue_ids, tokenizer=tokenizer, **changes)
            return stack.enter_context(CompletionServer(behaviour).running())

        yield start


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a server be asked again soon, and not often."""
    monkeypatch.setattr(server_source, "PATIENCE", Patience(attempts=3, first_wait_s=0.01, longest_wait_s=0.05))
