"""The line charts: coordinates against hand-worked ones, and text that cannot break out."""

import doctest
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_core.results import charts
from dflash_core.results.charts import Level, Point, Series, line_chart, nice_ticks


def draw(series, **changes):
    settings = {"label": "a label", "x_label": "step", "y_label": "tau", "y_low": 1.0}
    return ElementTree.fromstring(str(line_chart(series, **(settings | changes))))


def coordinates(element):
    return [tuple(map(float, pair.split(","))) for pair in element.get("points").split()]


def by_class(picture, name):
    return [element for element in picture.iter() if name in (element.get("class") or "").split()]


LINE = Series(
    name="run-a",
    points=(Point(x=0, y=1.0, low=1.0, high=2.0), Point(x=100, y=3.0, low=2.0, high=5.0)),
)


def test_points_lie_where_their_values_say():
    picture = draw([LINE])
    left, right = charts.LEFT, charts.WIDTH - charts.RIGHT
    bottom, top = charts.HEIGHT - charts.BOTTOM, charts.TOP
    # The y axis goes from 1 to 5: 1 is the bottom, 3 the middle.
    assert coordinates(by_class(picture, "line")[0]) == [(left, bottom), (right, (bottom + top) / 2)]
    band = coordinates(by_class(picture, "band")[0])
    assert band[0] == (left, pytest.approx(bottom - (bottom - top) / 4, abs=0.1))
    assert band[1] == (right, top)
    assert band[-1] == (left, bottom)
    assert [dot.get("cx") for dot in by_class(picture, "dot")] == [f"{left:.1f}", f"{right:.1f}"]


def test_one_point_alone_is_a_dot_with_a_bar():
    picture = draw([Series(name="run", points=(Point(x=100, y=2.0, low=1.5, high=2.5),))])
    assert len(by_class(picture, "dot")) == 1
    assert len(by_class(picture, "bar")) == 1
    assert by_class(picture, "band") == []


def test_points_without_interval_have_no_band():
    picture = draw([Series(name="run", points=(Point(x=1, y=2.0), Point(x=2, y=2.5)))])
    assert by_class(picture, "band") == by_class(picture, "bar") == []


def test_a_level_crosses_the_whole_chart_and_is_inside_the_axis():
    picture = draw([LINE], levels=[Level(name="published", y=7.5)])
    level = by_class(picture, "level")[0]
    assert (level.get("x1"), level.get("x2")) == (str(charts.LEFT), str(charts.WIDTH - charts.RIGHT))
    assert charts.TOP <= float(level.get("y1")) < charts.HEIGHT - charts.BOTTOM
    assert "published" in "".join(picture.itertext())


def test_the_picture_is_named_for_people_who_cannot_see_it():
    picture = draw([LINE], label="tau rises")
    assert (picture.get("role"), picture.get("aria-label")) == ("img", "tau rises")
    assert by_class(picture, "dot")[1].find("title").text == "run-a: 3.000"


def test_text_cannot_break_out_of_the_picture():
    evil = '"><script>alert(1)</script>&amp;'
    text = str(
        line_chart(
            [Series(name=evil, points=(Point(x=1, y=2.0, note=evil), Point(x=2, y=2.0)))],
            label=evil,
            x_label=evil,
            y_label=evil,
            y_low=1.0,
            levels=[Level(name=evil, y=1.5)],
        )
    )
    assert "<script" not in text
    picture = ElementTree.fromstring(text)
    assert picture.get("aria-label") == evil
    assert by_class(picture, "dot")[0].find("title").text == evil


def test_many_lines_keep_apart_by_colour_and_dashes():
    classes = [charts.colour_class(place) for place in range(2 * charts.NUM_COLOURS)]
    assert len(set(classes)) == len(classes)


@given(st.floats(-1e6, 1e6), st.floats(0, 1e6), st.integers(2, 8), st.booleans())
def test_ticks_enclose_the_range_in_even_round_steps(low, width, num_steps, whole):
    ticks = nice_ticks(low, low + width, num_steps, whole=whole)
    assert 2 <= len(ticks) <= num_steps + 3
    slack = 2e-6 * max(1.0, abs(low), width)
    assert ticks[0] <= low + slack
    assert ticks[-1] >= low + width - slack
    step = ticks[1] - ticks[0]
    assert all(b - a == pytest.approx(step, rel=1e-3) for a, b in zip(ticks, ticks[1:], strict=False))
    assert not whole or step >= 1


def test_the_example_in_the_docstring_runs():
    assert doctest.testmod(charts).failed == 0
    assert re.search(r">>> nice_ticks", nice_ticks.__doc__)
