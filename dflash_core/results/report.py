"""One self-contained HTML page of the results: learning curves, survival, leaderboard, failures.

The page loads nothing and runs no script; its policy forbids both. All text is escaped, since
names of runs and datasets and messages of errors come from files of other people.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from dflash_core.errors import ResultsError
from dflash_core.results.charts import Level, Point, Series, colour_class, line_chart
from dflash_core.results.connection import DEFAULT_WAIT_S, PathLike
from dflash_core.results.report_data import ReportData, Row, Section, read_report_data

TEMPLATE = "report.html.j2"
DIGEST_LENGTH = 12
# So many draft positions can all be marked on the axis.
MAX_POSITION_TICKS = 16
_CONDITIONS = {
    "target": "Target",
    "block_size": "Block size",
    "dtype": "Drafter dtype",
    "target_dtype": "Target dtype",
    "device": "Device",
    "thinking": "Thinking",
    "chat_template_digest": "Chat template",
    "transcripts_digest": "Transcripts",
    "verification_rule": "Verification rule",
    "counting_rule": "Counting rule",
    "row_alignment": "Row alignment",
    "metrics_version": "Metrics version",
}
_MISSING = "–"


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A picture with its heading and the names of its lines."""

    title: str
    svg: Markup
    legend: tuple[tuple[str, str], ...]
    """Style class and name of each line."""


def write_report(
    db_path: PathLike, out_path: PathLike, *, now: datetime | None = None, wait_s: float = DEFAULT_WAIT_S
) -> Path:
    """Write the report and return where it lies.

    Args:
        db_path: the results database.
        out_path: the HTML file; its folder is made, an older file is replaced at once.
        now: the time to print on the page; None is the present.
        wait_s: how long to wait, in seconds, while another process writes the database.

    Raises:
        NoResults: there is no database yet.
        ResultsError: the database cannot be read, or the file cannot be written.
    """
    page = render_report(read_report_data(db_path, wait_s=wait_s), now=now or datetime.now(UTC))
    out = Path(out_path)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=out.parent, delete=False) as file:
            file.write(page)
        os.chmod(file.name, 0o644)
        os.replace(file.name, out)
    except OSError as error:
        raise ResultsError(f"the report {str(out)!r} cannot be written: {error}") from error
    return out


def render_report(data: ReportData, *, now: datetime) -> str:
    """Return the page as text."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "p_value": _p_value,
        "number": _number,
        "percent": _percent,
        "bytes": _bytes,
        "seconds": _seconds,
    }
    environment.globals |= {"label": _label}
    return environment.get_template(TEMPLATE).render(
        sections=[_section(section) for section in data.sections],
        failures=data.failures,
        vanished=data.vanished,
        made_at=now.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def _section(section: Section) -> dict[str, Any]:
    """Return what the template shows of one set of conditions."""
    runs = list(dict.fromkeys(row["run"] for row in section.rows if row["step"] is not None))
    return {
        "target": section.rows[0]["target"],
        "block_size": section.rows[0]["block_size"],
        "conditions": _conditions(section),
        "prompts": _prompt_counts(section),
        "best": section.ranked[0] if section.ranked else None,
        "latest": section.latest,
        "curve": _curve_chart("All prompts", section.rows, runs),
        "small": [_curve_chart(_slice_title(*key), rows, runs) for key, rows in sorted(section.slices.items())],
        "survival": _survival_chart(section),
        "survival_rows": _survival_table(section),
        "ranked": section.ranked,
        "rows": section.rows,
        "differences": section.differences,
        "stages": sorted({stage for row in section.rows for stage in row["seconds"]}),
    }


def _conditions(section: Section) -> list[tuple[str, str]]:
    """Return name and value of each condition; several values where the rows differ."""
    found = []
    for name, title in _CONDITIONS.items():
        values = list(dict.fromkeys(_condition_text(name, row[name]) for row in section.rows))
        found.append((title, ", ".join(values)))
    return found


def _condition_text(name: str, value: Any) -> str:
    if value is None:
        return "not recorded"
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)[:DIGEST_LENGTH] if name.endswith("_digest") else str(value)


def _prompt_counts(section: Section) -> str:
    """Return each dataset with its number of prompts."""
    counts = [
        f"{name} {max(row['num_prompts'] for row in rows)}"
        for (kind, name), rows in sorted(section.slices.items())
        if kind == "dataset"
    ]
    return ", ".join(counts)


def _slice_title(kind: str, name: str) -> str:
    return f"Dataset {name}" if kind == "dataset" else f"Group {name}"


def _label(row: Row) -> str:
    """Return run and step as one name."""
    return row["run"] if row["step"] is None else f"{row['run']}, step {row['step']}"


def _curve_chart(title: str, rows: Sequence[Row], runs: Sequence[str]) -> Chart | None:
    """Draw tau against step, one line per run; a drafter without a step is a level."""
    measured = [row for row in rows if row["tau_pooled"] is not None]
    if not measured:
        return None
    points: dict[str, list[Point]] = {}
    for row in measured:
        if row["step"] is not None:
            points.setdefault(row["run"], []).append(_point(row))
    series = [Series(name=run, points=tuple(found), place=runs.index(run)) for run, found in points.items()]
    levels = [Level(name=_label(row), y=row["tau_pooled"]) for row in measured if row["step"] is None]
    newest = max(measured, key=lambda row: row["started_at"])
    label = (
        f"{title}: tau against training step, {len(series)} run(s), {len(measured)} checkpoint(s); "
        f"the newest, {_label(newest)}, has tau {_number(newest['tau_pooled'])}"
    )
    svg = line_chart(series, label=label, x_label="training step", y_label="tau", y_low=1.0, levels=levels)
    return Chart(title=title, svg=svg, legend=_legend(series))


def _point(row: Row) -> Point:
    note = f"{_label(row)}: tau {_number(row['tau_pooled'])}"
    if row["ci_low"] is not None:
        note += f" ({_number(row['ci_low'])} to {_number(row['ci_high'])})"
    return Point(x=row["step"], y=row["tau_pooled"], low=row["ci_low"], high=row["ci_high"], note=note)


def _legend(series: Sequence[Series]) -> tuple[tuple[str, str], ...]:
    return tuple((colour_class(line.place), line.name) for line in series)


def _chosen(section: Section) -> list[tuple[str, Row]]:
    """Return the best and the latest checkpoint, named; one of them when they are the same."""
    if not section.ranked or section.latest is None:
        return []
    best, latest = section.ranked[0], section.latest
    if best is latest:
        return [("best and latest", best)]
    return [("best", best), ("latest", latest)]


def _survival_chart(section: Section) -> Chart | None:
    series = []
    for place, (role, row) in enumerate(_chosen(section)):
        points = [
            Point(
                x=found["draft_position"],
                y=found["survival"],
                note=f"{_label(row)}, position {found['draft_position']}: {_percent(found['survival'])}",
            )
            for found in section.survival[row["evaluation_id"]]
            if found["survival"] is not None
        ]
        series.append(Series(name=f"{_label(row)} ({role})", points=tuple(points), place=place))
    if not any(line.points for line in series):
        return None
    label = "Share of blocks with at least so many accepted drafts: " + "; ".join(
        f"{line.name} from {_percent(line.points[0].y)} to {_percent(line.points[-1].y)}" for line in series
    )
    last = max(point.x for line in series for point in line.points)
    svg = line_chart(
        series,
        label=label,
        x_label="draft position",
        y_label="share of blocks",
        y_low=0.0,
        y_high=1.0,
        x_ticks=range(1, int(last) + 1) if last <= MAX_POSITION_TICKS else None,
    )
    return Chart(title="Survival by draft position", svg=svg, legend=_legend(series))


def _survival_table(section: Section) -> dict[str, Any]:
    chosen = _chosen(section)
    columns = [section.survival[row["evaluation_id"]] for _, row in chosen]
    return {
        "names": [f"{_label(row)} ({role})" for role, row in chosen],
        "rows": list(zip(*columns, strict=True)) if columns else [],
    }


def _number(value: float | None) -> str:
    return _MISSING if value is None else f"{value:.3f}"


def _p_value(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def _percent(value: float | None) -> str:
    return _MISSING if value is None else f"{100 * value:.1f} %"


def _seconds(value: float | None) -> str:
    return _MISSING if value is None else f"{value:,.1f}"


def _bytes(value: int | None) -> str:
    """Return a size in the decimal unit that leaves one to three digits before the point."""
    if value is None:
        return _MISSING
    amount, units = float(value), ["B", "kB", "MB", "GB", "TB"]
    while amount >= 1000 and len(units) > 1:
        amount, units = amount / 1000, units[1:]
    return f"{amount:.0f} {units[0]}" if units[0] == "B" else f"{amount:.1f} {units[0]}"
