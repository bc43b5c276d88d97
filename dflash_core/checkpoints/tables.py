"""Embedding and head in a checkpoint: copies of the target's, or the drafter's own.

Trainers save frozen copies along with the drafter. A copy need not be fetched, for the target has
the same; it is told from a table of the drafter's own by sampled rows, that of the mask token among
them: a trainer that adds such a token trains its row alone. A table that differs was what the drafter
saw in training, so it is the drafter's own: it is fetched, used, and named in a warning, because a
target that was swapped or trained along looks just like that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy
from numpy.typing import NDArray

from dflash_core.checkpoints.container import Container
from dflash_core.checkpoints.names import Role
from dflash_core.checkpoints.samples import read_samples
from dflash_core.checkpoints.source_base import ByteRange
from dflash_core.checkpoints.values import TensorEntry

NUM_ROWS = 64
MAX_COLUMNS = 128
CANONICAL = {"embedding": "embed_tokens.weight", "head": "lm_head.weight"}


class TargetTables(Protocol):
    """The target's embedding and head, read by rows."""

    def shape(self, role: Role) -> tuple[int, int] | None:
        """Return [vocabulary, hidden size] of a table, or None where the target has none."""

    def rows(self, role: Role, indices: Sequence[int], num_columns: int) -> NDArray[numpy.float32]:
        """Return the first columns of some rows, in float32."""


class TableReading(NamedTuple):
    """Which tables of a checkpoint are the drafter's own."""

    own: tuple[TensorEntry, ...]
    warnings: tuple[str, ...]


def mask_token_ids(config: Mapping[str, Any] | None, facts: Mapping[str, Any]) -> set[int]:
    """Return whatever a checkpoint calls its mask token, in the config beside the weights or among its facts."""
    levels = [level for level in ((config or {}), *(config or {}).values()) if isinstance(level, Mapping)]
    stated = [level.get("mask_token_id") for level in levels]
    stated += [value for name, value in facts.items() if name.rpartition(".")[2] == "mask_token_id"]
    return {value for value in stated if type(value) is int}


def read_tables(
    container: Container, entries: Sequence[TensorEntry], target: TargetTables, *, also: Collection[int] = ()
) -> TableReading:
    """Compare the embedding and head in a checkpoint with the target's, by sampled rows.

    Args:
        container: the open container.
        entries: its tensors.
        target: the target's tables.
        also: rows that are looked at beside the sampled ones, where a table has them.
    """
    tables = [entry for entry in entries if entry.role in CANONICAL]
    comparable = [entry for entry in tables if entry.shape == target.shape(entry.role)]
    indices = {entry.name: _spread(entry.shape[0], also) for entry in comparable}
    samples = read_samples(container, {entry.name: _ranges(entry, indices[entry.name]) for entry in comparable})
    own, warnings = [], []
    for entry in tables:
        difference: str | None
        if entry not in comparable:
            shape = target.shape(entry.role)
            theirs = "none" if shape is None else f"{list(shape)}"
            difference = f"has the shape {list(entry.shape)}, the target's is {theirs}"
        else:
            difference = _difference(entry, samples[entry.name], target, indices[entry.name])
        if difference is None:
            continue
        if difference == ONLY_NAN:
            warnings.append(f"{entry.name} {difference}; the target's is used")
            continue
        own.append(entry)
        warnings.append(f"{entry.name} {difference}; the drafter's own is used")
    return TableReading(tuple(own), tuple(warnings))


ONLY_NAN = "holds NaN"


def _difference(
    entry: TensorEntry, sample: list[bytes] | None, target: TargetTables, indices: Sequence[int]
) -> str | None:
    """Return how a table differs from the target's, or None where all sampled rows are the same."""
    if sample is None:
        return "does not lie in its own order, so it was not compared with the target's"
    columns = min(entry.shape[1], MAX_COLUMNS)
    mine = _floats(b"".join(sample), entry.dtype)
    if mine is None:
        return f"is of type {entry.dtype}, so it was not compared with the target's"
    mine = mine.reshape(len(indices), columns)
    if numpy.isnan(mine).all():
        return ONLY_NAN
    theirs = _rounded(target.rows(entry.role, indices, columns), entry.dtype)
    num_different = int((mine != theirs).any(axis=1).sum())
    if not num_different:
        return None
    furthest = float(numpy.abs(mine - theirs).max())
    return f"differs from the target's in {num_different} of {len(indices)} sampled rows, by up to {furthest:.2g}"


def _spread(num_rows: int, also: Collection[int]) -> list[int]:
    """Return row numbers spread evenly, the first and last among them, and others that there are."""
    count = min(NUM_ROWS, num_rows)
    spread = {round(i * (num_rows - 1) / max(1, count - 1)) for i in range(count)}
    return sorted(spread | {row for row in also if 0 <= row < num_rows})


def _ranges(entry: TensorEntry, rows: Sequence[int]) -> list[ByteRange]:
    itemsize = entry.size_bytes // max(1, entry.shape[0] * entry.shape[1])
    row_bytes = entry.shape[1] * itemsize
    size = min(entry.shape[1], MAX_COLUMNS) * itemsize
    return [ByteRange(offset=row * row_bytes, size=size) for row in rows]


def _floats(data: bytes, dtype: str) -> NDArray[numpy.float32] | None:
    if dtype == "bfloat16":
        return (numpy.frombuffer(data, dtype="<u2").astype("<u4") << 16).view("<f4")
    if dtype in ("float16", "float32", "float64"):
        return numpy.frombuffer(data, dtype=f"<f{int(dtype[5:]) // 8}").astype("<f4")
    return None


def _rounded(values: NDArray[numpy.float32], dtype: str) -> NDArray[numpy.float32]:
    """Return values as they would be after a copy in that type: to the nearest, ties to even."""
    if dtype == "float16":
        return values.astype("<f2").astype("<f4")
    if dtype != "bfloat16":
        return values
    bits = values.astype("<f4").view("<u4")
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view("<f4")
