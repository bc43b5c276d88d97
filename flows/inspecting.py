"""`dflash-eval inspect`: what a checkpoint is, from its index alone."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict
from typing import Any

from dflash_core.checkpoints import CheckpointInspection
from dflash_core.config import Config
from dflash_core.drafter.spec import DrafterSpec
from dflash_core.errors import DFlashEvalError, one_line
from flows import screen

_MOST_FACTS = 24


def inspection_json(inspection: CheckpointInspection, config: Config) -> dict[str, Any]:
    """Return the inspection as plain data, with the drafter's canonical reading where it can be made."""
    spec, problem = _reading(inspection, config)
    reading = None if spec is None else _plain(spec)
    return {**asdict(inspection), "drafter": reading, "drafter_problem": problem}


def show_inspection(inspection: CheckpointInspection, config: Config) -> None:
    """Print layout, readiness, bytes, tensors by role, facts and the drafter's canonical reading."""
    ref = inspection.ref
    skipped = inspection.bytes_total - inspection.bytes_wanted
    summary = {
        "run": ref.run,
        "step": ref.step,
        "layout": ref.layout,
        "dialect": inspection.dialect,
        "ready": "yes" if inspection.ready else f"no: {inspection.not_ready_reason}",
        "to read": screen.megabytes(inspection.bytes_wanted) if inspection.ready else None,
        "to skip": screen.megabytes(skipped) if inspection.ready else None,
        "total": screen.megabytes(inspection.bytes_total),
        "read by this look": screen.megabytes(inspection.bytes_read),
        "identity": ref.identity[:16],
    }
    screen.print_table(ref.url, [{"what": key, "value": value} for key, value in summary.items()])
    if inspection.tensors:
        screen.print_table("Tensors", _tensor_rows(inspection))
    for contradiction in inspection.contradictions:
        screen.say(f"contradiction: {contradiction}")
    if inspection.odd_globals:
        screen.say(f"names in the pickle that no checkpoint needs (never run): {', '.join(inspection.odd_globals)}")
    facts = [{"found in the checkpoint": name, "value": str(value)} for name, value in inspection.facts.items()]
    if facts:
        screen.print_table("Facts", facts[:_MOST_FACTS])
    if inspection.ready and inspection.refusal is None:
        _show_reading(inspection, config)


def _plain(spec: DrafterSpec) -> dict[str, Any]:
    """Return all facts of a drafter, those at their plain value too, and what decided each."""
    more = {"num_drafts": spec.num_drafts, "dialect": spec.dialect, "notes": list(spec.notes)}
    return {**spec.facts(), **more, "sources": dict(spec.sources)}


def _tensor_rows(inspection: CheckpointInspection) -> list[dict[str, Any]]:
    """Return one row per kind of tensor; those of a layer stand together."""
    kinds: Counter[tuple[str, str, str, str]] = Counter()
    sizes: Counter[tuple[str, str, str, str]] = Counter()
    for entry in inspection.tensors:
        name = re.sub(r"\.\d+\.", ".N.", entry.canonical_name or entry.name)
        kind = (entry.role, name, f"{entry.dtype} {list(entry.shape)}", entry.reason)
        kinds[kind] += 1
        sizes[kind] += entry.size_bytes
    return [
        {
            "role": role,
            "tensor": name,
            "count": count,
            "type": shape,
            "size": screen.megabytes(sizes[(role, name, shape, why)]),
            "why": why,
        }
        for (role, name, shape, why), count in kinds.items()
    ]


def _show_reading(inspection: CheckpointInspection, config: Config) -> None:
    spec, problem = _reading(inspection, config)
    if spec is None:
        screen.say(f"the drafter's facts were not checked: {problem}")
        return
    rows = [
        {"fact": name, "value": str(value), "decided by": spec.sources.get(name)}
        for name, value in spec.facts().items()
    ]
    screen.print_table("Drafter", [{"fact": "form of the config", "value": spec.dialect, "decided by": None}, *rows])
    for note in spec.notes:
        screen.say(f"note: {note}")


def _reading(inspection: CheckpointInspection, config: Config) -> tuple[DrafterSpec | None, str | None]:
    """Return the canonical reading, or why there is none."""
    from dflash_core.drafter_reading import read_drafter
    from dflash_core.store_opening import store_of
    from dflash_core.target.loading import resolve_target

    if not inspection.ready:
        return None, inspection.not_ready_reason
    if inspection.refusal is not None:
        return None, inspection.refusal
    if config.target.model is None:
        return None, "no target.model in the config to check them against"
    try:
        target = resolve_target(config.target.model, store_of(config))
        return read_drafter(inspection, config, target.config), None
    except DFlashEvalError as error:
        return None, one_line(error)
