"""A database whose creation was cut off, by a full disk or SIGKILL, before even an empty one was there."""

import subprocess
import sys
from pathlib import Path

import duckdb
import pytest

from dflash_core.errors import NoResults, ResultsError
from dflash_core.results.connection import NEW_FILE_BYTES, reading
from dflash_core.results.database import has_evaluation, read_evaluation, write_evaluation
from tests.dflash_core.results.builders import make_record

CREATOR = """
import fcntl, sys, time
with open(sys.argv[1], "r+b") as file:
    fcntl.lockf(file, fcntl.LOCK_EX)
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("num_bytes", [0, 1, 4096, NEW_FILE_BYTES - 1])
def test_what_is_left_of_it_is_no_results_and_the_next_writer_makes_it_good(tmp_path: Path, num_bytes: int) -> None:
    path = tmp_path / "r.duckdb"
    path.write_bytes(bytes(num_bytes))
    with pytest.raises(NoResults, match="cut off"), reading(path, wait_s=0.2):
        pass
    assert not has_evaluation(path, "one", wait_s=0.2)
    assert path.stat().st_size == num_bytes, "a reader changes nothing"
    inode = path.stat().st_ino
    write_evaluation(path, make_record("one"), wait_s=0.2)
    evaluation = read_evaluation(path, "one")
    assert evaluation is not None
    assert evaluation["status"] == "done"
    assert path.stat().st_ino == inode, "who had opened it before writes into the same file"


def test_one_that_another_process_is_just_creating_is_left_to_it(tmp_path: Path) -> None:
    path = tmp_path / "r.duckdb"
    path.touch()
    command = [sys.executable, "-c", CREATOR, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as creator:
        assert creator.stdout is not None
        assert creator.stdout.readline() == "locked\n"
        with pytest.raises(ResultsError, match="held by"):
            write_evaluation(path, make_record("one"), wait_s=0.2)
        assert path.stat().st_size == 0
        creator.communicate()
    write_evaluation(path, make_record("one"), wait_s=0.2)


@pytest.mark.parametrize("num_bytes", [5, NEW_FILE_BYTES])
def test_a_file_that_is_no_database_is_not_written_over(tmp_path: Path, num_bytes: int) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(b"x" * num_bytes)
    with pytest.raises(ResultsError, match="cannot be opened"):
        write_evaluation(path, make_record("one"), wait_s=0.2)
    assert path.read_bytes() == b"x" * num_bytes


def test_the_first_part_of_a_real_one_is_made_good(tmp_path: Path) -> None:
    duckdb.connect(str(tmp_path / "whole.duckdb")).close()
    path = tmp_path / "r.duckdb"
    path.write_bytes((tmp_path / "whole.duckdb").read_bytes()[:5000])
    write_evaluation(path, make_record("one"), wait_s=0.2)
    assert has_evaluation(path, "one")
