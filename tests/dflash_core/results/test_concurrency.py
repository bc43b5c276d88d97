"""Several processes at one database at once; one of them may die."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dflash_core.errors import ResultsError
from dflash_core.results.connection import reading
from dflash_core.results.database import has_evaluation, read_evaluation, write_evaluation
from dflash_core.results.query import run_query
from tests.dflash_core.results.builders import make_prompts, make_record

ROOT = Path(__file__).parents[3]
WRITER = """
import sys, time
from dflash_core.results.database import write_evaluation
from tests.dflash_core.results.builders import make_record
path, name, start = sys.argv[1], sys.argv[2], float(sys.argv[3])
records = [make_record(f"{name}-{i % 4}", step=100 * (i % 4), seed=i % 4) for i in range(8)]
time.sleep(max(0.0, start - time.time()))
for record in records:
    write_evaluation(path, record, wait_s=60)
"""
READER = """
import sys, time
from dflash_core.results.query import run_query
from dflash_core.errors import NoResults
path, start = sys.argv[1], float(sys.argv[2])
time.sleep(max(0.0, start - time.time()))
sql = '''SELECT evaluation_id, count(*) FILTER (is_on_walk) AS n, any_value(num_verification_steps) AS said
FROM blocks JOIN acceptance USING (evaluation_id) WHERE slice = 'all' GROUP BY ALL'''
for _ in range(15):
    try:
        rows = run_query(path, sql, wait_s=60).rows()
    except NoResults:
        rows = []
    assert all(n == said for _, n, said in rows), rows
    time.sleep(0.02)
"""
HOLDER = """
import sys, time
import duckdb
connection = duckdb.connect(sys.argv[1])
print("open", flush=True)
time.sleep(float(sys.argv[2]))
connection.close()
"""
DYING_WRITER = """
import os, signal, sys
from dflash_core.results import database
from tests.dflash_core.results.builders import make_record
real_insert = database._insert
def insert_and_die(connection, tables):
    real_insert(connection, tables)
    os.kill(os.getpid(), signal.SIGKILL)
database._insert = insert_and_die
database.write_evaluation(sys.argv[1], make_record(seed=7))
"""


def start(script, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1"},
    )


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new" / "acceptance.duckdb"


@pytest.fixture
def holder(path):
    """Start a process that holds the database for some seconds; end it at the end."""
    held = []

    def hold(seconds):
        process = start(HOLDER, path, seconds)
        held.append(process)
        assert process.stdout.readline() == "open\n"
        return process

    yield hold
    for process in held:
        process.kill()
        process.communicate()


def test_writers_and_readers_at_once_lose_and_double_nothing(path):
    # All start together on a database that does not exist yet, so that they race to create it too.
    together = time.time() + 3.0
    processes = [start(WRITER, path, name, together) for name in ("a", "b")] + [start(READER, path, together)]
    for process in processes:
        _, errors = process.communicate(timeout=90)
        assert process.returncode == 0, errors
    expected = {f"{name}-{i}": make_record(f"{name}-{i}", seed=i).blocks.height for name in "ab" for i in range(4)}
    counts = run_query(path, "SELECT evaluation_id, count(*) FROM blocks GROUP BY ALL").rows()
    assert dict(counts) == expected
    assert len(counts) == 8
    for table, number in {
        "evaluations": 8,
        "acceptance": 8 * 6,
        "survival": 8 * 6 * 3,
        "prompts": 9,
        "meta": 1,
    }.items():
        assert run_query(path, f"SELECT count(*) AS n FROM {table}")["n"][0] == number


def test_a_reader_and_a_writer_wait_for_a_held_database(path, holder):
    write_evaluation(path, make_record())
    holder(0.7)
    assert has_evaluation(path, "eval-a")
    holder(0.7)
    write_evaluation(path, make_record("eval-b", step=200))
    assert has_evaluation(path, "eval-b")


def test_a_database_held_for_too_long_is_one_line_that_names_the_holder(path, holder):
    write_evaluation(path, make_record())
    process = holder(60)
    for act in (
        lambda: write_evaluation(path, make_record(), wait_s=0.3),
        lambda: read_evaluation(path, "eval-a", wait_s=0.3),
        lambda: run_query(path, "SELECT 1 AS one", wait_s=0.3),
    ):
        begun = time.monotonic()
        with pytest.raises(ResultsError, match=rf"python[\d.]* \(process {process.pid}\) for 0.3 s") as caught:
            act()
        assert "\n" not in str(caught.value)
        assert time.monotonic() - begun < 5


def test_a_writer_killed_in_the_middle_leaves_the_old_rows(path):
    write_evaluation(path, make_record())
    before = read_evaluation(path, "eval-a", blocks=True)
    process = start(DYING_WRITER, path)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, errors
    assert read_evaluation(path, "eval-a", blocks=True) == before
    write_evaluation(path, make_record(seed=7))
    assert read_evaluation(path, "eval-a", blocks=True) != before


def test_threads_of_one_process_take_turns(path):
    problems = []

    def work(place):
        try:
            write_evaluation(path, make_record(f"thread-{place}", step=place, prompts=make_prompts(3)))
            run_query(path, "SELECT count(*) AS n FROM blocks")
            assert has_evaluation(path, f"thread-{place}")
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(place,)) for place in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert run_query(path, "SELECT count(*) AS n FROM evaluations")["n"][0] == 6


def test_a_connection_is_given_up_even_when_its_rows_are_still_held(path):
    write_evaluation(path, make_record())
    with reading(path) as connection:
        kept = connection.sql("FROM blocks")
        assert kept.limit(1).fetchall()
    process = start("import duckdb, sys; duckdb.connect(sys.argv[1]).close()", path)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    del kept
