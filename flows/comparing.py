"""`dflash-eval compare`: checkpoints side by side over the same prompts, and the gate."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, NamedTuple

from dflash_core.acceptance.statistics import PairedDifference
from dflash_core.config import Config, load_config
from dflash_core.errors import DFlashEvalError, InputError, one_line
from dflash_core.results import compare as comparing
from dflash_core.results import gate as gates
from dflash_core.results.compare import Comparison, ComparisonRow, Tau
from dflash_core.results.selection import CONDITION_NAMES, Wanted
from dflash_core.results.verdicts import NO_VERDICT, Verdict, judge_differences
from flows import screen

_DIGEST_CHARACTERS = 12


class Asked(NamedTuple):
    """The conditions that a configuration asks for, and why some are not known."""

    wanted: Wanted
    note: str | None


def compare_command(options: argparse.Namespace) -> int:
    """Compare checkpoints over the same prompts, and judge a gate; exit status 1 where it is missed."""
    limit = None if options.fail_below is None else gates.parse_limit(options.fail_below)
    if not options.detect > 0:
        raise InputError(f"--detect {options.detect:g} must be a difference above 0")
    config = load_config(options.config)
    asked = _asked(config, options)
    comparison = comparing.compare(
        config.results,
        options.selectors,
        options.baseline,
        wanted=asked.wanted,
        wanted_difference=options.detect,
    )
    gate = None if limit is None else gates.gate(comparison, limit)
    if options.json:
        values = comparison.as_json()
        if options.by is not None:
            values["slices"] = comparing.without_nan([_slice_json(row) for row in _slices(comparison, options.by)])
        values["notes"] += [asked.note] if asked.note else []
        verdict = None if gate is None else gate.verdict
        screen.print_json({**values, "verdict": verdict, "gate": None if gate is None else gates.as_json(gate)})
    else:
        _show(comparison, asked.note, options.by)
        if gate is not None:
            print(gate.message)
    return 0 if gate is None or gate.passed else 1


def conditions_of(config: Config, block_size: int | None) -> Asked:
    """Return the conditions of a configuration, as far as this machine can tell them.

    Args:
        config: target, prompts and block size.
        block_size: what was typed instead of the configuration's.
    """
    sizes: dict[str, Any] = {"block_size": block_size or config.drafter.block_size}
    sizes["is_block_size_typed"] = block_size is not None
    from dflash_core import evaluation, stages
    from dflash_core.store_opening import store_of
    from dflash_core.target import transcripts

    try:
        plan = stages.plan_target(config)
        written = store_of(config).find(transcripts.KIND, plan.transcripts_key)
    except DFlashEvalError as error:
        return Asked(
            Wanted(**sizes), f"conditions: of the newest evaluation; the config's are not known: {one_line(error)}"
        )
    if written is None:
        found = Wanted(target=plan.target.name, **sizes)
        return Asked(
            found, "conditions: the store holds no transcripts of the config's prompts, so the newest are taken"
        )
    digest = evaluation.labelled_digest(plan, written.meta["digest"])
    return Asked(Wanted(target=plan.target.name, transcripts_digest=digest, **sizes), None)


def _asked(config: Config, options: argparse.Namespace) -> Asked:
    """Read the target and the prompts only where no checkpoint is named: names bring their own conditions."""
    special = any(
        name.rpartition(":")[2] in ("best", "latest") for name in [*options.selectors, options.baseline or ""]
    )
    if options.selectors and not special:
        typed = options.block_size is not None
        return Asked(Wanted(block_size=options.block_size, is_block_size_typed=typed), None)
    return conditions_of(config, options.block_size)


def _show(comparison: Comparison, note: str | None, by: str | None) -> None:
    caption = "tokens per verification step: pooled over steps with its 95 % interval, and the mean of prompts"
    rows = [{"checkpoint": row.label, **_tau_cells(row.tau)} for row in comparison.rows]
    screen.print_table("Comparison", rows, caption=f"{caption}. Same for all rows: {_conditions_text(comparison)}")
    differences = [_difference_row(row, comparison.wanted_difference) for row in comparison.rows if row.difference]
    if differences:
        caption = (
            "paired over the same prompts. All verdicts of a table hold in 95 % of the cases (Holm): intervals are "
            "wider the more is judged, and leave 0 out where it is better or worse. detectable: what so many prompts "
            f"show in 80 % of the cases; prompts for {comparison.wanted_difference:g}: how many would show that"
        )
        screen.print_table("Differences", differences, caption=caption)
    if by is not None:
        screen.print_table(f"By {by}", [_slice_cells(row, by) for row in _slices(comparison, by)])
    for line in [*_words(comparison), *_best_lines(comparison), *comparison.notes, *([note] if note else [])]:
        print(line)


def _difference_row(row: ComparisonRow, wanted: float) -> dict[str, Any]:
    assert row.difference is not None
    return {
        "checkpoint": row.label,
        "against": row.compared_with,
        **_difference_cells(row.difference, row.verdict),
        "detectable": _number(row.difference.smallest_detectable),
        f"prompts for {wanted:g}": row.num_prompts_needed,
    }


def _tau_cells(tau: Tau | None) -> dict[str, Any]:
    if tau is None:
        return {"tau pooled": None, "tau prompt mean": None, "prompts": 0, "steps": 0}
    return {
        "tau pooled": screen.interval_text(_number(tau.tau_pooled), _number(tau.ci_low), _number(tau.ci_high)),
        "tau prompt mean": None if math.isnan(tau.tau_prompt_mean) else f"{tau.tau_prompt_mean:.2f}",
        "prompts": tau.num_prompts,
        "steps": tau.num_verification_steps,
    }


def _difference_cells(found: PairedDifference | None, verdict: Verdict | None) -> dict[str, Any]:
    if found is None:
        return {"pooled difference": None, "prompt means": None, "p (Holm)": None, "verdict": None}
    low, high = (math.nan, math.nan) if verdict is None else (verdict.ci_low, verdict.ci_high)
    mean = found.difference_prompt_mean
    return {
        "pooled difference": screen.difference_text(found.difference, low, high),
        "prompt means": None if math.isnan(mean) else f"{mean:+.2f}",
        "p (Holm)": None if verdict is None else _number(verdict.p_adjusted),
        "verdict": None if verdict is None else verdict.word,
    }


class _SliceRow(NamedTuple):
    """One checkpoint on one dataset or group."""

    name: str
    label: str
    tau: Tau | None
    difference: PairedDifference | None
    verdict: Verdict | None


def _slices(comparison: Comparison, by: str) -> Iterator[_SliceRow]:
    """Yield a row per slice and checkpoint; verdicts are corrected for all of them together."""
    taus = [row.taus_by(by) for row in comparison.rows]
    differences = [row.differences_by(by) for row in comparison.rows]
    names = list(dict.fromkeys(name for found in taus for name in found))
    cells = [(name, place) for name in names for place in range(len(comparison.rows))]
    found = [differences[place].get(name) for name, place in cells]
    for (name, place), difference, verdict in zip(cells, found, judge_differences(found), strict=True):
        yield _SliceRow(name, comparison.rows[place].label, taus[place].get(name), difference, verdict)


def _slice_cells(row: _SliceRow, by: str) -> dict[str, Any]:
    cells = _without(_tau_cells(row.tau), "steps")
    return {by: row.name, "checkpoint": row.label, **cells, **_difference_cells(row.difference, row.verdict)}


def _slice_json(row: _SliceRow) -> dict[str, Any]:
    return {
        "name": row.name,
        "label": row.label,
        "tau": None if row.tau is None else asdict(row.tau),
        "difference": None if row.difference is None else row.difference.as_json(),
        **(NO_VERDICT if row.verdict is None else row.verdict.as_json()),
    }


def _without(cells: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in cells.items() if key != name}


def _words(comparison: Comparison) -> Iterator[str]:
    """Say why an interval is missing, and where the two means disagree."""
    for row in comparison.rows:
        pair = f"{row.label} against {row.compared_with}"
        if row.tau.word is not None:
            yield f"{row.label}: {row.tau.word}"
        if row.difference is not None and row.difference.word is not None:
            yield f"{pair}: {row.difference.word}"
        if row.difference is not None and row.difference.difference * row.difference.difference_prompt_mean < 0:
            yield f"{pair}: the two means disagree on which is better; look at the prompts"


def _best_lines(comparison: Comparison) -> Iterator[str]:
    """Name the set that cannot be told from the best, where there is more than one checkpoint."""
    labels = comparison.not_told_from_best
    if len(comparison.rows) < 2 or not labels:
        return
    if len(labels) == 1:
        yield f"best: {labels[0]}, told from all others (95 %)"
    else:
        number = f"{len(labels)} of {len(comparison.rows)}"
        yield f"cannot be told from the best (95 %): {number}: {', '.join(labels)}"


def _conditions_text(comparison: Comparison) -> str:
    parts = []
    for name, value in comparison.conditions._asdict().items():
        if value is None:
            continue
        text = str(value)[:_DIGEST_CHARACTERS] if name.endswith(("_digest", "_identity")) else str(value)
        parts.append(f"{CONDITION_NAMES[name]} {text}")
    return ", ".join(parts)


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
