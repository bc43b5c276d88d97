"""Comparing stored checkpoints, and the gate."""

import dataclasses
import json
import math

import pytest

from dflash_core.acceptance.statistics import paired_difference
from dflash_core.errors import InputError, NoResults
from dflash_core.results.compare import compare, gate
from dflash_core.results.database import read_evaluation, write_evaluation
from tests.dflash_core.results.builders import make_failed, make_prompts, make_record


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("results") / "acceptance.duckdb"
    for place, (step, quality) in enumerate(((1000, 0.3), (900, 0.2), (10000, 0.8))):
        write_evaluation(path, make_record(f"eval-{step}", step=step, quality=quality, seed=place, minutes=place))
    write_evaluation(path, make_record("eval-published", run="published", step=None, quality=0.9, seed=8))
    write_evaluation(path, make_failed("eval-failed", step=20000))
    write_evaluation(path, make_failed("eval-gone", status="vanished", error="rotated away", step=30000))
    write_evaluation(path, make_failed("eval-gone-again", status="vanished", error="gone too", step=40000, minutes=2))
    write_evaluation(path, make_failed("eval-failed-once", step=40000, minutes=1))
    return path


def labels(comparison):
    return [row.label for row in comparison.rows]


def test_without_names_every_step_is_compared_with_the_step_before_it(path):
    found = compare(path)
    assert labels(found) == ["published", "run-a:900", "run-a:1000", "run-a:10000"]
    assert [row.compared_with for row in found.rows] == [None, None, "run-a:900", "run-a:1000"]
    assert found.baseline is None
    assert found.conditions.target == "SmolLM2-135M-Instruct"


def test_named_rows_keep_their_order_and_are_compared_with_the_row_before(path):
    found = compare(path, ["run-a:10000", "step_900", "eval-pub"])
    assert labels(found) == ["run-a:10000", "run-a:900", "published"]
    assert [row.compared_with for row in found.rows] == [None, "run-a:10000", "run-a:900"]


def test_with_a_baseline_every_row_is_compared_with_it(path):
    found = compare(path, [], "published")
    assert labels(found)[0] == found.baseline == "published"
    assert [row.compared_with for row in found.rows] == [None, "published", "published", "published"]
    named = compare(path, ["900", "published"], "published")
    assert labels(named) == ["published", "run-a:900"]


def test_numbers_are_the_stored_ones_and_differences_are_paired_over_prompts(path):
    row = compare(path, ["900", "1000"]).rows[1]
    stored = [read_evaluation(path, f"eval-{step}", blocks=True) for step in (900, 1000)]
    assert row.tau_pooled == stored[1]["datasets"]["all"]["tau_pooled"]
    walks_a, walks_b = (evaluation["walks"] for evaluation in stored)
    ids = sorted(walks_a)
    sums = [[function(walks[name]) for name in ids] for walks in (walks_a, walks_b) for function in (sum, len)]
    assert row.difference == paired_difference(*sums)
    assert row.difference.num_prompts == 9
    assert set(row.datasets) == {"chat", "code", "math"}
    assert sum(found.num_prompts for found in row.datasets.values()) == 9
    assert row.difference.difference == pytest.approx(
        stored[1]["datasets"]["all"]["tau_pooled"] - stored[0]["datasets"]["all"]["tau_pooled"]
    )


def test_p_values_are_adjusted_for_the_number_of_rows(path):
    rows = compare(path, [], "900").rows
    assert math.isnan(rows[0].p_adjusted)
    assert all(row.p_adjusted >= row.difference.p_value for row in rows[1:])
    assert any(row.p_adjusted > row.difference.p_value for row in rows[1:])


@pytest.mark.parametrize(
    "selector",
    [
        "eval-900",
        "run-a:900",
        "run-a:step_900",
        "900",
        "step_900",
        "ssh://me@train-box:2222/data/run-a/step_900/checkpoint.pt",
        "ssh://me@train-box:2222/data/run-a/step_900",
        "ssh://me@train-box:2222/data/run-a/step_900/",
    ],
)
def test_a_checkpoint_has_many_names(path, selector):
    assert labels(compare(path, [selector])) == ["run-a:900"]


def test_a_local_checkpoint_is_found_by_its_relative_path(tmp_path, monkeypatch):
    local = dataclasses.replace(make_record().checkpoint, url=str(tmp_path / "run/s.pt"))
    write_evaluation(tmp_path / "db", make_record(checkpoint=local))
    monkeypatch.chdir(tmp_path)
    assert compare(tmp_path / "db", ["run/s.pt"]).rows[0].evaluation_id == "eval-a"


@pytest.mark.parametrize(
    ("selectors", "words"),
    [
        pytest.param(["run-a:9000"], "nearest is 'run-a:900'", id="unknown step"),
        pytest.param(["zzz"], "known are published, run-a:1000", id="unknown name"),
        pytest.param(["20000"], "failed and has no numbers: the file is cut off", id="failed"),
        pytest.param(["30000"], "checkpoint 'run-a:30000' vanished and has no numbers: rotated", id="vanished"),
        pytest.param(["40000"], "vanished and has no numbers: gone too", id="failed, then vanished"),
        pytest.param(["run-a"], "several checkpoints: run-a:1000, run-a:10000", id="run with several steps"),
        pytest.param(["checkpoint.pt"], "several checkpoints", id="file name that all share"),
    ],
)
def test_a_name_that_stands_for_nothing_clear_is_one_line(path, selectors, words):
    with pytest.raises(InputError, match=words) as caught:
        compare(path, selectors)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_status == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param({"transcripts_digest": "other"}, "transcripts 'd1d1.*' and 'other'", id="other transcripts"),
        pytest.param({"target": "Qwen"}, "target 'SmolLM2-135M-Instruct' and 'Qwen'", id="other target"),
        pytest.param({"block_size": 8}, "block size 4 and 8", id="other block size"),
        pytest.param({"spec": {"metrics_version": 2}}, "metrics version '1' and '2'", id="other way of counting"),
    ],
)
def test_evaluations_under_other_conditions_are_refused_by_name_or_left_out(tmp_path, changes, words):
    path = tmp_path / "acceptance.duckdb"
    write_evaluation(path, make_record("eval-one", step=1))
    write_evaluation(path, make_record("eval-two", step=2, minutes=5, **changes))
    with pytest.raises(InputError, match=f"cannot be compared, they differ in {words}"):
        compare(path, ["1", "2"])
    whole = compare(path)
    assert labels(whole) == ["run-a:2"]
    assert "left out under other conditions: 1 evaluation, the newest" in whole.notes[0]


def test_of_several_evaluations_the_newest_that_all_names_share_is_taken(tmp_path):
    path = tmp_path / "acceptance.duckdb"
    write_evaluation(path, make_record("eval-1-old", step=1))
    write_evaluation(path, make_record("eval-1-new", step=1, minutes=9, transcripts_digest="other"))
    write_evaluation(path, make_record("eval-2-old", step=2, minutes=1))
    assert [row.evaluation_id for row in compare(path, ["1", "2"]).rows] == ["eval-1-old", "eval-2-old"]
    assert [row.evaluation_id for row in compare(path, ["1"]).rows] == ["eval-1-new"]


def test_the_newest_bytes_of_a_step_stand_for_it(tmp_path):
    path = tmp_path / "acceptance.duckdb"
    write_evaluation(path, make_record("eval-before", step=1))
    write_evaluation(path, make_record("eval-after", step=1, minutes=9, seed=4))
    assert [row.evaluation_id for row in compare(path).rows] == ["eval-after"]


def test_prompts_that_only_one_has_do_not_count_in_the_difference(tmp_path):
    path = tmp_path / "acceptance.duckdb"
    write_evaluation(path, make_record("eval-1", step=1, prompts=make_prompts(9)))
    write_evaluation(path, make_record("eval-2", step=2, prompts=make_prompts(4), seed=2))
    row = compare(path, ["1", "2"]).rows[1]
    assert (row.num_prompts, row.difference.num_prompts) == (4, 4)


def test_different_dtypes_are_noted(tmp_path):
    path = tmp_path / "acceptance.duckdb"
    write_evaluation(path, make_record("eval-1", step=1))
    write_evaluation(path, make_record("eval-2", step=2, dtype="bfloat16"))
    assert compare(path).notes == (
        "the drafter ran in different dtypes (bfloat16, float32): small differences may come from that",
    )


def test_a_comparison_is_json(path):
    text = json.dumps(compare(path, [], "published").as_json(), allow_nan=False)
    rows = json.loads(text)["rows"]
    assert rows[0]["difference"] is None
    assert rows[0]["p_adjusted"] is None
    assert rows[1]["difference"]["num_prompts"] == 9
    assert rows[1]["datasets"]["chat"]["num_prompts"] == 3


def test_a_missing_database_and_one_without_a_finished_evaluation_say_what_to_do(tmp_path):
    with pytest.raises(NoResults, match="run `dflash-eval evaluate` first"):
        compare(tmp_path / "none.duckdb")
    write_evaluation(tmp_path / "failed.duckdb", make_failed())
    with pytest.raises(InputError, match="run `dflash-eval evaluate` first"):
        compare(tmp_path / "failed.duckdb")


def test_the_gate_without_baseline_judges_the_lowest_tau(path):
    found = compare(path, ["900", "10000"])
    lowest = min(row.tau_pooled for row in found.rows)
    assert gate(found, lowest).passed
    missed = gate(found, lowest + 1e-6)
    assert not missed.passed
    assert f"tau, {lowest:.3f} of run-a:900 (95 % interval" in missed.message
    assert "\n" not in missed.message


def test_the_gate_with_baseline_judges_the_difference_and_not_the_baseline_itself(path):
    found = compare(path, ["1000", "10000"], "900")
    worst = min(row.difference.difference for row in found.rows[1:])
    assert worst > 0
    assert gate(found, 0.0).passed
    assert gate(found, worst - 1e-9).passed
    missed = gate(found, worst + 1e-6)
    assert not missed.passed
    assert "difference to run-a:900" in missed.message
    assert not gate(compare(path, ["900"], "10000"), -0.05).passed


def test_a_gate_with_nothing_to_judge_or_nothing_measured_fails(path, tmp_path):
    alone = compare(path, ["900"], "900")
    assert len(alone.rows) == 1
    assert gate(alone, -10.0) == (
        False,
        "gate failed: there is nothing to judge the difference to run-a:900 of",
    )
    one_token = tuple(dataclasses.replace(prompt, num_response_tokens=1) for prompt in make_prompts(2))
    write_evaluation(tmp_path / "db", make_record("eval-empty", step=1, prompts=one_token))
    unmeasured = gate(compare(tmp_path / "db"), 0.0)
    assert unmeasured == (False, "gate failed: the tau of run-a:1 was not measured")
    with pytest.raises(InputError, match="must be a number"):
        gate(alone, math.nan)
