"""What was accepted, refused and wasted is told by signs and places, with colour and without."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.text import Text

from dflash_core.draft_odds import Odds
from dflash_core.drafts import DraftedBlock
from flows.draft_lines import LEGEND, BlockLines, block_lines


def block(accepted: tuple[str, ...], rejected: tuple[str, ...], bonus: str | None) -> DraftedBlock:
    chances = tuple(0.9 - 0.1 * place for place in range(len(accepted) + len(rejected)))
    has_miss = bool(rejected) and bonus is not None
    odds = Odds(probabilities=chances, miss_rank=3 if has_miss else None, miss_probability=0.0625 if has_miss else None)
    return DraftedBlock(
        anchor_index=4, anchor=" the", accepted=accepted, rejected=rejected, bonus=bonus, confidences=(), odds=odds
    )


def printed(lines: BlockLines, **settings: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, width=200, highlight=False, force_terminal=settings.get("force_terminal", False))
    console.print(lines.joined(), soft_wrap=True)
    return out.getvalue()


def test_signs_tell_accepted_rejected_and_unused_apart_without_colour() -> None:
    lines = block_lines(block((" cat", " sat"), (" on", " a", " mat"), " down"))
    first, second = printed(lines).splitlines()
    assert first == "' the'  + ' cat' ' sat'  x ' on'  ~ ' a' ' mat'"
    assert second.strip() == "> ' down'"
    assert second.index(">") == first.index("x"), "the target's own token stands under the miss"


@pytest.mark.parametrize(
    ("accepted", "rejected", "bonus", "first", "second"),
    [
        pytest.param((" cat",), (), " sat", "' the'  + ' cat'", "> ' sat'", id="all accepted"),
        pytest.param((), (" dog",), " cat", "' the'  x ' dog'", "> ' cat'", id="first one rejected"),
        pytest.param((" cat",), (" sat",), None, "' the'  + ' cat'  ~ ' sat'", None, id="the answer ends"),
        pytest.param((), (), " cat", "' the'", "> ' cat'", id="nothing drafted"),
    ],
)
def test_every_way_a_block_can_end(
    accepted: tuple[str, ...], rejected: tuple[str, ...], bonus: str | None, first: str, second: str | None
) -> None:
    lines = block_lines(block(accepted, rejected, bonus))
    assert lines.drafts.plain == first
    assert (None if lines.under is None else lines.under.plain.strip()) == second


def test_probabilities_and_the_rank_of_the_targets_token_are_shown_on_demand() -> None:
    lines = block_lines(block((" cat",), (" on", " a"), " sat"), has_odds=True)
    assert lines.drafts.plain == "' the'  + ' cat' 90%  x ' on' 80%  ~ ' a' 70%"
    assert lines.under is not None
    assert lines.under.plain.strip() == "> ' sat'  rank 3, 6.2%"
    assert "%" not in printed(block_lines(block((" cat",), (" on",), " sat")))


def test_colours_are_sent_to_a_terminal_and_not_where_no_color_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = block_lines(block((" cat",), (" on",), " sat"))
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[32m" in printed(lines, force_terminal=True)
    monkeypatch.setenv("NO_COLOR", "1")
    plain = printed(lines, force_terminal=True)
    assert "\x1b[32m" not in plain
    assert "+" in plain
    assert "\x1b" not in printed(lines)


def test_a_token_that_would_steer_the_terminal_is_written_out() -> None:
    lines = block_lines(block(("\x1b[2J\n",), ("[red]",), "\r"))
    assert "\x1b" not in lines.drafts.plain
    assert "'\\x1b[2J\\n'" in lines.drafts.plain
    assert "'[red]'" in printed(lines), "markup of the console is text here"


def test_wide_characters_keep_the_miss_above_the_targets_token() -> None:
    lines = block_lines(block(("日本",), ("語",), "人"))
    assert lines.under is not None
    before_miss, before_own = lines.drafts.plain.split("  x ")[0], lines.under.plain.split("  > ")[0]
    assert Text(before_miss).cell_len == Text(before_own).cell_len


def test_the_legend_names_every_sign() -> None:
    for sign in ("+ accepted", "x first one rejected", "~ drafts not used", "> the target's own token"):
        assert sign in LEGEND
