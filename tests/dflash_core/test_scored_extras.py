"""Extras from the configuration to the database and back: asked for, added to what is known, and absent otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflash_core import evaluation, stages
from dflash_core.config import Config, load_config
from dflash_core.drafter.spec import DrafterSpec
from dflash_core.drafter_reading import read_drafter
from dflash_core.results import database
from dflash_core.results.query import run_query
from dflash_core.results.records import EvaluationRecord
from tests.support import scene as setups

ASKED = {
    "extras": ["sweep", "recall", "trees", "sampled"],
    "sweep_block_sizes": [2, 4],
    "tree_budgets": [4, 16],
    "temperatures": [0.7],
}


@pytest.fixture
def setup(tmp_path: Path) -> setups.Setup:
    return setups.make_setup(tmp_path)


def evaluate(setup: setups.Setup, drafter: dict[str, Any]) -> tuple[Config, EvaluationRecord, DrafterSpec]:
    """Run the stages one by one, without a flow, and store the record."""
    setup.change_config(drafter=drafter)
    config = load_config(setup.config)
    inspection = evaluation.inspect(str(setup.run / "step_1"), config)
    plan = stages.plan_target(config)
    facts = read_drafter(inspection, config, plan.target.config)
    key = stages.drafter_key(inspection, config)
    streamed = stages.stream_drafter(str(setup.run / "step_1"), config, inspection.ref.identity, key)
    transcripts = stages.write_transcripts(config)
    stages.extract_hidden_states(config, facts.target_layer_ids)
    sha256 = streamed["meta"]["weights_sha256"]
    spec = evaluation.evaluation_spec(config, plan, transcripts["meta"], facts, sha256)
    blocks = stages.run_drafter(config, spec, key, facts)
    record = evaluation.done_record(
        config,
        evaluation.checkpoint_record(inspection, sha256),
        spec,
        blocks,
        started_at=evaluation.now(),
        seconds={},
        cached={},
        bytes_read=0,
    )
    database.write_evaluation(config.results, record)
    return config, record, facts


def test_extras_go_from_the_config_into_the_database_and_back(setup: setups.Setup) -> None:
    config, record, facts = evaluate(setup, ASKED)
    found = database.read_evaluation(config.results, record.evaluation_id)
    assert found is not None
    assert set(found["extras"]) == {"sweep", "recall", "trees", "sampled"}
    trees = found["extras"]["trees"]["datasets"]
    assert [row["budget"] for row in trees["all"]] == [4, 16]
    assert set(trees) == {"all", "odd", "even"}
    all_prompts = found["datasets"]["all"]
    emitted = all_prompts["num_emitted_tokens"]
    for name in ("trees", "sweep"):
        assert {row["num_emitted_tokens"] for row in found["extras"][name]["datasets"]["all"]} == {emitted}
    for row in found["extras"]["recall"]["datasets"]["all"]:
        assert row["num_blocks"] <= all_prompts["num_verification_steps"]
    assert {row["num_blocks"] for row in found["extras"]["sampled"]["datasets"]["all"]} == {
        all_prompts["num_verification_steps"]
    }
    sizes = run_query(config.results, "SELECT block_size FROM block_sizes WHERE slice = 'all'")
    assert sizes["block_size"].to_list() == [2, 4, facts.block_size]


def test_asking_later_adds_them_to_the_same_evaluation_and_changes_no_other_number(setup: setups.Setup) -> None:
    config, plain, _ = evaluate(setup, {})
    inspection = evaluation.inspect(str(setup.run / "step_1"), config)
    known = evaluation.known_evaluation(config, inspection)
    assert known == (plain.evaluation_id, {})
    before = database.read_evaluation(config.results, plain.evaluation_id)
    assert before is not None
    assert "extras" not in before

    setup.change_config(drafter=ASKED)
    asking = load_config(setup.config)
    known = evaluation.known_evaluation(asking, inspection)
    assert known is not None
    assert known.evaluation_id == plain.evaluation_id
    assert not database.has_evaluation(config.results, known.evaluation_id, extras=known.extras)

    _, record, _ = evaluate(setup, ASKED)
    after = database.read_evaluation(config.results, record.evaluation_id)
    assert after is not None
    assert after["datasets"] == before["datasets"]
    assert database.has_evaluation(config.results, known.evaluation_id, extras=known.extras)
    assert database.has_evaluation(config.results, known.evaluation_id), "asking for less, it is known"
    assert run_query(config.results, "SELECT count(*) FROM evaluations").item() == 1


def test_a_whole_command_shows_them_and_answers_the_second_time_from_the_store(setup: setups.Setup) -> None:
    setup.change_config(drafter=ASKED)
    (first,) = setup.json("evaluate", str(setup.run / "step_1"))
    (again,) = setup.json("evaluate", str(setup.run / "step_1"))
    assert first["status"] == again["status"] == "done"
    assert first["extras"] == again["extras"]
    assert set(again["seconds"]) == {"answer_from_store"}
