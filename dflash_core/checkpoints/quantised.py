"""Tensors that are fetched faithfully and not computed with: quantised weights."""

from __future__ import annotations

from collections.abc import Iterable

from dflash_core.checkpoints.dtypes import WEIGHT_TYPES
from dflash_core.checkpoints.names import DRAFT_VOCABULARY
from dflash_core.checkpoints.values import TensorEntry
from dflash_core.errors import UnsupportedCheckpoint

_MAP_TYPES = {"d2t": ("int64", "int32"), "t2d": ("bool", "uint8")}


def refuse_quantised(tensors: Iterable[TensorEntry], *, where: str) -> None:
    """Refuse a drafter's tensor whose type is not that of a weight, or of a map between vocabularies.

    Args:
        tensors: the drafter's own.
        where: the checkpoint, for messages.

    Raises:
        UnsupportedCheckpoint: with the tensor's name and type.
    """
    for entry in tensors:
        is_map = entry.canonical_name in DRAFT_VOCABULARY
        types = _MAP_TYPES[str(entry.canonical_name)] if is_map else WEIGHT_TYPES
        if entry.dtype not in types:
            why = "" if is_map else "; quantised drafters are not scored, for the scales are not part of the tensor"
            raise UnsupportedCheckpoint(
                f"{where}: tensor {entry.name!r} is of type {entry.dtype}, expected {', '.join(types)}{why}"
            )
