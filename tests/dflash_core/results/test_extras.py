"""Extra numbers in the database: added up over slices, replaced with their evaluation, read back, refused, absent."""

import dataclasses

import duckdb
import polars
import pytest

from dflash_core.errors import ResultsError
from dflash_core.results.connection import reading
from dflash_core.results.database import has_evaluation, read_evaluation, write_evaluation
from dflash_core.results.query import run_query
from dflash_core.results.records import EXTRA_SCHEMAS, Extras
from tests.dflash_core.results.builders import make_extras, make_failed, make_prompts, make_record

SETTINGS = {
    "sweep": ("block_size", "method"),
    "recall": ("draft_position", "k"),
    "trees": ("budget",),
    "sampled": ("temperature", "rule"),
}
# Each ratio by its columns in the same row.
RATIOS = {
    "sweep": {"tau_pooled": ("num_emitted_tokens", "num_verification_steps")},
    "trees": {"tau_pooled": ("num_emitted_tokens", "num_verification_steps")},
    "recall": {
        "recall_teacher_forced": ("num_recalled", "num_blocks"),
        "recall_conditional": ("num_reached_recalled", "num_reached"),
    },
    "sampled": {
        "first_acceptance": ("sum_first_acceptance", "num_with_drafts"),
        "expected_accepted_teacher_forced": ("sum_expected_accepted", "num_blocks"),
        "expected_accepted_at_least": ("sum_accepted_on_transcript", "num_blocks"),
    },
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "acceptance.duckdb"


def table(path, name):
    with reading(path) as connection:
        return polars.DataFrame(connection.sql(f"FROM {name} ORDER BY ALL"))


@pytest.mark.parametrize("name", EXTRA_SCHEMAS)
def test_every_slice_adds_up_its_prompts_and_every_ratio_follows_from_its_row(path, name):
    extras = make_extras()
    write_evaluation(path, make_record(extras=extras))
    frame, counts = extras.frames()[name], [c for c in EXTRA_SCHEMAS[name] if c.startswith(("num_", "sum_"))]
    stored = table(path, name)
    slices = {("all", "all"): lambda prompt: True}
    for dataset in ("chat", "code", "math"):
        slices["dataset", dataset] = lambda prompt, dataset=dataset: prompt.dataset == dataset
    for group in ("held out", "trained on"):
        slices["group", group] = lambda prompt, group=group: prompt.group == group
    assert stored.height == len(slices) * len(set(frame.select(SETTINGS[name]).rows()))
    for (kind, label), belongs in slices.items():
        ids = {prompt.prompt_id for prompt in make_prompts() if belongs(prompt)}
        for row in stored.filter(slice=kind, dataset=label).rows(named=True):
            of_setting = {column: row[column] for column in SETTINGS[name]}
            rows = [one for one in frame.filter(**of_setting).rows(named=True) if one["prompt_id"] in ids]
            for column in counts:
                assert row[column] == pytest.approx(sum(one[column] for one in rows), rel=1e-12)
            for ratio, (above, below) in RATIOS[name].items():
                assert row[ratio] == pytest.approx(row[above] / row[below], rel=1e-12)
            if "tau_prompt_mean" in row:
                taus = [one["num_emitted_tokens"] / one["num_verification_steps"] for one in rows]
                assert row["tau_prompt_mean"] == pytest.approx(sum(taus) / len(taus), rel=1e-12)
                assert row["num_prompts"] == len(rows)


def test_nothing_is_written_that_was_not_asked_for(path):
    write_evaluation(path, make_record())
    assert {name: table(path, name).height for name in EXTRA_SCHEMAS} == dict.fromkeys(EXTRA_SCHEMAS, 0)
    assert "extras" not in read_evaluation(path, "eval-a")
    write_evaluation(path, make_record("eval-b", extras=Extras(trees=make_extras().trees)))
    assert set(read_evaluation(path, "eval-b")["extras"]) == {"trees"}


def test_they_are_read_back_by_dataset_and_group(path):
    write_evaluation(path, make_record(extras=make_extras()))
    found = read_evaluation(path, "eval-a")["extras"]
    assert set(found) == set(EXTRA_SCHEMAS)
    for name, slices in found.items():
        assert set(slices["datasets"]) == {"all", "chat", "code", "math"}
        assert set(slices["groups"]) == {"held out", "trained on"}
        for row in slices["datasets"]["all"]:
            assert set(row) == set(table(path, name).columns) - {"evaluation_id", "slice", "dataset"}
    assert [row["budget"] for row in found["trees"]["datasets"]["math"]] == [4, 16]
    stored = table(path, "trees").filter(slice="all", budget=16).row(0, named=True)
    assert found["trees"]["datasets"]["all"][1] == {
        key: value for key, value in stored.items() if key not in ("evaluation_id", "slice", "dataset")
    }


def test_evaluating_again_replaces_them_and_leaves_those_of_others(path):
    write_evaluation(path, make_record("eval-a", extras=make_extras(budgets=(4, 16, 64))))
    write_evaluation(path, make_record("eval-b", extras=make_extras()))
    write_evaluation(path, make_record("eval-a", extras=Extras(trees=make_extras(budgets=(8,)).trees)))
    budgets = run_query(path, "SELECT DISTINCT evaluation_id, budget FROM trees ORDER BY ALL").rows()
    assert budgets == [("eval-a", 8), ("eval-b", 4), ("eval-b", 16)]
    assert run_query(path, "SELECT DISTINCT evaluation_id FROM recall").rows() == [("eval-b",)]


def test_a_prompt_without_a_step_counts_in_no_mean_and_leaves_nulls_behind(path):
    extras = make_extras()
    rows = extras.trees.with_columns(
        polars.lit(0, dtype=polars.Int64).alias(name)
        for name in ("num_verification_steps", "num_accepted_drafts", "num_emitted_tokens")
    )
    write_evaluation(path, make_record(extras=Extras(trees=rows)))
    stored = table(path, "trees")
    assert stored.select("num_prompts").unique().rows() == [(0,)]
    assert stored.select("tau_pooled", "tau_prompt_mean").unique().rows() == [(None, None)]


def test_the_same_evaluation_with_other_extras_wanted_is_not_known_yet(path):
    wanted = {"tree_budgets": [4, 16]}
    plain = make_record()
    write_evaluation(path, plain)
    assert has_evaluation(path, "eval-a")
    assert not has_evaluation(path, "eval-a", extras=wanted)
    write_evaluation(path, dataclasses.replace(plain, spec=plain.spec | {"extras": wanted}, extras=make_extras()))
    assert has_evaluation(path, "eval-a", extras=wanted)
    assert has_evaluation(path, "eval-a"), "more than was asked for is there"
    assert not has_evaluation(path, "eval-a", extras={"tree_budgets": [4]})


def changed(name, **changes):
    frame = make_extras().frames()[name]
    return Extras(**{name: frame.with_columns(**changes)})


@pytest.mark.parametrize(
    ("extras", "words"),
    [
        pytest.param(Extras(trees=make_extras().trees.drop("budget")), "trees must have the columns", id="columns"),
        pytest.param(changed("trees", prompt_id=polars.lit("nobody")), "that the record lacks", id="unknown prompt"),
        pytest.param(changed("trees", budget=polars.lit(None, dtype=polars.Int64)), "holds a NULL", id="null"),
        pytest.param(changed("sweep", block_size=polars.lit(2)), "columns|two rows", id="the same setting twice"),
        pytest.param(
            changed("trees", num_accepted_drafts=polars.col("num_emitted_tokens")), "contradict", id="too many accepted"
        ),
        pytest.param(
            changed("recall", num_reached_recalled=polars.col("num_blocks") + 1), "contradict", id="more than reached"
        ),
        pytest.param(
            changed("sampled", sum_accepted_on_transcript=polars.col("sum_expected_accepted") * 1.1),
            "contradict",
            id="a bound above its estimate",
        ),
    ],
)
def test_counts_that_contradict_themselves_are_refused(path, extras, words):
    with pytest.raises(ResultsError, match=words):
        write_evaluation(path, make_record(extras=extras))
    assert not path.exists()


def test_an_evaluation_without_numbers_has_no_extras(path):
    with pytest.raises(ResultsError, match="no extras"):
        write_evaluation(path, dataclasses.replace(make_failed(), extras=make_extras()))


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE trees SET tau_pooled = 'nan'::DOUBLE",
        "UPDATE sampled SET rule = 'guess'",
        "UPDATE sampled SET sum_first_acceptance = 'inf'::DOUBLE",
        "UPDATE sweep SET method = 'guess'",
        "UPDATE recall SET recall_conditional = 'nan'::DOUBLE",
        "INSERT INTO recall FROM recall LIMIT 1",
    ],
)
def test_the_tables_themselves_refuse_what_is_no_number_or_twice(path, statement):
    write_evaluation(path, make_record(extras=make_extras()))
    with duckdb.connect(str(path)) as connection, pytest.raises(duckdb.ConstraintException):
        connection.execute(statement)
