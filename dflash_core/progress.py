"""Progress of long work, told to whoever listens; nobody listens unless told to.

The core reports `(stage, done, total)`; the command line turns it into a bar with the time left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Listener = Callable[[str, float, float], None]

_listeners: list[Listener] = []
_details: dict[str, str] = {}


def report(stage: str, done: float, total: float, detail: str = "") -> None:
    """Tell that `done` of `total` units of a stage are finished; `detail` says at what it is, for people."""
    _details[stage] = detail
    for listener in list(_listeners):
        listener(stage, done, total)


def detail(stage: str) -> str:
    """Return at what a stage is, as it last said: `layer 3 of 30, transcript 5 of 12`; else an empty text."""
    return _details.get(stage, "")


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call `listener(stage, done, total)` for every report inside the block."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
