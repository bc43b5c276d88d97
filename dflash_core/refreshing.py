"""Making again what the store holds already, on request: `--refresh STAGE`.

    transcripts ─ hidden_states ┐
                  drafter ──────┴ blocks ─ results

A stage that is refreshed takes along all that is made from it. While `refreshing` lasts, a store does not find
what is to be made again, so that each builder builds; what it holds stays valid until the new one replaces it.
What comes out otherwise under the same key is remembered: something that decides it is not in its key, or
the machine does not compute the same twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from dflash_core.errors import InputError

STAGES = ("transcripts", "hidden_states", "drafter", "blocks", "results")
"""All but the last are kinds of artifacts in the store."""
OF_TARGET = ("transcripts", "hidden_states")
"""What a preparation makes; all checkpoints rest on it."""
ALL = "all"
_NEXT = {
    "transcripts": ("hidden_states",),
    "hidden_states": ("blocks",),
    "drafter": ("blocks",),
    "blocks": ("results",),
    "results": (),
}


class Refresh:
    """What is to be made again, each artifact once."""

    def __init__(self, names: Iterable[str]) -> None:
        """Take names of stages, or `all`.

        Raises:
            InputError: a name is none of these.
        """
        self.stages = _with_following(names)
        self._differing: list[tuple[str, str]] = []
        """Kind and line of each artifact that did not come out as it was."""
        self._made: set[tuple[str, str]] = set()

    def is_due(self, kind: str, key: str) -> bool:
        """Tell whether an artifact still has to be made again."""
        return kind in self.stages and (kind, key) not in self._made

    def made(self, kind: str, key: str, before: dict[str, str], after: dict[str, str]) -> None:
        """Note that an artifact was made again, and whether its files came out as they were.

        Args:
            kind: the stage that made it.
            key: its key.
            before: digest of each file that the store held; empty where it held none.
            after: the same of what was made.
        """
        self._made.add((kind, key))
        if before and before != after:
            names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
            text = (
                f"{kind} {key[:8]} was made again and came out otherwise ({', '.join(names)}): the machine, or what "
                "made it before, does not compute the same numbers; numbers that rest on the old one may differ"
            )
            self._differing.append((kind, text))

    def take_differing(self) -> list[str]:
        """Return a line for each artifact that did not come out as it was; of one checkpoint's own no second time."""
        lines = [text for _, text in self._differing]
        self._differing = [one for one in self._differing if one[0] in OF_TARGET]
        return lines

    def made_elsewhere(self, *stages: str) -> None:
        """Note that another machine made what stages make."""
        self.stages -= set(stages)


_current: ContextVar[Refresh | None] = ContextVar("refresh", default=None)


def is_due(kind: str, key: str) -> bool:
    """Tell whether an artifact is to be made again now."""
    refresh = _current.get()
    return refresh is not None and refresh.is_due(kind, key)


def note(kind: str, key: str, before: dict[str, str], after: dict[str, str]) -> None:
    """Tell the refresh that lasts, if one does, what was made; see `Refresh.made`."""
    refresh = _current.get()
    if refresh is not None and refresh.is_due(kind, key):
        refresh.made(kind, key, before, after)


@contextmanager
def refreshing(names: Iterable[str]) -> Iterator[Refresh]:
    """Have stages make their products again while the block lasts.

    Inside another such block that one goes on: of several checkpoints in a row, the target's part is made once.

    Raises:
        InputError: a name is not a stage.
    """
    asked = Refresh(names)
    outer = _current.get()
    if outer is not None:
        yield outer
        return
    token = _current.set(asked)
    try:
        yield asked
    finally:
        _current.reset(token)


def require_stages(names: Iterable[str], allowed: Iterable[str]) -> list[str]:
    """Return the names of stages as they are, where each is `all` or allowed.

    Raises:
        InputError: one is not.
    """
    given, known = list(names), tuple(allowed)
    for name in given:
        if name != ALL and name not in known:
            raise InputError(f"refresh = {name!r} is no stage; expected {ALL}, or some of {', '.join(known)}")
    return given


def _with_following(names: Iterable[str]) -> frozenset[str]:
    found: set[str] = set()
    waiting = require_stages(names, STAGES)
    while waiting:
        name = waiting.pop()
        if name == ALL:
            waiting.extend(STAGES)
        elif name not in found:
            found.add(name)
            waiting.extend(_NEXT[name])
    return frozenset(found)
