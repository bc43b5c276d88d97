"""One verification step as people read it: what was accepted, refused and wasted, by colour and by sign.

' the' + ' cat' ' sat'  x ' on'  ~ ' a' ' mat'
                        > ' down'
"""

from __future__ import annotations

from dataclasses import dataclass

from rich.text import Text

from dflash_core.drafts import DraftedBlock

LEGEND = (
    "one row per verification step: anchor | + accepted drafts | x first one rejected | ~ drafts not used | "
    "> the target's own token"
)
ODDS_LEGEND = (
    "after each draft: the drafter's probability of it at temperature 1; after the target's own token: the rank and "
    "probability that the drafter gave it"
)
CONFIDENCE_LEGEND = (
    "in brackets: what the confidence head says, the chance that the draft is accepted when drafter and target draw at "
    "temperature 1 and all before it were accepted"
)
_ANCHOR, _ACCEPTED, _REJECTED, _UNUSED, _OWN, _ODDS = "bold", "green", "bold red", "dim", "bold cyan", "dim"


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockLines:
    """The drafts of a block, and the target's own token on a line below, under the draft that it refused."""

    drafts: Text
    under: Text | None
    """None where the answer ends inside the block."""

    @property
    def width(self) -> int:
        """Return the columns that the longer line takes."""
        return max(self.drafts.cell_len, 0 if self.under is None else self.under.cell_len)

    def joined(self) -> Text:
        """Return both lines as one text."""
        return self.drafts if self.under is None else Text("\n").join([self.drafts, self.under])


def block_lines(block: DraftedBlock, *, has_odds: bool = False) -> BlockLines:
    """Return a block as lines.

    Args:
        block: the verification step.
        has_odds: add the drafter's probability of each draft, what its confidence head says of it in brackets, and
            the rank and probability of the target's token.
    """
    num_accepted = len(block.accepted)
    chances = _chances(block) if has_odds else ()
    has_miss = bool(block.rejected) and block.bonus is not None
    line = Text().append(repr(block.anchor), style=_ANCHOR)
    _add(line, "+", block.accepted, _ACCEPTED, chances[:num_accepted])
    place = line.cell_len
    if has_miss:
        _add(line, "x", block.rejected[:1], _REJECTED, chances[num_accepted : num_accepted + 1])
    first_unused = num_accepted + has_miss
    _add(line, "~", block.rejected[has_miss:], _UNUSED, chances[first_unused:])
    if block.bonus is None:
        return BlockLines(drafts=line, under=None)
    under = Text(" " * place)
    _add(under, ">", (block.bonus,), _OWN, ())
    if has_odds and block.odds is not None and block.odds.miss_rank is not None:
        under.append(f"  rank {block.odds.miss_rank}, {block.odds.miss_probability or 0:.1%}", style=_ODDS)
    return BlockLines(drafts=line, under=under)


def _chances(block: DraftedBlock) -> tuple[str, ...]:
    """Return a probability per draft, and in brackets a confidence where there is one."""
    if block.odds is None:
        return ()
    said = [f" ({confidence:.0%})" for confidence in block.confidences] or [""] * len(block.odds.probabilities)
    return tuple(f"{chance:.0%}{also}" for chance, also in zip(block.odds.probabilities, said, strict=True))


def _add(line: Text, sign: str, tokens: tuple[str, ...], style: str, chances: tuple[str, ...]) -> None:
    """Append a sign and tokens, each with its chances where they are known."""
    if not tokens:
        return
    line.append(f"  {sign}", style=style)
    for place, token in enumerate(tokens):
        line.append(" ").append(repr(token), style=style)
        if place < len(chances):
            line.append(f" {chances[place]}", style=_ODDS)
