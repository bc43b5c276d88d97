"""Reports and plans as rows of text for a table, and as plain JSON; nothing is printed here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter

from dflash_core.hosts.report import GPU, READ_ONLY_NOTE, Disk, HostFacts, HostReport, ModelFolder
from dflash_core.hosts.stages import Plan, StagePlan
from dflash_core.hosts.wording import gib, printable

ABSENT = "-"
"""Cell of a fact that the host did not give."""
_MIB = 2**20


def report_rows(reports: Sequence[HostReport]) -> list[dict[str, str]]:
    """Return one row per host; the keys are the columns, in order."""
    return [_row(_host_cells(report)) for report in reports]


def model_rows(reports: Sequence[HostReport]) -> list[dict[str, str]]:
    """Return one row per model folder of every host."""
    return [_row(_model_cells(report.name, model)) for report in reports for model in report.facts.models]


def plan_rows(plan: Plan) -> list[dict[str, str]]:
    """Return one row per stage, in the order in which they run."""
    return [_row(_stage_cells(stage)) for stage in plan.stages]


def turn(rows: Sequence[Mapping[str, str]], *, by: str) -> list[dict[str, str]]:
    """Return a table turned on its side, for a terminal that is too narrow for all columns.

    Args:
        rows: for example `report_rows`; all with the same columns.
        by: the column whose cells become the columns, for example `host`.

    Returns:
        One row per other column, named under the key `""`; columns that nobody filled are left out.
    """
    names = [name for name in (rows[0] if rows else {}) if name != by]
    filled = [name for name in names if any(row[name] != ABSENT for row in rows)]
    return [{"": name, **{row[by]: row[name] for row in rows}} for name in filled]


def report_json(report: HostReport) -> dict[str, Any]:
    """Return a report as plain JSON types: its own fields, and the facts beside them; null is absent."""
    values = _plain(asdict(report))
    return {**{key: value for key, value in values.items() if key != "facts"}, **values["facts"]}


def report_from_json(data: Mapping[str, Any]) -> HostReport:
    """Return the report that `report_json` wrote.

    Raises:
        pydantic.ValidationError: the data is not of that form.
    """
    names = HostFacts.__dataclass_fields__
    own = {key: value for key, value in data.items() if key not in names}
    facts = {key: value for key, value in data.items() if key in names}
    return _REPORT.validate_python({**own, "facts": facts})


def plan_json(plan: Plan) -> list[dict[str, Any]]:
    """Return a plan as plain JSON types, one object per stage."""
    return [
        {**_plain(asdict(stage)), "memory_needed_bytes": stage.memory_needed_bytes, "fits": stage.fits}
        for stage in plan.stages
    ]


def _host_cells(report: HostReport) -> dict[str, str | None]:
    facts = report.facts
    return {
        "host": report.name,
        "status": READ_ONLY_NOTE if report.status == "read-only" else report.status,
        "gpus": ", ".join(map(_gpu_text, facts.gpus)),
        "driver": ", ".join(dict.fromkeys(gpu.driver for gpu in facts.gpus if gpu.driver)),
        "ram": _of(facts.ram_available_bytes, facts.ram_total_bytes, "available"),
        "swap": _of(facts.swap_free_bytes, facts.swap_total_bytes, "free"),
        "disks": ", ".join(map(_disk_text, facts.disks)),
        "cpu": facts.cpu_model,
        "threads": None if facts.threads is None else str(facts.threads),
        "flags": None if facts.cpu_flags is None else " ".join(facts.cpu_flags) or "none of interest",
        "python": facts.python,
        "torch": _torch_text(facts),
        "folder": _folder_text(facts),
        "seconds": f"{report.seconds:.1f}",
        "problem": "; ".join([*([report.problem] if report.problem else []), *facts.notes]),
    }


def _gpu_text(gpu: GPU) -> str:
    used = "unknown" if gpu.memory_used_mib is None else f"{gpu.memory_used_mib * _MIB / 2**30:.1f}"
    total = gib(None if gpu.memory_total_mib is None else gpu.memory_total_mib * _MIB)
    capability = f", capability {gpu.compute_capability}" if gpu.compute_capability else ""
    return f"{gpu.index}: {gpu.name} ({used} of {total} used{capability})"


def _disk_text(disk: Disk) -> str:
    if disk.total_bytes is None and not disk.is_present:
        return f"{disk.path}: no such folder"
    return (
        f"{disk.path}: {_of(disk.free_bytes, disk.total_bytes, 'free')}{'' if disk.is_present else ' (not yet there)'}"
    )


def _of(part: int | None, whole: int | None, word: str) -> str | None:
    """Return for example `3.0 of 4.0 GiB free`."""
    if part is None and whole is None:
        return None
    return f"{gib(part).removesuffix(' GiB')} of {gib(whole)} {word}"


def _torch_text(facts: HostFacts) -> str | None:
    if facts.torch is None:
        return None
    return f"{facts.torch} ({f'CUDA {facts.torch_cuda}' if facts.torch_cuda else 'no CUDA'})"


def _folder_text(facts: HostFacts) -> str | None:
    if facts.folder is None:
        return None
    num = facts.folder.num_entries
    return f"{facts.folder.path}: {'cannot be listed' if num is None else f'{num} entries'}"


def _model_cells(host: str, model: ModelFolder) -> dict[str, str | None]:
    config = model.config
    asked = model.num_shards + len(model.shards_missing)
    sizes = ("num_layers", "hidden_size", "vocab_size")
    return {
        "host": host,
        "path": model.path,
        "present": "yes" if model.is_present else "no",
        "size": None if model.size_bytes is None else gib(model.size_bytes),
        "shards": f"{model.num_shards} of {asked}" if asked else None,
        "architecture": config.architecture if config else None,
        "depth": str(config.num_layers) if config else None,
        "hidden": str(config.hidden_size) if config else None,
        "vocabulary": str(config.vocab_size) if config else None,
        "dtype": config.dtype if config else None,
        "keys": ", ".join(config.sources[name] for name in sizes) if config else None,
        "problem": model.problem,
    }


def _stage_cells(stage: StagePlan) -> dict[str, str | None]:
    return {
        "stage": stage.stage,
        "host": stage.host,
        "device": stage.device,
        "dtype": stage.dtype,
        "memory": f"{gib(stage.memory_needed_bytes)} of {gib(stage.memory_available_bytes)}",
        "disk": None
        if stage.disk_needed_bytes is None
        else f"{gib(stage.disk_needed_bytes)} of {gib(stage.disk_available_bytes)}",
        "threads": None if stage.threads is None else str(stage.threads),
        "fits": "yes" if stage.fits else "no",
        "why": stage.why,
        "parts": ", ".join(f"{part.name} {gib(part.size_bytes)}" for part in stage.parts),
    }


def _row(cells: Mapping[str, str | None]) -> dict[str, str]:
    """Return cells fit for a terminal: what a host wrote may hold control characters."""
    return {name: printable(text, longest=500) or ABSENT for name, text in cells.items()}


def _plain(value: Any) -> Any:
    """Return nested dataclass values with lists in place of tuples."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value


_REPORT = TypeAdapter(HostReport)
