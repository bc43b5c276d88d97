"""The schema, the views, the documentation of both, and the ready-made queries."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_core.results.connection import reading
from dflash_core.results.database import write_evaluation
from dflash_core.results.query import run_query
from dflash_core.results.records import SPEC_COLUMNS
from dflash_core.results.selection import Conditions
from tests.dflash_core.results.builders import make_extras, make_failed, make_prompts, make_record

ROOT = Path(__file__).parents[3]
QUERIES = sorted((ROOT / "results" / "queries").glob("*.sql"))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("results") / "acceptance.duckdb"
    for place, quality in enumerate((0.2, 0.5, 0.8)):
        step = 100 * (place + 1)
        record = make_record(
            f"eval-{step}", step=step, quality=quality, seed=place, minutes=place, extras=make_extras()
        )
        write_evaluation(path, record)
    write_evaluation(path, make_record("eval-300-again", step=300, quality=0.6, seed=7, minutes=20))
    write_evaluation(path, make_record("eval-small-block", step=300, quality=0.8, block_size=3, minutes=1))
    write_evaluation(path, make_record("eval-published", run="published", step=None, quality=0.9, seed=9))
    write_evaluation(path, make_failed("eval-broken", step=400))
    write_evaluation(path, make_failed("eval-gone", status="vanished", error="rotated away", step=500))
    write_evaluation(path, make_failed("eval-200-was-busy", step=200, minutes=-1))
    return path


def columns_in_the_database(path):
    with reading(path) as connection:
        rows = connection.execute(
            "SELECT table_name, column_name FROM duckdb_columns() WHERE NOT internal ORDER BY column_index"
        ).fetchall()
    found = {}
    for table, column in rows:
        found.setdefault(table, []).append(column)
    return found


def columns_in_the_readme():
    text = (ROOT / "results" / "README.md").read_text(encoding="utf-8")
    found = {}
    for section in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
        name = re.match(r"`(\w+)`", section)[1]
        found[name] = re.findall(r"^\| `(\w+)` \| \S", section, flags=re.MULTILINE)
    return found


def test_the_readme_defines_every_column_of_every_table_and_view_and_no_other(path):
    in_database, in_readme = columns_in_the_database(path), columns_in_the_readme()
    assert set(in_database) == set(in_readme)
    for table, columns in in_database.items():
        assert sorted(in_readme[table]) == sorted(columns), table


def test_the_python_of_the_readme_runs(path, tmp_path):
    text = (ROOT / "results" / "README.md").read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(examples) == 2
    for example in examples:
        script = example.replace("results/acceptance.duckdb", str(path)) + "\nassert frame.height > 2, frame"
        done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


def test_every_condition_of_the_spec_is_a_column(path):
    assert set(SPEC_COLUMNS) <= set(columns_in_the_database(path)["evaluations"])


def changed_spec(name, value):
    return {"spec": make_record().spec | {name: value}}


ONE_CONDITION = {
    "target": {"target": "Qwen3-8B"},
    "target_identity": changed_spec("target_identity", "5a"),
    "transcripts_digest": {"transcripts_digest": "e2" * 16},
    "block_size": {"block_size": 5},
    "dtype": {"dtype": "bfloat16"},
    "target_dtype": changed_spec("target_dtype", "bfloat16"),
    "store_dtype": changed_spec("store_dtype", "bfloat16"),
    "thinking": changed_spec("thinking", True),
    "chat_template_digest": changed_spec("chat_template_digest", "beef"),
    "verification_rule": changed_spec("verification_rule", "typical"),
    "counting_rule": changed_spec("counting_rule", "bonus not counted"),
    "row_alignment": changed_spec("row_alignment", "shifted"),
    "metrics_version": changed_spec("metrics_version", 2),
    "extraction_version": changed_spec("extraction_version", 2),
}
NO_CONDITION = {
    "device": {"device": "cuda"},
    "anchors": {"spec": make_record().spec | {"anchors": "all"}},
    "extras": {"extras": make_extras(make_prompts(4)), **changed_spec("extras", {"tree_budgets": [4, 16]})},
    "packages": changed_spec("packages", {"torch": "9"}),
}


def test_every_condition_that_compare_knows_is_tried_below():
    assert set(ONE_CONDITION) == set(Conditions._fields)


def evaluations_of_one_checkpoint(path, variants):
    """Write a worse checkpoint, a better one, and more evaluations of the better one under changed circumstances."""
    prompts = make_prompts(4)
    better = make_record("eval-first", step=200, quality=0.8, seed=3, prompts=prompts)
    write_evaluation(path, make_record("eval-worse", step=100, quality=0.2, seed=2, prompts=prompts))
    write_evaluation(path, better)
    for place, (name, changes) in enumerate(variants.items()):
        changes = {"prompts": prompts, "checkpoint": better.checkpoint, "minutes": 1 + place} | changes
        write_evaluation(path, make_record(name, quality=0.8, seed=3, **changes))
    return path


def test_evaluations_that_differ_in_one_condition_share_no_place_no_curve_and_no_pair(tmp_path):
    path = evaluations_of_one_checkpoint(tmp_path / "acceptance.duckdb", ONE_CONDITION)
    board = run_query(path, "FROM leaderboard")
    assert dict(board.select("evaluation_id", "place").rows()) == dict.fromkeys(ONE_CONDITION, 1) | {
        "eval-first": 1,
        "eval-worse": 2,
    }
    curve = run_query(path, "FROM learning_curve WHERE slice = 'all'")
    assert curve["is_newest_of_step"].to_list() == [True] * (len(ONE_CONDITION) + 2)
    pairs = run_query(path, "FROM paired")
    assert set(pairs.select("evaluation_a", "evaluation_b").rows()) == {
        ("eval-first", "eval-worse"),
        ("eval-worse", "eval-first"),
    }
    prompts = run_query(path, "FROM prompt_acceptance")
    conditions = run_query(path, "FROM evaluation_conditions")
    assert conditions["conditions"].n_unique() == len(ONE_CONDITION) + 1
    for view in (board, curve, prompts, conditions):
        first = view.filter(evaluation_id="eval-first").row(0, named=True)
        for name in ONE_CONDITION:
            other = view.filter(evaluation_id=name).row(0, named=True)
            differing = {one for one in (*ONE_CONDITION, "conditions") if first[one] != other[one]}
            assert differing == {name, "conditions"}, "each view says in what they differ"
    assert set(ONE_CONDITION) <= set(pairs.columns)


def test_what_does_not_decide_tau_parts_nothing(tmp_path):
    path = evaluations_of_one_checkpoint(tmp_path / "acceptance.duckdb", NO_CONDITION)
    places = dict(run_query(path, "SELECT evaluation_id, place FROM leaderboard").rows())
    assert places == dict.fromkeys(NO_CONDITION, 1) | {"eval-first": 1, "eval-worse": len(NO_CONDITION) + 2}
    curve = run_query(path, "SELECT evaluation_id FROM learning_curve WHERE slice = 'all' AND step = 200").rows()
    assert curve == [(list(NO_CONDITION)[-1],)], "of one checkpoint the latest"
    pairs = run_query(path, "SELECT DISTINCT evaluation_a, evaluation_b FROM paired")
    number = len(NO_CONDITION) + 2
    assert pairs.height == number * (number - 1)


def test_the_leaderboard_is_ordered_and_ranks_only_what_may_be_compared(path):
    rows = run_query(path, "FROM leaderboard")
    assert rows["tau_pooled"].to_list() == sorted(rows["tau_pooled"], reverse=True)
    assert rows.height == 6
    places = dict(rows.select("evaluation_id", "place").rows())
    assert places["eval-published"] == places["eval-small-block"] == 1
    assert sorted(places.values()) == [1, 1, 2, 3, 4, 5]


def test_the_learning_curve_marks_the_newest_bytes_of_a_step(path):
    curve = run_query(path, "FROM learning_curve WHERE slice = 'all' AND run = 'run-a' AND block_size = 4")
    assert curve["step"].to_list() == [100, 200, 300, 300]
    newest = dict(curve.select("evaluation_id", "is_newest_of_step").rows())
    assert newest == {"eval-100": True, "eval-200": True, "eval-300": False, "eval-300-again": True}
    assert curve["bytes_total"].to_list() == [100_000_000] * 4
    per_step = run_query(path, "SELECT slice, dataset FROM learning_curve WHERE evaluation_id = 'eval-100'").rows()
    assert len(per_step) == len(set(per_step)) == 6


def test_the_learning_curve_keeps_the_latest_of_several_evaluations_of_one_checkpoint(tmp_path):
    path = tmp_path / "acceptance.duckdb"
    first = make_record("eval-first")
    again = make_record("eval-again", checkpoint=first.checkpoint, device="cuda", minutes=3)
    in_bf16 = make_record("eval-bf16", checkpoint=first.checkpoint, dtype="bfloat16", minutes=1)
    for record in (again, first, in_bf16):
        write_evaluation(path, record)
    curve = run_query(path, "SELECT evaluation_id, is_newest_of_step FROM learning_curve WHERE slice = 'all'")
    assert sorted(curve.rows()) == [("eval-again", True), ("eval-bf16", True)]


def test_pairs_hold_both_orders_of_what_may_be_compared_and_nothing_else(path):
    pairs = run_query(path, "SELECT DISTINCT evaluation_a, evaluation_b FROM paired").rows()
    comparable = {"eval-100", "eval-200", "eval-300", "eval-300-again", "eval-published"}
    assert set(pairs) == {(a, b) for a in comparable for b in comparable if a != b}
    assert len(pairs) == len(set(pairs))
    rows = run_query(
        path, "FROM paired WHERE evaluation_a = 'eval-100' AND evaluation_b = 'eval-300' ORDER BY prompt_id"
    )
    assert rows["prompt_id"].to_list() == [prompt.prompt_id for prompt in make_prompts()]
    for row in rows.iter_rows(named=True):
        assert row["difference"] == row["tau_b"] - row["tau_a"]
        assert row["tau_a"] == row["num_emitted_tokens_a"] / row["num_verification_steps_a"]


def test_there_is_a_query_for_each_question_people_ask():
    assert {query.stem for query in QUERIES} >= {
        "best_checkpoint_per_dataset",
        "best_checkpoint_per_run",
        "cost_per_checkpoint",
        "learning_curve_per_dataset",
        "survival_of_two_checkpoints",
        "weakest_prompts",
        "near_tie_share",
        "not_scored",
        "paired_differences",
        "prompts_that_got_worse",
        "where_acceptance_breaks_off",
        "recall_by_position",
        "sampled_acceptance",
        "which_block_size_pays",
        "which_tree_budget_pays",
    }


def test_the_readme_names_every_ready_made_query():
    text = (ROOT / "results" / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`(\w+)\.sql`", text)) == {query.stem for query in QUERIES}


def test_the_readme_gives_names_elsewhere_to_numbers_that_exist(path):
    text = (ROOT / "results" / "README.md").read_text(encoding="utf-8").split("## The same number elsewhere")[1]
    names = re.findall(r"^\| `(\w+)`", text.split("\n## ")[0], flags=re.MULTILINE)
    columns = {column for of_table in columns_in_the_database(path).values() for column in of_table}
    assert len(names) > 8
    assert set(names) <= columns


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.stem)
def test_each_ready_made_query_says_what_it_answers_and_answers(path, query):
    text = query.read_text(encoding="utf-8")
    assert text.startswith("-- ")
    assert "?" in text.split("\nSELECT")[0].split("\nWITH")[0]
    rows = run_query(path, text)
    assert rows.height > 0
    assert rows.columns == list(dict.fromkeys(rows.columns))


def answer(path, name):
    return run_query(path, (ROOT / "results" / "queries" / f"{name}.sql").read_text(encoding="utf-8"))


def test_the_queries_give_the_right_answers(path):
    best = answer(path, "best_checkpoint_per_run").filter(run="run-a", block_size=4).row(0, named=True)
    conditions = "slice = 'all' AND run = 'run-a' AND block_size = 4 AND is_newest_of_step"
    curve = dict(run_query(path, f"SELECT step, tau_pooled FROM learning_curve WHERE {conditions}").rows())
    assert best["best_tau"] == max(curve.values())
    assert curve[best["best_step"]] == best["best_tau"]
    assert best["lead_over_newest"] == best["best_tau"] - curve[300]

    survival = answer(path, "survival_of_two_checkpoints")
    assert survival["evaluation_a"].unique().to_list() == ["eval-100"]
    assert survival["evaluation_b"].unique().to_list() == ["eval-published"]
    assert survival["survival_a"][0] < survival["survival_b"][0]

    weakest = answer(path, "weakest_prompts")
    assert weakest["evaluation_id"].unique().to_list() == ["eval-published"]
    assert weakest["tau"].to_list() == sorted(weakest["tau"])
    assert weakest["prompt_begins"][0].startswith("question ")

    paired = answer(path, "paired_differences").filter(evaluation_a="eval-100", evaluation_b="eval-300")
    assert paired["num_prompts"].to_list() == [3, 3, 3]
    assert all(row["num_better"] + row["num_worse"] <= 3 for row in paired.iter_rows(named=True))

    missed = answer(path, "not_scored").select("step", "status", "error").rows()
    assert missed == [(400, "failed", "the file is cut off"), (500, "vanished", "rotated away")]

    per_dataset = answer(path, "best_checkpoint_per_dataset").filter(block_size=4)
    assert per_dataset.select("slice", "dataset").rows() == [
        ("all", "all"),
        ("dataset", "chat"),
        ("dataset", "code"),
        ("dataset", "math"),
        ("group", "held out"),
        ("group", "trained on"),
    ]
    for row in per_dataset.iter_rows(named=True):
        where = f"slice = '{row['slice']}' AND dataset = '{row['dataset']}' AND block_size = 4 AND is_newest_of_step"
        taus = dict(run_query(path, f"SELECT evaluation_id, tau_pooled FROM learning_curve WHERE {where}").rows())
        assert taus[row["evaluation_id"]] == row["tau_pooled"] == max(taus.values())
        assert row["tau_of_the_best_of_all"] == taus["eval-published"]

    positions = answer(path, "where_acceptance_breaks_off").filter(slice="all")
    assert positions["evaluation_id"].unique().to_list() == ["eval-published"]
    accepted = make_record(quality=0.9, seed=9).blocks.filter("is_on_walk")["num_accepted_drafts"].to_list()
    assert positions["draft_position"].to_list() == [1, 2, 3]
    assert positions["num_ended_here"].to_list() == [accepted.count(number) for number in (0, 1, 2)]
    assert positions["lost_tokens"][2] == pytest.approx(accepted.count(2) / len(accepted)), "the last costs one token"

    worse = answer(path, "prompts_that_got_worse")
    assert worse.select("step_a", "step_b").unique().rows() == [(200, 300)]
    assert worse["evaluation_b"].unique().to_list() == ["eval-300-again"]
    both = "evaluation_a = 'eval-200' AND evaluation_b = 'eval-300-again'"
    pairs = dict(run_query(path, f"SELECT prompt_id, difference FROM paired WHERE {both}").rows())
    assert dict(worse.select("prompt_id", "difference").rows()) == {k: v for k, v in pairs.items() if v < 0} != {}
    assert worse["difference"].to_list() == sorted(worse["difference"])

    cost = answer(path, "cost_per_checkpoint")
    first = cost.filter(evaluation_id="eval-100").row(0, named=True)
    assert first["total_seconds"] == 2.75 == sum(stage["value"] for stage in first["seconds_per_stage"])
    assert (first["share_of_bytes_read"], first["mb_per_second"], first["seconds_per_prompt"]) == (0.205, 41, 2.75 / 9)
    assert cost.filter(evaluation_id="eval-broken")["seconds_per_prompt"].to_list() == [None]

    ties = answer(path, "near_tie_share").filter(evaluation_id="eval-100", slice="all").row(0, named=True)
    walk = make_record(quality=0.2, seed=0).blocks.filter("is_on_walk")
    assert ties["near_tie_share"] == walk["is_near_tie"].mean()


def test_what_the_best_checkpoint_lacks_is_not_taken_from_another(tmp_path):
    """The best has no interval (all its prompts have one tau); the drafter without a step has no step before it."""
    path, prompts = tmp_path / "acceptance.duckdb", make_prompts(6)
    write_evaluation(path, make_record("eval-100", step=100, quality=0.5, prompts=prompts))
    even = tuple(dataclasses.replace(prompt, num_response_tokens=21) for prompt in prompts)
    write_evaluation(path, make_record("eval-200", step=200, quality=2.0, prompts=even))
    write_evaluation(path, make_record("eval-no-step", step=None, quality=0.3, prompts=prompts))
    (best,) = answer(path, "best_checkpoint_per_run").rows(named=True)
    assert (best["best_step"], best["best_tau"], best["newest_step"], best["lead_over_newest"]) == (200, 4.0, 200, 0.0)
    assert (best["ci_low"], best["ci_high"]) == (None, None)
    assert best["num_checkpoints"] == 3
    curve = answer(path, "learning_curve_per_dataset").filter(slice="all")
    changes = dict(curve.select("step", "change").rows())
    assert (changes[100], changes[None]) == (None, None)
    assert changes[200] > 1

    write_evaluation(path, make_record("eval-alone", run="published", step=None, quality=0.9, prompts=prompts))
    alone = answer(path, "best_checkpoint_per_run").filter(run="published").row(0, named=True)
    assert (alone["best_step"], alone["newest_step"], alone["lead_over_newest"]) == (None, None, None)
    assert alone["best_tau"] > 1


def test_the_queries_on_extras_give_the_right_answers(path):
    def of_all(name):
        rows = answer(path, name).filter(evaluation_id="eval-100")
        return rows.filter(slice="all") if "slice" in rows.columns else rows

    chain = run_query(
        path, "SELECT tau_pooled FROM acceptance WHERE evaluation_id = 'eval-100' AND slice = 'all'"
    ).item()
    trees = of_all("which_tree_budget_pays")
    small, large = trees.rows(named=True)
    assert (small["budget"], large["budget"]) == (4, 16)
    assert small["gain"] == small["tau_pooled"] - chain
    assert small["tokens_per_node_more"] == (small["tau_pooled"] - chain) / (4 - 3), "the chain drafts 3"
    assert large["tokens_per_node_more"] == (large["tau_pooled"] - small["tau_pooled"]) / 12

    blocks = of_all("which_block_size_pays")
    assert blocks["block_size"].to_list() == [2, 3, 4]
    assert blocks["method"].to_list() == ["redrafted", "redrafted", "evaluated"]
    assert blocks["tau_pooled"][2] == chain
    assert blocks["share_of_the_longest"].to_list() == [tau / chain for tau in blocks["tau_pooled"]]

    recall = of_all("recall_by_position")
    assert recall["draft_position"].to_list() == [1, 2, 3]
    frame = make_extras().recall
    at = frame.filter(draft_position=2, k=4)
    assert recall["recall_at_4"][1] == at["num_reached_recalled"].sum() / at["num_reached"].sum()
    assert (recall["recall_at_1"] <= recall["recall_at_16"]).all()

    sampled = of_all("sampled_acceptance")
    assert sampled.select("temperature", "rule").rows() == [
        (0.5, "one_hot"),
        (0.5, "sampled"),
        (1.0, "one_hot"),
        (1.0, "sampled"),
    ]
    assert (sampled["expected_accepted_at_least"] < sampled["expected_accepted_teacher_forced"]).all()


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.stem)
def test_both_readmes_name_each_ready_made_query(query):
    for readme in (ROOT / "README.md", ROOT / "results" / "README.md"):
        assert re.search(rf"\b{query.stem}\b", readme.read_text(encoding="utf-8")), readme
