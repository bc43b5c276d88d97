"""`dflash-eval prepare` with a served target: done, or one line and status 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_core.config import load_config
from dflash_core.target.loading import read_target_folder
from dflash_core.target.rendering import load_tokenizer
from dflash_core.target.servers import source
from dflash_core.target.servers.client import Patience
from tests.support.completion_server import Behaviour, CompletionServer
from tests.support.scene import MAX_NEW_TOKENS, NUM_PROMPTS, make_setup


@pytest.mark.usefixtures("prefect_api")
def test_preparing_asks_the_server_once_and_says_when_it_is_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "PATIENCE", Patience(attempts=2, first_wait_s=0.01))
    setup = make_setup(tmp_path / "s", steps=())
    target = read_target_folder(setup.folder / "target", name="target")
    behaviour = Behaviour(
        api="vllm",
        continue_ids=lambda prompt: ([prompt[1]] * MAX_NEW_TOKENS, "length"),
        tokenizer=load_tokenizer(target),
    )
    completions = {"source": "server", "max_new_tokens": MAX_NEW_TOKENS}
    with CompletionServer(behaviour).running() as server:
        setup.change_config(completions=completions | {"base_url": server.url})
        prepared = setup.json("prepare")
        assert len(server.asked) == NUM_PROMPTS
    assert load_config(setup.config).completions.base_url == server.url
    assert prepared["transcripts"]["source"] == "server"
    assert prepared["transcripts"]["server"]["model"] == "target"
    assert setup.json("prepare")["transcripts"] == prepared["transcripts"], "the server is gone, its words are kept"

    setup.change_config(completions=completions | {"base_url": server.url, "max_new_tokens": 5})
    failed = setup.cli("prepare")
    assert failed.returncode == 2
    (line,) = [line for line in failed.stderr.splitlines() if "the server" in line]
    assert f"the server {server.url} does not answer" in line
    assert "Traceback" not in failed.stderr
