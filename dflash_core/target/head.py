"""The target's embedding and head, read from its shards without loading the rest of the model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from dflash_core.errors import TargetError
from dflash_core.target.loading import Target

if TYPE_CHECKING:
    from torch import Tensor

_EMBEDDING = "embed_tokens.weight"
_HEAD = "lm_head.weight"


class EmbeddingAndHead(NamedTuple):
    """The two tensors of the target that a drafter borrows, memory-mapped, in the stored dtype."""

    embedding_VD: Tensor
    """As stored: what the model's code multiplies it with is `ModelConfig.embedding_scale`."""
    head_VD: Tensor
    """The same tensor as the embedding where the target ties them."""


def load_embedding_and_head(target: Target) -> EmbeddingAndHead:
    """Map the target's embedding and head into memory; nothing of them is read yet.

    A head that is there is used even where the config says that it is the embedding: transformers ties
    the two only where they are equal.

    Raises:
        TargetError: a shard has no such tensor, or one of another shape than the config says, or is cut off,
            or the target is untied and has no head.
    """
    places = _find(target, (_EMBEDDING, _HEAD))
    if _EMBEDDING not in places:
        raise TargetError(f"{target.folder} holds no tensor that ends in {_EMBEDDING!r}")
    embedding_VD = _read_table(target, *places[_EMBEDDING])
    if _HEAD in places:
        return EmbeddingAndHead(embedding_VD, _read_table(target, *places[_HEAD]))
    if target.config.tie_word_embeddings is False:
        said = target.config.sources["tie_word_embeddings"]
        raise TargetError(f"{target.folder} holds no {_HEAD!r}, yet its config says that it is not tied ({said})")
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


def _read_table(target: Target, path: Path, name: str) -> Tensor:
    """Return a table of one row per token, whose shape must be the config's."""
    table_VD = _read(path, name)
    wanted = [target.config.vocab_size, target.config.hidden_size]
    if list(table_VD.shape) != wanted:
        raise TargetError(
            f"{path}: {name} has the shape {list(table_VD.shape)}, the config says vocabulary and hidden size "
            f"{wanted}; do config and weights belong together?"
        )
    return table_VD


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
