"""Comparing stored checkpoints."""

import dataclasses
import json
import math

import pytest

from dflash_core.acceptance.statistics import paired_difference
from dflash_core.drafter.spec import ROW_ALIGNMENTS
from dflash_core.errors import InputError, NoResults
from dflash_core.results.compare import compare, url_of
from dflash_core.results.database import read_evaluation, write_evaluation
from dflash_core.results.selection import Conditions, Wanted
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
    assert row.tau.tau_pooled == pytest.approx(stored[1]["datasets"]["all"]["tau_pooled"])
    assert row.tau.tau_prompt_mean == pytest.approx(stored[1]["datasets"]["all"]["tau_prompt_mean"])
    assert row.tau.ci_low < row.tau.tau_pooled < row.tau.ci_high
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


def changed(name, value, words):
    return {"spec": make_record().spec | {name: value}}, words


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param({"transcripts_digest": "other"}, "transcripts 'd1d1.*' and 'other'", id="other transcripts"),
        pytest.param({"target": "Qwen"}, "target 'SmolLM2-135M-Instruct' and 'Qwen'", id="other target"),
        pytest.param({"block_size": 8}, "block size 4 and 8", id="other block size"),
        pytest.param({"dtype": "bfloat16"}, "dtype of the drafter 'float32' and 'bfloat16'", id="other dtype"),
        pytest.param(*changed("target_dtype", "bfloat16", "dtype of the target 'float32' and 'bfloat16'")),
        pytest.param(*changed("thinking", True, "thinking False and True")),
        pytest.param(*changed("chat_template_digest", "beef", "chat template 'c0ffee.*' and 'beef'")),
        pytest.param(*changed("verification_rule", "sampled", "verification rule 'greedy' and 'sampled'")),
        pytest.param(*changed("counting_rule", "bonus not counted", "counting rule 'bonus counted.* and 'bonus not")),
        pytest.param(*changed("row_alignment", "shifted", "row alignment 'same position' and 'shifted'")),
        pytest.param(*changed("metrics_version", 2, "metrics version '1' and '2'")),
        pytest.param(*changed("extraction_version", 2, "extraction version '1' and '2'")),
        pytest.param(*changed("target_identity", "5a", "content of the target not recorded and '5a'")),
        pytest.param(*changed("store_dtype", "bfloat16", "dtype of the stored hidden states not recorded and 'bf")),
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
    assert (row.tau.num_prompts, row.difference.num_prompts) == (4, 4)


def test_every_condition_that_is_compared_is_one_of_the_refusals_above():
    tried = {"target", "transcripts_digest", "block_size", "dtype", "target_dtype", "thinking", "chat_template_digest"}
    tried |= {"verification_rule", "counting_rule", "row_alignment", "metrics_version", "extraction_version"}
    tried |= {"target_identity", "store_dtype"}
    assert set(Conditions._fields) == tried


def test_different_devices_are_noted(tmp_path):
    path = tmp_path / "acceptance.duckdb"
    write_evaluation(path, make_record("eval-1", step=1))
    write_evaluation(path, make_record("eval-2", step=2, device="cuda"))
    assert compare(path).notes == (
        "the drafter ran on different devices (cpu, cuda): small differences may come from that",
    )


@pytest.fixture
def two_sizes(tmp_path):
    """Three steps with blocks of 4; later, one of them with blocks of 8."""
    path = tmp_path / "acceptance.duckdb"
    for place, step in enumerate((1, 2, 3)):
        record = make_record(f"eval-{step}", step=step, seed=place, minutes=place, quality=0.9 if step == 2 else 0.5)
        write_evaluation(path, record)
    write_evaluation(path, make_record("eval-2-of-8", step=2, minutes=9, block_size=8))
    return path


def test_the_conditions_of_the_config_are_taken_instead_of_the_newest(two_sizes):
    assert labels(compare(two_sizes)) == ["run-a:2"], "the newest has blocks of 8"
    asked = Wanted(target="SmolLM2-135M-Instruct", transcripts_digest="d1" * 16, block_size=4)
    found = compare(two_sizes, wanted=asked)
    assert labels(found) == ["run-a:1", "run-a:2", "run-a:3"]
    assert found.notes[0] == "conditions: those of the config"
    with_baseline = compare(two_sizes, [], "2", wanted=asked)
    assert labels(with_baseline) == ["run-a:2", "run-a:1", "run-a:3"]
    assert with_baseline.conditions.block_size == 4


def test_a_config_under_which_nothing_was_evaluated_says_what_there_is(two_sizes):
    with pytest.raises(InputError, match=r"\(transcripts 'ff'\); the newest .* transcripts 'd1d1.*evaluate first"):
        compare(two_sizes, wanted=Wanted(transcripts_digest="ff"))
    named = compare(two_sizes, ["1", "3"], wanted=Wanted(transcripts_digest="ff"))
    assert "the config has other ones (transcripts 'ff')" in named.notes[0]


def test_a_block_size_that_was_typed_is_meant(two_sizes):
    typed = Wanted(block_size=8, is_block_size_typed=True)
    assert labels(compare(two_sizes, ["2"], wanted=typed)) == ["run-a:2"]
    with pytest.raises(InputError, match="no evaluation matches '1'"):
        compare(two_sizes, ["1"], wanted=typed)
    with pytest.raises(InputError, match="nothing was evaluated with block size 5; there is: 4, 8"):
        compare(two_sizes, ["1"], wanted=Wanted(block_size=5, is_block_size_typed=True))


def test_best_and_latest_are_names_under_one_set_of_conditions(two_sizes):
    of_4 = Wanted(block_size=4)
    assert labels(compare(two_sizes, ["best", "latest"], wanted=of_4)) == ["run-a:2", "run-a:3"]
    assert labels(compare(two_sizes, ["run-a:latest"], wanted=of_4)) == ["run-a:3"]
    assert url_of(two_sizes, "latest", of_4).endswith("/step_3/checkpoint.pt")
    with pytest.raises(InputError, match="no evaluation matches 'run-b:best'"):
        compare(two_sizes, ["run-b:best"])


def test_the_set_that_cannot_be_told_from_the_best_has_the_best_and_not_the_clearly_worse(path):
    found = compare(path, ["900", "10000", "published"])
    best = max(found.rows, key=lambda row: row.tau.tau_pooled)
    assert best.label in found.not_told_from_best
    assert "run-a:900" not in found.not_told_from_best
    assert compare(path, ["900"]).not_told_from_best == ()


def test_what_the_prompts_can_detect_is_told_and_how_many_more_would_do(path):
    row = compare(path, ["900", "1000"], wanted_difference=0.01).rows[1]
    assert row.difference.smallest_detectable > row.difference.standard_error
    assert row.num_prompts_needed > 9
    few = compare(path, ["900", "1000"], wanted_difference=2 * row.difference.smallest_detectable).rows[1]
    assert few.num_prompts_needed < 9


def test_slices_have_their_own_taus_and_differences(path):
    row = compare(path, ["900", "1000"]).rows[1]
    assert {name: tau.num_prompts for name, tau in row.taus_by("group").items()} == {"held out": 5, "trained on": 4}
    stored = read_evaluation(path, "eval-1000")["groups"]["held out"]
    assert row.taus_by("group")["held out"].tau_pooled == pytest.approx(stored["tau_pooled"])
    assert set(row.groups) == {"held out", "trained on"}
    assert set(row.taus_by("dataset")) == set(row.datasets)


def test_turns_of_one_conversation_count_as_one_unit(tmp_path):
    prompts = tuple(
        dataclasses.replace(prompt, prompt_id=f"mt-{place // 3}#{place % 3 + 1}")
        for place, prompt in enumerate(make_prompts(9))
    )
    path = tmp_path / "acceptance.duckdb"
    write_evaluation(path, make_record("eval-1", step=1, prompts=prompts))
    write_evaluation(path, make_record("eval-2", step=2, prompts=prompts, seed=2))
    found = compare(path, ["1", "2"])
    assert (found.rows[1].difference.num_prompts, found.rows[1].difference.num_units) == (9, 3)
    assert found.notes == ("turns of one conversation are resampled together: 9 prompts are 3 conversations",)


def test_a_comparison_is_json(path):
    text = json.dumps(compare(path, [], "published").as_json(), allow_nan=False)
    rows = json.loads(text)["rows"]
    assert rows[0]["difference"] is None
    assert rows[0]["p_adjusted"] is None
    assert rows[1]["difference"]["num_prompts"] == 9
    assert rows[1]["datasets"]["chat"]["num_prompts"] == 3
    assert {"tau_pooled", "ci_low", "ci_high", "tau_prompt_mean", "tau_word"} <= set(rows[0])


def test_a_missing_database_and_one_without_a_finished_evaluation_say_what_to_do(tmp_path):
    with pytest.raises(NoResults, match="run `dflash-eval evaluate` first"):
        compare(tmp_path / "none.duckdb")
    write_evaluation(tmp_path / "failed.duckdb", make_failed())
    with pytest.raises(InputError, match="run `dflash-eval evaluate` first"):
        compare(tmp_path / "failed.duckdb")


def test_the_interval_of_an_anchor_shifted_drafter_is_not_cut_at_its_block_size(tmp_path):
    """Its block of 4 slots drafts 4 tokens: a step emits up to 5."""
    spec = make_record().spec | {"row_alignment": ROW_ALIGNMENTS["anchor_shifted"]}
    record = make_record("e", quality=1.25, block_size=5, prompts=make_prompts(20), spec=spec, num_drafts=4)
    write_evaluation(tmp_path / "db", dataclasses.replace(record, block_size=4))
    (row,) = compare(tmp_path / "db").rows
    for tau in (row.tau, *row.taus_by("dataset").values()):
        assert 4 < tau.tau_pooled < tau.ci_high <= 5
