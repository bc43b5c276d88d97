"""How sizes and foreign texts are shown: one line, printable, GiB with one decimal."""

from __future__ import annotations

GIB = 2**30


def gib(size_bytes: int | None) -> str:
    """Return a size in GiB (2^30 bytes) with one decimal; `unknown` for None."""
    return "unknown" if size_bytes is None else f"{size_bytes / GIB:.1f} GiB"


def printable(text: str | None, *, longest: int = 120) -> str | None:
    """Return a text as one line of printable characters; None when nothing is left."""
    if text is None:
        return None
    cleaned = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return cleaned[:longest] or None
