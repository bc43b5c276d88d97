"""What reading a checkpoint yields: plain values, no open file, no tensor."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dflash_core.checkpoints.names import Role
from dflash_core.errors import CheckpointCorrupt, UnsupportedCheckpoint

Layout = Literal[
    "torch_zip", "torch_legacy", "torch_sharded", "safetensors", "safetensors_sharded", "dcp", "dcp_safetensors"
]

Facts = dict[str, Any]
"""Dotted name to a plain value: int, float, str, bool, or a list of them."""


class CheckpointCutOff(CheckpointCorrupt):
    """Raised when a file ends before its own index says, as one that is still being written does."""


class NoDrafter(UnsupportedCheckpoint):
    """Raised when a file can be read but holds no drafter, as one with the optimizer's state alone."""

    def __init__(self, message: str, facts: Facts | None = None) -> None:
        super().__init__(message)
        self.facts = facts or {}
        """The plain values in it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRef:
    """One saved drafter; `identity` says what it is, the rest where and when."""

    url: str
    """The file or folder, as given."""
    run: str
    """Name of the training run."""
    step: int | None
    """Training step: from the checkpoint's content where it says so, else from its name."""
    layout: Layout
    identity: str
    """Digest of the index (names, sizes, checksums): other bytes, other identity."""
    bytes_total: int
    """Size of all files of the checkpoint."""
    files: tuple[str, ...]
    """Their paths on the host."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """One tensor of a checkpoint."""

    name: str
    """As the checkpoint calls it."""
    canonical_name: str | None
    """As z-lab calls it; None unless it is the drafter's own."""
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    role: Role
    reason: str
    """Why it has this role."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointInspection:
    """What the index of a checkpoint tells."""

    ref: CheckpointRef
    dialect: str
    """The trainer whose layout it has; `custom` where none is recognised."""
    ready: bool
    not_ready_reason: str | None
    refusal: str | None
    """Why it cannot be scored although it can be read, or None; its tensors are listed all the same."""
    tensors: tuple[TensorEntry, ...]
    """Empty when the checkpoint is not ready."""
    bytes_wanted: int
    """Bytes of the drafter's own tensors."""
    bytes_total: int
    bytes_read: int
    """What this inspection itself read."""
    facts: Facts
    """Plain values found beside the weights: `step`, `epoch`, `args.block_size`, ..."""
    config: dict[str, Any] | None
    """The `config.json` beside the weights, or None."""
    odd_globals: tuple[str, ...]
    """Names in the pickle that no ordinary checkpoint holds, such as `posix.system`; never run."""
    contradictions: tuple[str, ...] = ()
    """What two places of the checkpoint say differently; none of it decides a number."""

    @property
    def has_tables(self) -> bool:
        """Tell whether it holds an embedding or head, a copy of the target's or the drafter's own."""
        return any(entry.role in ("embedding", "head") for entry in self.tensors)


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamedCheckpoint:
    """A drafter's tensors, fetched."""

    ref: CheckpointRef
    path: Path
    """One safetensors file with z-lab's names and the checkpoint's own dtypes."""
    weights_sha256: str
    """Digest of the tensors, independent of the file they came in."""
    bytes_read: int
    """Everything read from the host for this checkpoint, the index included."""
    bytes_wanted: int
    bytes_total: int
    facts: Facts
    config: dict[str, Any] | None
    unverified_tensors: tuple[str, ...] = ()
    """Canonical names of tensors whose bytes no checksum of the checkpoint covers."""
    own_tables: tuple[str, ...] = ()
    """Embedding and head that were fetched because they are the drafter's own: they differ from the target's."""
    warnings: tuple[str, ...] = ()
    """What a person should know before trusting the numbers, one line each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundCheckpoint:
    """A checkpoint seen in a run folder, its content not looked at."""

    url: str
    run: str
    """Name of the training run."""
    name: str
    step: int | None
    """From the name; None where it holds no number."""
    signature: str
    """Digest of the sizes and times of its files: equal in two looks means that nobody wrote."""
    incomplete_reason: str | None = None
    """What already the listing shows to be missing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Readiness:
    """Whether a checkpoint can be scored now."""

    ready: bool
    reason: str
