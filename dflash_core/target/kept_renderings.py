"""Renderings that other processes made, kept on disk: loading a tokenizer to make one again takes seconds.

    <folder>/<key>.json     token ids of the prompts, digests of template and tokenizer, stop tokens

The key holds all that decides a rendering: prompts, settings, the versions of what renders, and the content of
every file beside the target's weights. What cannot be told from these is not kept at all: a template that asks for
the time, and tokenizers other than a `tokenizer.json`, which further packages may read.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dflash_core.store import MANIFEST_NAME, digest
from dflash_core.target.loading import Target
from dflash_core.target.prompts import Prompt
from dflash_core.target.rendering import RenderedPrompt, Rendering

RENDERING_VERSION = 1
"""Raised when the same prompts, files and packages would be rendered otherwise."""
FOLDER = "renderings"
"""Of the store; local, and never sent anywhere."""
MOST_KEPT = 32
_PACKAGES = ("transformers", "tokenizers", "jinja2", "mistral-common")
_TEMPLATES = "additional_chat_templates"
_LARGEST_READ_BYTES = 64 << 20
"""A larger file is no tokenizer; name, size and time stand for it."""
_CLOCK = b"strftime_now"


def rendering_key(target: Target, prompts: Sequence[Prompt], *, thinking: bool, max_new_tokens: int) -> str | None:
    """Return the key of a rendering; None where it may not be kept.

    Args:
        target: whose files render.
        prompts: what is rendered.
        thinking: handed to the template.
        max_new_tokens: room for the answer, without which a prompt is refused.
    """
    if not (target.folder / "tokenizer.json").is_file():
        return None
    try:
        files = list(_contents(target.folder))
    except OSError:  # a file that cannot be read may be one of those
        return None
    if any(asks_for_time for *_, asks_for_time in files):
        return None
    return digest(
        RENDERING_VERSION,
        [platform.python_version(), *map(_version, _PACKAGES)],
        [[name, content] for name, content, _ in files],
        [target.identity, target.config.max_position_embeddings, target.config.vocab_size],
        [[prompt.id, prompt.messages, prompt.follows, prompt.prompt_ids] for prompt in prompts],
        [thinking, max_new_tokens],
    )


def find_rendering(folder: Path, key: str, prompts: Sequence[Prompt]) -> Rendering | None:
    """Return a kept rendering, or None where there is none or its file is damaged.

    Args:
        folder: where renderings are kept.
        key: as `rendering_key` says.
        prompts: those of the key.
    """
    path = folder / f"{key}.json"
    first = [prompt for prompt in prompts if prompt.follows is None]
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        whole = kept["digest"] == digest(key, kept["rendering"])
        facts = kept["rendering"]
        if not whole or len(facts["prompt_ids"]) != len(first):
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    with suppress(OSError):  # a store that may only be read is still one
        os.utime(path)
    return Rendering(
        prompts=tuple(
            RenderedPrompt(
                id=prompt.id,
                prompt_ids=tuple(ids),
                messages=prompt.messages,
                from_template=prompt.prompt_ids is None,
            )
            for prompt, ids in zip(first, facts["prompt_ids"], strict=True)
        ),
        template_digest=facts["template_digest"],
        tokenizer_digest=facts["tokenizer_digest"],
        stop_token_ids=tuple(facts["stop_token_ids"]),
        thinking=facts["thinking"],
        later=tuple(prompt for prompt in prompts if prompt.follows is not None),
    )


def keep_rendering(folder: Path, key: str, rendering: Rendering) -> None:
    """Write a rendering down for other processes, where that is possible; the least recently used ones go."""
    facts: dict[str, Any] = {
        "prompt_ids": [prompt.prompt_ids for prompt in rendering.prompts],
        "template_digest": rendering.template_digest,
        "tokenizer_digest": rendering.tokenizer_digest,
        "stop_token_ids": rendering.stop_token_ids,
        "thinking": rendering.thinking,
    }
    temporary = folder / f"{key}.{uuid.uuid4().hex[:8]}.tmp"
    with suppress(OSError):  # a full disk or a store that may only be read: it is rendered again
        folder.mkdir(exist_ok=True)
        temporary.write_text(json.dumps({"digest": digest(key, facts), "rendering": facts}), encoding="utf-8")
        temporary.replace(folder / f"{key}.json")
    with suppress(OSError):
        temporary.unlink(missing_ok=True)
        for old in sorted(folder.iterdir(), key=lambda path: -path.stat().st_mtime_ns)[MOST_KEPT:]:
            old.unlink(missing_ok=True)


def _contents(folder: Path) -> Iterator[tuple[str, Any, bool]]:
    """Yield name, content and whether it asks for the time, of every file beside the weights that may render."""
    for path in sorted([*folder.iterdir(), *folder.glob(f"{_TEMPLATES}/*")]):
        # The manifest of a converted target is touched whenever it is found.
        if path.name.endswith(".safetensors") or path.name == MANIFEST_NAME or not path.is_file():
            continue
        stat = path.stat()
        name = path.relative_to(folder).as_posix()
        if stat.st_size > _LARGEST_READ_BYTES:
            yield name, [stat.st_size, stat.st_mtime_ns], False
            continue
        content = path.read_bytes()
        yield name, hashlib.sha256(content).hexdigest(), _CLOCK in content


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
