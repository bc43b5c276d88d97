"""A killed job asks only for what it had not finished."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
import yaml

from dflash_core import stages
from dflash_core.config import load_config
from dflash_core.store import Store
from dflash_core.target.loading import Target
from dflash_core.target.rendering import RenderedPrompt, load_tokenizer
from dflash_core.target.servers.answers import Finished
from dflash_core.target.servers.journal import Journal
from dflash_core.target.transcripts import KIND, Transcript, read_transcripts
from tests.dflash_core.target.servers.served_prompts import MAX_NEW_TOKENS
from tests.support.completion_server import Behaviour, CompletionServer

ROOT = Path(__file__).parents[4]
NUM_PROMPTS = 12
WRITE = """
import sys
from dflash_core import config, stages
stages.write_transcripts(config.load_config(sys.argv[1]))
"""


def test_after_a_kill_only_the_missing_prompts_are_asked_for(target: Target, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"id": f"p{number}", "prompt": f"w{30 + number} w21"} for number in range(NUM_PROMPTS)]
    prompts.write_text("\n".join(json.dumps(line) for line in lines))
    behaviour = Behaviour(
        api="vllm",
        continue_ids=lambda prompt: ([40 + prompt[1] % 7] * MAX_NEW_TOKENS, "length"),
        tokenizer=load_tokenizer(target),
        delay_s=0.25,
    )
    with CompletionServer(behaviour).running() as server:
        config = tmp_path / "dflash.yaml"
        data = {
            "target": {"model": str(target.folder), "compute_dtype": "float32"},
            "completions": {
                "source": "server",
                "base_url": server.url,
                "concurrency": 2,
                "max_new_tokens": MAX_NEW_TOKENS,
            },
            "prompts": str(prompts),
            "store": str(tmp_path / "store"),
        }
        config.write_text(yaml.safe_dump(data))
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with subprocess.Popen([sys.executable, "-c", WRITE, str(config)], env=environment) as process:
            _wait_until(lambda: len(server.asked) >= 6, process)
            process.send_signal(signal.SIGKILL)
        (journal,) = (tmp_path / "store" / "unfinished").glob("*/answers.jsonl")
        kept = len([line for line in journal.read_text().split("\n")[1:] if line.endswith("}")])
        assert 2 <= kept < NUM_PROMPTS
        time.sleep(2 * behaviour.delay_s)  # requests of the killed process end
        before = len(server.asked)
        stages.write_transcripts(load_config(config))
        assert len(server.asked) - before == NUM_PROMPTS - kept
        artifact = Store(tmp_path / "store").find(KIND, stages.plan_target(load_config(config)).transcripts_key)
    assert artifact is not None
    written = read_transcripts(artifact)
    assert [t.id for t in written] == [line["id"] for line in lines]
    assert [t.response_ids for t in written] == [(40 + (30 + n) % 7,) * MAX_NEW_TOKENS for n in range(NUM_PROMPTS)]
    assert not list((tmp_path / "store" / "unfinished").iterdir())


def _wait_until(is_so: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)


class TestJournal:
    WRITER: ClassVar[dict[str, str]] = {"api": "vllm", "model": "m"}
    PROMPT = RenderedPrompt(id="a", prompt_ids=(1, 2))
    FINISHED = Finished(
        transcript=Transcript(id="a", prompt_ids=(1, 2), response_ids=(3, 7), stop_reason="stop"),
        is_retokenised=True,
        is_sure=False,
        is_prompt_checked=True,
    )

    def write(self, folder: Path) -> Path:
        with Journal(folder, self.WRITER) as journal:
            journal.add(self.FINISHED)
        return folder / "answers.jsonl"

    def test_what_was_added_is_found_again(self, tmp_path: Path) -> None:
        self.write(tmp_path)
        with Journal(tmp_path, self.WRITER) as journal:
            assert journal.find(self.PROMPT) == self.FINISHED
            assert len(journal) == 1

    def test_a_prompt_with_other_tokens_is_another(self, tmp_path: Path) -> None:
        self.write(tmp_path)
        with Journal(tmp_path, self.WRITER) as journal:
            assert journal.find(RenderedPrompt(id="a", prompt_ids=(1, 3))) is None

    def test_answers_of_another_server_are_dropped(self, tmp_path: Path) -> None:
        self.write(tmp_path)
        with Journal(tmp_path, {"api": "sglang", "model": "m"}) as journal:
            assert journal.find(self.PROMPT) is None
        with Journal(tmp_path, self.WRITER) as journal:
            assert len(journal) == 0

    @pytest.mark.parametrize("num_bytes", [1, 20, 60])
    def test_a_line_that_the_kill_cut_off_is_not_there_and_the_next_is_whole(
        self, tmp_path: Path, num_bytes: int
    ) -> None:
        path = self.write(tmp_path)
        whole = path.read_bytes()
        path.write_bytes(whole + whole.split(b"\n")[1].replace(b'"a"', b'"b"')[:num_bytes])
        other = Finished(
            transcript=Transcript(id="c", prompt_ids=(5,), response_ids=(6,), stop_reason="length"),
            is_retokenised=False,
            is_sure=True,
            is_prompt_checked=True,
        )
        with Journal(tmp_path, self.WRITER) as journal:
            assert len(journal) == 1
            journal.add(other)
        with Journal(tmp_path, self.WRITER) as journal:
            assert journal.find(self.PROMPT) == self.FINISHED
            assert journal.find(RenderedPrompt(id="c", prompt_ids=(5,))) == other

    def test_discarded_answers_are_gone(self, tmp_path: Path) -> None:
        self.write(tmp_path)
        with Journal(tmp_path, self.WRITER) as journal:
            journal.discard()
        with Journal(tmp_path, self.WRITER) as journal:
            assert len(journal) == 0
