"""Evaluations into a real DuckDB file and back."""

import dataclasses
import json
import math
from datetime import UTC, datetime, timedelta, timezone

import duckdb
import polars
import pytest

from dflash_core.errors import NoResults, ResultsError
from dflash_core.results.connection import reading, writing
from dflash_core.results.database import has_evaluation, read_evaluation, write_evaluation, write_hosts
from dflash_core.results.migrations import SCHEMA_VERSION
from tests.dflash_core.results.builders import make_checkpoint, make_failed, make_prompts, make_record

TABLES = ("checkpoints", "evaluations", "prompts", "blocks", "acceptance", "survival", "hosts")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new folder" / "acceptance.duckdb"


def contents(path):
    with reading(path) as connection:
        return {name: sorted(map(repr, connection.execute(f"FROM {name}").fetchall())) for name in TABLES}


def query(path, statement, *parameters):
    with reading(path) as connection:
        return connection.execute(statement, parameters).fetchall()


def test_a_stored_evaluation_reads_back_as_the_json_of_evaluate(path):
    record = make_record()
    write_evaluation(path, record)
    found = read_evaluation(path, "eval-a", blocks=True)
    walk = record.blocks.filter("is_on_walk")
    assert found["checkpoint"] == record.checkpoint.url
    assert (found["run"], found["step"], found["status"], found["error"]) == ("run-a", 100, "done", None)
    assert (found["block_size"], found["device"], found["dtype"]) == (4, "cpu", "float32")
    assert (found["bytes_read"], found["bytes_total"]) == (20_500_000, 100_000_000)
    assert found["cached"] == record.cached
    assert found["seconds"] == record.seconds
    assert found["spec"] == record.spec
    assert set(found["datasets"]) == {"all", "chat", "code", "math"}
    assert set(found["groups"]) == {"trained on", "held out"}
    total = found["datasets"]["all"]
    assert total["num_prompts"] == 9
    assert total["num_verification_steps"] == walk.height
    assert total["num_accepted_drafts"] == walk["num_accepted_drafts"].sum()
    assert total["tau_pooled"] == walk["num_emitted_tokens"].sum() / walk.height
    assert total["ci_low"] < total["tau_pooled"] < total["ci_high"]
    assert len(total["survival"]) == 3
    assert json.loads(json.dumps(found)) == found


def test_walks_emit_every_token_after_the_first_in_order(path):
    record = make_record()
    write_evaluation(path, record)
    walks = read_evaluation(path, "eval-a", blocks=True)["walks"]
    for prompt in record.prompts:
        rows = record.blocks.filter(polars.col("is_on_walk") & (polars.col("prompt_id") == prompt.prompt_id))
        assert walks[prompt.prompt_id] == rows.sort("walk_step")["num_emitted_tokens"].to_list()
        assert sum(walks[prompt.prompt_id]) == prompt.num_response_tokens - 1
    assert "walks" not in read_evaluation(path, "eval-a")


def test_writing_twice_replaces_and_doubles_nothing(path):
    write_evaluation(path, make_record("eval-b", step=200, seed=4))
    write_evaluation(path, make_record())
    once = contents(path)
    write_evaluation(path, make_record())
    assert contents(path) == once
    write_evaluation(path, make_record(seed=9))
    assert len(contents(path)["evaluations"]) == 2
    assert contents(path)["blocks"] != once["blocks"]
    assert query(path, "SELECT count(*) FROM blocks WHERE evaluation_id = 'eval-b'") == [
        (make_record("eval-b", step=200, seed=4).blocks.height,)
    ]


@pytest.mark.parametrize("status", ["failed", "vanished"])
def test_an_evaluation_without_numbers_is_a_row_and_a_later_success_replaces_it(path, status):
    write_evaluation(path, make_failed("eval-a", status=status, error="the file is cut off"))
    assert not has_evaluation(path, "eval-a")
    found = read_evaluation(path, "eval-a")
    assert (found["status"], found["error"], found["datasets"]) == (status, "the file is cut off", {})
    assert query(path, "SELECT count(*) FROM checkpoints") == [(1,)]
    write_evaluation(path, make_record())
    assert has_evaluation(path, "eval-a")
    assert query(path, "SELECT status, error FROM evaluations") == [("done", None)]


@pytest.mark.parametrize("status", ["failed", "vanished"])
def test_a_failure_does_not_destroy_numbers_that_hold(path, status):
    write_evaluation(path, make_record())
    before = contents(path)
    write_evaluation(path, make_failed("eval-a", status=status, error="the host was down"))
    assert contents(path) == before


def test_of_several_outcomes_without_numbers_the_newest_stays(path):
    for status in ("failed", "vanished", "failed", "vanished"):
        write_evaluation(path, make_failed("eval-a", status=status))
        assert query(path, "SELECT status FROM evaluations") == [(status,)]


def test_a_later_look_at_a_checkpoint_keeps_what_was_known(path):
    write_evaluation(path, make_record())
    known = make_record().checkpoint
    blind = dataclasses.replace(known, weights_sha256=None, bytes_wanted=None, bytes_total=None)
    write_evaluation(path, dataclasses.replace(make_failed("eval-z"), checkpoint=blind))
    assert query(path, "SELECT weights_sha256, bytes_wanted, bytes_total FROM checkpoints") == [
        (known.weights_sha256, known.bytes_wanted, known.bytes_total)
    ]


def test_a_checkpoint_that_could_not_be_read_has_null_and_not_zero(path):
    blind = dataclasses.replace(
        make_checkpoint("blind"), layout=None, identity=None, weights_sha256=None, bytes_total=None, bytes_wanted=None
    )
    write_evaluation(path, dataclasses.replace(make_failed(), checkpoint=blind, block_size=None, device=None))
    assert query(path, "SELECT layout, bytes_total FROM checkpoints") == [(None, None)]
    assert read_evaluation(path, "eval-f")["bytes_total"] is None


def test_unknown_evaluations_and_missing_databases_are_none(path):
    assert read_evaluation(path, "eval-a") is None
    assert not has_evaluation(path, "eval-a")
    assert not path.exists()
    write_evaluation(path, make_record())
    assert read_evaluation(path, "eval-x") is None
    assert not has_evaluation(path, "eval-x")
    with pytest.raises(NoResults, match="run `dflash-eval evaluate` first"), reading(path.with_name("other.duckdb")):
        pass


def test_times_are_stored_as_utc(path):
    tokyo = timezone(timedelta(hours=9))
    write_evaluation(path, make_record(started_at=datetime(2026, 3, 1, 21, 0, tzinfo=tokyo)))
    assert query(path, "SELECT started_at FROM evaluations") == [(datetime(2026, 3, 1, 12, 0),)]
    assert read_evaluation(path, "eval-a")["started_at"] == "2026-03-01T12:00:00+00:00"


def test_spec_conditions_become_columns_and_absent_ones_are_null(path):
    write_evaluation(path, make_record(spec={"thinking": True, "metrics_version": 3, "packages": {"torch": "2.13"}}))
    columns = "thinking, metrics_version, packages ->> 'torch', verification_rule"
    assert query(path, f"SELECT {columns} FROM evaluations") == [(True, "3", "2.13", None)]


def test_a_password_in_a_url_is_not_stored(path):
    checkpoint = dataclasses.replace(
        make_record().checkpoint, url="sftp://me:geheim@train-box/data/step_1/checkpoint.pt"
    )
    write_evaluation(path, make_record(checkpoint=checkpoint))
    assert query(path, "SELECT url FROM checkpoints") == [("sftp://me@train-box/data/step_1/checkpoint.pt",)]


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        pytest.param("num_accepted_drafts", 7, "num_accepted_drafts <= num_available", id="more accepted than drafted"),
        pytest.param("num_emitted_tokens", 0, "1 <= num_emitted_tokens", id="a step that emits nothing"),
        pytest.param("num_accepted_drafts", None, "holds a NULL", id="missing count"),
        pytest.param("walk_step", None, "walk_step exactly on the walk", id="on the walk without a step"),
        pytest.param("anchor_index", 1, "share one prompt and anchor", id="anchor twice"),
        pytest.param("prompt_id", "stranger", "prompts that the record lacks", id="unknown prompt"),
        pytest.param("miss_rank", 0, "miss_rank >= 1", id="rank below the best"),
    ],
)
def test_blocks_that_contradict_themselves_are_refused_and_leave_nothing(path, column, value, words):
    record = make_record()
    first = polars.int_range(polars.len()) == 0
    changed = polars.when(first).then(polars.lit(value, dtype=record.blocks.schema[column])).otherwise(column)
    broken = record.blocks.with_columns(changed.alias(column))
    with pytest.raises(ResultsError, match=words):
        write_evaluation(path, dataclasses.replace(record, blocks=broken))
    assert not path.exists()


def test_a_walk_with_a_gap_is_refused(path):
    record = make_record(walk_only=True)
    gap = record.blocks.filter(~((polars.col("prompt_id") == "prompt-4") & (polars.col("walk_step") == 2)))
    with pytest.raises(ResultsError, match="gap or an overlap"):
        write_evaluation(path, dataclasses.replace(record, blocks=gap))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param({"error": "oh"}, "without an error", id="done with an error"),
        pytest.param({"status": "halfway"}, "halfway", id="unknown status"),
        pytest.param({"status": "vanished"}, "'vanished' has an error", id="vanished without a reason"),
        pytest.param({"status": "vanished", "error": "gone"}, "no blocks and no extras", id="vanished with numbers"),
        pytest.param({"blocks": None}, "a done evaluation has blocks", id="done without blocks"),
        pytest.param({"started_at": datetime(2026, 3, 1)}, "no time zone", id="naive time"),
        pytest.param({"seconds": {"run_drafter": math.nan}}, "JSON", id="nan in a stage's seconds"),
        pytest.param({"spec": {"tie_margin": math.inf}}, "JSON", id="infinity in the spec"),
    ],
)
def test_records_that_contradict_themselves_are_refused(path, changes, words):
    with pytest.raises(ResultsError, match=words):
        write_evaluation(path, make_record(**changes))
    assert not path.exists()


def test_a_dataset_called_all_is_refused(path):
    prompts = tuple(dataclasses.replace(prompt, dataset="all") for prompt in make_prompts())
    with pytest.raises(ResultsError, match="called 'all'"):
        write_evaluation(path, make_record(prompts=prompts))


def test_the_database_itself_refuses_nan_and_impossible_counts(path):
    write_evaluation(path, make_record())
    for statement in (
        "UPDATE acceptance SET tau_pooled = 'nan'::DOUBLE",
        "UPDATE survival SET survival = 'inf'::DOUBLE",
        "UPDATE evaluations SET error = 'but it is done'",
        "UPDATE blocks SET num_emitted_tokens = num_accepted_drafts + 2",
        "INSERT INTO blocks BY NAME SELECT 'eval-a' AS evaluation_id",
    ):
        with pytest.raises(ResultsError, match="onstraint"), writing(path) as connection:
            connection.execute(statement)


def test_an_error_in_the_middle_of_a_write_rolls_everything_back(path):
    write_evaluation(path, make_record())
    before = contents(path)
    with pytest.raises(ResultsError, match="nowhere"), writing(path) as connection:
        connection.execute("DELETE FROM blocks; DELETE FROM nowhere")
    with pytest.raises(ZeroDivisionError), writing(path) as connection:
        assert connection.execute("DELETE FROM blocks").fetchall()[0][0] / 0
    assert contents(path) == before


def test_a_database_of_a_newer_version_is_refused_in_one_line(path):
    write_evaluation(path, make_record())
    with writing(path) as connection:
        connection.execute("UPDATE meta SET schema_version = 99")
    for act in (lambda: write_evaluation(path, make_record()), lambda: read_evaluation(path, "eval-a")):
        words = f"schema version 99, this program knows {SCHEMA_VERSION}: upgrade"
        with pytest.raises(ResultsError, match=words) as caught:
            act()
        assert "\n" not in str(caught.value)


def test_a_database_of_somebody_else_and_a_text_file_are_refused(tmp_path):
    with duckdb.connect(str(tmp_path / "theirs.duckdb")) as connection:
        connection.execute("CREATE TABLE cats (name VARCHAR)")
    with pytest.raises(ResultsError, match="not one of results"):
        write_evaluation(tmp_path / "theirs.duckdb", make_record())
    (tmp_path / "notes.txt").write_text("no database\n" * 2000)
    with pytest.raises(ResultsError, match="cannot be opened"):
        read_evaluation(tmp_path / "notes.txt", "eval-a")


def test_an_empty_database_gets_the_tables_and_reads_as_nothing(tmp_path):
    duckdb.connect(str(tmp_path / "empty.duckdb")).close()
    assert read_evaluation(tmp_path / "empty.duckdb", "eval-a") is None
    write_evaluation(tmp_path / "empty.duckdb", make_record())
    assert has_evaluation(tmp_path / "empty.duckdb", "eval-a")


def test_hosts_keep_their_newest_row_without_secrets(path):
    first = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
    row = {"name": "training", "url": "ssh://me:pw@train-box:22", "status": "down", "problem": "no answer"}
    write_hosts(path, [row | {"probed_at": first, "facts": None}])
    up = {"status": "up", "problem": None, "facts": {"gpus": [{"memory_bytes": 80}]}, "probed_at": first + timedelta(1)}
    write_hosts(path, [row | up, row | up | {"name": "cpu_box"}])
    assert query(path, "SELECT name, url, status, problem, facts -> 'gpus' ->> 0 FROM hosts ORDER BY name") == [
        ("cpu_box", "ssh://me@train-box:22", "up", None, '{"memory_bytes":80}'),
        ("training", "ssh://me@train-box:22", "up", None, '{"memory_bytes":80}'),
    ]
    with pytest.raises(ResultsError, match="no time zone"):
        write_hosts(path, [row | up | {"probed_at": datetime(2026, 3, 1)}])
