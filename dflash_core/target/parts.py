"""The parts of a target's stored states, by name."""

from __future__ import annotations

Part = int | str
"""A 0-based decoder layer, `final` or `choices`."""
FINAL = "final"
CHOICES = "choices"


def part_name(part: Part) -> str:
    """Return the stem of a part's file."""
    return f"layer_{part:04d}" if isinstance(part, int) else part
