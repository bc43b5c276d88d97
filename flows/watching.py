"""The watch: look at a run's folder and score each checkpoint that becomes ready.

The loop itself needs no Prefect server: it lists, waits until a checkpoint has settled, and calls the
flow that scores one. A checkpoint that fails is tried a bounded number of times and never blocks the
others; one that vanishes before it was read whole, as a run that rotates its checkpoints makes them do,
is told and is no failure; a host that does not answer is asked again, less and less often.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from dflash_core import evaluation
from dflash_core.checkpoints import CheckpointInspection, FoundCheckpoint, check_readiness, list_checkpoints
from dflash_core.config import Config
from dflash_core.errors import (
    CheckpointError,
    CheckpointNotFound,
    CheckpointVanished,
    DFlashEvalError,
    HostError,
    one_line,
)
from dflash_core.results import database

MAX_ATTEMPTS = 3
SETTLE_S = 2.0
"""Least time between two looks at a folder; modification times have steps of one second."""
LONGEST_PAUSE_S = 300.0

Kind = Literal["waiting", "scored", "known", "failed", "vanished", "unreachable"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchEvent:
    """Something that a person who watches would like to know."""

    kind: Kind
    name: str
    """The checkpoint, or the folder."""
    message: str
    result: dict[str, Any] | None = None


@dataclass(kw_only=True)
class Watch:
    """The state of one watch over one folder.

    Args:
        run_url: the folder that holds the steps.
        config: the configuration.
        evaluate: scores one checkpoint by its address and returns the result.
        tell: is told every event, each reason for waiting once.
    """

    run_url: str
    config: Config
    evaluate: Callable[[str], dict[str, Any]]
    tell: Callable[[WatchEvent], None]
    results: list[dict[str, Any]] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    """Checkpoint to error of those that are given up."""
    vanished: dict[str, str] = field(default_factory=dict)
    """Checkpoint to reason of those that were listed, and gone before they were read whole."""
    _signatures: dict[str, str] = field(default_factory=dict)
    _settled: dict[str, str] = field(default_factory=dict)
    _attempts: dict[str, int] = field(default_factory=dict)
    _told: dict[str, str] = field(default_factory=dict)

    def look(self, *, must_exist: bool = False) -> list[FoundCheckpoint]:
        """List the folder and return the checkpoints that are ready and not settled yet, lowest step first.

        Args:
            must_exist: a folder that is not there is an error; else it is waited for.

        Raises:
            CheckpointNotFound: the folder must exist and does not.
            HostError: the host does not answer.
        """
        try:
            found = list_checkpoints(self.run_url, hosts=self.config.hosts, run=self.config.run, allow_empty=True)
        except CheckpointNotFound as error:
            if must_exist:
                raise
            self._tell_once("waiting", self.run_url, one_line(error))
            return []
        ready = []
        for one in found:
            if self._settled.get(one.url) == one.signature:
                continue
            previous = self._signatures.get(one.url)
            readiness = check_readiness(one, previous, hosts=self.config.hosts)
            self._signatures[one.url] = one.signature
            if readiness.ready:
                ready.append(one)
            elif previous is not None:
                self._tell_once("waiting", one.name, str(readiness.reason))
        return ready

    def score(self, found: FoundCheckpoint) -> None:
        """Score one checkpoint, or answer from the database; what goes wrong is noted, not raised."""
        try:
            scored = score_checkpoint(self.config, found.url, self.evaluate)
        except (CheckpointVanished, CheckpointNotFound) as error:
            self._note_vanished(found, error)
            return
        except (DFlashEvalError, OSError) as error:
            self._note_failure(found, error)
            return
        self._settled[found.url] = found.signature
        self.failures.pop(found.url, None)
        self.vanished.pop(found.url, None)
        self.results.append(scored.result)
        kind: Kind = "known" if scored.is_known else "scored"
        self.tell(WatchEvent(kind=kind, name=found.name, message="", result=scored.result))

    def run(self, *, once: bool, every_s: float, stop: Callable[[], bool] = lambda: False) -> None:
        """Look and score until told to stop; `once` scores what is ready now and returns.

        Args:
            once: two looks, so that what is still being written is left alone, then score and return.
            every_s: pause between looks while nothing is ready, in seconds.
            stop: asked after each look that found nothing ready; True ends the watch.

        Raises:
            CheckpointNotFound: in `once` mode, there is no such folder.
            HostError: in `once` mode, the host does not answer.
        """
        pause_s = max(SETTLE_S, every_s)
        if once:
            self.look(must_exist=True)
            time.sleep(SETTLE_S)
            for found in self.look(must_exist=True):
                self.score(found)
            return
        while True:
            try:
                ready = self.look()
            except HostError as error:
                self._tell_once("unreachable", self.run_url, f"{one_line(error)}; asking again in {pause_s:.0f} s")
                time.sleep(pause_s)
                pause_s = min(LONGEST_PAUSE_S, pause_s * 2)
                continue
            pause_s = max(SETTLE_S, every_s)
            if ready:
                self.score(ready[0])
            elif stop():
                return
            else:
                time.sleep(pause_s)

    def _note_vanished(self, found: FoundCheckpoint, error: Exception) -> None:
        """Should it come back, it is scored after two more looks; a listing that keeps naming it is given up."""
        attempts = self._attempts[found.url] = self._attempts.get(found.url, 0) + 1
        self._signatures.pop(found.url, None)
        if attempts >= MAX_ATTEMPTS:
            self._settled[found.url] = found.signature
            self._attempts.pop(found.url)
        self.failures.pop(found.url, None)
        self.vanished[found.url] = one_line(error)
        self.tell(WatchEvent(kind="vanished", name=found.name, message=one_line(error)))

    def _note_failure(self, found: FoundCheckpoint, error: Exception) -> None:
        attempts = self._attempts[found.url] = self._attempts.get(found.url, 0) + 1
        # What is wrong with the checkpoint itself stays wrong until its bytes change.
        final = isinstance(error, CheckpointError) or attempts >= MAX_ATTEMPTS
        if final:
            self._settled[found.url] = found.signature
            self.vanished.pop(found.url, None)
            self.failures[found.url] = one_line(error)
            self._attempts.pop(found.url)
        again = "" if final else f"; attempt {attempts} of {MAX_ATTEMPTS}"
        self.tell(WatchEvent(kind="failed", name=found.name, message=f"{one_line(error)}{again}"))

    def _tell_once(self, kind: Kind, name: str, message: str) -> None:
        if self._told.get(name) != message:
            self._told[name] = message
            self.tell(WatchEvent(kind=kind, name=name, message=message))


class Scored(NamedTuple):
    """The result of a checkpoint, and whether it was known before."""

    result: dict[str, Any]
    is_known: bool


def score_checkpoint(config: Config, checkpoint: str, evaluate: Callable[[str], dict[str, Any]]) -> Scored:
    """Return the result of a checkpoint: from the database where it is known, else from the flow.

    Args:
        config: the configuration.
        checkpoint: path or URL.
        evaluate: runs the flow for an address and returns the result.

    Raises:
        CheckpointNotFound: it was not there at the first look.
        CheckpointVanished: it was there at the first look and not any more when the flow came to read it;
            the results hold a row of it.
        DFlashEvalError: whatever else went wrong.
    """
    begin, started_at = time.monotonic(), evaluation.now()
    inspection = evaluation.inspect(checkpoint, config)
    evaluation.require_ready(inspection)
    known = _known_result(config, inspection, begin)
    if known is not None:
        return Scored(known, is_known=True)
    try:
        return Scored(evaluate(checkpoint), is_known=False)
    except CheckpointNotFound as error:  # the flow looked a second time, and found nothing to write a row of
        vanished = evaluation.vanished(inspection)
        row = evaluation.checkpoint_record(inspection, None)
        record = evaluation.failed_record(config, row, vanished, started_at=started_at, seconds={})
        database.write_evaluation(config.results, record)
        raise vanished from error


def _known_result(config: Config, inspection: CheckpointInspection, begin: float) -> dict[str, Any] | None:
    """Return the stored result of a checkpoint that was scored under these conditions, else None.

    Only the checkpoint's index was read; neither Prefect nor the target is needed.
    """
    evaluation_id = evaluation.known_evaluation_id(config, inspection)
    if evaluation_id is None or not database.has_evaluation(config.results, evaluation_id):
        return None
    result = database.read_evaluation(config.results, evaluation_id)
    if result is None:
        return None
    # What this answer cost, not what the first one did.
    answered = {"cached": dict.fromkeys(result["cached"], True), "bytes_read": inspection.bytes_read}
    return result | answered | {"seconds": {"answer_from_store": round(time.monotonic() - begin, 3)}}
