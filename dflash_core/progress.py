"""Progress of long work, told to whoever listens; nobody listens unless told to.

The core reports `(stage, done, total)` and what it counts; the command line makes a bar of it, with rate and time left.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

Listener = Callable[[str, float, float], None]
Clock = Callable[[], float]
"""Seconds from any beginning."""

_listeners: list[Listener] = []


class _Said(NamedTuple):
    detail: str
    unit: str
    per_unit: float


_said: dict[str, _Said] = {}
_NOTHING = _Said("", "", 1.0)
_WINDOW_S = 15.0


def report(stage: str, done: float, total: float, detail: str = "", *, unit: str = "", per_unit: float = 1.0) -> None:
    """Tell that `done` of `total` of a stage are finished.

    Args:
        stage: which.
        done: what is finished.
        total: all there is.
        detail: at what it is, for people.
        unit: what is counted, for people: `anchors`, `bytes`.
        per_unit: how many of what is counted make one of that unit.
    """
    _said[stage] = _Said(detail, unit, per_unit)
    for listener in list(_listeners):
        listener(stage, done, total)


def detail(stage: str) -> str:
    """Return at what a stage is, as it last said: `layer 3 of 30, transcript 5 of 12`; else an empty text."""
    return _said.get(stage, _NOTHING).detail


def unit(stage: str) -> tuple[str, float]:
    """Return what a stage counts, as it last said, and how many of what it reports make one; else an empty text."""
    said = _said.get(stage, _NOTHING)
    return said.unit, said.per_unit


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call `listener(stage, done, total)` for every report inside the block."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


class Pace(NamedTuple):
    """How fast a stage goes at present."""

    per_s: float
    """Units a second; NaN before there are two reports."""
    left_s: float
    """Seconds left at that rate; NaN where it is not known, or nothing moves."""


class PaceMeter:
    """The rate of one stage over the last seconds, since what went before says little of what is to come.

    Args:
        clock: what time it is.
        window_s: seconds that count; where reports come less often, the time since the last but one.
    """

    def __init__(self, clock: Clock = time.monotonic, *, window_s: float = _WINDOW_S) -> None:
        self._clock = clock
        self._window_s = window_s
        self._seen: deque[tuple[float, float]] = deque()

    def add(self, done: float, total: float) -> Pace:
        """Note a report and return the pace. A stage that goes back begins anew."""
        now = self._clock()
        if self._seen and done < self._seen[-1][1]:
            self._seen.clear()
        self._seen.append((now, done))
        while len(self._seen) > 2 and self._seen[1][0] <= now - self._window_s:
            self._seen.popleft()
        begin, before = self._seen[0]
        if now <= begin:
            return Pace(math.nan, math.nan)
        per_s = (done - before) / (now - begin)
        return Pace(per_s, max(total - done, 0.0) / per_s if per_s > 0 else math.nan)


class BytesRead:
    """What was read of a checkpoint while somebody counted."""

    def __init__(self) -> None:
        self.total = 0


_counters: ContextVar[tuple[BytesRead, ...]] = ContextVar("counters", default=())
"""Of this thread and what it calls: evaluations beside it have their own."""


@contextmanager
def counting_bytes() -> Iterator[BytesRead]:
    """Count the bytes that are read of checkpoints inside the block, by attempts that fail too."""
    counter = BytesRead()
    token = _counters.set((*_counters.get(), counter))
    try:
        yield counter
    finally:
        _counters.reset(token)


def note_bytes_read(num_bytes: int) -> None:
    """Tell whoever counts that so many bytes of a checkpoint were read."""
    for counter in _counters.get():
        counter.total += num_bytes
