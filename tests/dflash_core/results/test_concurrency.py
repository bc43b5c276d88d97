"""Several processes at one database at once; one of them may die."""

import fcntl
import json
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
from dflash_core.results.turns import turn
from tests.dflash_core.results.builders import make_prompts, make_record

ROOT = Path(__file__).parents[3]
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


def crowd(role, path, name, number, together):
    return subprocess.Popen(
        [sys.executable, "-m", "tests.benchmarks.crowd", role, str(path), name, str(number), str(together)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1"},
    )


def answer(process):
    out, errors = process.communicate(timeout=150)
    assert process.returncode == 0, errors
    return json.loads(out)


def test_eight_writers_and_two_readers_at_once_lose_and_double_nothing_and_all_get_their_turn(path):
    """All start together on a database that does not exist yet, so that they race to create it too.

    `tests/benchmarks/bench_results.py` does the same with 50 evaluations each, and prints the waits.
    """
    together, number = time.time() + 4.0, 4
    writers = [crowd("write", path, f"w{place}", number, together) for place in range(8)]
    readers = [crowd("read", path, f"r{place}", 3, together) for place in range(2)]
    written = [answer(process) for process in writers]
    Path(f"{path}.done").touch()
    read = [answer(process) for process in readers]
    assert {one["number"] for one in written} == {number + 1}, "one of each was written twice"
    # In turn, nobody is passed over: no wait is much longer than that of the others.
    assert max(one["longest"] for one in written) < 10 * max(one["mean"] for one in written)
    assert min(one["number"] for one in read) >= 3
    num_blocks = make_record(prompts=make_prompts(3), seed=2).blocks.height
    expected = {f"w{place}-{i}": num_blocks for place in range(8) for i in range(number)}
    counts = run_query(path, "SELECT evaluation_id, count(*) FROM blocks GROUP BY ALL").rows()
    assert dict(counts) == expected
    assert len(counts) == len(expected) == 32
    for table, rows in {
        "evaluations": 32,
        "acceptance": 32 * 6,
        "survival": 32 * 6 * 3,
        "prompts": 3,
        "meta": 1,
    }.items():
        assert run_query(path, f"SELECT count(*) AS n FROM {table}")["n"][0] == rows


def test_everybody_who_waits_gets_a_turn_and_one_who_gives_up_goes_on_without(tmp_path):
    """Four come one after the other while the queue is held; the third waits for a moment only."""
    path, order, threads = tmp_path / "db", [], []

    def come(name, wait_s):
        with turn(path, deadline=time.monotonic() + wait_s):
            order.append(name)

    with turn(path, deadline=time.monotonic() + 60):
        for name, wait_s in (("first", 60), ("second", 60), ("impatient", 0.05), ("third", 60)):
            thread = threading.Thread(target=come, args=(name, wait_s))
            thread.start()
            threads.append(thread)
            wait_until(lambda: waiting_in_kernel() >= len(threads))
        threads[2].join(timeout=30)
        assert order == ["impatient"], "it goes on without a turn, and whoever holds the database keeps it out"
    for thread in threads:
        thread.join(timeout=30)
    assert sorted(order[1:]) == ["first", "second", "third"]
    wait_until(lambda: waiting_in_kernel() == 0)
    with turn(path, deadline=time.monotonic()):
        pass


def waiting_in_kernel():
    return sum(thread.name == "results-queue" for thread in threading.enumerate())


def wait_until(holds):
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_process_that_dies_at_the_front_of_the_queue_lets_the_next_one_come(path):
    write_evaluation(path, make_record())
    script = (
        "import sys, time; from dflash_core.results.turns import turn\n"
        "with turn(sys.argv[1], deadline=time.monotonic()): print('front', flush=True); time.sleep(60)"
    )
    process = start(script, path)
    assert process.stdout.readline() == "front\n"
    assert not is_free(path)
    process.kill()
    process.communicate()
    assert is_free(path)
    assert has_evaluation(path, "eval-a")


def is_free(path):
    with open(f"{path}.queue", "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


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
