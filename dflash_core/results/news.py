"""What is news about a checkpoint, and how it is told: one line for people, the numbers for programs.

    best        its tau is the highest of its run; `certain` says whether the interval against the best before
                lies above 0, so that it is not the luck of these prompts
    regressed   told (95 %) to be worse than the step before; or led by the best of the steps up to it by more
                than chance, or worse than the baseline, where the step before was not: a lasting decline is
                told once
    failed      it has no numbers, and nobody tries again

Values in, values out. Each has a key of its own, by which it is told once; see `dflash_core/notices.py`.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from dflash_core.acceptance.statistics import PairedDifference
from dflash_core.results.compare import Tau, without_nan
from dflash_core.results.standing import NAMES, Change, Standing
from dflash_core.store import digest

Event = Literal["best", "regressed", "failed"]
_LONGEST_ERROR = 500
"""Characters of an error in the one line; the payload has all of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class News:
    """One thing to tell, once."""

    event: Event
    key: str
    """Of this event of this evaluation, or of this checkpoint where it has none."""
    payload: dict[str, Any]
    """JSON values; `text` is the line for people."""

    @property
    def text(self) -> str:
        """Return the line for people."""
        return str(self.payload["text"])


def news_of(standing: Standing) -> list[News]:
    """Return what is news about an evaluation that is done; most evaluations are no news."""
    found = []
    best = standing.best
    if best.difference is not None and best.difference.difference > 0:
        certainty = "" if best.is_better else ", which may be luck: the interval includes 0"
        line = f"new best: {_own_text(standing)}, {_change_text(best)}{certainty}"
        found.append(_news("best", standing, line, certain=best.is_better))
    worse_than = _worse_than(standing)
    if worse_than:
        line = f"regressed: {_own_text(standing)}, {', '.join(_change_text(change) for change in worse_than)}"
        names = [change.what for change in worse_than]
        found.append(_news("regressed", standing, line, certain=True, worse_than=names))
    return found


def failure(*, run: str, step: int | None, checkpoint: str, checkpoint_id: str, error: str) -> News:
    """Return the news that a checkpoint has no numbers and is not tried again.

    Args:
        run: name of the training run.
        step: of the checkpoint; None where it has none.
        checkpoint: its path or URL; a query in it, which may be a signature, is left out.
        checkpoint_id: names the checkpoint and its contents.
        error: what went wrong.
    """
    label = run if step is None else f"{run}:{step}"
    short = error if len(error) <= _LONGEST_ERROR else f"{error[:_LONGEST_ERROR]}…"
    key = digest("news", "failed", checkpoint_id)
    payload = {
        "text": _escaped(f"failed: {label}: {short}"),
        "event": "failed",
        "id": key,
        "run": run,
        "step": step,
        "checkpoint": checkpoint.partition("?")[0],
        "error": error,
    }
    return News(event="failed", key=key, payload=payload)


def _worse_than(standing: Standing) -> list[Change]:
    found = [standing.previous] if standing.previous.is_worse else []
    if standing.has_fallen and standing.best.label != standing.previous.label:
        found.append(standing.best)
    if standing.fell_below_baseline:
        found.append(standing.baseline)
    return found


def _news(event: Event, standing: Standing, line: str, *, certain: bool, **more: Any) -> News:
    key = digest("news", event, standing.evaluation_id)
    payload = {
        "text": _escaped(line),
        "event": event,
        "id": key,
        "run": standing.run,
        "step": standing.step,
        "checkpoint": standing.url,
        "evaluation_id": standing.evaluation_id,
        "certain": certain,
        **more,
        "tau": _tau_json(standing.tau),
        "changes": {change.what: _change_json(change) for change in standing.changes},
        "datasets": {
            name: {
                **_tau_json(tau),
                "changes": {
                    change.what: _difference_json(change.datasets[name])
                    for change in standing.changes
                    if name in change.datasets
                },
            }
            for name, tau in standing.taus.items()
        },
        "conditions": {**standing.conditions._asdict(), "device": standing.device},
    }
    return News(event=event, key=key, payload=without_nan(payload))


def _own_text(standing: Standing) -> str:
    tau = standing.tau
    interval = "" if math.isnan(tau.ci_low) else f" [{tau.ci_low:.2f}, {tau.ci_high:.2f}]"
    return f"{standing.label}, tau {tau.tau_pooled:.2f}{interval}"


def _change_text(change: Change) -> str:
    assert change.difference is not None
    return f"{difference_text(change.difference)} against {NAMES[change.what]}, {change.label}"


def difference_text(found: PairedDifference) -> str:
    """Return a difference with its sign and 95 % interval, or a dash where nothing was measured."""
    if math.isnan(found.difference):
        return "-"
    interval = "" if math.isnan(found.ci_low) else f" [{found.ci_low:+.2f}, {found.ci_high:+.2f}]"
    return f"{found.difference:+.2f}{interval}"


def _tau_json(tau: Tau) -> dict[str, Any]:
    values = asdict(tau)
    return values | {"word": values.pop("word")}


def _change_json(change: Change) -> dict[str, Any]:
    if change.difference is None:
        return {"against": None, "why_not": change.why_not}
    return {"against": change.label, **_difference_json(change.difference)}


def _difference_json(found: PairedDifference) -> dict[str, Any]:
    names = ("difference", "ci_low", "ci_high", "p_value", "num_prompts", "word")
    return {name: getattr(found, name) for name in names}


def _escaped(line: str) -> str:
    """Return one line that a chat shows as it is: a name in it can neither mention people nor make a link.

    Slack and Mattermost read `<...>` as commands, and `&lt;` as the sign.
    """
    text = " ".join(line.split())
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
