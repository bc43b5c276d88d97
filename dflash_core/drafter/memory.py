"""The plan of a drafter's memory: what scoring takes on a device, by part, and how much is held at once there.

Pure arithmetic on `footprint`'s counts. What is held at once starts from what costs no speed and is halved, each
time where that saves most, until the plan fits; where not even one block at a time fits, it says so. Running out of
memory in spite of a plan is `scoring.Slices`' business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from dflash_core.drafter.footprint import USUAL, Footprint, Slicing

_MIB, _GIB = 1 << 20, 1 << 30
_SHARE = 0.1
"""Share of what comes and goes that an allocator may hold without use, since its pieces differ in size."""
_LEAST = {"context_tokens": 64}
"""Below it halving saves nothing that counts; of all else one is left."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """What scoring takes, and how much of it at once."""

    slicing: Slicing
    resident: Mapping[str, int]
    """Part to bytes, of what is held from the first block to the last."""
    stages: Mapping[str, Mapping[str, int]]
    """Stage to part to bytes; stages come after one another."""
    runtime_bytes: int
    """What the device's libraries load and reserve when they are first used."""
    free_bytes: int | None
    """Free before anything is loaded; None where nobody knows."""

    @property
    def working(self) -> tuple[str, Mapping[str, int]]:
        """Return the stage that holds most, with its parts."""
        return max(self.stages.items(), key=lambda stage: sum(stage[1].values()))

    @property
    def counted_bytes(self) -> int:
        """Return what is held at the fullest moment: what is resident, and the stage that holds most."""
        return sum(self.resident.values()) + sum(self.working[1].values())

    @property
    def margin_bytes(self) -> int:
        """Return the room for the allocator and the device's libraries."""
        return int(_SHARE * sum(self.working[1].values())) + self.runtime_bytes

    @property
    def needed_bytes(self) -> int:
        """Return all that is to be free."""
        return self.counted_bytes + self.margin_bytes

    @property
    def fits(self) -> bool:
        """Tell whether as much is free; where nobody knows, it is not held against the device."""
        return self.free_bytes is None or self.needed_bytes <= self.free_bytes

    def parts(self) -> dict[str, int]:
        """Return name to bytes; they add up to `needed_bytes`."""
        stage, parts = self.working
        named = {f"{stage}: {name}": size for name, size in parts.items()}
        return {**self.resident, **named, "margin": self.margin_bytes}

    def text(self) -> str:
        """Return the numbers for people, without the parts that hardly count."""
        least = self.needed_bytes // 100
        parts = ", ".join(f"{name} {_shown(size)}" for name, size in self.parts().items() if size > least)
        free = "" if self.free_bytes is None else f", {_shown(self.free_bytes)} free"
        return f"{_shown(self.needed_bytes)} needed ({parts}){free}"

    def facts(self) -> dict[str, Any]:
        """Return the plan as plain data."""
        return {
            "parts": self.parts(),
            "needed_bytes": self.needed_bytes,
            "free_bytes": self.free_bytes,
            "at_once": {field.name: getattr(self.slicing, field.name) for field in fields(self.slicing)},
        }


def plan_memory(footprint: Footprint, free_bytes: int | None, *, runtime_bytes: int) -> MemoryPlan:
    """Return the plan that holds as much at once as is useful and fits.

    Args:
        footprint: what a drafter's scoring holds.
        free_bytes: free memory of the device; None where nobody knows, which gives the usual slicing.
        runtime_bytes: what the device's libraries take besides.

    Returns:
        A plan; one that does not fit is the smallest there is.
    """

    def plan(slicing: Slicing) -> MemoryPlan:
        return MemoryPlan(
            slicing=slicing,
            resident=footprint.resident(slicing),
            stages=footprint.stages(slicing),
            runtime_bytes=runtime_bytes,
            free_bytes=free_bytes,
        )

    best = plan(USUAL)
    while not best.fits:
        smaller = [found for name in _names() if (found := _halved(best, name, plan)) is not None]
        if not smaller:
            break
        best = min(smaller, key=_size)
    return best


def _halved(before: MemoryPlan, name: str, plan: Callable[[Slicing], MemoryPlan]) -> MemoryPlan | None:
    """Return the plan with one slice halved until that saves something; None where it never does."""
    value = getattr(before.slicing, name)
    while value > _LEAST.get(name, 1):
        value //= 2
        found = plan(replace(before.slicing, **{name: value}))
        if _size(found) < _size(before):
            return found
    return None


def _size(plan: MemoryPlan) -> tuple[int, int]:
    """Return what decides between plans; of stages that tie, lowering one is a step too."""
    return plan.needed_bytes, sum(sum(parts.values()) for parts in plan.stages.values())


def _shown(size: int) -> str:
    return f"{size / _GIB:.1f} GiB" if size >= _GIB else f"{size / _MIB:.0f} MiB"


def _names() -> list[str]:
    return [field.name for field in fields(Slicing)]
