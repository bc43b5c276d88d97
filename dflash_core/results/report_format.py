"""How the report writes numbers: a missing one is a dash, never a zero."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflash_core.results.report_data import Row

DIGEST_LENGTH = 12
MISSING = "–"
_CONDITIONS = {
    "target": "Target",
    "target_identity": "Content of the target",
    "block_size": "Block size",
    "dtype": "Drafter dtype",
    "target_dtype": "Target dtype",
    "store_dtype": "Dtype of the hidden states",
    "device": "Device",
    "thinking": "Thinking",
    "chat_template_digest": "Chat template",
    "transcripts_digest": "Transcripts",
    "verification_rule": "Verification rule",
    "counting_rule": "Counting rule",
    "row_alignment": "Row alignment",
    "metrics_version": "Metrics version",
    "extraction_version": "Extraction version",
}


def conditions(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Return name and value of each condition; several values where the rows differ."""
    found = []
    for name, title in _CONDITIONS.items():
        values = list(dict.fromkeys(condition_text(name, row[name]) for row in rows))
        found.append((title, ", ".join(values)))
    return found


def condition_text(name: str, value: Any) -> str:
    """Return the value of a condition in words; digests are cut short."""
    if value is None:
        return "not recorded"
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)[:DIGEST_LENGTH] if name.endswith(("_digest", "_identity")) else str(value)


def number(value: float | None) -> str:
    """Return a tau."""
    return MISSING if value is None else f"{value:.3f}"


def signed(value: float | None) -> str:
    """Return a difference, with its sign."""
    return MISSING if value is None else f"{value:+.3f}"


def percent(value: float | None) -> str:
    """Return a share."""
    return MISSING if value is None else f"{100 * value:.1f} %"


def seconds(value: float | None) -> str:
    """Return a time in seconds, without the unit."""
    return MISSING if value is None else f"{value:,.1f}"


def size(value: int | None) -> str:
    """Return a size in the decimal unit that leaves one to three digits before the point."""
    if value is None:
        return MISSING
    amount, units = float(value), ["B", "kB", "MB", "GB", "TB"]
    while amount >= 1000 and len(units) > 1:
        amount, units = amount / 1000, units[1:]
    return f"{amount:.0f} {units[0]}" if units[0] == "B" else f"{amount:.1f} {units[0]}"


def token(text: str) -> str:
    """Return a token as `dflash-eval show` writes it: in quotes, with its spaces and line ends visible."""
    return repr(text)


FILTERS = {
    "number": number,
    "signed": signed,
    "percent": percent,
    "seconds": seconds,
    "size": size,
    "token": token,
}
"""The filters of the page's template."""
