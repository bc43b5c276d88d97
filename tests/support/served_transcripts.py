"""Transcripts written by a server, and the one line that says why it wrote none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_core.config import CompletionSettings
from dflash_core.errors import ServerError
from dflash_core.store import Artifact, Store
from dflash_core.target.loading import Target
from dflash_core.target.rendering import Rendering
from dflash_core.target.servers.source import ServerSource
from dflash_core.target.transcripts import write_transcripts
from tests.dflash_core.target.servers.served_prompts import MAX_NEW_TOKENS, rendered
from tests.support.completion_server import CompletionServer

APIS = ("sglang", "vllm", "openai")
Start = Callable[..., CompletionServer]


def write(
    target: Target, server: CompletionServer | str, folder: Path, rendering: Rendering | None = None, **settings: Any
) -> Artifact:
    url = server if isinstance(server, str) else server.url
    source = ServerSource(settings=CompletionSettings(source="server", base_url=url, **settings))
    return write_transcripts(
        Store(folder), target, rendering or rendered(target), source, max_new_tokens=MAX_NEW_TOKENS
    )


def refusal(
    target: Target, server: CompletionServer | str, folder: Path, kind: type[Exception] = ServerError, **settings: Any
) -> str:
    with pytest.raises(kind) as refused:
        write(target, server, folder, **settings)
    assert type(refused.value) is kind
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 600
    return str(refused.value)
