"""How many rows of the head are tokens: many models pad it, and no text can hold what lies beyond the tokenizer.

    rows of the head    0 ........................ 151668 | 151669 ... 151935
                        tokens and added tokens           | padding: never a proposal

A mask token may lie in the padding (z-lab's Qwen3 drafters have 151669): it is read, not proposed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dflash_core.errors import TargetError
from dflash_core.target.model_config import ModelConfig


def num_token_rows(folder: Path, config: ModelConfig) -> int:
    """Return how many rows of the head, from the first, can be tokens of a text.

    Args:
        folder: the target's, with its tokenizer. Of a tokenizer that cannot be read nothing is known: all rows count.
        config: its sizes.

    Raises:
        TargetError: tokenizer.json is there and holds no vocabulary.
    """
    limit = min(config.vocab_size, config.unpadded_vocab_size or config.vocab_size)
    size = tokenizer_size(folder)
    return limit if size is None else min(limit, size)


def tokenizer_size(folder: Path) -> int | None:
    """Return the largest token id of a folder's tokenizer plus one, or None where it has none that can be read.

    `len(tokenizer)` is smaller where ids have gaps. Reading `tokenizer.json` itself takes a tenth of the
    time that transformers takes to load it.

    Raises:
        TargetError: tokenizer.json is there and holds no vocabulary.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        return _size_by_transformers(folder)
    try:
        ids = list(_token_ids(json.loads(path.read_text(encoding="utf-8"))))
        ids += _added_in_config(folder / "tokenizer_config.json")
        return max(ids) + 1
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TargetError(f"{path} holds no vocabulary that can be read ({error!r}); copy it again") from error


def _token_ids(data: dict[str, Any]) -> Iterator[int]:
    """Yield all ids of a tokenizer.json: a vocabulary by token, or a list in order of ids, and what was added."""
    vocab = data["model"]["vocab"]
    if isinstance(vocab, dict):
        yield from vocab.values()
    else:
        yield len(vocab) - 1
    for token in data.get("added_tokens") or []:
        yield token["id"]


def _added_in_config(path: Path) -> list[int]:
    """Return the ids of tokens that the tokenizer's settings add."""
    if not path.exists():
        return []
    added = json.loads(path.read_text(encoding="utf-8")).get("added_tokens_decoder") or {}
    return [int(token_id) for token_id in added]


def _size_by_transformers(folder: Path) -> int | None:
    from transformers import AutoTokenizer

    try:
        vocab = AutoTokenizer.from_pretrained(folder, local_files_only=True).get_vocab()
    except (OSError, ValueError):
        return None
    return max(vocab.values()) + 1 if vocab else None
