"""Which checkpoints of a run a watch takes, and in which order.

Filters look at names and step numbers alone, so what they pass over is never opened.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from dflash_core.checkpoints import FoundCheckpoint
from dflash_core.errors import InputError

Order = Literal["oldest", "newest"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Filters, order and limit of one watch; by default everything is taken, lowest step first."""

    each: int = 1
    """Take each Nth checkpoint in the order of steps: the Nth, the 2Nth and so on of all that pass the other
    filters and that the watch has seen since it began, those that were rotated away meanwhile included."""
    multiple_of: int = 1
    """Take steps that are a multiple of this number; needs no memory, so it holds over restarts and rotation."""
    from_step: int | None = None
    """Take this step and later ones."""
    match: tuple[str, ...] = ()
    """Take names that match one of these patterns (`*`, `?`, `[...]`); none takes all."""
    max_backlog: int | None = None
    """Of those that are ready and not scored yet keep so many, the first ones in `order`; the rest is skipped."""
    order: Order = "oldest"
    """Lowest or highest step first."""

    def __post_init__(self) -> None:
        for name, value in (("each", self.each), ("multiple-of", self.multiple_of), ("max-backlog", self.max_backlog)):
            if value is not None and value < 1:
                raise InputError(f"{name} {value} must be a number of checkpoints or steps, 1 or more")
        if self.order not in ("oldest", "newest"):
            raise InputError(f"order {self.order!r} must be 'oldest' or 'newest': which waiting checkpoint is next")

    def passes(self, found: FoundCheckpoint) -> bool:
        """Tell whether name and step pass all filters but `each`; without a step no filter on steps is passed."""
        if self.match and not any(fnmatchcase(found.name, pattern) for pattern in self.match):
            return False
        if self.from_step is None and self.each == 1 and self.multiple_of == 1:
            return True
        return (
            found.step is not None
            and (self.from_step is None or found.step >= self.from_step)
            and found.step % self.multiple_of == 0
        )

    def select(self, listed: Iterable[FoundCheckpoint], seen_steps: Iterable[int]) -> list[FoundCheckpoint]:
        """Return those that are taken, in order; among equal steps the listing's order holds.

        Args:
            listed: what the folder holds now, lowest step first.
            seen_steps: the steps of all that `passes` took so far, those of `listed` included.
        """
        taken = [found for found in listed if self.passes(found)]
        if self.each > 1:
            chosen = set(sorted(seen_steps)[self.each - 1 :: self.each])
            taken = [found for found in taken if found.step in chosen]
        return taken if self.order == "oldest" else taken[::-1]
