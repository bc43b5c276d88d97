"""How far a stage is, how fast it goes and how long it will take, in words: `1234/5678 anchors, 410/s, 11 s left`."""

from __future__ import annotations

import math
import time

from dflash_core import progress

_MEGABYTE = 1e6
_BYTES = "bytes"


class Paces:
    """The texts of all stages.

    Args:
        clock: what time it is, in seconds.
    """

    def __init__(self, clock: progress.Clock = time.monotonic) -> None:
        self._clock = clock
        self._meters: dict[str, progress.PaceMeter] = {}

    def text(self, stage: str, done: float, total: float) -> str:
        """Note a report of a stage and return what to show for it."""
        pace = self._meters.setdefault(stage, progress.PaceMeter(self._clock)).add(done, total)
        unit, per_unit = progress.unit(stage)
        if unit == _BYTES:
            unit, per_unit = "MB", _MEGABYTE
        parts = [
            f"{_count(done / per_unit, total / per_unit)}/{_count(total / per_unit, total / per_unit)} {unit}".strip()
        ]
        if not math.isnan(pace.per_s):
            parts.append(_rate(pace.per_s / per_unit, unit if unit == "MB" else ""))
        if not math.isnan(pace.left_s) and done < total:
            parts.append(f"{duration(pace.left_s)} left")
        return ", ".join(parts)


def duration(seconds: float) -> str:
    """Return a time as people say it.

    >>> [duration(seconds) for seconds in (0.2, 59.4, 61, 3599.7, 7500, 200000)]
    ['1 s', '59 s', '1 min 1 s', '1 h 0 min', '2 h 5 min', '2 d 7 h']
    """
    whole = max(1, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def _count(value: float, total: float) -> str:
    """Return a count; with a decimal where there are few and they come in parts."""
    return f"{value:.0f}" if total >= 1000 or value.is_integer() else f"{value:.1f}"


def _rate(per_s: float, unit: str) -> str:
    suffix = f" {unit}" if unit else ""
    if 0 < per_s < 0.1:
        return f"{per_s * 60:.1f}{suffix}/min"
    return f"{per_s:.0f}{suffix}/s" if per_s >= 10 else f"{per_s:.1f}{suffix}/s"
