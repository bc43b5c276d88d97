"""What came of a soak: each content of each step against a clean run, and against what the watch said."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb

from dflash_core.config import Config
from dflash_core.results import database
from dflash_core.results.connection import reading
from dflash_core.store_opening import store_of
from tests.support.direct import evaluate_directly
from tests.support.soak_plan import GONE, SOUND
from tests.support.soak_training import Content

_TOLD = re.compile(r"\d\d:\d\d:\d\d (waiting|failed|vanished)\s+step_(\d+)\s+(\S.*)")
_NUMBERS = """
    SELECT step, weights_sha256, evaluation_id, slice, dataset, acceptance.* EXCLUDE (evaluation_id, slice, dataset)
    FROM acceptance JOIN evaluations USING (evaluation_id) JOIN checkpoints USING (checkpoint_id)
    WHERE status = 'done'
"""
_ERRORS = """
    SELECT step, status, error FROM evaluations JOIN checkpoints USING (checkpoint_id) WHERE status <> 'done'
"""
_CONTRADICTIONS = {
    "an evaluation has two rows for one prompt and anchor": """
        SELECT evaluation_id FROM blocks GROUP BY evaluation_id, prompt_id, anchor_index HAVING count(*) > 1""",
    "rows of blocks belong to no evaluation that is done": """
        SELECT evaluation_id FROM blocks ANTI JOIN (FROM evaluations WHERE status = 'done') USING (evaluation_id)""",
    "rows of acceptance belong to no evaluation that is done": """
        SELECT evaluation_id FROM acceptance
        ANTI JOIN (FROM evaluations WHERE status = 'done') USING (evaluation_id)""",
    "an evaluation that is done has no blocks": """
        SELECT evaluation_id FROM evaluations ANTI JOIN blocks USING (evaluation_id) WHERE status = 'done'""",
    "an evaluation has no checkpoint": """
        SELECT evaluation_id FROM evaluations ANTI JOIN checkpoints USING (checkpoint_id)""",
    "acceptance does not say what the blocks say": """
        SELECT evaluation_id FROM acceptance JOIN (
            SELECT evaluation_id, count(*) AS steps, sum(num_emitted_tokens) AS emitted,
                sum(num_accepted_drafts) AS accepted
            FROM blocks WHERE is_on_walk GROUP BY evaluation_id
        ) USING (evaluation_id)
        WHERE slice = 'all' AND (steps, emitted, accepted)
            IS DISTINCT FROM (num_verification_steps, num_emitted_tokens, num_accepted_drafts)""",
}
Numbers = dict[tuple[str, str], dict[str, Any]]
"""Slice and dataset to the numbers of one evaluation."""


@dataclass
class Verdict:
    """What a soak found; all but the counts must be empty."""

    counts: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    """Sound checkpoints without an evaluation."""
    doubled: list[str] = field(default_factory=list)
    """Contents with more than one."""
    wrong: list[str] = field(default_factory=list)
    """Evaluations with other numbers than the clean run's, or of nothing that was ever written."""
    unexplained: list[str] = field(default_factory=list)
    """Unsound checkpoints without a reason."""
    unseen: list[str] = field(default_factory=list)
    """Checkpoints that went while a watch read them that was then killed before it could say so."""
    damage: list[str] = field(default_factory=list)
    """What the database, the store or the processes left behind."""

    @property
    def is_open(self) -> bool:
        """Tell whether something is still to come that the watch may do by itself."""
        return bool(self.lost or self.unexplained)


class Judge:
    """Knows what the numbers should be, from the same weights where nothing goes wrong."""

    def __init__(self, clean: Config) -> None:
        """Take the configuration of the clean run: a store and a database of its own."""
        self._clean = clean
        self._shas: dict[Path, str] = {}

    def sha(self, content: Content) -> str | None:
        """Return the digest of a content's weights, scoring them in the clean run on the first call."""
        if content.clean is None:
            return None
        if content.clean not in self._shas:
            record = evaluate_directly(self._clean, content.clean).record
            database.write_evaluation(self._clean.results, record)
            assert record.checkpoint.weights_sha256 is not None
            self._shas[content.clean] = record.checkpoint.weights_sha256
        return self._shas[content.clean]

    def judge(self, config: Config, contents: Iterable[Content], gone: set[int], log: Path) -> Verdict:
        """Compare what the results and the watch's log say with what was written."""
        verdict = Verdict()
        contents = list(contents)
        expected = _numbers(self._clean.results, [self.sha(content) for content in contents])
        found = _numbers(config.results) if Path(config.results).is_file() else {}
        errors, told = _errors(config.results), _told(log)
        verdict.counts["evaluations"] = sum(len(evaluations) for evaluations in found.values())
        known = set()
        for content in contents:
            sha, name = self.sha(content), f"step_{content.step} ({content.fate})"
            key = (content.step, sha or "")
            known.add(key)
            evaluations = found.get(key, {})
            if len(evaluations) > 1:
                verdict.doubled.append(name)
            verdict.wrong += [name for numbers in evaluations.values() if [numbers] != list(expected[key].values())]
            is_sound = content.fate in SOUND or (content.fate in GONE and content.step not in gone)
            verdict.counts["sound" if is_sound and not content.is_superseded else "not sound"] += 1
            if evaluations or content.is_superseded:
                continue
            if is_sound:
                verdict.lost.append(name)
            elif reason := errors.get(content.step) or told.get(content.step):
                verdict.counts[f"reason given: {content.fate}"] += 1
                assert reason
            else:
                (verdict.unseen if content.fate in GONE else verdict.unexplained).append(name)
        verdict.wrong += [f"step_{step} of unknown weights {sha[:8]}" for step, sha in set(found) - known]
        return verdict

    def inspect_damage(self, config: Config, verdict: Verdict) -> None:
        """Add what is wrong with database and store, once nothing runs any more."""
        try:
            with reading(config.results) as connection:
                for what, query in _CONTRADICTIONS.items():
                    if rows := connection.execute(query).fetchall():
                        verdict.damage.append(f"{what}: {rows[0][0][:12]} and {len(rows) - 1} more")
                for view in ("leaderboard", "learning_curve", "paired"):
                    connection.execute(f"SELECT count(*) FROM {view}").fetchall()
            with duckdb.connect(config.results) as connection:
                connection.execute("CHECKPOINT")
        except Exception as error:  # whatever it is: it does not open
            verdict.damage.append(f"the database does not open: {error}")
        root = store_of(config).root
        for path in sorted(root.rglob("*")):
            name = path.relative_to(root).as_posix()
            if name.startswith("unfinished/"):
                kind, _, key = name.split("/")[1].rpartition("-")
                if name.count("/") == 1 and (root / kind / key).exists():
                    verdict.damage.append(f"unfinished work lies beside what was finished: {name}")
            elif path.name.endswith((".tmp", ".part", ".journal")):
                verdict.damage.append(f"a temporary file is left: {name}")


def _numbers(results: str, shas: Iterable[str | None] = ()) -> dict[tuple[int, str], dict[str, Numbers]]:
    """Return step and weights to evaluations, each with all its numbers."""
    found: dict[tuple[int, str], dict[str, Numbers]] = defaultdict(lambda: defaultdict(dict))
    list(shas)  # scored by now
    with reading(results) as connection:
        cursor = connection.execute(_NUMBERS)
        for step, sha, evaluation, slice_, dataset, *numbers in cursor.fetchall():
            found[step, sha][evaluation][slice_, dataset] = dict(enumerate(numbers))
    return found


def _errors(results: str) -> dict[int, str]:
    if not Path(results).is_file():
        return {}
    with reading(results) as connection:
        return {step: f"{status}: {error}" for step, status, error in connection.execute(_ERRORS).fetchall()}


def _told(log: Path) -> dict[int, str]:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    return {int(found[2]): f"{found[1]}: {found[3]}" for line in lines if (found := _TOLD.match(line))}
