"""Short connections to the results database, and what to do while another process holds it.

A DuckDB file has one process that writes, or many that read. So every connection here lives for
one statement or one transaction, opening is tried again while somebody else holds the file, in the order in which
all came (`turns`), and one process opens the file once at a time (DuckDB shares one instance, with
its settings, between the connections of a process).

A file of an older version is brought up to date when it is opened for writing; reading leaves it as it
is: what that version did not have yet is missing, everything else is answered alike.
"""

from __future__ import annotations

import fcntl
import os
import random
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import resources
from pathlib import Path

import duckdb

from dflash_core.errors import NoResults, ResultsError
from dflash_core.results.migrations import SCHEMA_VERSION, migrate_one_step
from dflash_core.results.turns import turn

DEFAULT_WAIT_S = 60.0
FIRST_PAUSE_S = 0.005
LONGEST_PAUSE_S = 0.03
# A file that another process is just creating is shorter than DuckDB's three headers of 4 KiB.
NEW_FILE_BYTES = 12288

# DuckDB would fetch an extension from its makers' host for a query that needs one, or for a file of SQLite.
_CONFIG: dict[str, str | bool | int | float | list[str]] = {
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
}

_in_this_process = threading.Lock()

PathLike = str | os.PathLike[str]


def database_exists(path: PathLike) -> bool:
    """Tell whether a results database lies at a path."""
    return Path(path).is_file()


@contextmanager
def reading(path: PathLike, *, wait_s: float = DEFAULT_WAIT_S) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open the database read-only and close it again.

    Args:
        path: of the database file.
        wait_s: how long to wait, in seconds, while another process writes.

    Raises:
        NoResults: nothing lies there, or nothing was ever written to it.
        ResultsError: it is held for too long, is no results database, or is of a newer version.
    """
    if not database_exists(path):
        raise NoResults(f"no results database at {str(path)!r}: run `dflash-eval evaluate` first")
    with _opened(path, read_only=True, wait_s=wait_s) as connection:
        if _schema_version(connection, path) is None:
            raise NoResults(f"the database {str(path)!r} holds no results: run `dflash-eval evaluate` first")
        yield connection


@contextmanager
def writing(path: PathLike, *, wait_s: float = DEFAULT_WAIT_S) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open the database for one transaction, which is committed at the end or leaves nothing.

    The folder, the file and its tables are made when they are missing; tables of an older version are
    brought up to date first, in a transaction of their own.

    Raises:
        ResultsError: as `reading`, or the folder cannot be made, or the tables cannot be brought up to date.
    """
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResultsError(f"the folder of the results database {str(path)!r} cannot be made: {error}") from error
    with _opened(path, read_only=False, wait_s=wait_s) as connection:
        version = _schema_version(connection, path)
        if version is not None:
            _bring_up_to_date(connection, path, version)
        with _transaction(connection):
            if version is None:
                _create_schema(connection)
            yield connection


@contextmanager
def _transaction(connection: duckdb.DuckDBPyConnection) -> Iterator[None]:
    connection.begin()
    try:
        yield
    except BaseException:
        connection.rollback()
        raise
    connection.commit()


def _bring_up_to_date(connection: duckdb.DuckDBPyConnection, path: PathLike, version: int) -> None:
    while version < SCHEMA_VERSION:
        try:
            with _transaction(connection):
                migrate_one_step(connection, version)
        except duckdb.Error as error:
            raise ResultsError(
                f"the results database {str(path)!r} could not be brought from schema version {version} to "
                f"{version + 1} and was left as it is: {first_line(error)}: put that right, or name another file "
                "under `results`"
            ) from error
        version += 1


@contextmanager
def _opened(path: PathLike, *, read_only: bool, wait_s: float) -> Iterator[duckdb.DuckDBPyConnection]:
    deadline = time.monotonic() + wait_s
    if not _in_this_process.acquire(timeout=wait_s):
        raise ResultsError(f"the results database {str(path)!r} is in use by another thread for over {wait_s:g} s")
    try:
        with turn(path, deadline=deadline):
            connection = _connect(path, read_only=read_only, wait_s=wait_s, deadline=deadline)
        try:
            yield connection
        except duckdb.Error as error:
            raise ResultsError(f"the results database {str(path)!r} answered: {first_line(error)}") from error
        finally:
            connection.close()
    finally:
        _in_this_process.release()


def _connect(path: PathLike, *, read_only: bool, wait_s: float, deadline: float) -> duckdb.DuckDBPyConnection:
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            return duckdb.connect(os.fspath(path), read_only=read_only, config=_CONFIG)
        except duckdb.Error as error:
            if _is_unborn(error, path) and _was_left_unborn(path, is_repaired=not read_only):
                if read_only:
                    raise NoResults(f"the database {str(path)!r} holds no results: its creation was cut off") from error
                continue
            holder = _holder(error, path)
            if holder is None:
                what = f"the results database {str(path)!r} cannot be opened"
                raise ResultsError(f"{what}: {first_line(error)}") from error
            if time.monotonic() + pause_s > deadline:
                raise ResultsError(
                    f"the results database {str(path)!r} was held by {holder} for {wait_s:g} s: "
                    "close that program, or try again when it has finished"
                ) from error
        # Half of the pause is random: where there is no queue, waiting processes do not all come back at once.
        time.sleep(pause_s * random.uniform(0.5, 1.0))
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _holder(error: duckdb.Error, path: PathLike) -> str | None:
    """Name who holds the file, or None when waiting would not help."""
    text = str(error)
    if "Could not set lock" in text:
        found = re.search(r"held in (\S+) \(PID (\d+)\)", text)
        return f"{Path(found[1]).name} (process {found[2]})" if found else "another process"
    if "different configuration" in text:
        return "another connection of this process"
    return "a process that is creating it" if _is_unborn(error, path) else None


def _is_unborn(error: duckdb.Error, path: PathLike) -> bool:
    """Tell whether a file has not yet all that even an empty database has, and nothing else."""
    if "Could not set lock" in str(error):
        return False
    with suppress(FileNotFoundError):
        if Path(path).stat().st_size < NEW_FILE_BYTES:  # to close a whole one would free our locks
            data = Path(path).read_bytes()
            return not data.strip(b"\0") or data[8:12] == b"DUCK"
    return False


def _was_left_unborn(path: PathLike, *, is_repaired: bool) -> bool:
    """Tell whether the process that was creating a file is gone, as by SIGKILL or a full disk; DuckDB waits for ever.

    Who creates one holds DuckDB's lock on it. To repair is to write an empty database in place: under a new
    file somebody who has just opened this one would write into what has no name any more.

    Raises:
        ResultsError: it cannot be repaired.
    """
    try:
        with open(path, "r+b" if is_repaired else "rb") as file:
            fcntl.lockf(file, (fcntl.LOCK_EX if is_repaired else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_size >= NEW_FILE_BYTES:
                return False
            if is_repaired:
                file.write(_empty_database())
                file.flush()
                os.fsync(file.fileno())
            return True
    except (BlockingIOError, FileNotFoundError):
        return False
    except (OSError, duckdb.Error) as error:
        raise ResultsError(
            f"the results database {str(path)!r} was cut off when it was made, and cannot be made: {first_line(error)}"
        ) from error


def _empty_database() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        empty = Path(folder) / "empty.duckdb"
        duckdb.connect(str(empty)).close()
        return empty.read_bytes()


def _schema_version(connection: duckdb.DuckDBPyConnection, path: PathLike) -> int | None:
    """Return the version of the schema in the file; None when it has no tables at all.

    Raises:
        ResultsError: the tables are not ours, or of a newer version than this program knows.
    """
    tables = {name for (name,) in connection.execute("SELECT table_name FROM duckdb_tables()").fetchall()}
    if not tables:
        return None
    rows = connection.execute("SELECT schema_version FROM meta").fetchall() if "meta" in tables else []
    if len(rows) != 1 or rows[0][0] < 1:
        raise ResultsError(f"{str(path)!r} is a database but not one of results: name another file under `results`")
    version = int(rows[0][0])
    if version > SCHEMA_VERSION:
        raise ResultsError(
            f"the results database {str(path)!r} has schema version {version}, this program knows {SCHEMA_VERSION}: "
            "upgrade dflash-eval, or name another file under `results`"
        )
    return version


def age_note(connection: duckdb.DuckDBPyConnection) -> str:
    """Return what to say where a table or column was not found: nothing, unless the file is of an older version."""
    row = connection.execute("SELECT schema_version FROM meta").fetchone()
    if row is None or row[0] >= SCHEMA_VERSION:
        return ""
    return (
        f"; this file has schema version {row[0]} and not yet all of version {SCHEMA_VERSION}: "
        "the next `dflash-eval evaluate` brings it up to date"
    )


def _create_schema(connection: duckdb.DuckDBPyConnection) -> None:
    connection.execute(resources.files("dflash_core.results").joinpath("schema.sql").read_text(encoding="utf-8"))
    connection.execute("INSERT INTO meta BY NAME SELECT ? AS schema_version", [SCHEMA_VERSION])


def first_line(error: BaseException) -> str:
    """Return what went wrong in one line, without DuckDB's picture of the statement."""
    text = str(error).strip()
    return " ".join(text.split("\n\n")[0].split()) or type(error).__name__
