"""The drafts of the prompts that the report shows, where somebody can draft them again: bounded in number and time.

The database holds what was accepted, not which tokens were drafted. They are drafted again from the store, and shown
only where that gives the very walk that was stored: under other conditions they would be another drafter's words.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_core.errors import DFlashEvalError
from dflash_core.results.report_prompts import PromptList, ShownPrompt, WalkStep

if TYPE_CHECKING:
    from dflash_core.drafts import DraftedBlock, DraftedPrompt

REASON_LENGTH = 300
NO_SOURCE = "this report was made without the store that the drafts come from"
TOO_MANY = "the report shows the drafts of no more prompts"
TOO_LATE = "the time that the report takes for drafts was used up"

DraftSource = Callable[[str, str], "DraftedPrompt"]
"""Drafts one prompt again; takes the checkpoint's URL and the prompt's id."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftLimits:
    """How much of the drafts a report shows."""

    num_prompts: int = 12
    """So many prompts in all; the checkpoint that was evaluated last comes first."""
    num_blocks: int = 40
    """So many verification steps of each."""
    seconds: float = 60.0
    """No prompt is begun after so long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownDrafts:
    """The drafts of one prompt, or why there are none."""

    blocks: tuple[DraftedBlock, ...] = ()
    num_blocks: int = 0
    """All verification steps, those that are not shown included."""
    why_not: str | None = None


Drafts = dict[tuple[str, str], ShownDrafts]
"""(Evaluation, prompt) to its drafts."""


def draft_again(lists: Iterable[PromptList], source: DraftSource | None, limits: DraftLimits) -> Drafts:
    """Return the drafts of each shown prompt; what cannot be had says why.

    Args:
        lists: the prompts of each checkpoint, the most wanted first.
        source: what drafts; None where there is nothing to draft with.
        limits: how much is shown.
    """
    found: Drafts = {}
    deadline = time.monotonic() + limits.seconds
    for shown in lists:
        failed: str | None = None
        for prompt in shown.prompts:
            why_not = failed
            if source is None:
                why_not = NO_SOURCE
            elif why_not is None and _num_drafted(found) >= limits.num_prompts:
                why_not = TOO_MANY
            elif why_not is None and time.monotonic() > deadline:
                why_not = TOO_LATE
            if why_not is not None or source is None:
                found[shown.evaluation_id, prompt.prompt_id] = ShownDrafts(why_not=why_not)
                continue
            drafts = _draft(source, shown, prompt, limits.num_blocks)
            found[shown.evaluation_id, prompt.prompt_id] = drafts
            # What stops one prompt stops the checkpoint's others, and a host that is down is asked once.
            failed = drafts.why_not
    return found


def _num_drafted(found: Drafts) -> int:
    return sum(drafts.why_not is None for drafts in found.values())


def _draft(source: DraftSource, shown: PromptList, prompt: ShownPrompt, num_blocks: int) -> ShownDrafts:
    try:
        drafted = source(shown.url, prompt.prompt_id)
    except DFlashEvalError as error:
        text = " ".join(str(error).split())
        return ShownDrafts(why_not=text if len(text) <= REASON_LENGTH else text[:REASON_LENGTH] + "…")
    walk = tuple(
        WalkStep(block.anchor_index, len(block.accepted) + len(block.rejected), len(block.accepted))
        for block in drafted.blocks
    )
    if walk != prompt.walk:
        return ShownDrafts(why_not="drafted again with this configuration, its walk is not the one that was stored")
    return ShownDrafts(blocks=drafted.blocks[:num_blocks], num_blocks=len(drafted.blocks))
