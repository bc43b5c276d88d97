"""Rows as people see them."""

from __future__ import annotations

import polars
import pytest

from flows.querying import show_rows


def test_what_fits_is_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    show_rows(polars.DataFrame({"run": ["a", None], "tau": [1.5, float("nan")]}), limit=200)
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["│", "a", "│", "1.500", "│"] for line in lines)
    assert any(line.split() == ["│", "-", "│", "-", "│"] for line in lines), "what was not measured is a dash"


def test_what_does_not_fit_is_one_record_below_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    frame = polars.DataFrame({f"column_{number:02}": [number, -number] for number in range(20)})
    show_rows(frame, limit=200)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "row 1"
    assert lines[4] == "  column_03  3"
    assert lines[21] == "row 2"
    assert len(lines) == 2 * 21


def test_a_long_text_is_folded_in_a_table_and_whole_in_a_record(capsys: pytest.CaptureFixture[str]) -> None:
    text = "word " * 60 + "end"
    show_rows(polars.DataFrame({"prompt": [text]}), limit=200)
    assert "┃ prompt" in capsys.readouterr().out
    columns = {f"column_{number:02}": [number] for number in range(20)}
    show_rows(polars.DataFrame({"prompt": [text], **columns}), limit=200)
    assert text in capsys.readouterr().out


def test_people_see_so_many_rows_and_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    frame = polars.DataFrame({"n": range(50)})
    show_rows(frame, limit=5)
    shown = capsys.readouterr()
    assert "│ 4 │" in shown.out
    assert "│ 5 │" not in shown.out
    assert "5 of 50 rows" in shown.err
    show_rows(frame, limit=0)
    everything = capsys.readouterr()
    assert "49" in everything.out
    assert everything.err == ""


def test_nothing_is_an_empty_table(capsys: pytest.CaptureFixture[str]) -> None:
    show_rows(polars.DataFrame({"n": []}), limit=5)
    assert "n" in capsys.readouterr().out


def test_a_text_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    show_rows(polars.DataFrame({"text": ["\x1b[2J [bold]x"]}), limit=5)
    out = capsys.readouterr().out
    assert "\\x1b[2J [bold]x" in out
    assert "\x1b" not in out
