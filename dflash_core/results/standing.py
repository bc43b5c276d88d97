"""Where one evaluation stands: against the step before it, the best of its run, and a baseline.

Every difference is paired over the same prompts and made only between evaluations under the same conditions;
where there is none, `why_not` says why in a few words. Late steps are put where they belong: the step before
is the highest lower one that was scored, whenever that was.

    step      100   200   300   400                   a decline that no single step shows:
    tau       2.0   3.0   2.95  2.85   <- scored now  400 is told from 200, and 300 was not: it has fallen
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from dflash_core.acceptance.bounds import DEFAULT_LEVEL
from dflash_core.acceptance.statistics import PairedDifference
from dflash_core.errors import InputError, ResultsError, one_line
from dflash_core.results.compare import (
    CountsOfPrompts,
    Tau,
    paired,
    paired_by,
    read_candidates,
    read_counts,
    sliced,
    tau_of,
    told_from_the_best,
)
from dflash_core.results.connection import DEFAULT_WAIT_S, PathLike, reading
from dflash_core.results.selection import Candidate, Conditions, Wanted, describe_difference, find

MOST_RIVALS = 20
"""So many of the best earlier steps decide whether a step has fallen; the others cannot lead it by more."""

What = Literal["previous", "best", "baseline"]
NAMES: dict[What, str] = {"previous": "the step before", "best": "the best other", "baseline": "the baseline"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """This evaluation minus another one, on the prompts that both have."""

    what: What
    label: str | None = None
    """`run:step` of the other one; None where there is none."""
    difference: PairedDifference | None = None
    datasets: Mapping[str, PairedDifference] = field(default_factory=dict)
    why_not: str | None = None
    """Why there is no difference."""

    @property
    def is_better(self) -> bool:
        """Tell whether the whole 95 % interval lies above 0."""
        return self.difference is not None and _bounds(self.difference)[0] > 0

    @property
    def is_worse(self) -> bool:
        """Tell whether the whole 95 % interval lies below 0."""
        return self.difference is not None and _bounds(self.difference)[1] < 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """One evaluation beside those that it may be compared with."""

    evaluation_id: str
    checkpoint_id: str
    run: str
    step: int | None
    label: str
    url: str
    started_at: datetime
    """In UTC, without a zone."""
    conditions: Conditions
    device: str | None
    tau: Tau
    taus: Mapping[str, Tau]
    """Per dataset."""
    previous: Change
    best: Change
    """The best of all other checkpoints of the run, whatever their steps."""
    baseline: Change
    has_fallen: bool
    """Told from the best of the steps up to it (95 %, corrected for their number), as the step before was not."""
    fell_below_baseline: bool
    """Told to be worse than the baseline, as the step before was not."""

    @property
    def changes(self) -> tuple[Change, Change, Change]:
        """All three differences."""
        return self.previous, self.best, self.baseline


def read_standing(
    path: PathLike, evaluation_id: str, baseline: str | None = None, *, wait_s: float = DEFAULT_WAIT_S
) -> Standing:
    """Return where an evaluation stands.

    Args:
        path: of the database.
        evaluation_id: in full; it must be done.
        baseline: what else to compare with, as `compare --baseline` takes it.
        wait_s: how long to wait, in seconds, while another process writes.

    Raises:
        ResultsError: there is no such evaluation, or it has no numbers.
        NoResults: there is no database.
    """
    with reading(path, wait_s=wait_s) as connection:
        candidates = read_candidates(connection)
        own = next((one for one in candidates if one.evaluation_id == evaluation_id and one.status == "done"), None)
        if own is None:
            raise ResultsError(f"no evaluation {evaluation_id[:12]!r} with numbers in {str(path)!r}; evaluate it again")
        rivals = _rivals(candidates, own)
        found, why_not = _baseline(candidates, own, baseline)
        wanted = {one.evaluation_id for one in [own, *_kept(rivals, own), *([found] if found else [])]}
        counts = read_counts(connection, sorted(wanted))
    earlier = _earlier(rivals, own)
    before = earlier[-1] if earlier else None
    own_counts = counts[own.evaluation_id]
    fell_below = False
    against_baseline = _change("baseline", own, found, counts, why_not=why_not)
    if found is not None and before is not None and against_baseline.is_worse:
        fell_below = not _change("baseline", before, found, counts).is_worse
    return Standing(
        evaluation_id=own.evaluation_id,
        checkpoint_id=own.checkpoint_id,
        run=own.run,
        step=own.step,
        label=own.label,
        url=own.url,
        started_at=own.started_at,
        conditions=own.conditions,
        device=own.device,
        tau=tau_of(own_counts, own.conditions.highest_tau),
        taus={name: tau_of(part, own.conditions.highest_tau) for name, part in sliced(own_counts, "dataset").items()},
        previous=_change("previous", own, before, counts, why_not=_why_no_step_before(candidates, own)),
        best=_change("best", own, _best(rivals), counts, why_not="no other checkpoint under these conditions"),
        baseline=against_baseline,
        has_fallen=_has_fallen(own, earlier, counts),
        fell_below_baseline=fell_below,
    )


def _rivals(candidates: Sequence[Candidate], own: Candidate) -> list[Candidate]:
    """Return the newest evaluation of each other checkpoint of the run under the same conditions, by step."""
    newest: dict[str, Candidate] = {}
    for one in sorted(candidates, key=lambda one: one.started_at):
        if (
            one.status == "done"
            and one.tau_pooled is not None
            and one.run == own.run
            and one.checkpoint_id != own.checkpoint_id
            and one.conditions == own.conditions
        ):
            newest[one.checkpoint_id] = one
    return sorted(newest.values(), key=lambda one: (one.step or 0, one.started_at))


def _earlier(rivals: Sequence[Candidate], own: Candidate) -> list[Candidate]:
    if own.step is None:
        return []
    return [one for one in rivals if one.step is not None and one.step < own.step]


def _best(rivals: Sequence[Candidate]) -> Candidate | None:
    return max(rivals, key=lambda one: one.tau_pooled or 0.0, default=None)


def _leading(rivals: Sequence[Candidate]) -> list[Candidate]:
    return sorted(rivals, key=lambda one: one.tau_pooled or 0.0, reverse=True)[:MOST_RIVALS]


def _kept(rivals: Sequence[Candidate], own: Candidate) -> list[Candidate]:
    """Return those whose counts are needed: counting walks every block, and a run may have hundreds of steps."""
    earlier, best = _earlier(rivals, own), _best(rivals)
    return [*_leading(earlier), *_leading(earlier[:-1]), *earlier[-1:], *([best] if best else [])]


def _baseline(
    candidates: Sequence[Candidate], own: Candidate, baseline: str | None
) -> tuple[Candidate | None, str | None]:
    """Return the evaluation that a baseline stands for under the conditions of our own, or why there is none."""
    if baseline is None:
        return None, "no baseline is configured"
    conditions = own.conditions
    wanted = Wanted(
        target=conditions.target,
        transcripts_digest=conditions.transcripts_digest,
        block_size=conditions.block_size,
    )
    try:
        found = find(candidates, baseline, wanted)
    except InputError as error:
        return None, one_line(error)
    if found[0].checkpoint_id == own.checkpoint_id:
        return None, "this is the baseline"
    same = next((one for one in found if one.conditions == conditions), None)
    if same is None:
        return None, f"{found[0].label} differs in {describe_difference(found[0], own)}"
    return same, None


def _why_no_step_before(candidates: Sequence[Candidate], own: Candidate) -> str:
    if own.step is None:
        return "it has no step"
    before = [one for one in candidates if one.run == own.run and one.status == "done" and (one.step or 0) < own.step]
    others = [one for one in before if one.step is not None and one.conditions != own.conditions]
    if not others:
        return "it is the first step of its run"
    nearest = max(others, key=lambda one: (one.step or 0, one.started_at))
    return f"{nearest.label} differs in {describe_difference(nearest, own)}"


def _change(
    what: What,
    own: Candidate,
    other: Candidate | None,
    counts: Mapping[str, CountsOfPrompts],
    *,
    why_not: str | None = None,
) -> Change:
    if other is None:
        return Change(what=what, why_not=why_not)
    a, b = counts[other.evaluation_id], counts[own.evaluation_id]
    return Change(what=what, label=other.label, difference=paired(a, b), datasets=paired_by(a, b, "dataset"))


def _has_fallen(own: Candidate, earlier: list[Candidate], counts: Mapping[str, CountsOfPrompts]) -> bool:
    """Tell whether a step has just come to be led by more than chance.

    The interval against the one best step before would be too sure of itself: that one was chosen for its luck.
    """
    return _is_led(own, earlier, counts) and not _is_led(earlier[-1], earlier[:-1], counts)


def _is_led(one: Candidate, earlier: Sequence[Candidate], counts: Mapping[str, CountsOfPrompts]) -> bool:
    if not earlier:
        return False
    of_all = [counts[rival.evaluation_id] for rival in [*_leading(earlier), one]]
    # Those that are left out were looked at too: the 5 % are shared by as many groups of rivals as there are.
    level = 1 - (1 - DEFAULT_LEVEL) * min(1.0, MOST_RIVALS / len(earlier))
    return bool(told_from_the_best(of_all, places=[len(of_all) - 1], level=level)[0])


def _bounds(found: PairedDifference) -> tuple[float, float]:
    """Return the interval; where all prompts differ alike there is none, and 6 of them are an answer (a sign test)."""
    if found.word is not None and found.p_value <= 1 - DEFAULT_LEVEL:
        return found.difference, found.difference
    return found.ci_low, found.ci_high
