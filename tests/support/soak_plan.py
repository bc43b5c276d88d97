"""What happens in a soak, drawn from one seed: which checkpoints appear, what becomes of them, which faults come."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Fate = Literal[
    "whole",
    "growing",
    "marked",
    "replaced",
    "deleted",
    "renamed",
    "cut off",
    "bit flipped",
    "diverged",
    "never released",
]
SHARES: dict[Fate, float] = {
    "whole": 0.44,  # renamed into place
    "growing": 0.13,  # half of it lies there for a while
    "marked": 0.06,  # whole, with a marker that goes later
    "replaced": 0.08,  # the step comes again with other weights
    "deleted": 0.06,  # while it is read
    "renamed": 0.05,  # while it is read
    "cut off": 0.06,  # for ever
    "bit flipped": 0.05,
    "diverged": 0.04,  # a NaN in its weights
    "never released": 0.03,  # its marker stays
}
SOUND: tuple[Fate, ...] = ("whole", "growing", "marked", "replaced")
"""Whole and there in the end: exactly one evaluation. Of a step that came twice this holds for the second."""
GONE: tuple[Fate, ...] = ("deleted", "renamed")
MOST_READS = 12
"""A checkpoint that goes while it is read goes at one of so many reads of its files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedCheckpoint:
    """One step of the run."""

    step: int
    fate: Fate
    form: Literal["safetensors", "torch"]
    seed: int
    """Of its weights."""
    second_seed: int
    """Of the weights that come later, where it is replaced."""
    at_s: float
    """When it appears, in seconds since the beginning."""
    then_s: float
    """When what is half is made whole, what is marked released, and so on."""
    share: float
    """How much of it is there at first, or for ever."""
    read: int
    """The read of its files at which it goes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedFault:
    """One fault, and how much of it."""

    kind: str
    at_s: float
    amount: float
    """From 0 to 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All of it; the same seed gives the same plan."""

    seed: int
    seconds: float
    checkpoints: tuple[PlannedCheckpoint, ...]
    faults: tuple[PlannedFault, ...]


def make_plan(seed: int, *, num_checkpoints: int, seconds: float, fault_kinds: Sequence[str], num_faults: int) -> Plan:
    """Draw a plan; every fate and every kind of fault comes at least once.

    Args:
        seed: decides everything.
        num_checkpoints: steps that appear.
        seconds: how long checkpoints appear and faults come.
        fault_kinds: what may go wrong around them.
        num_faults: how often something does.
    """
    assert num_checkpoints >= len(SHARES), "too few for every fate"
    assert num_faults >= len(fault_kinds), "too few for every kind of fault"
    draw = random.Random(seed)
    fates: list[Fate] = list(SHARES)
    fates += draw.choices(list(SHARES), weights=list(SHARES.values()), k=num_checkpoints - len(fates))
    draw.shuffle(fates)
    steps = [10 * number for number in range(1, num_checkpoints + 1)]
    draw.shuffle(steps)  # the order in which they appear
    checkpoints = []
    for number, (step, fate) in enumerate(zip(steps, fates, strict=True)):
        at_s = seconds * (number + draw.random()) / num_checkpoints
        checkpoints.append(
            PlannedCheckpoint(
                step=step,
                fate=fate,
                form="torch" if fate == "bit flipped" or draw.random() < 0.5 else "safetensors",
                seed=2 * step,
                second_seed=2 * step + 1,
                at_s=at_s,
                then_s=at_s + draw.uniform(3.0, 15.0),
                share=draw.uniform(0.1, 0.95),
                read=draw.randint(1, MOST_READS),
            )
        )
    kinds = list(fault_kinds)
    draw.shuffle(kinds)
    more = [draw.choice(list(fault_kinds)) for _ in range(num_faults - len(kinds))]
    kinds = [*kinds, *more]
    faults = tuple(
        PlannedFault(kind=kind, at_s=seconds * (place + draw.random()) / num_faults, amount=draw.random())
        for place, kind in enumerate(kinds)
    )
    return Plan(seed=seed, seconds=seconds, checkpoints=tuple(checkpoints), faults=faults)
