"""What a person sees of a stage: how far, how fast, how long still. Only the clock is faked."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dflash_core import progress
from flows import screen
from flows.pace import Paces, duration


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def shown(reports: list[tuple[float, float]], total: float, *, unit: str, per_unit: float = 1.0) -> str:
    clock = Clock()
    paces = Paces(clock)
    text = ""
    for clock.now, done in reports:
        progress.report("stage of a test", done, total, unit=unit, per_unit=per_unit)
        text = paces.text("stage of a test", done, total)
    return text


@pytest.mark.parametrize(
    ("reports", "total", "unit", "per_unit", "text"),
    [
        ([(0.0, 414), (2.0, 1234)], 5678, "anchors", 1, "1234/5678 anchors, 410/s, 11 s left"),
        ([(0.0, 0), (60.0, 2)], 30, "transcripts", 1, "2/30 transcripts, 2.0/min, 14 min 0 s left"),
        ([(0.0, 500), (2.0, 1250)], 15_000, "layers", 500, "2.5/30 layers, 0.8/s, 37 s left"),
        ([(0.0, 0), (0.5, 95e6)], 290e6, "bytes", 1, "95/290 MB, 190 MB/s, 1 s left"),
        ([(0.0, 3)], 10, "anchors", 1, "3/10 anchors"),
        ([(0.0, 5), (1.0, 10)], 10, "anchors", 1, "10/10 anchors, 5.0/s"),
        ([(0.0, 5), (1.0, 5)], 10, "anchors", 1, "5/10 anchors, 0.0/s"),
        ([(0.0, 0), (1.0, 1)], 4, "", 1, "1/4, 1.0/s, 3 s left"),
    ],
    ids=["anchors", "transcripts", "layers", "bytes", "first", "done", "standing", "no unit"],
)
def test_each_stage_speaks_in_its_own_unit(
    reports: list[tuple[float, float]], total: float, unit: str, per_unit: float, text: str
) -> None:
    assert shown(reports, total, unit=unit, per_unit=per_unit) == text


def test_stages_have_paces_of_their_own() -> None:
    clock = Clock()
    paces = Paces(clock)
    paces.text("one", 0, 10)
    clock.now = 1.0
    assert paces.text("other", 5, 10) == "5/10"
    assert paces.text("one", 5, 10) == "5/10, 5.0/s, 1 s left"


def test_long_times_are_told_in_two_parts() -> None:
    assert [duration(seconds) for seconds in (119.6, 3600, 90_000)] == ["2 min 0 s", "1 h 0 min", "1 d 1 h"]


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, str]]:
    """Return a function that scores a little and returns standard output and standard error."""

    def run(*, terminal: bool, enabled: bool = True) -> tuple[str, str]:
        monkeypatch.setenv("COLUMNS", "160")
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("TTY_COMPATIBLE", "1" if terminal else "0")
        clock = Clock()
        with screen.progress_bars(enabled=enabled, clock=clock):
            for clock.now, done in ((0.0, 414), (2.0, 1234)):
                progress.report("run_drafter", done, 5678, "a detail", unit="anchors")
        captured = capsys.readouterr()
        return captured.out, captured.err

    return run


def test_a_terminal_shows_the_pace_on_standard_error_alone(show: Callable[..., tuple[str, str]]) -> None:
    out, err = show(terminal=True)
    assert out == ""
    assert "drafter drafts" in err
    assert "1234/5678 anchors, 410/s, 11 s left" in err
    assert "a detail" in err


@pytest.mark.parametrize("options", [{"terminal": False}, {"terminal": True, "enabled": False}], ids=["pipe", "json"])
def test_elsewhere_nothing_is_shown(show: Callable[..., tuple[str, str]], options: dict[str, bool]) -> None:
    assert show(**options) == ("", "")
