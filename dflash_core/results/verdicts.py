"""What may be said of many differences at once: better, worse, or that the data cannot tell."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dflash_core.acceptance.bounds import judged_together
from dflash_core.acceptance.statistics import PairedDifference, holm_adjusted

ROUNDING = 1e-12
"""Between 1 - level and a p-value that is the same share of resamples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """One difference, judged together with the others of its table by Holm's rule."""

    word: Literal["better", "worse", "cannot tell"]
    """In at most 5 % of the tables any difference is called better or worse that is not so."""
    p_adjusted: float
    """The p-value times the number that was left to judge: at most 0.05 where it is better or worse."""
    level: float
    """Of the interval: 0.95 for a single difference, more for one of many."""
    ci_low: float
    """The interval leaves 0 out exactly where the word is better or worse; NaN where there is none."""
    ci_high: float

    def as_json(self) -> dict[str, Any]:
        """Return the verdict as plain values, named apart from those of the difference alone."""
        return {
            "verdict": self.word,
            "p_adjusted": self.p_adjusted,
            "level_adjusted": self.level,
            "ci_low_adjusted": self.ci_low,
            "ci_high_adjusted": self.ci_high,
        }


def judge_differences(differences: Sequence[PairedDifference | None]) -> list[Verdict | None]:
    """Return a verdict per difference; None where there is none, or nothing was measured."""
    p_values = [math.nan if found is None else found.p_value for found in differences]
    adjusted = holm_adjusted(p_values)
    told = judged_together([None if math.isnan(p) else _leaves_zero_out(p) for p in p_values])
    verdicts: list[Verdict | None] = []
    for found, p_adjusted, one in zip(differences, adjusted, told, strict=True):
        if found is None or one is None:
            verdicts.append(None)
            continue
        interval = found.bounds.interval(one.level)
        verdicts.append(
            Verdict(
                word=_word(found.difference, is_told=one.is_told),
                p_adjusted=p_adjusted,
                level=one.level,
                ci_low=interval.low,
                ci_high=interval.high,
            )
        )
    return verdicts


def _leaves_zero_out(p_value: float) -> Callable[[float], bool]:
    return lambda level: p_value <= 1 - level + ROUNDING


def _word(difference: float, *, is_told: bool) -> Literal["better", "worse", "cannot tell"]:
    if not is_told:
        return "cannot tell"
    return "better" if difference > 0 else "worse"


NO_VERDICT: dict[str, Any] = {
    "verdict": None,
    "p_adjusted": None,
    "level_adjusted": None,
    "ci_low_adjusted": None,
    "ci_high_adjusted": None,
}
"""What `Verdict.as_json` is where there is no difference."""
