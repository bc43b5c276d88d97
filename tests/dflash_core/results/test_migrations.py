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
import polars
import pytest

from dflash_core.errors import QueryError, ResultsError
from dflash_core.results.compare import compare
from dflash_core.results.connection import reading, writing
from dflash_core.results.database import has_evaluation, read_evaluation, write_evaluation, write_hosts
from dflash_core.results.migrations import SCHEMA_VERSION
from dflash_core.results.query import run_query
from dflash_core.results.report import write_report
from tests.dflash_core.results.builders import make_failed, make_prompts, make_record

ROOT = Path(__file__).parents[3]
SCHEMAS = {
    version: Path(__file__).with_name(f"schema_v{version}.sql").read_text(encoding="utf-8") for version in (1, 2, 3)
}
QUERIES = sorted((ROOT / "results" / "queries").glob("*.sql"))
OF_EXTRAS = {"recall_by_position", "sampled_acceptance", "which_block_size_pays", "which_tree_budget_pays"}
"""Queries on tables that version 3 brought."""
FOR_ALL_VERSIONS = {"near_tie_share", "not_scored", "paired_differences", "cost_per_checkpoint"}
"""Queries that do without the column `conditions`, which version 4 brought."""
TABLES = ("checkpoints", "evaluations", "prompts", "blocks", "acceptance", "survival", "hosts")
VIEWS = ("prompt_acceptance", "leaderboard", "learning_curve", "paired")
NOW = datetime(2026, 3, 2, 8, 30, tzinfo=UTC)
DYING = """
import os, signal, sys
from dflash_core.results import migrations
from dflash_core.results.connection import writing
path, moment, version = sys.argv[1], sys.argv[2], int(sys.argv[3])
def die():
    os.kill(os.getpid(), signal.SIGKILL)
if moment == "in the middle of the step":
    steps = list(migrations.MIGRATIONS)
    def step_and_die(connection):
        migrations_before[version - 1](connection)
        die()
    migrations_before = migrations.MIGRATIONS
    steps[version - 1] = step_and_die
    migrations.MIGRATIONS = tuple(steps)
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


@pytest.fixture(scope="module", params=SCHEMAS, ids=lambda version: f"from version {version}")
def version(request):
    return request.param


@pytest.fixture(scope="module")
def original(tmp_path_factory, version):
    """A file of an old version with every table filled: declared by that version's text, filled column by column."""
    folder = tmp_path_factory.mktemp("old version")
    source = folder / "present.duckdb"
    for place, quality in enumerate((0.2, 0.5, 0.8)):
        write_evaluation(source, make_record(f"eval-{place}", step=100 * place, quality=quality, seed=place))
    write_evaluation(source, make_record("eval-published", run="published", step=None, seed=9, walk_only=True))
    unknown = make_record("eval-without-margins", run="other", seed=4)
    blocks = unknown.blocks.with_columns(is_near_tie=polars.lit(None, dtype=polars.Boolean))
    write_evaluation(source, dataclasses.replace(unknown, blocks=blocks))
    tied = make_record("eval-all-tied", run="third", seed=5)
    blocks = tied.blocks.with_columns(is_near_tie=polars.col("is_near_tie") | polars.col("prompt_id").ne("prompt-2"))
    write_evaluation(source, dataclasses.replace(tied, blocks=blocks))
    one_prompt = make_record("eval-of-one-prompt", run="fourth", prompts=make_prompts(1), transcripts_digest="one")
    write_evaluation(source, one_prompt)
    write_evaluation(source, make_failed("eval-broken", step=400))
    host = {"name": "box", "url": "ssh://me@box", "status": "ok", "problem": None, "probed_at": NOW, "facts": {"n": 1}}
    write_hosts(source, [host])
    path = folder / "acceptance.duckdb"
    with duckdb.connect(str(path)) as connection:
        connection.execute(SCHEMAS[version])
        connection.execute("INSERT INTO meta VALUES (?)", [version])
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


def contents(path, like=None):
    """Return columns and rows of every table and view, and the version; only the columns of `like` where given."""
    with reading(path) as connection:
        found = {}
        for name in (*TABLES, *VIEWS):
            columns = like[name][0] if like else [row[0] for row in connection.execute(f"DESCRIBE {name}").fetchall()]
            quoted = ", ".join('"' + column.replace('"', '""') + '"' for column in columns)
            found[name] = columns, connection.execute(f"SELECT {quoted} FROM {name} ORDER BY ALL").fetchall()
        return found, connection.execute("FROM meta").fetchall()


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


def test_every_row_survives(path, version):
    before, stored = contents(path)
    assert stored == [(version,)]
    with writing(path):
        pass
    assert contents(path, like=before) == (before, [(SCHEMA_VERSION,)])


def test_new_columns_hold_what_a_new_file_would_hold(path, original):
    """Both ways: counts exactly, means to rounding, since SQL adds the prompts' taus up in another order."""
    with writing(path):
        pass
    found, expected = contents(path)[0], contents(original.with_name("present.duckdb"))[0]
    for name in TABLES:
        assert found[name][0] == expected[name][0]
        for here, there in zip(found[name][1], expected[name][1], strict=True):
            assert here == tuple(
                pytest.approx(value, rel=1e-12) if isinstance(value, float) else value for value in there
            ), name
    columns, rows = found["acceptance"]
    tied = [dict(zip(columns, row, strict=True)) for row in rows if "eval-all-tied" in row]
    assert {row["num_prompts_without_near_ties"] for row in tied} == {0, 1}
    assert {row["tau_prompt_mean_without_near_ties"] is None for row in tied} == {True, False}
    unknown = [dict(zip(columns, row, strict=True)) for row in rows if "eval-without-margins" in row]
    assert {row["num_emitted_without_near_ties"] for row in unknown} == {None}


def test_ready_made_queries_run_on_an_old_file_or_say_what_brings_it_up_to_date(path, version):
    assert {query.stem for query in QUERIES} >= FOR_ALL_VERSIONS | OF_EXTRAS
    for query in QUERIES:
        text = query.read_text(encoding="utf-8")
        if query.stem in FOR_ALL_VERSIONS or (version == 3 and query.stem in OF_EXTRAS):
            run_query(path, text)
        else:
            with pytest.raises(QueryError, match="the next `dflash-eval evaluate` brings it up to date"):
                run_query(path, text)
    with writing(path):
        pass
    for query in QUERIES:
        run_query(path, query.read_text(encoding="utf-8"))


def test_percentile_intervals_of_old_are_made_anew_and_missing_ones_stay_missing(path, original):
    with duckdb.connect(str(path)) as connection:
        connection.execute("UPDATE acceptance SET ci_low = 1.25, ci_high = 1.5 WHERE ci_low IS NOT NULL")
    with writing(path):
        pass
    statement = "SELECT evaluation_id, slice, dataset, ci_low, ci_high FROM acceptance ORDER BY ALL"
    found = run_query(path, statement).rows()
    assert found == run_query(original.with_name("present.duckdb"), statement).rows()
    assert (1.25, 1.5) not in {row[3:] for row in found}
    assert (None, None) in {row[3:] for row in found}


def test_what_the_first_version_refused_can_be_written(path, version):
    before, _ = contents(path)
    if version == 1:
        with duckdb.connect(str(path)) as connection, pytest.raises(duckdb.ConstraintException, match="status"):
            connection.execute("UPDATE evaluations SET status = 'vanished' WHERE evaluation_id = 'eval-broken'")
    write_evaluation(path, make_failed("eval-gone", status="vanished", error="rotated away", step=500))
    found = read_evaluation(path, "eval-gone")
    assert (found["status"], found["error"], found["datasets"]) == ("vanished", "rotated away", {})
    after, _ = contents(path, like=before)
    added = {name: len(after[name][1]) - len(rows) for name, (_, rows) in before.items()}
    assert added == dict.fromkeys(before, 0) | {"checkpoints": 1, "evaluations": 1}
    assert all(set(map(repr, rows)) <= set(map(repr, after[name][1])) for name, (_, rows) in before.items())


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


def test_an_old_file_is_read_as_it_is(path, version, tmp_path):
    before = digest(path)
    assert has_evaluation(path, "eval-0")
    found = read_evaluation(path, "eval-1", blocks=True)
    assert found["walks"]
    assert "extras" not in found
    assert found["datasets"]["all"]["tau_without_near_ties"] is not None
    assert (found["datasets"]["all"]["tau_prompt_mean_without_near_ties"] is None) == (version < 3)
    expected = ["published", "other:100", "run-a:0", "run-a:100", "run-a:200", "third:100"]
    assert [row.label for row in compare(path, [], "published").rows] == expected
    assert run_query(path, "FROM leaderboard").height == 7
    queries = [query for query in QUERIES if query.stem in FOR_ALL_VERSIONS]
    answers = {query.stem: run_query(path, query.read_text(encoding="utf-8")).rows() for query in queries}
    page = write_report(path, tmp_path / "old.html", now=NOW).read_text(encoding="utf-8")
    assert digest(path) == before
    with writing(path):
        pass
    assert {query.stem: run_query(path, query.read_text(encoding="utf-8")).rows() for query in queries} == answers
    assert write_report(path, tmp_path / "new.html", now=NOW).read_text(encoding="utf-8") == page


def test_a_query_on_what_an_old_file_lacks_says_so(path, version):
    words = f"schema version {version} and not yet all of version {SCHEMA_VERSION}: the next `dflash-eval evaluate`"
    lacking = ["SELECT conditions FROM leaderboard"]
    if version < 3:
        lacking += ["FROM trees", "SELECT tau_prompt_mean_without_near_ties FROM leaderboard"]
    for statement in lacking:
        with pytest.raises(QueryError, match=words) as caught:
            run_query(path, statement)
        assert "\n" not in str(caught.value)
    with writing(path):
        pass
    assert run_query(path, "FROM trees").height == 0
    with pytest.raises(QueryError) as caught:
        run_query(path, "FROM no_such_table")
    assert "schema version" not in str(caught.value)


def add_by_hand(path):
    with duckdb.connect(str(path)) as connection:
        connection.execute("""ALTER TABLE evaluations ADD COLUMN "my ""note" VARCHAR[] DEFAULT ['mine']""")
        connection.execute("CREATE INDEX by_target ON evaluations (target)")
        connection.execute("CREATE VIEW mine AS SELECT run, count(*) AS n FROM leaderboard GROUP BY run")
        connection.execute("CREATE TABLE cats AS SELECT 'Tom' AS name")


@pytest.mark.parametrize("moment", ["in the middle of the step", "after the step"])
@pytest.mark.parametrize("has_additions", [False, True], ids=["plain file", "with what a person added"])
def test_a_command_killed_while_it_migrates_leaves_one_version_or_the_other(path, version, moment, has_additions):
    if has_additions:
        add_by_hand(path)
    before, _ = contents(path)
    process = run(DYING, path, moment, SCHEMA_VERSION - 1)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, errors
    left = SCHEMA_VERSION - 1 if moment == "in the middle of the step" else SCHEMA_VERSION
    assert contents(path, like=before) == (before, [(left,)])
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
        assert connection.execute("FROM mine ORDER BY run").fetchall() == [
            ("fourth", 1),
            ("other", 1),
            ("published", 1),
            ("run-a", 3),
            ("third", 1),
        ]
        assert connection.execute("FROM cats").fetchall() == [("Tom",)]
    write_evaluation(path, make_record("eval-new", step=700))
    assert run_query(path, "SELECT n FROM mine WHERE run = 'run-a'").rows() == [(4,)]


def test_a_file_that_cannot_be_migrated_is_left_as_it_is_and_can_be_read(path, version):
    with duckdb.connect(str(path)) as connection:
        if version < 3:
            connection.execute("CREATE TABLE remarks (evaluation_id VARCHAR REFERENCES evaluations, remark VARCHAR)")
        else:
            connection.execute("CREATE TABLE kept AS FROM leaderboard; DROP VIEW leaderboard")
            connection.execute("CREATE TABLE leaderboard AS FROM kept")
    before = contents(path)
    with pytest.raises(
        ResultsError,
        match=f"from schema version {version} to {version + 1} and was left as it is: "
        ".*(key table of the table .remarks|leaderboard. is of type Table).*: put that right",
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


@pytest.mark.parametrize("unknown", [SCHEMA_VERSION + 1, 0])
def test_a_version_that_is_not_known_is_refused_and_nothing_is_changed(path, unknown):
    with duckdb.connect(str(path)) as connection:
        connection.execute("UPDATE meta SET schema_version = ?", [unknown])
    before = digest(path)
    words = {
        SCHEMA_VERSION + 1: f"has schema version {unknown}, this program knows {SCHEMA_VERSION}: upgrade dflash-eval",
        0: "not one of results",
    }[unknown]
    gone = dataclasses.replace(make_failed("eval-gone"), status="vanished")
    for act in (lambda: write_evaluation(path, gone), lambda: run_query(path, "FROM leaderboard")):
        with pytest.raises(ResultsError, match=words):
            act()
    assert digest(path) == before
