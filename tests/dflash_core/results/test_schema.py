"""The schema, the views, the documentation of both, and the ready-made queries."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_core.results.connection import reading
from dflash_core.results.database import write_evaluation
from dflash_core.results.query import run_query
from dflash_core.results.records import SPEC_COLUMNS
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
        "best_checkpoint_per_run",
        "learning_curve_per_dataset",
        "survival_of_two_checkpoints",
        "weakest_prompts",
        "near_tie_share",
        "not_scored",
        "paired_differences",
        "recall_by_position",
        "sampled_acceptance",
        "which_block_size_pays",
        "which_tree_budget_pays",
    }


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

    ties = answer(path, "near_tie_share").filter(evaluation_id="eval-100", slice="all").row(0, named=True)
    walk = make_record(quality=0.2, seed=0).blocks.filter("is_on_walk")
    assert ties["near_tie_share"] == walk["is_near_tie"].mean()


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
