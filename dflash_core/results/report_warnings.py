"""What a reader of one section must know before its numbers are believed: sentences, none where all is well."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dflash_core.results.report_data import Row, Section
from dflash_core.results.selection import CONDITION_NAMES

FEW_PROMPTS = 10
MANY_NEAR_TIES = 0.05
"""Share of the verification steps that rounding may have decided."""


def section_warnings(section: Section) -> list[str]:
    """Return the warnings of one set of conditions."""
    checks: tuple[Callable[[Section], str | None], ...] = (
        _nothing_measured,
        _few_prompts,
        _other_prompts,
        _no_interval,
        _near_ties,
        _unknown_near_ties,
        _devices,
        _unrecorded,
    )
    return [warning for warning in (check(section) for check in checks) if warning is not None]


def near_tie_share(row: Row) -> float | None:
    """Return the share of the verification steps that a near-tie decided; None where that is not known."""
    if row["near_ties"] is None or not row["num_verification_steps"]:
        return None
    return float(row["near_ties"] / row["num_verification_steps"])


def _nothing_measured(section: Section) -> str | None:
    missing = [row for row in section.rows if row["tau_pooled"] is None]
    if not missing:
        return None
    return f"{_checkpoints(missing)} without a single verification step: every answer is too short to draft in."


def _few_prompts(section: Section) -> str | None:
    most = max(row["num_prompts"] for row in section.rows)
    if most == 0 or most >= FEW_PROMPTS:
        return None
    if most == 1:
        return "One prompt only: there is no interval, and nothing can be said about other prompts."
    return f"Only {most} prompts: take the intervals as a rough guide."


def _other_prompts(section: Section) -> str | None:
    most = max(row["num_prompts"] for row in section.rows)
    fewer = [row for row in section.rows if 0 < row["num_prompts"] < most]
    if not fewer:
        return None
    return f"{_checkpoints(fewer)} scored on fewer prompts than others ({most}): their taus are of other prompts."


def _no_interval(section: Section) -> str | None:
    rows = [row for row in section.rows if row["tau_pooled"] is not None and row["ci_low"] is None]
    if not rows or max(row["num_prompts"] for row in rows) < 2:
        return None
    return (
        f"{_checkpoints(rows)} without an interval: their prompts all have the same tau, are turns of one "
        "conversation, or were not counted."
    )


def _near_ties(section: Section) -> str | None:
    shares = [share for row in section.rows if (share := near_tie_share(row)) is not None]
    if not shares or max(shares) <= MANY_NEAR_TIES:
        return None
    return (
        f"Up to {100 * max(shares):.1f} % of the verification steps were decided by a near-tie, which another machine "
        "may decide otherwise: look at tau without near-ties too."
    )


def _unknown_near_ties(section: Section) -> str | None:
    rows = [row for row in section.rows if row["near_ties"] is None and row["num_verification_steps"]]
    if not rows:
        return None
    return f"{_checkpoints(rows)} with unknown margins: how many steps a near-tie decided was not recorded."


def _devices(section: Section) -> str | None:
    devices = sorted({str(row["device"]) for row in section.rows})
    if len(devices) < 2:
        return None
    return f"The drafter ran on different devices ({', '.join(devices)}): small differences may come from that."


def _unrecorded(section: Section) -> str | None:
    names = [title for name, title in CONDITION_NAMES.items() if section.rows[0][name] is None]
    if not names:
        return None
    return f"Not recorded: {', '.join(names)}. Taus of other conditions may stand beside each other."


def _checkpoints(rows: Sequence[Row]) -> str:
    return "One checkpoint is" if len(rows) == 1 else f"{len(rows)} checkpoints are"
