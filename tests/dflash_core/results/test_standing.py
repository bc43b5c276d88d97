"""Where an evaluation stands: the step before, the best, a baseline, and when there is nothing to compare with."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dflash_core.drafter.spec import ROW_ALIGNMENTS
from dflash_core.errors import NoResults, ResultsError
from dflash_core.results import standing
from dflash_core.results.compare import Counts, compare
from dflash_core.results.database import write_evaluation
from dflash_core.results.records import EvaluationRecord
from dflash_core.results.standing import Standing, read_standing
from tests.dflash_core.results.builders import make_failed, make_prompts, make_record

PROMPTS = make_prompts(20)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.duckdb"


def record(step: int | None, quality: float, **changes: Any) -> EvaluationRecord:
    """One draw of the same prompts for all: qualities alone decide who is better."""
    name = changes.pop("name", f"eval-{step}")
    minutes = changes.pop("minutes", step or 0)
    return make_record(
        name,
        step=step,
        quality=quality,
        seed=changes.pop("seed", 5),
        minutes=minutes,
        prompts=changes.pop("prompts", PROMPTS),
        walk_only=True,
        **changes,
    )


def stand(path: Path, *records: EvaluationRecord, baseline: str | None = None) -> Standing:
    """Write evaluations and return the standing of the last."""
    for one in records:
        write_evaluation(path, one)
    return read_standing(path, records[-1].evaluation_id, baseline)


class TestComparisons:
    def test_the_numbers_are_those_of_compare(self, path: Path) -> None:
        found = stand(path, record(100, 0.4), record(200, 0.7), baseline="run-a:100")
        comparison = compare(path, ["200"], "100")
        row = comparison.rows[1]
        assert found.previous.difference == found.baseline.difference == found.best.difference == row.difference
        assert found.previous.datasets == row.datasets
        assert found.tau == row.tau
        assert found.taus == row.taus_by("dataset")
        assert found.previous.label == "run-a:100"
        assert found.previous.is_better

    def test_a_late_step_is_compared_with_the_step_before_it_not_the_one_scored_before(self, path: Path) -> None:
        found = stand(path, record(100, 0.4), record(300, 0.7), record(200, 0.5, minutes=999))
        assert found.previous.label == "run-a:100"
        assert found.best.label == "run-a:300"

    def test_a_step_that_was_written_again_is_not_its_own_predecessor(self, path: Path) -> None:
        found = stand(path, record(100, 0.4), record(200, 0.5), record(200, 0.6, name="again", minutes=999))
        assert found.previous.label == "run-a:100"

    def test_another_run_is_no_predecessor(self, path: Path) -> None:
        found = stand(path, record(100, 0.4, run="run-b", name="b"), record(200, 0.5))
        assert found.previous.difference is None
        assert found.previous.why_not == "it is the first step of its run"
        assert found.best.why_not == "no other checkpoint under these conditions"

    def test_other_conditions_are_not_compared_and_the_reason_names_them(self, path: Path) -> None:
        found = stand(path, record(100, 0.4, block_size=5, name="other"), record(200, 0.5), baseline="run-a:100")
        for change in (found.previous, found.baseline):
            assert change.difference is None
            assert change.why_not == "run-a:100 differs in block size 5 and 4"

    def test_a_baseline_may_be_of_another_run(self, path: Path) -> None:
        found = stand(path, record(None, 0.5, run="published", name="p"), record(200, 0.5), baseline="published")
        assert found.baseline.label == "published"
        assert found.baseline.difference is not None

    @pytest.mark.parametrize(
        ("baseline", "reason"),
        [
            (None, "no baseline is configured"),
            ("nothing-like-it", "no evaluation matches 'nothing-like-it'"),
            ("200", "this is the baseline"),
            ("best", "this is the baseline"),
        ],
    )
    def test_a_baseline_that_is_none_is_told(self, path: Path, baseline: str | None, reason: str) -> None:
        found = stand(path, record(100, 0.4), record(200, 0.7), baseline=baseline)
        assert (found.baseline.why_not or "").startswith(reason)

    def test_one_without_a_step_has_no_step_before(self, path: Path) -> None:
        found = stand(path, record(100, 0.4), record(None, 0.7))
        assert found.previous.why_not == "it has no step"
        assert found.best.label == "run-a:100"

    def test_without_numbers_there_is_no_standing(self, path: Path) -> None:
        with pytest.raises(NoResults):
            read_standing(path, "x")
        write_evaluation(path, make_failed("eval-f"))
        with pytest.raises(ResultsError, match="no evaluation 'eval-f' with numbers"):
            read_standing(path, "eval-f")

    def test_a_failed_step_is_no_predecessor(self, path: Path) -> None:
        found = stand(path, record(100, 0.4), make_failed("eval-f", step=150), record(200, 0.5))
        assert found.previous.label == "run-a:100"

    @pytest.mark.parametrize("num_prompts", [5, 6])
    def test_six_prompts_alike_are_an_answer_and_five_are_not(self, path: Path, num_prompts: int) -> None:
        """No interval can be made where every prompt moved by the same; six such prompts tell all the same."""
        prompts = tuple(dataclasses.replace(prompt, num_response_tokens=21) for prompt in PROMPTS[:num_prompts])
        never, always = record(100, 0.0, prompts=prompts), record(200, 9.0, prompts=prompts)
        found = stand(path, never, always, record(300, 0.0, prompts=prompts, name="again"))
        assert found.previous.difference is not None
        assert (found.previous.difference.difference, found.previous.difference.num_prompts) == (-3.0, num_prompts)
        assert found.previous.difference.word == "no interval: the difference is the same on every prompt"
        assert (found.previous.is_better, found.previous.is_worse) == (False, num_prompts == 6)
        risen = read_standing(path, always.evaluation_id)
        assert (risen.previous.is_better, risen.previous.is_worse) == (num_prompts == 6, False)

    def test_the_interval_of_an_anchor_shifted_drafter_is_not_cut_at_its_block_size(self, path: Path) -> None:
        """Its block of 4 slots drafts 4 tokens: a step emits up to 5."""
        spec = make_record().spec | {"row_alignment": ROW_ALIGNMENTS["anchor_shifted"]}
        drafted = record(100, 1.25, block_size=5, spec=spec, num_drafts=4)
        found = stand(path, dataclasses.replace(drafted, block_size=4))
        for tau in (found.tau, *found.taus.values()):
            assert 4 < tau.tau_pooled < tau.ci_high <= 5


class TestFalling:
    def test_a_clear_drop_is_worse_than_the_step_before(self, path: Path) -> None:
        found = stand(path, record(100, 0.4), record(200, 0.8), record(300, 0.4))
        assert found.previous.is_worse
        assert found.has_fallen

    def test_a_decline_that_no_step_shows_is_told_once(self, path: Path) -> None:
        """Each step loses a little: none is told from the one before, and the sum is."""
        # Different draws for each step, so that neighbours differ by noise.
        qualities = [0.72, 0.70, 0.67, 0.63, 0.58, 0.55, 0.51]
        standings = [
            stand(path, record(100 * (number + 1), quality, seed=number)) for number, quality in enumerate(qualities)
        ]
        fallen = [standing.step for standing in standings if standing.has_fallen]
        assert len(fallen) == 1, "once, not at each step that follows"
        assert not any(standing.has_fallen and standing.previous.is_worse for standing in standings)

    def test_equal_drafters_do_not_fall(self, path: Path) -> None:
        fallen = [stand(path, record(100 * (number + 1), 0.6, seed=number)).has_fallen for number in range(6)]
        assert not any(fallen)

    def test_only_a_step_that_was_not_below_it_falls_below_the_baseline(self, path: Path) -> None:
        base = record(None, 0.6, run="published", name="p")
        below = [
            stand(path, base, record(step, quality), baseline="published").fell_below_baseline
            for step, quality in [(100, 0.2), (200, 0.4), (300, 0.7), (400, 0.3), (500, 0.2)]
        ]
        assert below == [False, False, False, True, False]

    def test_a_long_run_reads_the_counts_of_few(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(standing, "MOST_RIVALS", 2)
        for step in range(1, 8):
            write_evaluation(path, make_record(f"e{step}", step=step, seed=step, prompts=PROMPTS[:3], minutes=step))
        asked: list[int] = []
        original = standing.read_counts

        def counted(connection: Any, ids: Any) -> Any:
            asked.append(len(ids))
            return original(connection, ids)

        monkeypatch.setattr(standing, "read_counts", counted)
        read_standing(path, "e7")
        assert 2 <= asked[0] <= 2 + 4


def test_the_longer_a_run_the_more_it_takes_to_have_fallen() -> None:
    """Of 100 equal steps the 20 best are those with most luck: 5 % of equal steps may seem led, not 17 %."""
    generator = np.random.default_rng(3)
    num_led = 0
    for _ in range(100):
        rates, steps = generator.uniform(0.3, 0.7, size=40), generator.integers(30, 90, size=40)
        counts, rows = {}, []
        for place in range(101):
            own = np.clip(rates + generator.normal(0, 0.05, 40), 0.01, 0.99)
            emitted = steps + generator.binomial(3 * steps, own)
            counts[str(place)] = {
                f"p{n}": Counts("d", None, int(e), int(s)) for n, (e, s) in enumerate(zip(emitted, steps, strict=True))
            }
            rows.append(SimpleNamespace(evaluation_id=str(place), tau_pooled=emitted.sum() / steps.sum()))
        num_led += standing._is_led(rows[-1], rows[:-1], counts)  # type: ignore[arg-type]
    assert num_led <= 100 * 0.05 + 3 * math.sqrt(100 * 0.05 * 0.95)


def test_a_prompt_less_dataset_of_the_other_has_no_change(path: Path) -> None:
    found = stand(path, record(100, 0.4), record(200, 0.5))
    assert set(found.taus) == set(found.previous.datasets) == {"chat", "code", "math"}
    assert not math.isnan(dataclasses.asdict(found.taus["chat"])["tau_pooled"])
