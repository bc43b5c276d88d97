"""What a drafter may be and still not be scored here: one table, shorter with every rule that is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from dflash_core.drafter.spec import DrafterSpec
from dflash_core.errors import UnsupportedCheckpoint


class _Gap(NamedTuple):
    """A kind of drafter that is read and not computed."""

    applies: Callable[[DrafterSpec], bool]
    fact: str
    what: str


_GAPS: tuple[_Gap, ...] = ()
"""None at present: whatever a `DrafterSpec` can say is computed."""


def require_scorable(spec: DrafterSpec, *, where: str) -> None:
    """Refuse a drafter that the forward pass or the scoring does not compute yet.

    Args:
        spec: its facts.
        where: the checkpoint, for the message.

    Raises:
        UnsupportedCheckpoint: naming the fact and what decided it.
    """
    for gap in _GAPS:
        if gap.applies(spec):
            value = getattr(spec, gap.fact)
            raise UnsupportedCheckpoint(
                f"{where}: {gap.what} is not scored yet: {gap.fact} = {value!r} ({spec.sources.get(gap.fact)})"
            )
