"""Where prompts are written: JSON lines, parquet, a folder or pattern of both, or a data set of the hub.

Only what is common to all of them happens here: each prompt becomes a row of plain data with the place
it was read from. What the keys mean is `prompts`' matter.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_core.errors import PromptError

_ENDINGS = (".jsonl", ".parquet")
_HUB = "hf://"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One prompt as plain data."""

    where: str
    """File and line, from 1; for a parquet file the row."""
    name: str
    """What it is called where it has no id of its own."""
    data: dict[str, Any]
    is_of_table: bool
    """True for parquet files and the hub's data sets, whose further columns are left alone."""


def read_rows(path: str | Path) -> list[Row]:
    """Read every prompt's keys and values, in order.

    Args:
        path: a `.jsonl` or `.parquet` file (any other ending is read as JSON lines), a folder or a pattern
            (`prompts/*.jsonl`) of such files, or an `hf://` path, which the hub is asked for.

    Raises:
        PromptError: nothing is there or it cannot be read, or a line is not a JSON object.
    """
    text = str(path)
    if text.startswith(_HUB):
        return list(_rows_of_frame(text, "prompt"))
    files = _files(Path(text))
    return [row for file in files for row in _rows_of_file(file, alone=len(files) == 1)]


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in _ENDINGS and file.is_file())
    elif not path.exists() and any(sign in path.name for sign in "*?["):
        files = sorted(file for file in path.parent.glob(path.name) if file.is_file())
    else:
        return [path]
    if not files:
        raise PromptError(f"prompts = {str(path)!r} holds no file that ends in {' or '.join(_ENDINGS)}")
    return files


def _rows_of_file(path: Path, *, alone: bool) -> Iterator[Row]:
    # In several files the same line numbers occur, and an id must occur once.
    stem = "prompt" if alone else path.stem
    if path.suffix == ".parquet":
        yield from _rows_of_frame(str(path), stem)
        return
    try:
        # Not splitlines: a text may hold other line separators (U+2028), which JSON does not escape.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"cannot read the prompt file {str(path)!r}: {error}; set `prompts` in the config") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"{path}:{number}"
            yield Row(where=where, name=f"{stem}-{number}", data=_object(line, where), is_of_table=False)


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PromptError(f"{where} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise PromptError(f"{where} must be a JSON object, found {type(data).__name__}")
    return data


def _rows_of_frame(path: str, stem: str) -> Iterator[Row]:
    """Yield a table's rows; an empty cell is a key that is left out."""
    import polars
    from polars.exceptions import PolarsError

    scan = polars.scan_ndjson if path.endswith((".jsonl", ".ndjson")) else polars.scan_parquet
    try:
        frame = scan(path).collect()
    except (PolarsError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        hint = "copy it to a local file when off-line" if path.startswith(_HUB) else "set `prompts` in the config"
        raise PromptError(f"cannot read the prompts of {path!r}: {reason}; {hint}") from error
    for number, row in enumerate(frame.iter_rows(named=True), 1):
        data = {name: value for name, value in row.items() if value is not None}
        yield Row(where=f"{path}:{number}", name=f"{stem}-{number}", data=data, is_of_table=True)
