"""`dflash-eval show`: the drafts of one prompt, accepted and rejected."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.text import Text

from dflash_core.config import Config
from dflash_core.drafts import DraftedBlock, draft_prompt
from flows.screen import console


def drafts_json(config: Config, checkpoint: str, prompt_id: str | None) -> dict[str, Any]:
    """Return the drafts as plain data."""
    return {"checkpoint": checkpoint, **asdict(draft_prompt(config, checkpoint, prompt_id))}


def show_drafts(config: Config, checkpoint: str, prompt_id: str | None) -> None:
    """Print one line per verification step: [anchor] accepted, then what was rejected -> the target's token."""
    drafted = draft_prompt(config, checkpoint, prompt_id)
    out = console()
    out.print(Text(f"prompt {drafted.prompt_id}: {drafted.prompt}"))
    out.print(
        Text("one line per verification step: anchor | accepted drafts | x rejected drafts | > the target's own token")
    )
    for step, block in enumerate(drafted.blocks):
        out.print(_line(step, block))
    emitted = sum(len(block.accepted) + (block.bonus is not None) for block in drafted.blocks)
    if drafted.blocks:
        tau = emitted / len(drafted.blocks)
        out.print(Text(f"{len(drafted.blocks)} verification steps, {emitted} tokens, tau {tau:.2f} on this prompt"))


def _line(step: int, block: DraftedBlock) -> Text:
    line = Text(f"{step:3} ", style="dim")
    line.append(_quoted([block.anchor]), style="bold")
    line.append(" | ").append(_quoted(block.accepted), style="green")
    if block.rejected:
        line.append(" | x ").append(_quoted(block.rejected), style="red")
    if block.bonus is not None:
        line.append(" | > ").append(_quoted([block.bonus]), style="cyan")
    return line


def _quoted(tokens: list[str] | tuple[str, ...]) -> str:
    return " ".join(repr(token) for token in tokens)
