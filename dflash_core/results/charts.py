"""Line charts as inline SVG: text in, text out, no library, no script.

Colours, fonts and dark mode come from the page's style sheet by class: `series-0`, `series-1`, ...
Every string that reaches the SVG is escaped here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH, HEIGHT = 440, 260
LEFT, RIGHT, TOP, BOTTOM = 54, 14, 12, 44
NUM_COLOURS = 6
"""Classes `series-0` to `series-5`; further series start again and differ by their dashes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One measured value, with its interval where there is one."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    note: str = ""
    """What a pointer that rests on the point is told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One line; its points are in the order of x."""

    name: str
    points: tuple[Point, ...]
    place: int = 0
    """Decides the colour; the same line keeps it in every chart of a page."""

    @property
    def band_points(self) -> list[Point]:
        """The points that have an interval."""
        return [point for point in self.points if point.low is not None and point.high is not None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """A value that has no place on the x axis, drawn as a line across the chart."""

    name: str
    y: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scale:
    """Data to picture coordinates along one axis."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / ((self.high - self.low) or 1.0)
        return self.start + share * (self.end - self.start)


def line_chart(
    series: Sequence[Series],
    *,
    label: str,
    x_label: str,
    y_label: str,
    y_low: float,
    y_high: float | None = None,
    x_ticks: Sequence[float] | None = None,
    levels: Sequence[Level] = (),
) -> Markup:
    """Draw lines with their intervals as bands.

    Args:
        series: at least one point in all.
        label: what the picture shows, for people who cannot see it.
        x_label: name of the x axis.
        y_label: name of the y axis.
        y_low: where the y axis starts.
        y_high: where it ends at the least; None: a little above the data.
        x_ticks: where the x axis is marked, its two ends among them; None: round numbers.
        levels: values drawn across the whole chart.

    Returns:
        One `<svg>` element.
    """
    xs = [point.x for line in series for point in line.points]
    ys = [value for line in series for p in line.points for value in (p.y, p.high) if value is not None]
    ys += [level.y for level in levels]
    if x_ticks is None:
        x_ticks = nice_ticks(min(xs, default=0.0), max(xs, default=1.0), 5, whole=True)
    y_ticks = nice_ticks(y_low, max([*ys, y_low] if y_high is None else [*ys, y_high]), 5)
    x_scale = _Scale(low=x_ticks[0], high=x_ticks[-1], start=LEFT, end=WIDTH - RIGHT)
    y_scale = _Scale(low=y_ticks[0], high=y_ticks[-1], start=HEIGHT - BOTTOM, end=TOP)
    parts = [
        Markup('<svg class="chart" role="img" viewBox="0 0 {} {}" aria-label="{}">').format(WIDTH, HEIGHT, label),
        _axes(x_ticks, y_ticks, x_scale, y_scale, x_label, y_label),
        *(_level(level, y_scale) for level in levels),
        *(_band(line, x_scale, y_scale) for line in series),
        *(_line(line, x_scale, y_scale) for line in series),
        Markup("</svg>"),
    ]
    return Markup("\n").join(part for part in parts if part)


def colour_class(place: int) -> str:
    """Return the style class of the n-th series: a colour, and dashes once the colours are used up."""
    dashes = " dashed" if (place // NUM_COLOURS) % 2 else ""
    return f"series-{place % NUM_COLOURS}{dashes}"


def nice_ticks(low: float, high: float, num_steps: int, *, whole: bool = False) -> list[float]:
    """Return round numbers that enclose [low, high], about `num_steps` steps of 1, 2 or 5 times 10^k.

    A range that is empty, or too short to tell its ends apart, is widened to about 1; `whole` allows no step below 1.

    >>> nice_ticks(1.0, 4.3, 4)
    [1.0, 2.0, 3.0, 4.0, 5.0]
    """
    span = high - low
    if span < 1e-6 * max(1.0, abs(low)):
        span = 1.0
    rough = span / num_steps
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    if whole:
        step = max(step, 1.0)
    first = math.floor(low / step + 1e-9)
    last = max(math.ceil(high / step - 1e-9), first + 1)
    return [round(place * step, 10) for place in range(first, last + 1)]


def _axes(
    x_ticks: Sequence[float], y_ticks: Sequence[float], x_scale: _Scale, y_scale: _Scale, x_label: str, y_label: str
) -> Markup:
    parts = []
    for tick in y_ticks:
        y = y_scale(tick)
        grid = Markup('<line class="grid" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>')
        parts.append(grid.format(LEFT, WIDTH - RIGHT, y, y))
        parts.append(Markup('<text class="tick end" x="{}" y="{:.1f}">{:g}</text>').format(LEFT - 6, y + 4, tick))
    for tick in x_ticks:
        text = Markup('<text class="tick middle" x="{:.1f}" y="{}">{:g}</text>')
        parts.append(text.format(x_scale(tick), HEIGHT - BOTTOM + 17, tick))
    base = HEIGHT - BOTTOM
    parts.append(Markup('<line class="axis" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(LEFT, WIDTH - RIGHT, base, base))
    name = Markup('<text class="name middle" x="{}" y="{}">{}</text>')
    parts.append(name.format((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, x_label))
    middle = (TOP + base) / 2
    turned = Markup('<text class="name middle" transform="rotate(-90)" x="{}" y="13">{}</text>')
    parts.append(turned.format(-middle, y_label))
    return Markup("\n").join(parts)


def _level(level: Level, y_scale: _Scale) -> Markup:
    y = y_scale(level.y)
    return Markup(
        '<line class="level" x1="{0}" x2="{1}" y1="{2:.1f}" y2="{2:.1f}"/>'
        '<text class="tick end" x="{1}" y="{3:.1f}">{4}</text>'
    ).format(LEFT, WIDTH - RIGHT, y, y - 5, level.name)


def _band(line: Series, x_scale: _Scale, y_scale: _Scale) -> Markup:
    """Draw the intervals: a band, or a bar where there is one point alone."""
    points = line.band_points
    if not points:
        return Markup("")
    if len(points) == 1:
        low, high = y_scale(points[0].low or 0.0), y_scale(points[0].high or 0.0)
        bar = Markup('<line class="bar {}" x1="{x:.1f}" x2="{x:.1f}" y1="{:.1f}" y2="{:.1f}"/>')
        return bar.format(colour_class(line.place), low, high, x=x_scale(points[0].x))
    upper = [f"{x_scale(point.x):.1f},{y_scale(point.high or 0.0):.1f}" for point in points]
    lower = [f"{x_scale(point.x):.1f},{y_scale(point.low or 0.0):.1f}" for point in reversed(points)]
    return Markup('<polygon class="band {}" points="{}"/>').format(colour_class(line.place), " ".join(upper + lower))


def _line(line: Series, x_scale: _Scale, y_scale: _Scale) -> Markup:
    places = [(x_scale(point.x), y_scale(point.y)) for point in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    parts = [Markup('<polyline class="line {}" points="{}"/>').format(colour_class(line.place), path)]
    dot = Markup('<circle class="dot {}" cx="{:.1f}" cy="{:.1f}" r="3.5"><title>{}</title></circle>')
    for (x, y), point in zip(places, line.points, strict=True):
        parts.append(dot.format(colour_class(line.place), x, y, escape(point.note or f"{line.name}: {point.y:.3f}")))
    return Markup("\n").join(parts)
