"""The numbers behind the plots as one JSON document, and its form inside the page.

Everything is by place: checkpoints, parts of the prompts and bins are listed once, and the numbers are lists in
their order. Counts are sent where a share is drawn, so that nothing is rounded on the way.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dflash_core.results.report_data import ALL, Row, Section
from dflash_core.results.report_steps import SliceKey, bin_name

Counts = dict[int, tuple[int, int]]

_STAGES = (
    "plan_target",
    "probe_hosts",
    "stream_checkpoint",
    "prepare_target",
    "write_transcripts",
    "extract_hidden_states",
    "wait_for_device",
    "run_drafter",
)

# Inside a script element these could end it or start a comment; the last two end a line in old scripts.
_ESCAPED = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def to_script_json(value: Any) -> str:
    r"""Return JSON that can stand inside a `<script>` element: nothing in it ends the element or starts a comment.

    >>> to_script_json(["</script><!--"])
    '["\\u003c/script\\u003e\\u003c!--"]'
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character, escape in _ESCAPED.items():
        text = text.replace(character, escape)
    # A lone surrogate has no UTF-8.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def label(row: Row) -> str:
    """Return run and step as one name."""
    return str(row["run"]) if row["step"] is None else f"{row['run']}, step {row['step']}"


def slice_title(part: SliceKey) -> str:
    """Return how a part of the prompts is called on the page."""
    kind, name = part
    return {"all": "All prompts", "dataset": f"Dataset {name}", "group": f"Group {name}"}[kind]


def default_chosen(section: Section) -> list[int]:
    """Return the places of the checkpoints that detail plots show at first: the best, the latest, the baseline."""
    places = {row["evaluation_id"]: place for place, row in enumerate(section.rows)}
    wanted = [*section.ranked[:1], section.latest, section.baseline]
    return list(dict.fromkeys(places[row["evaluation_id"]] for row in wanted if row is not None))


def section_payload(section: Section) -> dict[str, Any]:
    """Return the plain values that the plots of one section are made of."""
    ids = [row["evaluation_id"] for row in section.rows]
    parts = list(section.slices)
    places = {evaluation_id: place for place, evaluation_id in enumerate(ids)}
    base = section.baseline
    return {
        "checkpoints": [{"label": label(row), "run": row["run"], "step": row["step"]} for row in section.rows],
        "slices": [{"kind": kind, "title": slice_title((kind, name))} for kind, name in parts],
        "baseline": None if base is None else places[base["evaluation_id"]],
        "chosen": default_chosen(section),
        "block_size": section.rows[0]["block_size"],
        "tau": [[_tau(section.slices[part].get(name)) for name in ids] for part in parts],
        "difference": [[_difference(section, name, part) for name in ids] for part in parts],
        "survived": [[section.survival.get((name, part)) for name in ids] for part in parts],
        "emitted": _by_place(section.steps.by("num_emitted_tokens"), ids, parts, first=1, with_tokens=False),
        "answer": _binned(section.steps.by("answer_bin"), ids, parts),
        "context": _binned(section.steps.by("context_bin"), ids, parts),
        "stages": _stages(section.rows),
        "extras": {
            name: [[places[entry[0]], *entry[1:]] for entry in entries] for name, entries in section.extras.items()
        },
    }


def _tau(row: Row | None) -> list[Any] | None:
    """Return tau, its interval, the mean over prompts, tau without near-ties, prompts, steps and near-ties."""
    if row is None or row["tau_pooled"] is None:
        return None
    names = ("tau_pooled", "ci_low", "ci_high", "tau_prompt_mean", "tau_without_ties")
    return [row[name] for name in (*names, "num_prompts", "num_verification_steps", "near_ties")]


def _difference(section: Section, evaluation_id: str, part: SliceKey) -> list[Any] | None:
    found = section.differences.get((evaluation_id, part))
    return None if found is None else [found.value, found.low, found.high, found.num_prompts]


def _by_place(
    counts: Mapping[tuple[str, SliceKey], Counts],
    ids: Sequence[str],
    parts: Sequence[SliceKey],
    *,
    first: int = 0,
    with_tokens: bool = True,
) -> list[list[Any]]:
    """Return steps (and tokens) at each value from `first` to the largest, by part of the prompts and checkpoint."""
    last = max((value for found in counts.values() for value in found), default=first)
    values = range(first, last + 1)

    def one(found: Counts | None) -> Any:
        if found is None:
            return None
        pairs = [found.get(value, (0, 0)) for value in values]
        return [list(pair) for pair in pairs] if with_tokens else [num_steps for num_steps, _ in pairs]

    return [[one(counts.get((name, part))) for name in ids] for part in parts]


def _binned(
    counts: Mapping[tuple[str, SliceKey], Counts], ids: Sequence[str], parts: Sequence[SliceKey]
) -> dict[str, Any]:
    last = max((value for found in counts.values() for value in found), default=-1)
    return {"bins": [bin_name(place) for place in range(last + 1)], "counts": _by_place(counts, ids, parts)}


def _stages(rows: Sequence[Row]) -> dict[str, Any]:
    names = stage_names(rows)
    return {
        "names": names,
        "seconds": [[row["seconds"].get(name) for name in names] for row in rows],
        "total": [row["total_seconds"] for row in rows],
        "bytes": [[row["bytes_read"], row["bytes_total"]] for row in rows],
    }


def stage_names(rows: Iterable[Row]) -> list[str]:
    """Return the stages that were timed, in the order in which they run; unknown ones last, by name."""
    found = {stage for row in rows for stage in row["seconds"]}
    return sorted(found, key=lambda name: (_STAGES.index(name) if name in _STAGES else len(_STAGES), name))


def has_numbers(section: Section) -> bool:
    """Tell whether there is anything to draw."""
    return any(row["tau_pooled"] is not None for row in section.slices[ALL].values())
