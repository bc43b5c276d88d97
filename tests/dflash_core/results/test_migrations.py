"""A results database of an older version: read as it is, brought up to date by the first write, or left whole."""

import dataclasses
import hashlib
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import duckdb
import pytest

from dflash_core.errors import ResultsError
from dflash_core.results.compare import compare
from dflash_core.results.connection import reading, writing
from dflash_core.results.database import has_evaluation, read_evaluation, write_evaluation, write_hosts
from dflash_core.results.migrations import SCHEMA_VERSION
from dflash_core.results.query import run_query
from dflash_core.results.report import write_report
from tests.dflash_core.results.builders import make_failed, make_record

ROOT = Path(__file__).parents[3]
SCHEMA_1 = Path(__file__).with_name("schema_v1.sql").read_text(encoding="utf-8")
QUERIES = sorted((ROOT / "results" / "queries").glob("*.sql"))
TABLES = ("checkpoints", "evaluations", "prompts", "blocks", "acceptance", "survival", "hosts")
VIEWS = ("prompt_acceptance", "leaderboard", "learning_curve", "paired")
NOW = datetime(2026, 3, 2, 8, 30, tzinfo=UTC)
DYING = """
import os, signal, sys
from dflash_core.results import migrations
from dflash_core.results.connection import writing
path, moment = sys.argv[1:]
def die():
    os.kill(os.getpid(), signal.SIGKILL)
if moment == "in the middle of the step":
    step = migrations.MIGRATIONS[0]
    def step_and_die(connection):
        step(connection)
        die()
    migrations.MIGRATIONS = (step_and_die,)
with writing(path):
    die()  # the step is committed, the file is not closed
"""
WRITER = """
import sys, time
from dflash_core.results.database import write_evaluation
from tests.dflash_core.results.builders import make_failed
path, name, start = sys.argv[1], sys.argv[2], float(sys.argv[3])
time.sleep(max(0.0, start - time.time()))
write_evaluation(path, make_failed(name, status="vanished", step=int(name)))
"""


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A file of version 1 with every table filled: declared by the text of that version, filled column by column."""
    folder = tmp_path_factory.mktemp("version 1")
    source = folder / "present.duckdb"
    for place, quality in enumerate((0.2, 0.5, 0.8)):
        write_evaluation(source, make_record(f"eval-{place}", step=100 * place, quality=quality, seed=place))
    write_evaluation(source, make_record("eval-published", run="published", step=None, seed=9, walk_only=True))
    write_evaluation(source, make_failed("eval-broken", step=400))
    host = {"name": "box", "url": "ssh://me@box", "status": "ok", "problem": None, "probed_at": NOW, "facts": {"n": 1}}
    write_hosts(source, [host])
    path = folder / "acceptance.duckdb"
    with duckdb.connect(str(path)) as connection:
        connection.execute(SCHEMA_1)
        connection.execute("INSERT INTO meta VALUES (1)")
        connection.execute(f"ATTACH '{source}' AS present (READ_ONLY)")
        for table in TABLES:
            columns = ", ".join(row[0] for row in connection.execute(f"DESCRIBE {table}").fetchall())
            connection.execute(f"INSERT INTO {table} BY NAME SELECT {columns} FROM present.{table}")
            assert connection.execute(f"SELECT count(*) FROM {table}").fetchone() > (0,), table
        assert connection.execute("SELECT count(*) FROM blocks").fetchone() > (1000,)
    return path


@pytest.fixture
def path(original, tmp_path):
    path = tmp_path / "acceptance.duckdb"
    path.write_bytes(original.read_bytes())
    return path


def contents(path):
    """Return every row of every table and view, and the version."""
    with reading(path) as connection:
        rows = {name: connection.execute(f"FROM {name} ORDER BY ALL").fetchall() for name in (*TABLES, *VIEWS)}
        return rows, connection.execute("FROM meta").fetchall()


def declarations(path):
    """Return what DuckDB says of tables, views, constraints and indexes, in its own words."""
    catalogue = {
        "tables": "SELECT sql FROM duckdb_tables()",
        "views": "SELECT sql FROM duckdb_views() WHERE NOT internal",
        "constraints": "SELECT table_name, constraint_type, constraint_text FROM duckdb_constraints()",
        "indexes": "SELECT table_name, sql FROM duckdb_indexes()",
    }
    with reading(path) as connection:
        return {kind: sorted(connection.execute(sql).fetchall()) for kind, sql in catalogue.items()}


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def run(script, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1"},
    )


def test_every_row_survives_and_what_the_old_version_refused_can_be_written(path):
    before, version = contents(path)
    assert version == [(1,)]
    with duckdb.connect(str(path)) as connection, pytest.raises(duckdb.ConstraintException, match="status"):
        connection.execute("UPDATE evaluations SET status = 'vanished' WHERE evaluation_id = 'eval-broken'")
    with writing(path):
        pass
    assert contents(path) == (before, [(SCHEMA_VERSION,)])

    write_evaluation(path, make_failed("eval-gone", status="vanished", error="rotated away", step=500))
    found = read_evaluation(path, "eval-gone")
    assert (found["status"], found["error"], found["datasets"]) == ("vanished", "rotated away", {})
    after, _ = contents(path)
    added = {name: len(after[name]) - len(rows) for name, rows in before.items()}
    assert added == dict.fromkeys(before, 0) | {"checkpoints": 1, "evaluations": 1}
    assert all(set(map(repr, rows)) <= set(map(repr, after[name])) for name, rows in before.items())


def test_a_migrated_file_is_declared_exactly_like_a_new_one(path, tmp_path):
    new = tmp_path / "new.duckdb"
    for each in (new, path):
        with writing(each):
            pass
    assert declarations(path) == declarations(new)
    assert len(declarations(new)["constraints"]) > 30


def test_the_constraints_hold_after_the_migration(path):
    with writing(path):
        pass
    for statement, words in (
        ("UPDATE evaluations SET status = 'lost' WHERE evaluation_id = 'eval-broken'", "CHECK"),
        ("UPDATE evaluations SET error = NULL WHERE evaluation_id = 'eval-broken'", "CHECK"),
        ("UPDATE evaluations SET total_seconds = 'nan'::DOUBLE", "CHECK"),
        ("INSERT INTO evaluations FROM evaluations WHERE evaluation_id = 'eval-0'", "primary key"),
    ):
        with pytest.raises(ResultsError, match=words), writing(path) as connection:
            connection.execute(statement)


def test_the_write_that_migrates_may_replace_an_old_row(path):
    broken = read_evaluation(path, "eval-broken")
    again = make_record("eval-broken", step=400, seed=3)
    write_evaluation(path, again)
    assert broken["status"] == "failed"
    assert has_evaluation(path, "eval-broken")


def test_an_old_file_is_read_as_it_is(path, tmp_path):
    before = digest(path)
    assert has_evaluation(path, "eval-0")
    assert read_evaluation(path, "eval-1", blocks=True)["walks"]
    assert [row.label for row in compare(path).rows] == ["published", "run-a:0", "run-a:100", "run-a:200"]
    assert run_query(path, "FROM leaderboard").height == 4
    answers = {query.stem: run_query(path, query.read_text(encoding="utf-8")).rows() for query in QUERIES}
    page = write_report(path, tmp_path / "old.html", now=NOW).read_text(encoding="utf-8")
    assert digest(path) == before
    with writing(path):
        pass
    assert {query.stem: run_query(path, query.read_text(encoding="utf-8")).rows() for query in QUERIES} == answers
    assert write_report(path, tmp_path / "new.html", now=NOW).read_text(encoding="utf-8") == page


def add_by_hand(path):
    with duckdb.connect(str(path)) as connection:
        connection.execute("""ALTER TABLE evaluations ADD COLUMN "my ""note" VARCHAR[] DEFAULT ['mine']""")
        connection.execute("CREATE INDEX by_target ON evaluations (target)")
        connection.execute("CREATE VIEW mine AS SELECT run, count(*) AS n FROM leaderboard GROUP BY run")
        connection.execute("CREATE TABLE cats AS SELECT 'Tom' AS name")


@pytest.mark.parametrize("moment", ["in the middle of the step", "after the step"])
@pytest.mark.parametrize("has_additions", [False, True], ids=["plain file", "with what a person added"])
def test_a_command_killed_while_it_migrates_leaves_one_version_or_the_other(path, moment, has_additions):
    if has_additions:
        add_by_hand(path)
    before, _ = contents(path)
    process = run(DYING, path, moment)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, errors
    assert contents(path) == (before, [(1,) if moment == "in the middle of the step" else (SCHEMA_VERSION,)])
    write_evaluation(path, make_failed("eval-gone", status="vanished", step=500))
    assert read_evaluation(path, "eval-gone")["status"] == "vanished"


def test_what_a_person_added_to_the_file_stays(path):
    add_by_hand(path)
    with writing(path):
        pass
    with reading(path) as connection:
        notes = connection.execute("""SELECT DISTINCT "my ""note" FROM evaluations""").fetchall()
        indexes = connection.execute("SELECT index_name FROM duckdb_indexes() WHERE sql IS NOT NULL").fetchall()
        assert (notes, indexes) == ([(["mine"],)], [("by_target",)])
        assert connection.execute("FROM mine ORDER BY run").fetchall() == [("published", 1), ("run-a", 3)]
        assert connection.execute("FROM cats").fetchall() == [("Tom",)]
    write_evaluation(path, make_record("eval-new", step=700))
    assert run_query(path, "SELECT n FROM mine WHERE run = 'run-a'").rows() == [(4,)]


def test_a_file_that_cannot_be_migrated_is_left_as_it_is_and_can_be_read(path):
    with duckdb.connect(str(path)) as connection:
        connection.execute("CREATE TABLE remarks (evaluation_id VARCHAR REFERENCES evaluations, remark VARCHAR)")
    before = contents(path)
    with pytest.raises(
        ResultsError,
        match="from schema version 1 to 2 and was left as it is: .*key table of the table .remarks.*: put that right",
    ) as caught:
        write_evaluation(path, make_record("eval-new", step=700))
    assert "\n" not in str(caught.value)
    assert contents(path) == before


def test_two_commands_that_find_an_old_file_at_once_both_write(path):
    together = time.time() + 2.0
    processes = [run(WRITER, path, name, together) for name in ("501", "502")]
    for process in processes:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    rows = run_query(path, "SELECT evaluation_id FROM evaluations WHERE status = 'vanished' ORDER BY ALL").rows()
    assert rows == [("501",), ("502",)]
    assert contents(path)[1] == [(SCHEMA_VERSION,)]


@pytest.mark.parametrize("version", [SCHEMA_VERSION + 1, 0])
def test_a_version_that_is_not_known_is_refused_and_nothing_is_changed(path, version):
    with duckdb.connect(str(path)) as connection:
        connection.execute("UPDATE meta SET schema_version = ?", [version])
    before = digest(path)
    words = {
        SCHEMA_VERSION + 1: f"has schema version {version}, this program knows {SCHEMA_VERSION}: upgrade dflash-eval",
        0: "not one of results",
    }[version]
    gone = dataclasses.replace(make_failed("eval-gone"), status="vanished")
    for act in (lambda: write_evaluation(path, gone), lambda: run_query(path, "FROM leaderboard")):
        with pytest.raises(ResultsError, match=words):
            act()
    assert digest(path) == before
