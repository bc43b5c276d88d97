"""Which stored evaluations a person means: names typed on the command line to evaluations.

Values only; `compare.py` reads the candidates from the database.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple
from urllib.parse import urlsplit

from dflash_core.errors import InputError

MIN_ID_PREFIX = 6
"""An evaluation id may be cut to so many characters; shorter ones could be a step."""


class Conditions(NamedTuple):
    """What two evaluations must share before their taus may be compared."""

    target: str
    transcripts_digest: str | None
    block_size: int | None
    metrics_version: str | None


CONDITION_NAMES = {
    "target": "target",
    "transcripts_digest": "transcripts",
    "block_size": "block size",
    "metrics_version": "metrics version",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One evaluation that a name may stand for."""

    evaluation_id: str
    checkpoint_id: str
    run: str
    step: int | None
    url: str
    status: str
    error: str | None
    started_at: datetime
    conditions: Conditions
    dtype: str | None
    target_dtype: str | None
    device: str | None

    @property
    def label(self) -> str:
        """`run:step`, or the run alone where there is no step."""
        return self.run if self.step is None else f"{self.run}:{self.step}"


class Selection(NamedTuple):
    """Evaluations that share their conditions, in the order of the table, and what to say about them."""

    rows: tuple[Candidate, ...]
    baseline: Candidate | None
    """The one that `--baseline` named; it is also the first of the rows."""
    notes: tuple[str, ...]


def select(candidates: Sequence[Candidate], selectors: Sequence[str], baseline: str | None) -> Selection:
    """Return the evaluations to compare.

    A selector is an evaluation id (or its first 6 characters or more), a checkpoint's URL or
    folder, `run:step`, the name or number of a step, or the name of a run with one checkpoint.
    Where one checkpoint was evaluated several times, the newest evaluation whose conditions all
    selectors share is taken. Without selectors: the newest of each step of each run, under the
    conditions of the baseline, else of the newest evaluation of all.

    Args:
        candidates: all stored evaluations.
        selectors: what the person typed; duplicates are dropped.
        baseline: one more selector, or None.

    Raises:
        InputError: a selector stands for nothing, for several checkpoints or for one that failed or
            vanished; or the evaluations differ in target, transcripts, block size or the
            version of the metrics.
    """
    names = list(dict.fromkeys(([] if baseline is None else [baseline]) + list(selectors)))
    found = [_find(candidates, name) for name in names]
    if selectors:
        rows = list(dict.fromkeys(_with_common_conditions(names, found)))
        left_out: list[Candidate] = []
    else:
        rows, left_out = _newest_of_each_step(candidates, found[0] if found else None)
    chosen_baseline = rows[0] if baseline is not None else None
    return Selection(tuple(rows), chosen_baseline, (*_left_out_note(rows[0], left_out), *_precision_notes(rows)))


def describe_difference(a: Candidate, b: Candidate) -> str:
    """Return in words in which conditions two evaluations differ."""
    pairs = zip(Conditions._fields, a.conditions, b.conditions, strict=True)
    return ", ".join(f"{CONDITION_NAMES[name]} {here!r} and {there!r}" for name, here, there in pairs if here != there)


def _find(candidates: Sequence[Candidate], selector: str) -> list[Candidate]:
    """Return the evaluations of the one checkpoint that a selector stands for, the newest first."""
    for matches in (_is_id, _is_id_prefix, _is_url, _is_run_and_step, _is_step, _is_run):
        matching = [candidate for candidate in candidates if matches(candidate, selector)]
        if matching:
            return _of_one_checkpoint(matching, selector)
    known = sorted({candidate.label for candidate in candidates})
    near = difflib.get_close_matches(selector, known, n=1, cutoff=0.4)
    hint = f"the nearest is {near[0]!r}" if near else f"known are {', '.join(known[:8]) or 'none'}"
    raise InputError(f"no evaluation matches {selector!r}: {hint}")


def _of_one_checkpoint(matching: list[Candidate], selector: str) -> list[Candidate]:
    labels = sorted({candidate.label for candidate in matching})
    if len(labels) > 1:
        raise InputError(f"{selector!r} stands for several checkpoints: {', '.join(labels[:8])}; write run:step")
    done = [candidate for candidate in matching if candidate.status == "done"]
    if not done:
        newest = max(matching, key=lambda candidate: candidate.started_at)
        what = "the checkpoint" if newest.status == "vanished" else "the evaluation of"
        raise InputError(f"{what} {labels[0]!r} {newest.status} and has no numbers: {newest.error}")
    return sorted(done, key=lambda candidate: candidate.started_at, reverse=True)


def _is_id(candidate: Candidate, selector: str) -> bool:
    return candidate.evaluation_id == selector


def _is_id_prefix(candidate: Candidate, selector: str) -> bool:
    return len(selector) >= MIN_ID_PREFIX and candidate.evaluation_id.startswith(selector)


def _is_url(candidate: Candidate, selector: str) -> bool:
    if "://" not in selector and "/" not in selector:
        return False
    spellings = {selector.rstrip("/")}
    if "://" not in selector:
        spellings |= {os.path.abspath(selector), "file://" + os.path.abspath(selector)}
    url = candidate.url.rstrip("/")
    return any(url == spelling or url.startswith(spelling + "/") for spelling in spellings)


def _is_run_and_step(candidate: Candidate, selector: str) -> bool:
    run, colon, step = selector.rpartition(":")
    return bool(colon) and candidate.run == run and _is_step(candidate, step)


def _is_step(candidate: Candidate, selector: str) -> bool:
    if candidate.step is not None and selector in (str(candidate.step), f"step_{candidate.step}"):
        return True
    return selector in urlsplit(candidate.url).path.split("/")[-2:]


def _is_run(candidate: Candidate, selector: str) -> bool:
    return candidate.run == selector


def _with_common_conditions(names: list[str], found: list[list[Candidate]]) -> list[Candidate]:
    """Return one evaluation per name, all under the same conditions."""
    common = set.intersection(*({candidate.conditions for candidate in group} for group in found))
    newest = [group[0] for group in found]
    if not common:
        first, other = next((newest[0], row) for row in newest[1:] if row.conditions != newest[0].conditions)
        raise InputError(
            f"{first.label!r} and {other.label!r} cannot be compared, they differ in "
            f"{describe_difference(first, other)}: evaluate both under the same conditions"
        )
    best = max(common, key=_newest_start(found[0]))
    return [next(candidate for candidate in group if candidate.conditions == best) for group in found]


def _newest_start(group: list[Candidate]) -> Callable[[Conditions], datetime]:
    return lambda conditions: max(row.started_at for row in group if row.conditions == conditions)


def _newest_of_each_step(
    candidates: Sequence[Candidate], baseline: list[Candidate] | None
) -> tuple[list[Candidate], list[Candidate]]:
    """Return the newest evaluation of each step, baseline first, and those under other conditions."""
    done = sorted((c for c in candidates if c.status == "done"), key=lambda c: c.started_at, reverse=True)
    if not done:
        raise InputError("no evaluation is done yet: run `dflash-eval evaluate` first")
    first = (baseline or done)[0]
    newest: dict[tuple[str, object], Candidate] = {}
    for candidate in done:
        if candidate.conditions == first.conditions:
            newest.setdefault(
                (candidate.run, candidate.checkpoint_id if candidate.step is None else candidate.step), candidate
            )
    rows = sorted(newest.values(), key=lambda c: (c.run, c.step is not None, c.step or 0, c.started_at))
    left_out = [candidate for candidate in done if candidate.conditions != first.conditions]
    if baseline is not None:
        rows = [first] + [row for row in rows if row.label != first.label]
    return rows, left_out


def _left_out_note(first: Candidate, left_out: list[Candidate]) -> list[str]:
    if not left_out:
        return []
    other = describe_difference(first, left_out[0])
    number = "1 evaluation" if len(left_out) == 1 else f"{len(left_out)} evaluations"
    return [f"left out under other conditions: {number}, the newest of which differs in {other}"]


def _precision_notes(rows: list[Candidate]) -> list[str]:
    """Near-ties fall differently in another precision; say so where rows were computed in several."""
    notes = []
    for name, words in (("dtype", "the drafter ran in"), ("target_dtype", "the target ran in")):
        values = sorted({str(getattr(row, name)) for row in rows})
        if len(values) > 1:
            notes.append(f"{words} different dtypes ({', '.join(values)}): small differences may come from that")
    return notes
