"""The figures of a soak as a table, and what must not be."""

from __future__ import annotations

import os

from tests.support.soak import Outcome


def problems(outcome: Outcome) -> list[str]:
    """Return everything that must not be."""
    verdict = outcome.verdict
    most_unseen = outcome.faults["watch killed"]
    named = {"lost": verdict.lost, "doubled": verdict.doubled, "wrong": verdict.wrong}
    named |= {"unexplained": verdict.unexplained, "damage": verdict.damage}
    named |= {"unseen": verdict.unseen if len(verdict.unseen) > most_unseen else []}
    return [f"{what}: {one}" for what, ones in named.items() for one in ones]


def table(outcome: Outcome) -> str:
    """Return the figures as lines of Markdown, and what is wrong below them."""
    verdict = outcome.verdict
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    rows = {
        "seed": outcome.plan.seed,
        "checkpoints": len(outcome.plan.checkpoints),
        "of which sound in the end": verdict.counts["sound"],
        **{f"faults: {kind}": number for kind, number in sorted(outcome.faults.items())},
        "connections broken": outcome.num_cut,
        "watches started": outcome.num_started,
        "evaluations done": verdict.counts["evaluations"],
        **{kind: number for kind, number in sorted(verdict.counts.items()) if kind.startswith("reason")},
        "gone with the watch that read them": len(verdict.unseen),
        "lost": len(verdict.lost),
        "doubled": len(verdict.doubled),
        "wrong": len(verdict.wrong),
        "without a reason": len(verdict.unexplained),
        "left behind": len(verdict.damage),
        "seconds": f"{outcome.seconds:.0f}",
        "disk": outcome.disk,
        "load": f"{load} on {os.cpu_count()} cores",
    }
    lines = ["| what | number |", "|---|---|", *(f"| {what} | {number} |" for what, number in rows.items())]
    return "\n".join(lines + problems(outcome))
