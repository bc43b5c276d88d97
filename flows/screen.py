"""What people see: tables, numbers and a progress bar with the time left."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table

from dflash_core import progress
from flows.pace import Paces

_LEAST_WIDTH = 110
"""Columns assumed where the output is no terminal, so that tables in logs are not cut."""
_CONTROLS = {code: repr(chr(code))[1:-1] for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""Characters that steer a terminal; a model's text may hold any."""
_STAGES = {
    "stream_checkpoint": "stream the drafter",
    "transcripts": "target writes transcripts",
    "hidden_states": "target's hidden states",
    "run_drafter": "drafter drafts",
}


def console(*, stderr: bool = False) -> Console:
    """Return a console for standard output or standard error."""
    stream = Console(stderr=stderr)
    if not stream.is_terminal:
        stream.width = max(stream.width, _LEAST_WIDTH)
    return stream


def print_json(value: Any) -> None:
    """Print one JSON document; NaN never occurs in it."""
    print(json.dumps(value, indent=2, allow_nan=False, default=str))


def print_table(
    title: str, rows: Sequence[Mapping[str, Any]], columns: Iterable[str] | None = None, *, caption: str | None = None
) -> None:
    """Print rows as a table; text is shown as it is, without markup."""
    names = list(columns if columns is not None else (rows[0] if rows else []))
    table = Table(
        title=escape(title), caption=caption and escape(caption), title_justify="left", caption_justify="left"
    )
    for name in names:
        numeric = rows and all(isinstance(row.get(name), int | float) for row in rows if row.get(name) is not None)
        table.add_column(escape(name), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(escape(cell(row.get(name))) for name in names))
    console().print(table)


def cell(value: Any) -> str:
    """Return a value as people read it; what would steer the terminal is shown as it is written in Python."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}"
    return str(value).translate(_CONTROLS)


def megabytes(num_bytes: int | None) -> str:
    """Return a size in MB (10^6 bytes)."""
    return "-" if num_bytes is None else f"{num_bytes / 1e6:.1f} MB"


def tau_text(slice_: Mapping[str, Any]) -> str:
    """Return tau with its 95 % interval, or a dash where nothing was measured."""
    return interval_text(slice_.get("tau_pooled"), slice_.get("ci_low"), slice_.get("ci_high"))


def difference_text(value: float, low: float, high: float) -> str:
    """Return a difference with its sign and interval, or a dash where nothing was measured."""
    if math.isnan(value):
        return "-"
    if math.isnan(low):
        return f"{value:+.2f}"
    return f"{value:+.2f} [{low:+.2f}, {high:+.2f}]"


def interval_text(value: float | None, low: float | None, high: float | None) -> str:
    """Return a number with its interval in brackets, or a dash where nothing was measured."""
    if value is None:
        return "-"
    return f"{value:.2f}" if low is None or high is None else f"{value:.2f} [{low:.2f}, {high:.2f}]"


@contextmanager
def progress_bars(*, enabled: bool = True, clock: progress.Clock = time.monotonic) -> Iterator[None]:
    """Show a bar per stage on standard error while the block runs, with rate and time left; only on a terminal."""
    stream = console(stderr=True)
    if not enabled or not stream.is_terminal:
        yield
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
    words = (TextColumn("{task.fields[pace]}"), TextColumn("{task.fields[detail]}"))
    with Progress(*columns, *words, console=stream, transient=True) as bars:
        tasks: dict[str, TaskID] = {}
        paces = Paces(clock)

        def listen(stage: str, done: float, total: float) -> None:
            if stage in tasks and done < bars.tasks[bars.task_ids.index(tasks[stage])].completed:
                bars.remove_task(tasks.pop(stage))
            if stage not in tasks:
                tasks[stage] = bars.add_task(_STAGES.get(stage, stage), total=total, pace="", detail="")
            pace = paces.text(stage, done, total)
            bars.update(tasks[stage], completed=done, total=total, pace=pace, detail=progress.detail(stage))

        with progress.listening(listen):
            yield


def say(text: str, *, quiet: bool = False) -> None:
    """Print a line for people on standard error."""
    if not quiet:
        print(text, file=sys.stderr, flush=True)
