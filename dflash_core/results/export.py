"""Rows of a query as files and text that other programs read."""

from __future__ import annotations

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import polars

from dflash_core.errors import InputError, ResultsError


def plain(value: Any) -> Any:
    """Return a value as JSON can say it: None for NaN and infinity, also inside of lists and structs."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: plain(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [plain(entry) for entry in value]
    return value


def to_csv(frame: polars.DataFrame) -> str:
    """Return a frame as CSV with a header.

    A missing number is an empty cell and an empty text is `""`; lists and structs are JSON, blobs hexadecimal.
    """
    texts = [
        polars.Series(name, [None if v is None else _json(v) for v in frame[name].to_list()], dtype=polars.String)
        for name, kind in frame.schema.items()
        if kind.is_nested()
    ]
    blobs = [polars.col(name).bin.encode("hex") for name, kind in frame.schema.items() if kind == polars.Binary]
    return frame.with_columns(*texts, *blobs).write_csv()


def write_parquet(frame: polars.DataFrame, path: str | os.PathLike[str]) -> int:
    """Write a frame as one Parquet file, whole or not at all, and return its size in bytes.

    Integers of 128 bits, which Parquet lacks, are written as text.

    Raises:
        InputError: its folder does not exist.
        ResultsError: the file cannot be written; what lay there before is left.
    """
    wide = [polars.col(name).cast(polars.String) for name, kind in frame.schema.items() if kind == polars.Int128]
    target = Path(path)
    if not target.parent.is_dir():
        raise InputError(f"the rows cannot be written to {str(path)!r}: there is no folder {str(target.parent)!r}")
    try:
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as file:
            try:
                frame.with_columns(wide).write_parquet(file)
                file.flush()
                os.fsync(file.fileno())
                os.chmod(file.name, 0o666 & ~_umask())
                os.replace(file.name, target)
            except BaseException:
                os.unlink(file.name)
                raise
    except (OSError, polars.exceptions.PolarsError) as error:
        raise ResultsError(f"the rows cannot be written to {str(path)!r}: {error}") from error
    return target.stat().st_size


def _json(value: Any) -> str:
    return json.dumps(plain(value.to_list() if isinstance(value, polars.Series) else value), default=str)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
