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
    target_identity: str | None
    """Digest of what its files hold; None in rows of old."""
    transcripts_digest: str | None
    block_size: int | None
    dtype: str | None
    target_dtype: str | None
    store_dtype: str | None
    """In which dtype the target's hidden states were handed to the drafter."""
    thinking: bool | None
    chat_template_digest: str | None
    verification_rule: str | None
    counting_rule: str | None
    row_alignment: str | None
    metrics_version: str | None
    extraction_version: str | None

    @property
    def highest_tau(self) -> int | None:
        """What tau cannot pass: the block size, and one more where the anchor's own row drafts, too."""
        if self.block_size is None:
            return None
        return self.block_size + (self.row_alignment or "").startswith("anchor-shifted")


CONDITIONS_SQL = ", ".join(
    {
        "target_identity": "evaluations.spec ->> '$.target_identity' AS target_identity",
        "store_dtype": "evaluations.spec ->> '$.store_dtype' AS store_dtype",
    }.get(name, f"evaluations.{name}")
    for name in Conditions._fields
)
"""All conditions as columns of a SELECT from `evaluations`, in files of any version."""
CONDITION_NAMES = {
    "target": "target",
    "target_identity": "content of the target",
    "transcripts_digest": "transcripts",
    "block_size": "block size",
    "dtype": "dtype of the drafter",
    "target_dtype": "dtype of the target",
    "store_dtype": "dtype of the stored hidden states",
    "thinking": "thinking",
    "chat_template_digest": "chat template",
    "verification_rule": "verification rule",
    "counting_rule": "counting rule",
    "row_alignment": "row alignment",
    "metrics_version": "metrics version",
    "extraction_version": "extraction version",
}
SPECIAL = ("best", "latest")
"""Selectors that stand for a checkpoint by what it is, alone or as `run:best`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """The conditions that a configuration asks for; what is None is not asked."""

    target: str | None = None
    transcripts_digest: str | None = None
    block_size: int | None = None
    is_block_size_typed: bool = False
    """The block size was typed for this comparison: nothing else will do, for named checkpoints neither."""

    def fits(self, conditions: Conditions) -> bool:
        """Tell whether an evaluation was made under these conditions."""
        return all(getattr(conditions, name) == value for name, value in self.asked().items())

    def asked(self) -> dict[str, str | int]:
        """Return the conditions that are asked for."""
        values = {name: getattr(self, name) for name in ("target", "transcripts_digest", "block_size")}
        return {name: value for name, value in values.items() if value is not None}

    def __str__(self) -> str:
        return ", ".join(f"{CONDITION_NAMES[name]} {value!r}" for name, value in self.asked().items())


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
    device: str | None
    tau_pooled: float | None

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


def select(
    candidates: Sequence[Candidate], selectors: Sequence[str], baseline: str | None, wanted: Wanted | None = None
) -> Selection:
    """Return the evaluations to compare.

    A selector is an evaluation id (or its first 6 characters or more), a checkpoint's URL or
    folder, `run:step`, the name or number of a step, the name of a run with one checkpoint, or `latest`
    or `best` (alone, or of a run: `run:best`). Where one checkpoint was evaluated several times, an
    evaluation under the wanted conditions is taken, else the newest whose conditions all selectors share.
    Without selectors: the newest of each step of each run, under the wanted conditions, else those of the
    baseline, else of the newest evaluation of all.

    Args:
        candidates: all stored evaluations.
        selectors: what the person typed; duplicates are dropped.
        baseline: one more selector, or None.
        wanted: the conditions of the configuration, where they are known.

    Raises:
        InputError: a selector stands for nothing, for several checkpoints or for one that failed or
            vanished; or the evaluations differ in a condition; or none was made under the wanted ones.
    """
    wanted = wanted or Wanted()
    if wanted.is_block_size_typed:
        candidates = _of_block_size(candidates, wanted)
    names = list(dict.fromkeys(([] if baseline is None else [baseline]) + list(selectors)))
    found = [find(candidates, name, wanted) for name in names]
    if selectors:
        rows = list(dict.fromkeys(_with_common_conditions(names, found, wanted)))
        left_out: list[Candidate] = []
    else:
        rows, left_out = _newest_of_each_step(candidates, found[0] if found else None, wanted)
    chosen_baseline = rows[0] if baseline is not None else None
    notes = (*_wanted_note(rows[0], wanted), *_left_out_note(rows[0], left_out), *_device_note(rows))
    return Selection(tuple(rows), chosen_baseline, notes)


def describe_difference(a: Candidate, b: Candidate) -> str:
    """Return in words in which conditions two evaluations differ."""
    pairs = zip(Conditions._fields, a.conditions, b.conditions, strict=True)
    return ", ".join(
        f"{CONDITION_NAMES[name]} {_shown(here)} and {_shown(there)}" for name, here, there in pairs if here != there
    )


def _shown(value: object) -> str:
    return "not recorded" if value is None else repr(value)


def find(candidates: Sequence[Candidate], selector: str, wanted: Wanted) -> list[Candidate]:
    """Return the evaluations of the one checkpoint that a selector stands for, the newest first.

    Raises:
        InputError: it stands for nothing, for several checkpoints, or for one without numbers.
    """
    for matches in (_is_id, _is_id_prefix, _is_url, _is_run_and_step, _is_step, _is_run):
        matching = [candidate for candidate in candidates if matches(candidate, selector)]
        if matching:
            return _of_one_checkpoint(matching, selector)
    special = _special(candidates, selector, wanted)
    if special is not None:
        return _of_one_checkpoint([c for c in candidates if c.checkpoint_id == special.checkpoint_id], selector)
    known = sorted({candidate.label for candidate in candidates})
    near = difflib.get_close_matches(selector, known, n=1, cutoff=0.4)
    hint = f"the nearest is {near[0]!r}" if near else f"known are {', '.join(known[:8]) or 'none'}"
    raise InputError(f"no evaluation matches {selector!r}: {hint}")


def _special(candidates: Sequence[Candidate], selector: str, wanted: Wanted) -> Candidate | None:
    """Return the checkpoint that `best`, `latest`, `run:best` or `run:latest` stands for."""
    run, _, word = selector.rpartition(":")
    if word not in SPECIAL:
        return None
    done = [c for c in candidates if c.status == "done" and c.tau_pooled is not None and run in ("", c.run)]
    fitting = [candidate for candidate in done if wanted.fits(candidate.conditions)]
    if not fitting and not done:
        return None
    newest = max(fitting or done, key=lambda candidate: candidate.started_at)
    same = [candidate for candidate in done if candidate.conditions == newest.conditions]
    if word == "best":
        return max(same, key=lambda candidate: (candidate.tau_pooled or 0.0, candidate.started_at))
    of_run = [candidate for candidate in same if candidate.run == newest.run]
    return max(of_run, key=lambda candidate: (candidate.step or 0, candidate.started_at))


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


def _of_block_size(candidates: Sequence[Candidate], wanted: Wanted) -> list[Candidate]:
    """Return the evaluations of the block size that was typed, and those without any number."""
    sizes = {candidate.conditions.block_size for candidate in candidates if candidate.status == "done"}
    if wanted.block_size not in sizes:
        known = ", ".join(str(size) for size in sorted(size for size in sizes if size is not None))
        raise InputError(f"nothing was evaluated with block size {wanted.block_size}; there is: {known or 'nothing'}")
    return [c for c in candidates if c.status != "done" or c.conditions.block_size == wanted.block_size]


def _with_common_conditions(names: list[str], found: list[list[Candidate]], wanted: Wanted) -> list[Candidate]:
    """Return one evaluation per name, all under the same conditions."""
    common = set.intersection(*({candidate.conditions for candidate in group} for group in found))
    newest = [group[0] for group in found]
    if not common:
        first, other = next((newest[0], row) for row in newest[1:] if row.conditions != newest[0].conditions)
        raise InputError(
            f"{first.label!r} and {other.label!r} cannot be compared, they differ in "
            f"{describe_difference(first, other)}: evaluate both under the same conditions"
        )
    started = _newest_start(found[0])
    best = max(common, key=lambda conditions: (wanted.fits(conditions), started(conditions)))
    return [next(candidate for candidate in group if candidate.conditions == best) for group in found]


def _newest_start(group: list[Candidate]) -> Callable[[Conditions], datetime]:
    return lambda conditions: max(row.started_at for row in group if row.conditions == conditions)


def _newest_of_each_step(
    candidates: Sequence[Candidate], baseline: list[Candidate] | None, wanted: Wanted
) -> tuple[list[Candidate], list[Candidate]]:
    """Return the newest evaluation of each step, baseline first, and those under other conditions."""
    done = sorted((c for c in candidates if c.status == "done"), key=lambda c: c.started_at, reverse=True)
    if not done:
        raise InputError("no evaluation is done yet: run `dflash-eval evaluate` first")
    fitting = [candidate for candidate in baseline or done if wanted.fits(candidate.conditions)]
    if not fitting:
        what = "nothing" if baseline is None else f"{baseline[0].label!r} not"
        raise InputError(
            f"{what} was evaluated under the conditions of the config ({wanted}); the newest evaluation has "
            f"{_differing(wanted, (baseline or done)[0])}: evaluate first, or name the checkpoints to compare"
        )
    first = fitting[0]
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


def _differing(wanted: Wanted, candidate: Candidate) -> str:
    """Return in words in which of the wanted conditions an evaluation differs."""
    has = candidate.conditions._asdict()
    pairs = [(name, has[name]) for name, value in wanted.asked().items() if has[name] != value]
    return ", ".join(f"{CONDITION_NAMES[name]} {value!r}" for name, value in pairs)


def _wanted_note(first: Candidate, wanted: Wanted) -> list[str]:
    """Say whose conditions the table has."""
    if not wanted.asked():
        return []
    if wanted.fits(first.conditions):
        return ["conditions: those of the config"]
    return [f"conditions: those that the named checkpoints share; the config has other ones ({wanted})"]


def _left_out_note(first: Candidate, left_out: list[Candidate]) -> list[str]:
    if not left_out:
        return []
    other = describe_difference(first, left_out[0])
    number = "1 evaluation" if len(left_out) == 1 else f"{len(left_out)} evaluations"
    return [f"left out under other conditions: {number}, the newest of which differs in {other}"]


def _device_note(rows: list[Candidate]) -> list[str]:
    """Near-ties fall differently on another device; say so where rows were computed on several."""
    devices = sorted({str(row.device) for row in rows})
    if len(devices) < 2:
        return []
    return [f"the drafter ran on different devices ({', '.join(devices)}): small differences may come from that"]
