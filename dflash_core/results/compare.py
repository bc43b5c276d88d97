"""Comparing checkpoints on the same prompts.

With a baseline every other row is compared with it; without one every row is compared with the
row before it: in the order typed, or else with the step before in the same run. Differences are
paired over the prompts that both rows have; turns of one conversation are resampled together.

Intervals are made here, from the stored counts: those of rows that an older version wrote are not used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import duckdb
import numpy as np

from dflash_core.acceptance import statistics
from dflash_core.acceptance.bounds import DEFAULT_LEVEL
from dflash_core.acceptance.power import prompts_needed
from dflash_core.acceptance.ranking import told_from_best
from dflash_core.acceptance.statistics import PairedDifference, conversation_of, paired_difference
from dflash_core.results.connection import DEFAULT_WAIT_S, PathLike, reading
from dflash_core.results.selection import CONDITIONS_SQL, Candidate, Conditions, Wanted, find, select
from dflash_core.results.verdicts import NO_VERDICT, Verdict, judge_differences

DEFAULT_WANTED_DIFFERENCE = 0.1
"""In tokens per verification step: how many prompts would show so much is told where nobody asks for another."""

_CANDIDATES = f"""
    SELECT
        evaluation_id, checkpoint_id, run, step, url, status, error, started_at, device, acceptance.tau_pooled,
        {CONDITIONS_SQL}
    FROM evaluations
    JOIN checkpoints USING (checkpoint_id)
    LEFT JOIN (FROM acceptance WHERE slice = 'all') AS acceptance USING (evaluation_id)
"""
_COUNTS = """
    SELECT evaluation_id, prompt_id, dataset, prompt_group, num_emitted_tokens, num_verification_steps
    FROM prompt_acceptance WHERE list_contains(?, evaluation_id)
"""


class Counts(NamedTuple):
    """What one drafter did on one prompt."""

    dataset: str
    group: str | None
    num_emitted_tokens: int
    num_verification_steps: int


CountsOfPrompts = Mapping[str, Counts]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tau:
    """Both means over one set of prompts, and the interval of the pooled one."""

    tau_pooled: float
    """NaN where nothing was measured."""
    ci_low: float
    ci_high: float
    tau_prompt_mean: float
    num_prompts: int
    num_verification_steps: int
    word: str | None
    """Why there is no interval."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparisonRow:
    """One checkpoint in the table."""

    evaluation_id: str
    label: str
    """`run:step`, or the run where there is no step."""
    run: str
    step: int | None
    url: str
    tau: Tau
    """Over all prompts of this checkpoint."""
    compared_with: str | None
    """Label of the row that the difference is to; None for the baseline and for a first row."""
    difference: PairedDifference | None
    """This row's pooled tau minus the other's, on the prompts that both have."""
    verdict: Verdict | None
    """Better, worse or not to tell, with Holm's correction for all rows of the table; None without a difference."""
    num_prompts_needed: int | None
    """Prompts that would show the wanted difference in 80 % of the cases; None where nothing can be said."""
    counts: CountsOfPrompts
    """What this checkpoint did on each prompt."""
    counts_of_other: CountsOfPrompts
    """What the one that it is compared with did; empty without one."""
    highest_tau: int | None
    """What its tau cannot pass."""

    @property
    def p_adjusted(self) -> float:
        """The p-value after Holm's correction for all rows of the table; NaN where there is none."""
        return math.nan if self.verdict is None else self.verdict.p_adjusted

    @property
    def datasets(self) -> dict[str, PairedDifference]:
        """The same difference per dataset, made when it is asked for."""
        return self.differences_by("dataset")

    @property
    def groups(self) -> dict[str, PairedDifference]:
        """The same difference per group of prompts."""
        return self.differences_by("group")

    def differences_by(self, by: str) -> dict[str, PairedDifference]:
        """Return the difference on each slice that both have prompts of."""
        return paired_by(self.counts_of_other, self.counts, by)

    def taus_by(self, by: str) -> dict[str, Tau]:
        """Return the taus of each dataset or group."""
        return {name: tau_of(part, self.highest_tau) for name, part in sliced(self.counts, by).items()}

    def as_json(self) -> dict[str, Any]:
        """Return the row as plain values, the taus of all prompts at the top."""
        own = ("evaluation_id", "label", "run", "step", "url", "compared_with", "num_prompts_needed")
        tau = asdict(self.tau)
        return {name: getattr(self, name) for name in own} | {
            "tau_word": tau.pop("word"),
            **tau,
            "difference": None if self.difference is None else self.difference.as_json(),
            **(NO_VERDICT if self.verdict is None else self.verdict.as_json()),
            "datasets": {name: found.as_json() for name, found in self.datasets.items()},
            "groups": {name: found.as_json() for name, found in self.groups.items()},
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A table of checkpoints that may be compared."""

    rows: tuple[ComparisonRow, ...]
    conditions: Conditions
    """What all rows share."""
    baseline: str | None
    """Label of the row that `--baseline` named; None: each row is compared with the one before."""
    not_told_from_best: tuple[str, ...]
    """Labels of the rows that cannot be told from the best on the prompts that all rows have; empty with one row."""
    wanted_difference: float
    """What `num_prompts_needed` of the rows is for, in tokens per verification step."""
    notes: tuple[str, ...]
    """What a reader must know beside the numbers, one line each."""

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as JSON values; a number that was not measured is None."""
        return without_nan(
            {
                "baseline": self.baseline,
                "conditions": self.conditions._asdict(),
                "notes": list(self.notes),
                "not_told_from_best": list(self.not_told_from_best),
                "wanted_difference": self.wanted_difference,
                "rows": [row.as_json() for row in self.rows],
            }
        )


def compare(
    path: PathLike,
    selectors: Sequence[str] = (),
    baseline: str | None = None,
    *,
    wanted: Wanted | None = None,
    wanted_difference: float = DEFAULT_WANTED_DIFFERENCE,
    wait_s: float = DEFAULT_WAIT_S,
) -> Comparison:
    """Compare evaluations on the prompts that they share.

    Args:
        path: of the database.
        selectors: what to compare, see `selection.select`; none: every step of every run.
        baseline: a selector for the row that all others are compared with; None compares each row
            with the row before it (without selectors: only within one run).
        wanted: the conditions to take, where several were evaluated.
        wanted_difference: how many prompts would show it is told per row, in tokens per verification step.
        wait_s: how long to wait, in seconds, while another process writes.

    Raises:
        InputError: a selector is wrong, or the evaluations may not be compared.
        NoResults: there is no database yet.
    """
    with reading(path, wait_s=wait_s) as connection:
        selection = select(read_candidates(connection), selectors, baseline, wanted)
        counts = read_counts(connection, [row.evaluation_id for row in selection.rows])
    others = _compared_with(selection.rows, selection.baseline, is_typed=bool(selectors))
    differences = [
        None if other is None else paired(counts[other.evaluation_id], counts[row.evaluation_id])
        for row, other in zip(selection.rows, others, strict=True)
    ]
    verdicts = judge_differences(differences)
    rows = []
    for row, other, found, verdict in zip(selection.rows, others, differences, verdicts, strict=True):
        own = counts[row.evaluation_id]
        of_other = {} if other is None else counts[other.evaluation_id]
        rows.append(
            ComparisonRow(
                evaluation_id=row.evaluation_id,
                label=row.label,
                run=row.run,
                step=row.step,
                url=row.url,
                tau=tau_of(own, row.conditions.highest_tau),
                compared_with=None if other is None else other.label,
                difference=found,
                verdict=verdict,
                num_prompts_needed=_needed(found, wanted_difference),
                counts=own,
                counts_of_other=of_other,
                highest_tau=row.conditions.highest_tau,
            )
        )
    return Comparison(
        rows=tuple(rows),
        conditions=selection.rows[0].conditions,
        baseline=None if selection.baseline is None else selection.baseline.label,
        not_told_from_best=_not_told_from_best(selection.rows, counts),
        wanted_difference=wanted_difference,
        notes=(*selection.notes, *_conversations_note(counts)),
    )


def url_of(path: PathLike, selector: str, wanted: Wanted | None = None, *, wait_s: float = DEFAULT_WAIT_S) -> str:
    """Return the address of the checkpoint that a selector of `compare` stands for.

    Raises:
        InputError: it stands for nothing, or for several checkpoints.
        NoResults: there is no database yet.
    """
    with reading(path, wait_s=wait_s) as connection:
        return find(read_candidates(connection), selector, wanted or Wanted())[0].url


def columns_of(a: CountsOfPrompts, b: CountsOfPrompts) -> tuple[list[list[int]], list[str]]:
    """Return tokens and steps of a and of b on the prompts that both have, and each prompt's conversation."""
    shared = sorted(a.keys() & b.keys())
    columns = [
        [getattr(side[prompt_id], name) for prompt_id in shared]
        for side in (a, b)
        for name in ("num_emitted_tokens", "num_verification_steps")
    ]
    return columns, [conversation_of(prompt_id) for prompt_id in shared]


def paired(a: CountsOfPrompts, b: CountsOfPrompts) -> PairedDifference:
    """Return b minus a over the prompts that both have."""
    columns, clusters = columns_of(a, b)
    return paired_difference(*columns, clusters=clusters)


def read_candidates(connection: duckdb.DuckDBPyConnection) -> list[Candidate]:
    """Return all stored evaluations, also those without numbers."""
    cursor = connection.execute(_CANDIDATES)
    names = [column[0] for column in cursor.description or []]
    found = []
    for values in cursor.fetchall():
        row = dict(zip(names, values, strict=True))
        conditions = Conditions(**{name: row.pop(name) for name in Conditions._fields})
        found.append(Candidate(**row, conditions=conditions))
    return found


def read_counts(connection: duckdb.DuckDBPyConnection, ids: Sequence[str]) -> dict[str, dict[str, Counts]]:
    """Return evaluation id to prompt id to counts."""
    counts: dict[str, dict[str, Counts]] = {evaluation_id: {} for evaluation_id in ids}
    for evaluation_id, prompt_id, *values in connection.execute(_COUNTS, [list(ids)]).fetchall():
        counts[evaluation_id][prompt_id] = Counts(*values)
    return counts


def _compared_with(rows: Sequence[Candidate], baseline: Candidate | None, *, is_typed: bool) -> list[Candidate | None]:
    if baseline is not None:
        return [None if row is baseline else baseline for row in rows]
    before = [None, *rows[:-1]]
    return [
        other if other is not None and (is_typed or other.run == row.run) else None
        for row, other in zip(rows, before, strict=True)
    ]


def paired_by(a: CountsOfPrompts, b: CountsOfPrompts, by: str) -> dict[str, PairedDifference]:
    """Return b minus a on each dataset or group that both have prompts of."""
    of_a, of_b = sliced(a, by), sliced(b, by)
    return {name: paired(of_a[name], of_b[name]) for name in sorted(of_a.keys() & of_b.keys())}


def sliced(counts: CountsOfPrompts, by: str) -> dict[str, dict[str, Counts]]:
    """Return the counts of each dataset or group; a prompt without one is in none."""
    parts: dict[str, dict[str, Counts]] = {}
    for prompt_id, found in counts.items():
        name = getattr(found, by)
        if name is not None:
            parts.setdefault(name, {})[prompt_id] = found
    return dict(sorted(parts.items()))


def tau_of(counts: CountsOfPrompts, highest_tau: int | None) -> Tau:
    """Return both means over prompts, and the interval of the pooled one."""
    emitted = [found.num_emitted_tokens for found in counts.values()]
    steps = [found.num_verification_steps for found in counts.values()]
    interval = statistics.bootstrap_interval(
        emitted, steps, clusters=[conversation_of(name) for name in counts], highest=highest_tau or math.inf
    )
    return Tau(
        tau_pooled=statistics.tau_pooled(emitted, steps),
        ci_low=interval.low,
        ci_high=interval.high,
        tau_prompt_mean=statistics.tau_prompt_mean(emitted, steps),
        num_prompts=sum(number > 0 for number in steps),
        num_verification_steps=sum(steps),
        word=interval.word,
    )


def _needed(found: PairedDifference | None, wanted: float) -> int | None:
    return None if found is None else prompts_needed(found.standard_error, found.num_units, wanted)


def _not_told_from_best(rows: Sequence[Candidate], counts: Mapping[str, CountsOfPrompts]) -> tuple[str, ...]:
    """Return the labels of the rows that no other row leads by more than chance."""
    if len(rows) < 2:
        return ()
    told = told_from_the_best([counts[row.evaluation_id] for row in rows])
    return tuple(row.label for row, is_told in zip(rows, told, strict=True) if not is_told)


def told_from_the_best(
    counts: Sequence[CountsOfPrompts], places: Sequence[int] | None = None, *, level: float = DEFAULT_LEVEL
) -> Sequence[bool]:
    """Return for each drafter, or for some, whether another leads it by more than chance, on the prompts of all."""
    shared = sorted(set.intersection(*(set(of_one) for of_one in counts)))
    conversations = sorted({conversation_of(prompt_id) for prompt_id in shared})
    place = {name: number for number, name in enumerate(conversations)}
    sums = np.zeros((2, len(counts), len(conversations)))
    for number, of_one in enumerate(counts):
        for prompt_id in shared:
            sums[:, number, place[conversation_of(prompt_id)]] += of_one[prompt_id][2:]
    return told_from_best(sums[0], sums[1], places=places, level=level)


def _conversations_note(counts: Mapping[str, CountsOfPrompts]) -> list[str]:
    ids = {prompt_id for found in counts.values() for prompt_id in found}
    conversations = {conversation_of(prompt_id) for prompt_id in ids}
    if len(conversations) == len(ids):
        return []
    return [
        f"turns of one conversation are resampled together: {len(ids)} prompts are {len(conversations)} conversations"
    ]


def without_nan(value: Any) -> Any:
    """Return JSON values with None for NaN, at any depth."""
    if isinstance(value, dict):
        return {key: without_nan(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(entry) for entry in value]
    return None if isinstance(value, float) and math.isnan(value) else value
