"""The target's embedding and head, read from its shards without loading the rest of the model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dflash_core.errors import TargetError
from dflash_core.target.loading import Target

_EMBEDDING = "embed_tokens.weight"
_HEAD = "lm_head.weight"


class EmbeddingAndHead(NamedTuple):
    """The two tensors of the target that a drafter borrows, memory-mapped, in the stored dtype."""

    embedding_VD: Tensor
    head_VD: Tensor
    """The same tensor as the embedding where the target ties them."""


def load_embedding_and_head(target: Target) -> EmbeddingAndHead:
    """Read the target's embedding and head.

    Raises:
        TargetError: a shard has no such tensor or is cut off, or the target is untied and has no head.
    """
    places = _find(target, (_EMBEDDING, _HEAD))
    if _EMBEDDING not in places:
        raise TargetError(f"{target.folder} holds no tensor that ends in {_EMBEDDING!r}")
    embedding_VD = _read(*places[_EMBEDDING])
    tied = target.config.tie_word_embeddings
    if tied is not True and _HEAD in places:
        return EmbeddingAndHead(embedding_VD, _read(*places[_HEAD]))
    if tied is False:
        raise TargetError(f"{target.folder} holds no {_HEAD!r}, yet its config says that it is not tied")
    return EmbeddingAndHead(embedding_VD, embedding_VD)


class TargetTables:
    """The target's embedding and head, read by rows: what frozen copies in a checkpoint are compared with."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._loaded: EmbeddingAndHead | None = None

    def shape(self, role: str) -> tuple[int, int] | None:
        """Return [vocabulary, hidden size] of a table."""
        rows, columns = self._table(role).shape
        return int(rows), int(columns)

    def rows(self, role: str, indices: Sequence[int], num_columns: int) -> NDArray[numpy.float32]:
        """Return the first columns of some rows, in float32."""
        values: NDArray[numpy.float32] = self._table(role)[list(indices), :num_columns].float().numpy()
        return values

    def _table(self, role: str) -> Tensor:
        if self._loaded is None:
            self._loaded = load_embedding_and_head(self._target)
        return self._loaded.embedding_VD if role == "embedding" else self._loaded.head_VD


def _find(target: Target, suffixes: tuple[str, ...]) -> dict[str, tuple[Path, str]]:
    """Return for each suffix the shard and name of its tensor; parts of vision or MTP towers do not count."""
    found: dict[str, tuple[Path, str]] = {}
    index = target.folder / "model.safetensors.index.json"
    if index.exists():
        pairs = [(name, shard) for name, shard in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items()]
    else:
        pairs = [(name, shard) for shard in target.shards for name in _names(target.folder / shard)]
    for name, shard in pairs:
        if any(part in ("visual", "vision_tower", "mtp", "audio_tower") for part in name.split(".")):
            continue
        for suffix in suffixes:
            if name == suffix or name.endswith(f".{suffix}"):
                found.setdefault(suffix, (target.folder / shard, name))
    return found


def _names(path: Path) -> list[str]:
    with _opened(path) as file:
        return list(file.keys())


def _read(path: Path, name: str) -> Tensor:
    with _opened(path) as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise TargetError(f"{path} cannot be read: {' '.join(str(error).split())}; copy it again") from error
