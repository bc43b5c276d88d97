"""Acceptance and survival recomputed from the table `blocks` by SQL, and their identities."""

import dataclasses

import numpy as np
import polars
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.results.aggregate import aggregate
from dflash_core.results.connection import reading
from dflash_core.results.database import write_evaluation
from dflash_core.results.records import BLOCK_SCHEMA
from tests.dflash_core.results.builders import make_prompts, make_record

NEAR_TIE_COLUMNS = (
    "num_near_ties",
    "num_prompts_without_near_ties",
    "num_emitted_without_near_ties",
    "tau_without_near_ties",
    "tau_prompt_mean_without_near_ties",
)
SLICED = """
    WITH labelled AS (
        SELECT blocks.*, prompts.dataset, prompts.prompt_group, evaluations.num_drafts AS most_drafts
        FROM blocks JOIN evaluations USING (evaluation_id)
        JOIN prompts USING (transcripts_digest, prompt_id)
    ),
    sliced AS (
        SELECT 'all' AS slice, 'all' AS name, * EXCLUDE (dataset, prompt_group) FROM labelled
        UNION ALL SELECT 'dataset', dataset, * EXCLUDE (dataset, prompt_group) FROM labelled
        UNION ALL SELECT 'group', prompt_group, * EXCLUDE (dataset, prompt_group) FROM labelled
        WHERE prompt_group IS NOT NULL
    )
"""
ACCEPTANCE = (
    SLICED
    + """
    , per_prompt AS (
        SELECT
            evaluation_id, slice, name, avg(tau) AS tau_prompt_mean,
            avg(tau_without) AS tau_prompt_mean_without_near_ties,
            count(tau_without) AS num_prompts_without_near_ties
        FROM (
            SELECT
                evaluation_id, slice, name, avg(num_emitted_tokens) AS tau,
                avg(num_emitted_tokens) FILTER (NOT is_near_tie) AS tau_without
            FROM sliced WHERE is_on_walk GROUP BY evaluation_id, slice, name, prompt_id
        ) GROUP BY ALL
    )
    SELECT
        evaluation_id, slice, name AS dataset,
        count(DISTINCT prompt_id) FILTER (is_on_walk) AS num_prompts,
        count(*) FILTER (is_on_walk) AS num_verification_steps,
        sum(num_drafted) FILTER (is_on_walk) AS num_drafted_tokens,
        sum(num_accepted_drafts) FILTER (is_on_walk) AS num_accepted_drafts,
        sum(num_emitted_tokens) FILTER (is_on_walk) AS num_emitted_tokens,
        count(*) FILTER (is_on_walk AND num_accepted_drafts = most_drafts) AS num_full_blocks,
        count(*) FILTER (is_on_walk AND is_near_tie) AS num_near_ties,
        count(*) AS num_anchors,
        sum(num_emitted_tokens) FILTER (is_on_walk) / count(*) FILTER (is_on_walk) AS tau_pooled,
        any_value(tau_prompt_mean) AS tau_prompt_mean,
        avg(num_emitted_tokens) AS tau_all_anchors,
        any_value(num_prompts_without_near_ties) AS num_prompts_without_near_ties,
        coalesce(sum(num_emitted_tokens) FILTER (is_on_walk AND NOT is_near_tie), 0) AS num_emitted_without_near_ties,
        avg(num_emitted_tokens) FILTER (is_on_walk AND NOT is_near_tie) AS tau_without_near_ties,
        any_value(tau_prompt_mean_without_near_ties) AS tau_prompt_mean_without_near_ties,
        sum(num_accepted_drafts) FILTER (is_on_walk) / sum(num_drafted) FILTER (is_on_walk) AS acceptance_rate,
        count(*) FILTER (is_on_walk AND num_accepted_drafts = most_drafts)
            / count(*) FILTER (is_on_walk) AS share_full_blocks
    FROM sliced JOIN per_prompt USING (evaluation_id, slice, name)
    GROUP BY evaluation_id, slice, name
    ORDER BY evaluation_id, slice, dataset
"""
)
SURVIVAL = (
    SLICED
    + """
    , counted AS (
        SELECT
            evaluation_id, slice, name AS dataset, draft_position,
            count(*) AS num_blocks,
            count(*) FILTER (num_available >= draft_position) AS num_available,
            count(*) FILTER (num_accepted_drafts >= draft_position) AS num_survived
        FROM sliced, range(1, most_drafts + 1) AS positions(draft_position)
        WHERE is_on_walk
        GROUP BY ALL
    )
    SELECT
        *, num_survived / num_blocks AS survival,
        num_survived / nullif(lag(num_survived, 1, num_blocks) OVER positions_of_one, 0) AS conditional_acceptance
    FROM counted
    WINDOW positions_of_one AS (PARTITION BY evaluation_id, slice, dataset ORDER BY draft_position)
    ORDER BY evaluation_id, slice, dataset, draft_position
"""
)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("results") / "acceptance.duckdb"
    write_evaluation(path, make_record("weak", quality=0.25, seed=1))
    write_evaluation(path, make_record("strong", step=200, quality=0.97, seed=2, block_size=8))
    # Every step of one dataset hangs on a near-tie, and every block drafts one more than its other slots.
    record = make_record("shifted", step=300, quality=0.8, seed=3, block_size=5)
    is_tied = polars.col("prompt_id").is_in([one.prompt_id for one in record.prompts if one.dataset == "math"])
    blocks = record.blocks.with_columns(is_near_tie=polars.col("is_near_tie") | is_tied)
    write_evaluation(path, dataclasses.replace(record, blocks=blocks, block_size=4, num_drafts=4))
    return path


def frame(path, statement):
    with reading(path) as connection:
        return polars.DataFrame(connection.sql(statement))


def assert_same(stored, recomputed):
    assert stored.height == recomputed.height > 0
    for name in recomputed.columns:
        for here, there in zip(stored[name], recomputed[name], strict=True):
            assert here == (pytest.approx(there, rel=1e-12) if isinstance(there, float) else there), name


def test_every_acceptance_column_but_the_interval_follows_from_blocks(path):
    stored = frame(path, "FROM acceptance ORDER BY evaluation_id, slice, dataset")
    recomputed = frame(path, ACCEPTANCE)
    assert set(stored.columns) - set(recomputed.columns) == {"ci_low", "ci_high"}
    assert_same(stored, recomputed)
    assert stored.height == 3 * (1 + 3 + 2)
    tied = stored.filter(evaluation_id="shifted", dataset="math").row(0, named=True)
    assert tied["num_near_ties"] == tied["num_verification_steps"] > 0
    assert (tied["num_prompts_without_near_ties"], tied["num_emitted_without_near_ties"]) == (0, 0)
    assert (tied["tau_without_near_ties"], tied["tau_prompt_mean_without_near_ties"]) == (None, None)


def test_survival_follows_from_blocks(path):
    stored = frame(path, "FROM survival ORDER BY evaluation_id, slice, dataset, draft_position")
    recomputed = frame(path, SURVIVAL)
    assert set(stored.columns) == set(recomputed.columns)
    assert_same(stored, recomputed)
    assert stored["conditional_acceptance"].null_count() < stored.height


def test_tau_is_one_plus_the_sum_of_survival_but_for_the_cut_at_the_end(path):
    rows = frame(
        path,
        """
        SELECT evaluation_id, num_emitted_tokens, num_verification_steps + sum(num_survived) AS uncut,
            any_value(tau_pooled) AS tau_pooled, num_prompts
        FROM acceptance JOIN survival USING (evaluation_id, slice, dataset) WHERE slice = 'all'
        GROUP BY evaluation_id, num_emitted_tokens, num_verification_steps, num_prompts
        """,
    )
    for row in rows.iter_rows(named=True):
        # At most the last block of each prompt is cut, by its bonus token.
        assert 0 <= row["uncut"] - row["num_emitted_tokens"] <= row["num_prompts"]
        assert row["tau_pooled"] >= 1


def test_survival_never_rises_and_available_blocks_bound_it(path):
    rows = frame(path, "FROM survival ORDER BY evaluation_id, slice, dataset, draft_position")
    for part in rows.partition_by("evaluation_id", "slice", "dataset"):
        survived = part["num_survived"].to_list()
        assert survived == sorted(survived, reverse=True)
        assert all(s <= a <= b for s, a, b in part.select("num_survived", "num_available", "num_blocks").rows())


def test_datasets_and_groups_add_up_to_all(path):
    sums = frame(
        path, "SELECT slice, sum(num_emitted_tokens) FROM acceptance WHERE evaluation_id = 'weak' GROUP BY slice"
    )
    assert len(set(sums["sum(num_emitted_tokens)"])) == 1
    assert sums.height == 3


def acceptance_of_all(tmp_path, record):
    write_evaluation(tmp_path / "one.duckdb", record)
    return frame(tmp_path / "one.duckdb", "FROM acceptance WHERE slice = 'all'").row(0, named=True)


def test_the_walk_alone_gives_the_same_numbers_without_a_mean_over_all_anchors(tmp_path, path):
    everything = frame(path, "FROM acceptance WHERE slice = 'all' AND evaluation_id = 'weak'").row(0, named=True)
    record = make_record("walk", quality=0.25, seed=1, walk_only=True)
    walk = acceptance_of_all(tmp_path, record)
    assert walk["tau_all_anchors"] is None
    assert everything["tau_all_anchors"] is not None
    assert walk["num_anchors"] == walk["num_verification_steps"] < everything["num_anchors"]
    differing = {"evaluation_id", "tau_all_anchors", "num_anchors"}
    assert {k: v for k, v in walk.items() if k not in differing} == {
        k: v for k, v in everything.items() if k not in differing
    }


def test_a_drafter_that_is_always_wrong_has_tau_one_over_all_anchors_if_the_spec_says_so(tmp_path):
    record = make_record(quality=0.0)
    assert record.blocks["is_on_walk"].all()
    said = acceptance_of_all(tmp_path, dataclasses.replace(record, spec=record.spec | {"anchors": "all"}))
    assert (said["tau_pooled"], said["tau_all_anchors"], said["share_full_blocks"]) == (1.0, 1.0, 0.0)


def test_one_prompt_has_no_interval(tmp_path):
    one = acceptance_of_all(tmp_path, make_record(prompts=make_prompts(1)))
    assert (one["ci_low"], one["ci_high"], one["num_prompts"]) == (None, None, 1)
    assert one["tau_pooled"] == one["tau_prompt_mean"]


def test_unknown_near_ties_stay_unknown(tmp_path):
    record = make_record()
    blocks = record.blocks.with_columns(is_near_tie=polars.lit(None, dtype=polars.Boolean))
    row = acceptance_of_all(tmp_path, dataclasses.replace(record, blocks=blocks))
    assert {row[name] for name in NEAR_TIE_COLUMNS} == {None}


def test_both_taus_without_near_ties_of_a_walk_counted_by_hand(tmp_path):
    """Two prompts: steps of 3, 1* and 2 tokens, and of 4*, 1, 1 and 1; * hangs on a near-tie."""
    walks = {"a": [(3, False), (1, True), (2, False)], "b": [(4, True), (1, False), (1, False), (1, False)]}
    rows, prompts = [], []
    for name, steps in walks.items():
        start = 0
        for step, (emitted, is_tie) in enumerate(steps):
            rows.append((name, start, step, True, 3, 3, emitted - 1, emitted, is_tie, None if emitted == 4 else 2))
            start += emitted
        prompts.append(dataclasses.replace(make_prompts(1)[0], prompt_id=name, num_response_tokens=start + 1))
    blocks = polars.DataFrame(rows, schema=BLOCK_SCHEMA, orient="row")
    row = acceptance_of_all(tmp_path, make_record(prompts=tuple(prompts), blocks=blocks))
    assert (row["num_verification_steps"], row["num_near_ties"]) == (7, 2)
    assert (row["tau_pooled"], row["tau_prompt_mean"]) == (13 / 7, (2 + 7 / 4) / 2)
    assert (row["num_prompts_without_near_ties"], row["num_emitted_without_near_ties"]) == (2, 8)
    assert row["tau_without_near_ties"] == 8 / 5
    assert row["tau_prompt_mean_without_near_ties"] == (5 / 2 + 1) / 2


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6), st.floats(0, 1))
def test_near_ties_left_out_and_left_in_add_up_and_without_any_nothing_changes(seed, share):
    record = make_record(quality=0.6, seed=seed)
    drawn = polars.Series(np.random.default_rng(seed).random(record.blocks.height) < share)
    blocks = record.blocks.with_columns(is_near_tie=drawn)
    every = rows_of(blocks, record.prompts)
    tied = rows_of(blocks.with_columns(is_near_tie=~polars.col("is_near_tie")), record.prompts)
    none = rows_of(blocks.with_columns(is_near_tie=polars.lit(False)), record.prompts)
    for with_drawn, with_others, without in zip(every, tied, none, strict=True):
        assert with_drawn["num_near_ties"] + with_others["num_near_ties"] == without["num_verification_steps"]
        emitted = [row["num_emitted_without_near_ties"] for row in (with_drawn, with_others)]
        assert sum(emitted) == without["num_emitted_tokens"] == without["num_emitted_without_near_ties"]
        assert without["tau_without_near_ties"] == without["tau_pooled"]
        assert without["tau_prompt_mean_without_near_ties"] == without["tau_prompt_mean"]
        assert without["num_prompts_without_near_ties"] == without["num_prompts"]
        tau = with_drawn["tau_without_near_ties"]
        assert (tau is None) == (with_drawn["num_near_ties"] == with_drawn["num_verification_steps"])
        assert tau is None or 1 <= tau <= 4


def rows_of(blocks, prompts):
    return aggregate(blocks, prompts, num_drafts=3, has_all_anchors=True).acceptance.rows(named=True)


def test_prompts_without_a_single_step_are_null_and_not_zero(tmp_path):
    prompts = tuple(dataclasses.replace(prompt, num_response_tokens=1) for prompt in make_prompts(2))
    row = acceptance_of_all(tmp_path, make_record(prompts=prompts))
    assert (row["num_prompts"], row["num_verification_steps"]) == (0, 0)
    assert (row["tau_pooled"], row["acceptance_rate"], row["tau_prompt_mean"]) == (None, None, None)
    survival = frame(tmp_path / "one.duckdb", "FROM survival")
    assert survival["survival"].null_count() == survival.height == 3 * (1 + 2 + 2)
