"""Renderings that were made before, by this process or another: an evaluation asks for the same one in every stage.

Reading a tokenizer is what costs: 0.12 s for one of 49 thousand tokens, a second for one of 250 thousand, and three
seconds before that to import transformers.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from dflash_core import refreshing
from dflash_core.store import MANIFEST_NAME
from dflash_core.target.kept_renderings import find_rendering, keep_rendering, rendering_key
from dflash_core.target.loading import Target
from dflash_core.target.prompts import Prompt
from dflash_core.target.rendering import Rendering, render_prompts

_MOST_REMEMBERED = 4
_lock = Lock()


class _Made(NamedTuple):
    rendering: Rendering
    name: str | None
    """Key for other processes, of the files as they were before; None where it is not kept for them."""
    kept_in: Path | None


_remembered: OrderedDict[Any, _Made] = OrderedDict()


def rendered(
    target: Target,
    prompts: tuple[Prompt, ...],
    *,
    thinking: bool,
    max_new_tokens: int,
    kept_in: Path | None = None,
) -> Rendering:
    """Return what `render_prompts` returns, without reading the tokenizer again where no file of it changed.

    Args:
        target: whose tokenizer and template are used.
        prompts: what to render.
        thinking: handed to the template.
        max_new_tokens: room that the continuation needs.
        kept_in: a folder for what other processes may use, made where the one around it is there; None keeps it to
            this process.

    Raises:
        TargetError: as `render_prompts`.
        PromptError: as `render_prompts`.
    """
    key = (target.folder, target.identity, _stamps(target.folder), prompts, thinking, max_new_tokens)

    def name() -> str | None:
        return rendering_key(target, prompts, thinking=thinking, max_new_tokens=max_new_tokens)

    with _lock:
        made = _remembered.get(key)
    if made is None:
        own_name = None if kept_in is None else name()
        found = _find(kept_in, own_name, prompts)
        rendering = found or render_prompts(target, prompts, thinking=thinking, max_new_tokens=max_new_tokens)
        made = _Made(rendering, own_name, None if found is None else kept_in)
    if kept_in is not None and made.name is not None and made.kept_in != kept_in and kept_in.parent.is_dir():
        if name() == made.name:  # no file changed while it was made
            keep_rendering(kept_in, made.name, made.rendering)
        made = made._replace(kept_in=kept_in)
    with _lock:
        _remembered[key] = made
        _remembered.move_to_end(key)
        while len(_remembered) > _MOST_REMEMBERED:
            _remembered.popitem(last=False)
    return made.rendering


def _find(kept_in: Path | None, name: str | None, prompts: tuple[Prompt, ...]) -> Rendering | None:
    # Whoever has transcripts made again wants nothing of what was before.
    if kept_in is None or name is None or refreshing.is_due("transcripts", name):
        return None
    return find_rendering(kept_in, name, prompts)


def _stamps(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Return name, size and time of every file beside the weights: tokenizer, template, stop tokens."""
    stamps = []
    with os.scandir(folder) as entries:
        for entry in entries:
            # The manifest of a converted target is touched whenever it is found.
            if not entry.name.endswith(".safetensors") and entry.name != MANIFEST_NAME:
                facts = entry.stat()
                stamps.append((entry.name, facts.st_size, facts.st_mtime_ns))
    return tuple(sorted(stamps))
