"""What a plan holds: for each stage a place, a dtype, and memory needed against memory there is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Stage = Literal["target", "drafter"]
"""`target`: transcripts and hidden states. `drafter`: scoring a checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPart:
    """One thing that takes memory."""

    name: str
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlan:
    """Where one stage runs."""

    stage: Stage
    host: str | None
    """None: no host may be given work."""
    device: str
    """`cpu` or `cuda:0`."""
    dtype: str
    threads: int | None
    parts: tuple[MemoryPart, ...]
    memory_available_bytes: int | None
    """RAM available or GPU memory free when the host was asked; None when it did not say."""
    disk_path: str | None
    disk_needed_bytes: int | None
    disk_available_bytes: int | None
    why: str
    """One sentence."""
    advice: str
    """What to do when it does not fit."""

    @property
    def memory_needed_bytes(self) -> int:
        """Return the sum of the parts."""
        return sum(part.size_bytes for part in self.parts)

    @property
    def fits(self) -> bool:
        """Tell whether the host has what is needed; what it did not say is not held against it."""
        return self.host is not None and self.memory_fits and self.disk_fits

    @property
    def memory_fits(self) -> bool:
        """Tell whether the memory suffices."""
        return self.memory_available_bytes is None or self.memory_needed_bytes <= self.memory_available_bytes

    @property
    def disk_fits(self) -> bool:
        """Tell whether the disk suffices."""
        known = self.disk_needed_bytes is not None and self.disk_available_bytes is not None
        return not known or (self.disk_needed_bytes or 0) <= (self.disk_available_bytes or 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Where a job runs."""

    target: StagePlan
    drafter: StagePlan

    @property
    def stages(self) -> tuple[StagePlan, ...]:
        """Return the stages in the order in which they run."""
        return (self.target, self.drafter)
