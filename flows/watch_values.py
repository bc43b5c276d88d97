"""What a watch tells, remembers and asks of others; plain values, no Prefect."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from dflash_core.checkpoints import CheckpointInspection, FoundCheckpoint
from dflash_core.errors import DFlashEvalError

Kind = Literal["waiting", "scored", "known", "started", "skipped", "failed", "vanished", "unreachable", "status"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchEvent:
    """Something that a person who watches would like to know."""

    kind: Kind
    name: str
    """The checkpoint, or the folder."""
    message: str
    result: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StartedRun:
    """An evaluation that was started elsewhere."""

    id: str
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEnd:
    """How such an evaluation ended."""

    error: str | None
    """None where it was completed."""
    is_final: bool = False
    """A person ended it, or the checkpoint itself is wrong: it is not tried again."""
    may_pass: bool = False
    """A machine was at fault, as with a full disk: it is tried more often."""


class PassingFault(DFlashEvalError):
    """Raised for a run that ended with a fault of its machine, which may pass by itself."""


class RunsUsedUp(DFlashEvalError):
    """Raised when all runs that a checkpoint may have were made, and none was completed."""


class Runs(Protocol):
    """Where evaluations are started when the watch does not compute them itself."""

    def start(self, inspection: CheckpointInspection) -> StartedRun:
        """Start the evaluation of a checkpoint, or return the run that was started for it before.

        Raises:
            RunsUsedUp: all attempts that it may have were made.
            HostError: the server of the runs does not answer.
        """
        ...

    def ended(self, runs: Sequence[StartedRun]) -> dict[str, RunEnd]:
        """Return how those of the runs ended that have ended, by their id.

        Raises:
            HostError: the server of the runs does not answer.
        """
        ...


@dataclass(kw_only=True, slots=True)
class Seen:
    """What a watch remembers of one checkpoint; a signature stands for its contents."""

    signature: str | None = None
    """At the last look."""
    ready: str | None = None
    """The contents that were found to be whole."""
    settled: str | None = None
    """The contents that are done with: scored, skipped or given up."""
    unknown: str | None = None
    """The contents that the database had no answer for."""
    reason: str = ""
    """Why it is not ready."""
    opened_at: float | None = None
    """When its files were opened last, to see whether they are whole."""
    attempts: int = 0
    not_before: float = 0.0
    """When it may be tried again."""
    run: StartedRun | None = None
    """The run that scores it elsewhere."""

    def settle(self, signature: str) -> None:
        """Have done with these contents."""
        self.settled, self.reason = signature, ""
        self.attempts, self.not_before, self.run = 0, 0.0, None

    def renew(self) -> None:
        """Forget what belonged to other contents."""
        self.ready, self.opened_at, self.run = None, None, None
        self.attempts, self.not_before = 0, 0.0

    @property
    def is_settled(self) -> bool:
        """Tell whether what lay there at the last look is done with."""
        return self.settled is not None and self.settled == self.signature


WENT_AWAY = "it went away before it was scored: deleted, renamed or rotated away"


def went_away(
    listed: Iterable[FoundCheckpoint], found: Iterable[FoundCheckpoint], seen: Mapping[str, Seen]
) -> list[FoundCheckpoint]:
    """Return what the last look listed and this one does not, and which nobody has said a word of yet.

    Args:
        listed: of the last look.
        found: of this look.
        seen: address to what is remembered of it.
    """
    present = {one.url for one in found}
    gone = [(one, seen.get(one.url, Seen())) for one in listed if one.url not in present]
    return [one for one, of_it in gone if of_it.signature == one.signature != of_it.settled and of_it.run is None]
