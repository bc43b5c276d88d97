"""`dflash-eval sql`: rows for people, as a table or record by record; for programs as JSON, CSV or Parquet."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from dflash_core.config import load_config
from dflash_core.errors import InputError
from dflash_core.results.export import plain, to_csv, write_parquet
from dflash_core.results.query import run_query
from flows import screen

if TYPE_CHECKING:
    import polars

DEFAULT_NUM_ROWS = 200
"""So many rows are shown to people; JSON, CSV and Parquet hold all of them."""
_CELL_SPACE = 3
_WIDEST_CELL = 40
"""A longer text may be folded inside its cell."""


def sql_command(options: argparse.Namespace) -> int:
    """Run one read-only statement on the results."""
    if options.limit < 0:
        raise InputError(f"--limit {options.limit} must be 0 (all rows) or more")
    if options.json and options.csv:
        raise InputError("--json and --csv both write to standard output: give one of them")
    frame = run_query(load_config(options.config).results, options.statement)
    if options.parquet is not None:
        size = write_parquet(frame, options.parquet)
        screen.say(f"{frame.height} rows written to {options.parquet} ({screen.megabytes(size)})")
    if options.csv:
        sys.stdout.write(to_csv(frame))
    elif options.json:
        screen.print_json([{name: plain(value) for name, value in row.items()} for row in frame.to_dicts()])
    elif options.parquet is None:
        show_rows(frame, options.limit)
    return 0


def show_rows(frame: polars.DataFrame, limit: int) -> None:
    """Print rows as a table; where it is too wide for the terminal, one record below the other."""
    shown = frame.head(limit) if limit else frame
    rows = [{name: plain(value) for name, value in row.items()} for row in shown.to_dicts()]
    if _table_width(frame.columns, rows) <= screen.console().width:
        screen.print_table("", rows, frame.columns)
    else:
        _print_records(frame.columns, rows)
    if shown.height < frame.height:
        screen.say(
            f"{shown.height} of {frame.height} rows; --limit 0 shows all, --json, --csv and --parquet hold all of them"
        )


def _table_width(names: list[str], rows: list[dict[str, Any]]) -> int:
    """Return how many columns of the terminal a table takes without folding anything but long texts."""
    total = 1
    for name in names:
        longest = max((len(screen.cell(row[name])) for row in rows), default=0)
        total += max(len(name), min(longest, _WIDEST_CELL)) + _CELL_SPACE
    return total


def _print_records(names: list[str], rows: list[dict[str, Any]]) -> None:
    out = screen.console()
    margin = max((len(name) for name in names), default=0)
    for number, row in enumerate(rows, start=1):
        out.print(f"[bold]row {number}[/bold]", highlight=False)
        for name in names:
            out.print(
                f"  {escape(name.ljust(margin))}  {escape(screen.cell(row[name]))}", highlight=False, soft_wrap=True
            )
