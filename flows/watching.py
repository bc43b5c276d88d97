"""The watch: look at a run's folder and score each checkpoint that becomes ready.

The loop itself needs no Prefect server: it lists, waits until a checkpoint has settled, and calls the
flow that scores one, or has it scored elsewhere. A checkpoint that fails is tried a bounded number of
times, with growing pauses, and never blocks the others; one that vanishes before it was read whole, as a
run that rotates its checkpoints makes them do, is told and is no failure; a host that does not answer is
asked again, less and less often.

Looking is cheap: a look lists folders, and a file is opened only of what is new, once it has stopped
changing. While nothing changes the pauses grow.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dflash_core import evaluation
from dflash_core.checkpoints import FoundCheckpoint, check_readiness, list_checkpoints
from dflash_core.config import Config
from dflash_core.errors import (
    CheckpointError,
    CheckpointNotFound,
    CheckpointVanished,
    DFlashEvalError,
    HostError,
    one_line,
)
from flows import notifying
from flows.scoring import known_result, score_checkpoint
from flows.watch_choice import Choice
from flows.watch_errors import is_passing
from flows.watch_values import WENT_AWAY, Kind, PassingFault, Runs, RunsUsedUp, Seen, WatchEvent, went_away

MAX_ATTEMPTS = 3
MAX_HOST_ATTEMPTS = 14
"""Where a machine is at fault, which may pass, as a full disk or a host that is away: with the pauses, an hour."""
SETTLE_S = 2.0
"""Least time between two looks at a folder; modification times have steps of one second."""
LONGEST_PAUSE_S = 300.0
FIRST_RETRY_S = 30.0
LONGEST_IDLE_S = 120.0
"""What the pause between looks grows to while nothing changes, unless a longer one is asked for."""
REOPEN_S = 300.0
"""A checkpoint that is not whole and does not change is opened again so often."""
TELL_EVERY_S = 600.0
"""So often a line says what is waited for."""
_NAMES_SHOWN = 5


@dataclass(kw_only=True)
class Watch:
    """The state of one watch over one folder.

    Args:
        run_url: the folder that holds the steps.
        config: the configuration.
        evaluate: scores one checkpoint by its address and returns the result.
        tell: is told every event, each reason for waiting once.
        choice: which checkpoints are taken, and in which order.
        runs: has checkpoints scored elsewhere, instead of `evaluate`; several at a time.
    """

    run_url: str
    config: Config
    evaluate: Callable[[str], dict[str, Any]]
    tell: Callable[[WatchEvent], None]
    choice: Choice = field(default_factory=Choice)
    runs: Runs | None = None
    results: list[dict[str, Any]] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    """Checkpoint to error of those that are given up."""
    vanished: dict[str, str] = field(default_factory=dict)
    """Checkpoint to reason of those that were listed, and gone before they were read whole."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Checkpoint to reason of those that the limit on the backlog left out."""
    scored_elsewhere: list[str] = field(default_factory=list)
    """Checkpoints whose results lie in another box's database."""
    _is_once: bool = False
    _is_changed: bool = True
    _num_scored: int = 0
    _listed: list[FoundCheckpoint] = field(default_factory=list)
    _num_passed_over: int = 0
    _problem: str = ""
    _look_again_at: float | None = None
    _status_told_at: float = 0.0
    _seen: dict[str, Seen] = field(default_factory=dict)
    _started: dict[str, FoundCheckpoint] = field(default_factory=dict)
    """Those that were ever handed to a run; one that was rotated away since still has its run."""
    _seen_steps: set[int] = field(default_factory=set)
    _told: dict[str, str] = field(default_factory=dict)

    def look(self, *, must_exist: bool = False) -> list[FoundCheckpoint]:
        """List the folder and return the checkpoints that are ready and not settled yet, in the chosen order.

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
            found, self._problem = [], one_line(error)
            self._tell_once("waiting", self.run_url, self._problem)
        else:
            self._problem = "" if found else "no checkpoint yet"
            for gone in went_away(self._listed, found, self._seen):
                self._tell_once("waiting", gone.name, WENT_AWAY)
        self._seen_steps |= {one.step for one in found if one.step is not None and self.choice.passes(one)}
        taken = self.choice.select(found, self._seen_steps)
        self._num_passed_over = len(found) - len(taken)
        self._is_changed = _contents(taken) != _contents(self._listed)
        self._listed = taken
        return [one for one in taken if self._is_ready(one)]

    def score(self, found: FoundCheckpoint) -> bool:
        """Score one checkpoint, or answer from the database; what goes wrong is noted, not raised.

        Returns:
            True where that took no time: it is known, or was started elsewhere.

        Raises:
            HostError: runs are started elsewhere, and the server of the runs or the checkpoint's host is away.
        """
        try:
            if self.runs is not None:
                self._start(found)
                return True
            with notifying.watched():
                scored = score_checkpoint(self.config, found.url, self.evaluate)
            self._note_scored(found, scored.result, is_known=scored.is_known)
            return scored.is_known
        except (CheckpointVanished, CheckpointNotFound) as error:
            self._note_vanished(found, error)
        except Exception as error:  # the watch outlives whatever one evaluation does
            if self.runs is not None and isinstance(error, HostError):
                raise
            self._note_failure(found, error)
        return False

    def run(
        self, *, once: bool, every_s: float, idle_s: float = LONGEST_IDLE_S, stop: Callable[[], bool] = lambda: False
    ) -> None:
        """Look and score until told to stop; `once` scores what is ready now and returns.

        Args:
            once: two looks, so that what is still being written is left alone, then score and return.
            every_s: pause between looks while nothing is ready, in seconds.
            idle_s: what that pause grows to while nothing changes, in seconds.
            stop: asked after each look that found nothing ready; True ends the watch.

        Raises:
            CheckpointNotFound: in `once` mode, there is no such folder.
            HostError: in `once` mode, the host does not answer.
        """
        shortest_s = max(SETTLE_S, every_s)
        self._status_told_at = time.monotonic()
        if once:
            self._run_once(shortest_s)
            return
        idle_s, pause_s, away_s = max(shortest_s, idle_s), shortest_s, shortest_s
        while True:
            try:
                has_ended = self._collect()
                ready = self._within_backlog(self.look())
                for found in ready:
                    if not self.score(found) and self.runs is None:
                        break  # that took a while: what is next now?
            except HostError as error:
                self._problem = one_line(error)
                self._tell_once("unreachable", self.run_url, f"{self._problem}; asking again in {away_s:.0f} s")
                self._pause(away_s)
                away_s = min(max(LONGEST_PAUSE_S, shortest_s), away_s * 2)
                continue
            if away_s > shortest_s:
                self._tell_once("waiting", self.run_url, "answers again")
                away_s = shortest_s
            if ready and not self.runs:
                pause_s = shortest_s
            elif not ready and stop():
                return
            else:
                pause_s = shortest_s if has_ended or ready or self._is_changed else min(idle_s, pause_s * 1.5)
                self._pause(min(pause_s, self._until_retry_s()))

    def status(self) -> str:
        """Return one line that says what was done, what is waited for and why."""
        done = [f"{self._num_scored} scored"]
        counts = (("failed", self.failures), ("vanished", self.vanished), ("skipped", self.skipped))
        done += [f"{len(of)} {kind}" for kind, of in counts if of]
        if self._num_passed_over:
            done.append(f"{self._num_passed_over} not chosen")
        waiting = [self._problem] if self._problem else []
        open_ones = [(one, self._seen[one.url]) for one in self._listed if not self._memory(one).is_settled]
        waiting += [f"{one.name} ({self._why_open(seen)})" for one, seen in open_ones[:_NAMES_SHOWN]]
        if len(open_ones) > _NAMES_SHOWN:
            waiting.append(f"{len(open_ones) - _NAMES_SHOWN} more")
        text = f"{', '.join(done)}; waiting for {'; '.join(waiting) or 'the next checkpoint'}"
        if self._look_again_at is None:
            return text
        return f"{text}; next look in {max(0.0, self._look_again_at - time.monotonic()):.0f} s"

    def _is_ready(self, found: FoundCheckpoint) -> bool:
        """Tell whether a listed checkpoint can be scored now; its files are opened as seldom as can be."""
        seen = self._memory(found)
        previous, seen.signature = seen.signature, found.signature
        if previous is not None and previous != found.signature:
            seen.renew()
        if seen.is_settled or seen.run is not None:
            return False
        now = time.monotonic()
        if seen.ready == found.signature and found.incomplete_reason is None:
            return now >= seen.not_before
        will_open = previous == found.signature and found.incomplete_reason is None
        if will_open and seen.opened_at is not None and now - seen.opened_at < REOPEN_S:
            return False
        readiness = check_readiness(found, previous, hosts=self.config.hosts)
        seen.opened_at = now if will_open else None
        if readiness.ready:
            seen.ready, seen.reason = found.signature, ""
            return now >= seen.not_before
        seen.reason = readiness.reason
        if previous is not None:
            self._tell_once("waiting", found.name, readiness.reason)
        return False

    def _start(self, found: FoundCheckpoint) -> None:
        """Have a checkpoint scored elsewhere, unless it is known."""
        assert self.runs is not None
        begin = time.monotonic()
        inspection = evaluation.inspect(found.url, self.config)
        evaluation.require_ready(inspection)
        try:
            known = known_result(self.config, inspection, begin)
        except HostError:
            raise
        except DFlashEvalError:  # this box may lack the target or the GPU, without which nothing can be told here
            known = None
        if known is not None:
            self._note_scored(found, known, is_known=True)
            return
        run = self._memory(found).run = self.runs.start(inspection)
        self._started[found.url] = found
        self.tell(WatchEvent(kind="started", name=found.name, message=f"flow run {run.name}"))

    def _collect(self) -> bool:
        """Take in the runs that ended; True where there was one."""
        under_way = {run.id: (run, found) for found in self._started.values() if (run := self._memory(found).run)}
        if self.runs is None or not under_way:
            return False
        ends = self.runs.ended([run for run, _ in under_way.values()])
        for run_id, end in ends.items():
            run, found = under_way[run_id]
            self._memory(found).run = None
            if end.error is None:
                self._note_scored(found, self._result_of(found), is_known=False, message=f"by flow run {run.name} ")
            else:
                error = (PassingFault if end.may_pass else DFlashEvalError)(f"flow run {run.name}: {end.error}")
                self._note_failure(found, error, is_final=end.is_final)
        return bool(ends)

    def _result_of(self, found: FoundCheckpoint) -> dict[str, Any] | None:
        """Return what a run elsewhere left in the database; None where that is another box's."""
        try:
            return known_result(self.config, evaluation.inspect(found.url, self.config), time.monotonic())
        except DFlashEvalError:
            return None

    def _within_backlog(self, ready: list[FoundCheckpoint]) -> list[FoundCheckpoint]:
        """Return what may be scored of those that are ready; the rest is skipped, unless it is known."""
        limit = self.choice.max_backlog
        if limit is None:
            return ready
        num_under_way = self._num_under_way()
        if len(ready) + num_under_way <= limit:
            return ready
        kept: list[FoundCheckpoint] = []
        for found in ready:
            if self._is_known(found):
                self.score(found)
            elif len(kept) + num_under_way < limit:
                kept.append(found)
            else:
                text = f"more than {limit} wait, and the {self.choice.order} go first; evaluate it by hand if it counts"
                self._memory(found).settle(found.signature)
                self.skipped[found.url] = text
                self.tell(WatchEvent(kind="skipped", name=found.name, message=text))
        return kept

    def _num_under_way(self) -> int:
        return sum(self._memory(found).run is not None for found in self._started.values())

    def _is_known(self, found: FoundCheckpoint) -> bool:
        seen = self._memory(found)
        if seen.unknown == found.signature:
            return False
        if self._result_of(found) is not None:
            return True
        seen.unknown = found.signature
        return False

    def _run_once(self, every_s: float) -> None:
        self._is_once = True
        self.look(must_exist=True)
        time.sleep(SETTLE_S)
        for found in self._within_backlog(self.look(must_exist=True)):
            self.score(found)
        while self._num_under_way():
            if not self._collect():
                self._pause(every_s)

    def _note_scored(
        self, found: FoundCheckpoint, result: dict[str, Any] | None, *, is_known: bool, message: str = ""
    ) -> None:
        self._memory(found).settle(found.signature)
        for noted in (self.failures, self.vanished, self.skipped):
            noted.pop(found.url, None)
        self._num_scored += 1
        if result is not None:
            self.results.append(result)
        else:
            self.scored_elsewhere.append(found.url)
        kind: Kind = "known" if is_known else "scored"
        self.tell(WatchEvent(kind=kind, name=found.name, message=message, result=result))

    def _note_vanished(self, found: FoundCheckpoint, error: Exception) -> None:
        """Should it come back, it is scored after two more looks; a listing that keeps naming it is given up."""
        seen = self._memory(found)
        attempts = seen.attempts + 1
        if attempts >= MAX_ATTEMPTS:
            seen.settle(found.signature)
        else:
            seen.renew()
            seen.signature, seen.attempts = None, attempts
        self.failures.pop(found.url, None)
        self.vanished[found.url] = one_line(error)
        self.tell(WatchEvent(kind="vanished", name=found.name, message=one_line(error)))

    def _note_failure(self, found: FoundCheckpoint, error: Exception, *, is_final: bool = False) -> None:
        seen = self._memory(found)
        seen.attempts += 1
        limit = MAX_HOST_ATTEMPTS if is_passing(error) else MAX_ATTEMPTS
        # What is wrong with the checkpoint itself stays wrong until its bytes change.
        is_final = (
            is_final or self._is_once or isinstance(error, CheckpointError | RunsUsedUp) or seen.attempts >= limit
        )
        text = one_line(error) if isinstance(error, DFlashEvalError) else f"{type(error).__name__}: {one_line(error)}"
        again = ""
        if is_final:
            seen.settle(found.signature)
            self.vanished.pop(found.url, None)
            self.failures[found.url] = text
        else:
            pause_s = min(LONGEST_PAUSE_S, FIRST_RETRY_S * 4 ** (seen.attempts - 1))
            seen.not_before = time.monotonic() + pause_s
            again = f"; attempt {seen.attempts} of {limit}, the next in {pause_s:.0f} s"
        self.tell(WatchEvent(kind="failed", name=found.name, message=f"{text}{again}"))
        if is_final:
            notifying.tell_given_up(self.config, found, text)

    def _why_open(self, seen: Seen) -> str:
        if seen.run is not None:
            return f"flow run {seen.run.name} is under way"
        left_s = seen.not_before - time.monotonic()
        if left_s > 0:
            return f"failed {seen.attempts} times, tried again in {left_s:.0f} s"
        return seen.reason or "ready, its turn comes"

    def _memory(self, found: FoundCheckpoint) -> Seen:
        return self._seen.setdefault(found.url, Seen())

    def _until_retry_s(self) -> float:
        now = time.monotonic()
        times = [seen.not_before - now for seen in map(self._memory, self._listed) if seen.not_before > now]
        return max(SETTLE_S, min(times, default=LONGEST_PAUSE_S * 100))

    def _pause(self, seconds: float) -> None:
        now = time.monotonic()
        self._look_again_at = now + seconds
        if now - self._status_told_at >= TELL_EVERY_S:
            self._status_told_at = now
            self.tell(WatchEvent(kind="status", name=self.run_url, message=self.status()))
        time.sleep(seconds)
        self._look_again_at = None

    def _tell_once(self, kind: Kind, name: str, message: str) -> None:
        if self._told.get(name) != message:
            self._told[name] = message
            self.tell(WatchEvent(kind=kind, name=name, message=message))


def _contents(found: list[FoundCheckpoint]) -> set[tuple[str, str]]:
    return {(one.url, one.signature) for one in found}
