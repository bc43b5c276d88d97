"""Progress: who hears what, and the pace of a stage over the last seconds. Only the clock is faked."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_core import progress
from dflash_core.progress import PaceMeter


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def paced(reports: list[tuple[float, float]], total: float, *, window_s: float = 10.0) -> progress.Pace:
    """Return the pace after reports at times."""
    clock = Clock()
    meter = PaceMeter(clock, window_s=window_s)
    pace = None
    for clock.now, done in reports:
        pace = meter.add(done, total)
    assert pace is not None
    return pace


def test_after_one_report_nothing_is_known() -> None:
    pace = paced([(0.0, 5)], 10)
    assert math.isnan(pace.per_s)
    assert math.isnan(pace.left_s)


def test_rate_and_time_left_follow_from_two() -> None:
    assert paced([(0.0, 100), (2.0, 300)], 1300) == (100.0, 10.0)


def test_what_was_before_the_window_does_not_count() -> None:
    """Slow for a hundred seconds, fast for the last ten: the time left is that of the fast pace."""
    slow = [(float(second), second) for second in range(100)]
    fast = [(100.0 + second, 100 + 50.0 * second) for second in range(13)]
    pace = paced([*slow, *fast], 1700)
    assert pace.per_s == pytest.approx(50)
    assert pace.left_s == pytest.approx((1700 - 700) / 50)


def test_a_stage_that_reports_seldom_still_has_a_pace() -> None:
    assert paced([(0.0, 0), (60.0, 1), (120.0, 2)], 30) == (1 / 60, 28 * 60)


def test_a_stage_that_stands_still_has_no_time_left_to_tell() -> None:
    pace = paced([(0.0, 7), (5.0, 7)], 10)
    assert pace.per_s == 0
    assert math.isnan(pace.left_s)


def test_a_stage_that_goes_back_begins_anew() -> None:
    assert math.isnan(paced([(0.0, 0), (1.0, 90), (2.0, 10)], 100).per_s)
    assert paced([(0.0, 0), (1.0, 90), (2.0, 10), (3.0, 40)], 100) == (30.0, 2.0)


def test_two_reports_at_one_moment_are_no_rate() -> None:
    assert math.isnan(paced([(1.0, 1), (1.0, 2)], 3).per_s)


@given(st.lists(st.tuples(st.floats(0.01, 30), st.floats(0, 1000)), min_size=1, max_size=30))
def test_the_time_left_is_never_negative_and_the_rate_never_above_the_fastest_step(
    steps: list[tuple[float, float]],
) -> None:
    reports, at, done = [(0.0, 0.0)], 0.0, 0.0
    for seconds, more in steps:
        at, done = at + seconds, done + more
        reports.append((at, done))
    pace = paced(reports, done * 0.9)
    assert 0 <= pace.per_s <= max(more / seconds for seconds, more in steps) * (1 + 1e-6) + 1e-9
    assert math.isnan(pace.left_s) or pace.left_s == 0


def test_a_listener_hears_while_it_listens_and_may_ask_what_was_said() -> None:
    heard: list[tuple[str, float, float]] = []
    with progress.listening(lambda *said: heard.append(said)):
        progress.report("reading", 3, 10, "page 3", unit="pages", per_unit=2)
        assert progress.detail("reading") == "page 3"
        assert progress.unit("reading") == ("pages", 2)
        progress.report("reading", 4, 10)
        assert (progress.detail("reading"), progress.unit("reading")) == ("", ("", 1.0))
    progress.report("reading", 5, 10)
    assert heard == [("reading", 3, 10), ("reading", 4, 10)]
    assert progress.unit("never heard of") == ("", 1.0)


def test_bytes_are_counted_by_everybody_around_and_by_nobody_beside() -> None:
    def read_beside() -> int:
        with progress.counting_bytes() as beside:
            progress.note_bytes_read(1000)
        return beside.total

    def fail() -> None:
        with progress.counting_bytes():
            progress.note_bytes_read(7)
            raise OSError("cut off")

    progress.note_bytes_read(1)  # nobody counts
    with progress.counting_bytes() as outer:
        progress.note_bytes_read(10)
        with pytest.raises(OSError, match="cut off"):
            fail()
        with progress.counting_bytes() as inner:
            progress.note_bytes_read(100)
        with ThreadPoolExecutor(1) as executor:  # another evaluation of this process
            assert executor.submit(read_beside).result() == 1000
    progress.note_bytes_read(1)
    assert (outer.total, inner.total) == (117, 100)
