"""`dflash-eval show`: the drafts of one checkpoint, or of two side by side, on one prompt."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from dflash_core.config import Config, load_config, with_overrides
from dflash_core.drafts import DraftedPrompt, draft_prompt
from dflash_core.errors import InputError, NoResults
from flows import screen
from flows.draft_lines import CONFIDENCE_LEGEND, LEGEND, ODDS_LEGEND, BlockLines, block_lines

_GAP = 3


class Shown(NamedTuple):
    """A checkpoint, as it was typed, and what it drafted."""

    name: str
    checkpoint: str
    drafted: DraftedPrompt


def show_command(options: argparse.Namespace) -> int:
    """Show what one drafter, or two, proposed on one prompt, block by block."""
    config = with_overrides(load_config(options.config), block_size=options.block_size, device=options.device)
    names = [options.checkpoint] if options.against is None else [options.checkpoint, options.against]
    shown = [_draft(config, name, options.prompt) for name in names]
    if options.json:
        screen.print_json(_as_json(shown))
    else:
        _print(shown, has_odds=options.probabilities)
    return 0


def checkpoint_of(config: Config, selector: str) -> str:
    """Return the address of a checkpoint: a path or URL as it is, else what the name stands for in the results.

    Raises:
        InputError: it is no path, and no evaluated checkpoint is called so.
    """
    if "://" in selector or "/" in selector or os.path.exists(selector):
        return selector
    from dflash_core.results.compare import url_of
    from flows.comparing import conditions_of

    try:
        return url_of(config.results, selector, conditions_of(config, None).wanted)
    except NoResults as error:
        raise InputError(f"{selector!r} is no path, and there are no results to look it up in: {error}") from error


def _draft(config: Config, name: str, prompt_id: str | None) -> Shown:
    checkpoint = checkpoint_of(config, name)
    return Shown(name, checkpoint, draft_prompt(config, checkpoint, prompt_id))


def _as_json(shown: Sequence[Shown]) -> dict[str, Any]:
    """Return the drafts as plain data; a second checkpoint's under `against`."""
    first, *others = ({"checkpoint": one.checkpoint, **asdict(one.drafted)} for one in shown)
    if not others:
        return first
    second = others[0]
    return first | {"against": {name: second[name] for name in ("checkpoint", "blocks")}}


def _print(shown: Sequence[Shown], *, has_odds: bool) -> None:
    out = screen.console()
    drafted = shown[0].drafted
    for title, text in ((f"prompt {drafted.prompt_id}", drafted.prompt), ("the target's answer", drafted.response)):
        out.print(Text(f"{title}: ", style="bold") + Text(screen.cell(text)))
    is_confident = any(block.confidences for one in shown for block in one.drafted.blocks)
    out.print(Text(LEGEND))
    if has_odds:
        out.print(Text(ODDS_LEGEND))
    if has_odds and is_confident:
        out.print(Text(CONFIDENCE_LEGEND))
    lines = [
        {block.anchor_index: block_lines(block, has_odds=has_odds) for block in one.drafted.blocks} for one in shown
    ]
    if len(shown) == 1:
        for number, block in enumerate(lines[0].values()):
            _print_block(f"{number:3} ", block)
    else:
        out.print(
            Text(f"A: {shown[0].name}; B: {shown[1].name}; each row is an anchor, the token's place in the answer")
        )
        _print_pairs(*lines)
    for letter, one in zip("AB", shown, strict=False):
        out.print(Text(("" if len(shown) == 1 else f"{letter}: ") + _summary(one.drafted, has_odds=has_odds)))
    if len(shown) == 2:
        num_shared = len(lines[0].keys() & lines[1].keys())
        out.print(Text(f"{num_shared} anchors are on both walks"))


def _print_pairs(a: dict[int, BlockLines], b: dict[int, BlockLines]) -> None:
    """Print both walks by anchor: in two columns where they fit, else one below the other."""
    out = screen.console()
    anchors = sorted(a.keys() | b.keys())
    width = max((block.width for block in [*a.values(), *b.values()]), default=0)
    if 2 * width + 4 + 3 * _GAP <= out.width:
        table = Table(show_edge=False, padding=(0, 1), pad_edge=False)
        for title in ("", "A", "B"):
            table.add_column(title, no_wrap=True)
        for anchor in anchors:
            cells = [side[anchor].joined() if anchor in side else Text("") for side in (a, b)]
            table.add_row(Text(str(anchor), style="dim"), *cells)
        out.print(table)
        return
    for anchor in anchors:
        for letter, side in (("A", a), ("B", b)):
            if anchor in side:
                _print_block(f"{anchor:4} {letter} ", side[anchor])


def _print_block(margin: str, block: BlockLines) -> None:
    out = screen.console()
    out.print(Text(margin, style="dim") + block.drafts, soft_wrap=True)
    if block.under is not None:
        out.print(Text(" " * len(margin)) + block.under, soft_wrap=True)


def _summary(drafted: DraftedPrompt, *, has_odds: bool) -> str:
    emitted = sum(len(block.accepted) + (block.bonus is not None) for block in drafted.blocks)
    if not drafted.blocks:
        return "no verification step: the answer is too short"
    tau = emitted / len(drafted.blocks)
    text = f"{len(drafted.blocks)} verification steps, {emitted} tokens, tau {tau:.2f} on this prompt"
    if not has_odds or not any(block.confidences for block in drafted.blocks):
        return text
    expected = sum(block.expected_tokens for block in drafted.blocks) / len(drafted.blocks)
    return f"{text}; its confidence head expects {expected:.2f} at temperature 1"
