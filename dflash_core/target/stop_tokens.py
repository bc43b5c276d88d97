"""Which tokens end a response: `generation_config.json` first, as serving does, then `config.json`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from dflash_core.errors import TargetError
from dflash_core.target.config_levels import LevelReader, as_token_ids, short

_FILES = ("generation_config.json", "config.json")
_KEYS = {"eos_token_ids": ("eos_token_id",)}


class StopTokens(NamedTuple):
    """The stop tokens of a model folder."""

    token_ids: tuple[int, ...]
    """Ascending, without repetition."""
    source: str
    """File and key path that they were read from."""
    conflicts: tuple[str, ...]
    """One line for each place that names other tokens, or something that is none."""


def read_stop_tokens(folder: Path) -> StopTokens | None:
    """Read the stop tokens that a model folder names, or None where only its tokenizer may know them.

    Args:
        folder: the model's. In `config.json` the outer level goes before a nested text part: for stop tokens, and
            for nothing else, transformers has it so.

    Raises:
        TargetError: a file that is there is not a JSON object.
    """
    found: StopTokens | None = None
    conflicts: list[str] = []
    for source, raw in _places(folder):
        token_ids = as_token_ids(raw)
        if token_ids is None:
            conflicts.append(f"{source} = {short(raw)} cannot be used as stop tokens")
        elif found is None:
            found = StopTokens(token_ids, source, ())
        elif not set(token_ids) <= set(found.token_ids):
            # Fewer tokens than generation names are usual: config.json keeps the one of training.
            conflicts.append(
                f"{source} = {short(list(token_ids))} contradicts {found.source} = {short(list(found.token_ids))}, "
                "which holds"
            )
    return None if found is None else found._replace(conflicts=tuple(conflicts))


def _places(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield file and key path of every place that names stop tokens, and what it says."""
    for name in _FILES:
        data = _read(folder / name)
        if data is not None:
            for path, raw in LevelReader(data, name, _KEYS).stated("eos_token_ids", outer_first=True):
                yield f"{name}: {path}", raw


def _read(path: Path) -> dict[str, Any] | None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise TargetError(f"{path} is not readable JSON: {' '.join(str(error).split())}; copy it again") from error
    if not isinstance(data, dict):
        raise TargetError(f"{path} must hold a JSON object, found {type(data).__name__}")
    return data
