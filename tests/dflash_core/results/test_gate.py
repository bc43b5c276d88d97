"""The gate: worse, not worse, or the data cannot tell."""

import dataclasses
import json
import math

import numpy as np
import pytest

from dflash_core.drafter.spec import ROW_ALIGNMENTS
from dflash_core.errors import InputError
from dflash_core.results.compare import Comparison, ComparisonRow, Counts, Tau, compare, paired
from dflash_core.results.database import write_evaluation
from dflash_core.results.gate import Limit, as_json, gate, parse_limit
from dflash_core.results.selection import Conditions
from tests.dflash_core.acceptance.simulated import prompt_set, walk
from tests.dflash_core.results.builders import make_prompts, make_record


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("results") / "acceptance.duckdb"
    for place, (step, quality) in enumerate(((900, 0.2), (1000, 0.25), (10000, 0.8))):
        record = make_record(f"eval-{step}", step=step, quality=quality, seed=place, prompts=make_prompts(24))
        write_evaluation(path, record)
    return path


def table_of(*walks):
    """Return a comparison of these counts with the first, without a database."""
    counts = {
        f"e{place}": {
            f"p{number}": Counts("d", None, int(e), int(s)) for number, (e, s) in enumerate(zip(*one, strict=True))
        }
        for place, one in enumerate(walks)
    }
    nothing = Tau(
        tau_pooled=math.nan, ci_low=math.nan, ci_high=math.nan, tau_prompt_mean=math.nan, num_prompts=0,
        num_verification_steps=0, word=None,
    )  # fmt: skip
    rows = [
        ComparisonRow(
            evaluation_id=name, label=name, run="r", step=None, url="", tau=nothing, verdict=None,
            compared_with="e0" if place else None, difference=paired(counts["e0"], found) if place else None,
            num_prompts_needed=None, counts=found, counts_of_other=counts["e0"] if place else {}, highest_tau=8,
        )
        for place, (name, found) in enumerate(counts.items())
    ]  # fmt: skip
    conditions = Conditions(**dict.fromkeys(Conditions._fields) | {"block_size": 8})
    return Comparison(
        rows=tuple(rows), conditions=conditions, baseline="e0", not_told_from_best=(), wanted_difference=0.1, notes=()
    )  # fmt: skip


def test_a_clear_loss_is_worse_and_a_clear_gain_is_not(path):
    worse = gate(compare(path, ["900"], "10000"), Limit(-0.05))
    assert (worse.passed, worse.verdict) == (False, "worse")
    assert worse.message.startswith("gate failed, worse: the difference to run-a:10000 of run-a:900, -")
    assert worse.message.endswith(" is below -0.05")
    assert worse.judgements[0].level == 0.95
    better = gate(compare(path, ["10000"], "900"), Limit(0.0))
    assert (better.passed, better.verdict) == (True, "not worse")
    assert "\n" not in worse.message + better.message


def test_a_limit_inside_the_interval_passes_and_says_that_the_data_cannot_tell(path):
    found = compare(path, ["1000"], "900")
    result = gate(found, Limit(found.rows[1].difference.difference))
    assert (result.passed, result.verdict) == (True, "cannot tell")
    assert "the data cannot tell" in result.message
    (judgement,) = result.judgements
    assert judgement.ci_low < found.rows[1].difference.difference < judgement.ci_high


def test_a_loss_below_the_limit_by_its_value_alone_does_not_close_the_gate(path):
    found = compare(path, ["900"], "1000")
    value, high = found.rows[1].difference.difference, found.rows[1].difference.ci_high
    assert gate(found, Limit(value + 1e-3)).verdict == "cannot tell"
    assert gate(found, Limit(high + 1e-3)).verdict == "worse"
    assert gate(found, Limit(found.rows[1].difference.ci_low)).verdict == "not worse"


def test_several_checkpoints_are_judged_together_with_wider_intervals(path):
    found = compare(path, [], "900")
    result = gate(found, Limit(-0.5))
    assert [one.level for one in result.judgements] == pytest.approx([0.975, 0.975]), "both are told at once"
    assert [one.label for one in result.judgements] == ["run-a:1000", "run-a:10000"]
    alone = gate(compare(path, ["1000"], "900"), Limit(-0.5)).judgements[0]
    assert result.judgements[0].ci_low < alone.ci_low
    assert result.judgements[0].ci_high > alone.ci_high
    mixed = gate(compare(path, ["900", "1000"], "10000"), Limit(-0.1))
    assert mixed.verdict == "worse"
    assert "2 of 2 checkpoints are judged so" in mixed.message


def test_per_cent_is_of_the_baseline(path):
    found = compare(path, ["900"], "10000")
    taus = [row.tau.tau_pooled for row in found.rows]
    result = gate(found, parse_limit("-2%"))
    assert result.judgements[0].value == pytest.approx(taus[1] / taus[0] - 1)
    assert result.verdict == "worse"
    assert result.message.endswith(" %), is below -2 %")
    assert gate(found, parse_limit("-99%")).verdict == "not worse"


def test_without_baseline_the_lowest_tau_is_judged(path):
    found = compare(path, ["900", "10000"])
    lowest = min(row.tau.tau_pooled for row in found.rows)
    assert gate(found, Limit(1.0)).verdict == "not worse"
    assert gate(found, Limit(lowest)).verdict == "cannot tell"
    closed = gate(found, Limit(3.9))
    assert closed.verdict == "worse"
    assert f"the tau of run-a:900, {lowest:.3f} (97.5 % interval" in closed.message
    with pytest.raises(InputError, match="give --baseline to judge a difference"):
        gate(found, Limit(-0.05))
    with pytest.raises(InputError, match="per cent of a baseline: give --baseline"):
        gate(found, parse_limit("-2%"))


def test_nothing_to_judge_and_nothing_measured_close_the_gate(path, tmp_path):
    alone = gate(compare(path, ["900"], "900"), Limit(-10.0))
    assert (alone.passed, alone.verdict) == (False, "cannot tell")
    assert "there is nothing to judge the difference to run-a:900 of" in alone.message
    one_token = tuple(dataclasses.replace(prompt, num_response_tokens=1) for prompt in make_prompts(2))
    write_evaluation(tmp_path / "db", make_record("eval-empty", step=1, prompts=one_token))
    unmeasured = gate(compare(tmp_path / "db"), Limit(1.5))
    assert not unmeasured.passed
    assert unmeasured.message == "gate failed: the tau of run-a:1 was not measured"
    with pytest.raises(InputError, match="must be a number"):
        gate(compare(path, ["900"], "900"), Limit(math.nan))


def test_one_prompt_cannot_tell_and_says_why(tmp_path):
    for step, quality in ((1, 0.9), (2, 0.1)):
        record = make_record(f"eval-{step}", step=step, quality=quality, seed=step, prompts=make_prompts(1))
        write_evaluation(tmp_path / "db", record)
    result = gate(compare(tmp_path / "db", ["2"], "1"), Limit(-0.05))
    assert (result.passed, result.verdict) == (True, "cannot tell")
    assert "it takes 2 prompts at least" in result.message


def test_the_same_counts_on_every_prompt_are_not_worse_and_the_same_loss_is():
    steps = np.arange(10, 34)
    same = gate(table_of((3 * steps, steps), (3 * steps, steps)), Limit(-0.05))
    assert (same.verdict, same.judgements[0].word) == ("not worse", "no interval: both did the same on every prompt")
    lost = gate(table_of((3 * steps, steps), (2 * steps, steps)), Limit(-0.05))
    assert (lost.verdict, lost.passed) == ("worse", False)
    assert "the difference is the same on every prompt" in lost.message
    few = gate(table_of((3 * steps[:5], steps[:5]), (2 * steps[:5], steps[:5])), Limit(-0.05))
    assert few.verdict == "cannot tell"


def test_a_drafter_of_which_nothing_was_ever_accepted_is_below_a_limit_that_no_unseen_prompt_could_lift_it_to(tmp_path):
    write_evaluation(tmp_path / "db", make_record("eval-0", step=1, quality=0.0, prompts=make_prompts(9)))
    found = compare(tmp_path / "db")
    assert found.rows[0].tau.word == "no interval: every prompt has the same tau"
    # At most 1 - 0.025^(1/9) = 34 % of all prompts were not seen among 9; with tau 4 each the mean is 2.01.
    assert gate(found, Limit(2.0)).verdict == "cannot tell"
    assert gate(found, Limit(2.02)).verdict == "worse"
    assert gate(found, Limit(1.0)).verdict == "not worse"


@pytest.mark.parametrize("quality", [5.0, 1.2])
def test_an_anchor_shifted_drafter_may_pass_its_block_size(tmp_path, quality):
    """Its block of 4 slots drafts 4 tokens, so that a step emits up to 5."""
    spec = make_record().spec | {"row_alignment": ROW_ALIGNMENTS["anchor_shifted"]}
    prompts = tuple(dataclasses.replace(prompt, num_response_tokens=46) for prompt in make_prompts(12))
    record = make_record("eval-1", quality=quality, block_size=5, prompts=prompts, spec=spec, num_drafts=4)
    write_evaluation(tmp_path / "db", dataclasses.replace(record, block_size=4))
    found = compare(tmp_path / "db")
    tau = found.rows[0].tau.tau_pooled
    assert tau > 4
    (judgement,) = gate(found, Limit(4.9)).judgements
    assert judgement.verdict == "cannot tell"
    if tau == 5:
        assert judgement.word == "no interval: every prompt has the same tau"
    else:
        assert judgement.ci_low < tau < judgement.ci_high <= 5


def test_the_answer_is_json(path):
    values = json.loads(json.dumps(as_json(gate(compare(path, [], "900"), Limit(0.0))), allow_nan=False))
    assert values["verdict"] in ("worse", "not worse", "cannot tell")
    assert set(values["judgements"][0]) == {"checkpoint", "verdict", "value", "level", "ci_low", "ci_high", "word"}


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("-0.05", (-0.05, False)),
        ("0", (0.0, False)),
        ("-2%", (-0.02, True)),
        ("+1.5 %", (0.015, True)),
        (".5", (0.5, False)),
    ],
)
def test_a_limit_is_a_number_or_per_cent(text, limit):
    assert parse_limit(text) == pytest.approx(limit)


@pytest.mark.parametrize("text", ["", "a lot", "nan", "-2%%", "1e-2", "--1"])
def test_another_limit_is_refused(text):
    with pytest.raises(InputError, match="must be a number or per cent"):
        parse_limit(text)


@pytest.mark.parametrize(("num_prompts", "num_checkpoints"), [(24, 1), (60, 1), (24, 4)])
def test_false_alarms_are_as_rare_as_said(num_prompts, num_checkpoints):
    """All checkpoints are truly as good as the baseline, and the gate asks for just that."""
    generator = np.random.default_rng([num_prompts, num_checkpoints])
    num_trials, num_closed = 250, 0
    for _ in range(num_trials):
        rate, tokens = prompt_set(generator, "middling", num_prompts)
        moved = np.clip(rate + generator.normal(0, 0.08, size=(num_checkpoints + 1, num_prompts)), 0.01, 0.97)
        walks = [walk(generator, one, tokens) for one in moved]
        num_closed += not gate(table_of(*walks), Limit(0.0)).passed
    # 5 % and three standard errors of 250 trials.
    assert num_closed / num_trials <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / num_trials)
