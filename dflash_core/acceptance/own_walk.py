"""The walk of a drafting that is scored beside the main one: shorter blocks, draft trees.

It stops at other anchors, since it accepts other counts:

    response index     0    1    2    3    4    5    6
    main, block of 4   A .. 3 emitted .. A .. 3 emitted ..
    block of 2         A .. 2 ..   A .. 2 ..   A .. 2 ..
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from dflash_core.acceptance import walk


@dataclass(frozen=True, kw_only=True, slots=True)
class WalkCounts:
    """Sums over the verification steps of one prompt's walk."""

    num_verification_steps: int
    num_accepted_drafts: int
    """Without the bonus tokens."""
    num_emitted_tokens: int
    """With them, cut at the end of the transcript."""


def follow(num_response_tokens: int, accepted_at: Callable[[int], int | None]) -> Iterator[tuple[int, int | None]]:
    """Yield anchor and accepted drafts, step by step; None, once, at the first anchor that is not known yet.

    Args:
        num_response_tokens: length of the response; its last token is no anchor.
        accepted_at: response index to accepted drafts, or None.
    """
    anchor = 0
    while anchor < num_response_tokens - 1:
        accepted = accepted_at(anchor)
        yield anchor, accepted
        if accepted is None:
            return
        anchor += walk.num_emitted(anchor, num_response_tokens, accepted)


def count_steps(num_response_tokens: int, accepted_at: Callable[[int], int | None]) -> WalkCounts:
    """Return the sums over a walk whose every anchor is known; arguments as for `follow`."""
    steps = []
    for anchor, accepted in follow(num_response_tokens, accepted_at):
        assert accepted is not None, anchor
        steps.append((accepted, walk.num_emitted(anchor, num_response_tokens, accepted)))
    return add_steps(steps)


def add_steps(steps: Iterable[tuple[int, int]]) -> WalkCounts:
    """Return the sums over pairs of accepted drafts and emitted tokens."""
    pairs = list(steps)
    return WalkCounts(
        num_verification_steps=len(pairs),
        num_accepted_drafts=sum(accepted for accepted, _ in pairs),
        num_emitted_tokens=sum(emitted for _, emitted in pairs),
    )
