"""A database on a full disk, on a read-only one, or of another program: one clear line, and nothing is lost."""

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dflash_core.errors import ResultsError
from dflash_core.results.database import has_evaluation, read_evaluation, write_evaluation
from dflash_core.results.query import run_query
from tests.dflash_core.results.builders import make_record

ROOT = Path(__file__).parents[3]
NOBODY = 65534
# The kernel refuses to let the file grow, as it does on a full disk; only the number of the error differs.
WRITER = """
import os, resource, sys
from dflash_core.errors import DFlashEvalError
from dflash_core.results.database import write_evaluation
from tests.dflash_core.results.builders import make_record
path, limit = sys.argv[1], int(sys.argv[2])
if limit < 0:
    # Nothing is read-only to root, so that root becomes somebody else, once all is imported.
    make_record()
    os.setuid(-limit)
if limit > 0:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
try:
    write_evaluation(path, make_record("new", step=200, block_size=16), wait_s=2)
except DFlashEvalError as error:
    print(error)
    sys.exit(error.exit_status)
"""
READER = """
import os, sys
from dflash_core.results.query import run_query
if int(sys.argv[2]) < 0:
    os.setuid(-int(sys.argv[2]))
print(run_query(sys.argv[1], "SELECT count(*) AS n FROM evaluations").item())
"""


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )


def assert_one_line(failed: subprocess.CompletedProcess[str]) -> None:
    assert failed.returncode == 1, failed.stderr
    (line,) = failed.stdout.splitlines()
    assert "acceptance.duckdb" in line
    assert "too large" in line or "space" in line


def test_a_full_disk_is_one_line_and_leaves_the_old_rows(tmp_path: Path) -> None:
    path = tmp_path / "acceptance.duckdb"
    write_evaluation(path, make_record("old"))
    before = read_evaluation(path, "old", blocks=True)
    assert_one_line(run(WRITER, path, 1))
    assert not has_evaluation(path, "new")
    assert read_evaluation(path, "old", blocks=True) == before
    write_evaluation(path, make_record("new", step=200))
    assert run_query(path, "SELECT count(*) AS n FROM evaluations").item() == 2


@pytest.mark.parametrize("room", [4096, 20_000])
def test_a_disk_that_fills_up_while_the_database_is_made_is_one_line_and_the_next_write_works(
    tmp_path: Path, room: int
) -> None:
    path = tmp_path / "acceptance.duckdb"
    assert_one_line(run(WRITER, path, room))
    assert not has_evaluation(path, "new", wait_s=1)
    write_evaluation(path, make_record("new", step=200), wait_s=1)
    assert has_evaluation(path, "new")


def test_a_read_only_database_is_read_and_a_write_is_one_line() -> None:
    folder = Path(tempfile.mkdtemp(prefix="read-only-"))
    path = folder / "acceptance.duckdb"
    try:
        write_evaluation(path, make_record("old"))
        for queue in folder.glob("*.queue"):
            queue.unlink()
        path.chmod(0o444)
        folder.chmod(0o555)
        user = -NOBODY if os.geteuid() == 0 else 0
        read = run(READER, path, user)
        assert read.stdout == "1\n", read.stderr
        failed = run(WRITER, path, user)
        assert failed.returncode == 1, failed.stderr
        (line,) = failed.stdout.splitlines()
        assert "acceptance.duckdb" in line
        assert "ermission denied" in line
        assert os.listdir(folder) == ["acceptance.duckdb"]
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)


def test_the_database_of_another_program_is_one_line_and_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "theirs.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE cats (name TEXT)")
    connection.close()
    before = path.read_bytes()
    for act in (lambda: write_evaluation(path, make_record(), wait_s=1), lambda: run_query(path, "SELECT 1", wait_s=1)):
        with pytest.raises(ResultsError) as caught:
            act()
        assert "\n" not in str(caught.value)
        assert "theirs.db" in str(caught.value)
    assert path.read_bytes() == before
