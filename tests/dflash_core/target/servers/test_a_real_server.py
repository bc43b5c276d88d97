"""`transformers serve` with a tiny target, in a process of its own: its transcripts are the local ones."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from dflash_core.config import CompletionSettings
from dflash_core.errors import ServerMismatch
from dflash_core.store import Artifact, Store
from dflash_core.target.loading import Target
from dflash_core.target.servers.source import ServerSource
from dflash_core.target.transcripts import read_transcripts, write_transcripts
from tests.dflash_core.target.servers.served_prompts import MAX_NEW_TOKENS, rendered

START_S = 120.0


@pytest.fixture(scope="module")
def url(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    log = tmp_path_factory.mktemp("serve") / "log"
    command = [str(Path(sys.executable).with_name("transformers")), "serve", str(target.folder)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--device", "cpu"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as out, subprocess.Popen(command, env=environment, stdout=out, stderr=out) as server:
        try:
            address = f"http://127.0.0.1:{port}"
            _wait_until_healthy(address, server, log)
            yield address
        finally:
            server.terminate()
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()


def _wait_until_healthy(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text(errors="replace")
        try:
            if httpx.get(f"{address}/health", trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    raise AssertionError(log.read_text(errors="replace"))


@pytest.mark.slow
def test_a_real_server_writes_what_the_target_itself_writes(
    target: Target, local: Artifact, url: str, tmp_path: Path
) -> None:
    source = ServerSource(settings=CompletionSettings(source="server", base_url=url, concurrency=2))
    artifact = write_transcripts(Store(tmp_path), target, rendered(target), source, max_new_tokens=MAX_NEW_TOKENS)
    assert read_transcripts(artifact) == read_transcripts(local)
    assert artifact.meta["server"]["api"] == "openai", "it is neither SGLang nor vLLM"
    assert artifact.meta["server"]["model"] == str(target.folder)
    assert artifact.meta["num_retokenised"] == len(read_transcripts(local))
    assert artifact.meta["warnings"] == []


@pytest.mark.slow
def test_a_real_server_of_another_template_is_told_by_what_it_counted(target: Target, url: str, tmp_path: Path) -> None:
    """The same server, and a template that changed here since it was started."""
    own = tmp_path / "target"
    own.mkdir()
    for path in target.folder.iterdir():
        (own / path.name).write_bytes(path.read_bytes())
    template = own / "chat_template.jinja"
    template.write_text("w12 w13 " + template.read_text())
    from dflash_core.target.loading import read_target_folder

    changed = read_target_folder(own, name="target")
    source = ServerSource(settings=CompletionSettings(source="server", base_url=url, concurrency=1))
    with pytest.raises(ServerMismatch, match="as 5 tokens, the target's tokenizer and template give 7"):
        write_transcripts(Store(tmp_path / "store"), changed, rendered(changed), source, max_new_tokens=MAX_NEW_TOKENS)
