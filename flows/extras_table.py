"""The extra numbers of one evaluation as lines under the result table: over all prompts; `--json` has every slice.

shorter blocks (each on its own walk): tau 1.21 at 2, 1.30 at 4, 1.33 at 8
draft trees (nodes, each on its own walk; no speed beside a chain's 1.33): tau 1.35 at 4, 1.52 at 16
the target's token among the drafter's k best, where all drafts before it were accepted (1420 blocks)
  position      k=1     k=2     k=4   blocks
         1      23%     31%     40%     1420
temperature 1, accepted drafts per step on the greedy text (greedy: 0.33)
  drafts of the largest probability: 0.29 expected, at least 0.24; the first with 22%
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_RULES = {"one_hot": "drafts of the largest probability", "sampled": "drafts drawn at that temperature"}
_WIDTH = 8


def extras_lines(result: Mapping[str, Any]) -> list[str]:
    """Return the extra numbers of a result over all prompts, none where none were asked for.

    Args:
        result: one checkpoint, as `dflash-eval evaluate --json` has it.
    """
    extras, chain = result.get("extras") or {}, result["datasets"].get("all", {})
    kinds = (("sweep", _sweep), ("trees", _trees), ("recall", _recall), ("sampled", _sampled))
    lines: list[str] = []
    for name, kind in kinds:
        rows = extras.get(name, {}).get("datasets", {}).get("all", [])
        if rows:
            lines += kind(rows, chain)
    return lines


def _sweep(rows: Sequence[Mapping[str, Any]], chain: Mapping[str, Any]) -> Iterator[str]:
    del chain
    yield f"shorter blocks (each on its own walk): tau {_taus(rows, 'block_size')}"


def _trees(rows: Sequence[Mapping[str, Any]], chain: Mapping[str, Any]) -> Iterator[str]:
    beside = _number(chain.get("tau_pooled"))
    yield (
        f"draft trees (nodes, each on its own walk; no speed beside the chain's {beside}): tau {_taus(rows, 'budget')}"
    )


def _recall(rows: Sequence[Mapping[str, Any]], chain: Mapping[str, Any]) -> Iterator[str]:
    del chain
    ks = sorted({row["k"] for row in rows})
    found = {(row["draft_position"], row["k"]): row for row in rows}
    yield "the target's token among the drafter's k best, where all drafts before it were accepted"
    yield "  position" + "".join(f"k={k}".rjust(_WIDTH) for k in ks) + "blocks".rjust(_WIDTH + 1)
    for position in sorted({row["draft_position"] for row in rows}):
        of_position = [found[position, k] for k in ks]
        shares = "".join(_share(row["recall_conditional"]).rjust(_WIDTH) for row in of_position)
        yield f"{position:10}{shares}{of_position[0]['num_reached']:{_WIDTH + 1}}"


def _sampled(rows: Sequence[Mapping[str, Any]], chain: Mapping[str, Any]) -> Iterator[str]:
    steps = chain.get("num_verification_steps")
    greedy = chain["num_accepted_drafts"] / steps if steps else None
    for temperature in sorted({row["temperature"] for row in rows}):
        yield (f"temperature {temperature:g}, accepted drafts per step on the greedy text (greedy: {_number(greedy)})")
        for row in rows:
            if row["temperature"] == temperature:
                expected, least = row["expected_accepted_teacher_forced"], row["expected_accepted_at_least"]
                yield (
                    f"  {_RULES.get(row['rule'], row['rule'])}: {_number(expected)} expected, at least "
                    f"{_number(least)}; the first with {_share(row['first_acceptance'])}"
                )


def _taus(rows: Sequence[Mapping[str, Any]], key: str) -> str:
    ordered = sorted(rows, key=lambda row: row[key])
    return ", ".join(f"{_number(row['tau_pooled'])} at {row[key]}" for row in ordered)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
