"""Reading the database with SQL that somebody typed."""

import pytest

from dflash_core.errors import NoResults, QueryError
from dflash_core.results import query
from dflash_core.results.database import read_evaluation, write_evaluation
from dflash_core.results.query import run_query
from tests.dflash_core.results.builders import make_record

BIG_SORT = "SELECT row_number() OVER (ORDER BY hash(r)) AS n FROM range(4000000) AS numbers(r)"
secret_variable = [{"token": "geheim"}]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("results") / "acceptance.duckdb"
    write_evaluation(path, make_record())
    write_evaluation(path, make_record("eval-b", step=200, quality=0.8, seed=3))
    return path


def test_rows_come_as_a_polars_frame(path):
    frame = run_query(path, "SELECT run, step, tau_pooled FROM leaderboard")
    assert frame.columns == ["run", "step", "tau_pooled"]
    assert frame["step"].to_list() == [200, 100]
    assert frame["tau_pooled"].to_list() == [
        read_evaluation(path, name)["datasets"]["all"]["tau_pooled"] for name in ("eval-b", "eval-a")
    ]


def test_sums_of_counts_are_plain_integers(path):
    frame = run_query(
        path, "SELECT sum(num_blocks) AS total, 170141183460469231731687303715884105727 AS huge FROM survival"
    )
    assert isinstance(frame["total"][0], int)
    assert frame["huge"][0] == 2**127 - 1


@pytest.mark.parametrize(
    "sql", ["SHOW TABLES", "DESCRIBE blocks", "SUMMARIZE acceptance", "FROM meta", "EXPLAIN FROM blocks"]
)
def test_other_ways_of_reading_work(path, sql):
    assert run_query(path, sql).height > 0


def test_types_that_polars_lacks_come_as_text(path):
    columns = (
        """INTERVAL 90 SECOND AS "a ""long"" pause", [INTERVAL 1 DAY] AS pauses, 1::BIGNUM AS n, [1, 2] AS numbers"""
    )
    frame = run_query(path, f"SELECT {columns}")
    assert frame.columns == ['a "long" pause', "pauses", "n", "numbers"]
    assert frame.rows() == [("00:01:30", "[1 day]", "1", [1, 2])]


@pytest.mark.parametrize(
    ("sql", "words"),
    [
        pytest.param("SELECT tau FROM leaderboard", "tau", id="unknown column"),
        pytest.param("SELEC 1", "syntax error", id="typing error"),
        pytest.param("SELECT * FROM nowhere", "nowhere", id="unknown table"),
        pytest.param("SELECT error('broken')", "broken", id="error while running"),
        pytest.param("", "got 0", id="nothing"),
        pytest.param("SELECT 1; SELECT 2", "got 2", id="two statements"),
        pytest.param("SELECT 1 AS a, 2 AS a", "two columns of the result are called 'a'", id="one name twice"),
    ],
)
def test_a_query_that_does_not_run_is_one_line(path, sql, words):
    with pytest.raises(QueryError, match=words) as caught:
        run_query(path, sql)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM blocks",
        "DROP TABLE blocks",
        "INSERT INTO meta VALUES (2)",
        "CREATE TEMP TABLE t AS SELECT 1",
        "CHECKPOINT",
        "BEGIN",
        "ATTACH '{other}' AS other",
        "COPY blocks TO '{other}'",
        "EXPORT DATABASE '{other}'",
        "EXPLAIN ANALYZE COPY blocks TO '{other}'",
        "EXPLAIN ANALYZE DELETE FROM blocks",
        "SELECT * FROM read_text('{file}')",
        "SELECT * FROM '{file}'",
        "SELECT * FROM glob('{file}')",
        "SELECT * FROM secret_variable",
        "SET enable_external_access = true",
        "RESET lock_configuration",
        "PRAGMA enable_profiling = 'json'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "PRAGMA import_database('{file}')",
        "PRAGMA force_checkpoint",
        "SET VARIABLE x = 1",
        "CALL enable_logging(storage = 'file', storage_path = '{other}')",
        "FROM enable_logging(storage = 'file', storage_path = '{other}')",
        "SELECT getenv('HOME')",
        "FROM read_csv('{file}')",
        "FROM read_json('{file}')",
        "FROM read_blob('{file}')",
        "FROM sniff_csv('{file}')",
        "FROM 'https://127.0.0.1:9/file.csv'",
        "FROM sqlite_scan('{file}', 't')",
        "SUMMARIZE '{file}'",
        "DETACH acceptance",
        "USE memory",
        "CREATE SECRET (TYPE s3)",
        "FROM duckdb_secrets()",
        "PREPARE p AS DELETE FROM blocks",
        "WITH gone AS (DELETE FROM blocks RETURNING *) FROM gone",
        "FROM query('DROP TABLE blocks')",
        "SELECT 1; DROP TABLE blocks",
        "TRUNCATE blocks",
        "VACUUM",
        "COMMENT ON TABLE blocks IS 'x'",
        "MERGE INTO meta USING (SELECT 1) ON false WHEN NOT MATCHED THEN INSERT VALUES (9)",
    ],
)
def test_nothing_but_this_database_can_be_read_and_nothing_written(path, tmp_path, sql):
    (tmp_path / "file.csv").write_text("a,b\n1,2\n")
    before = path.read_bytes()
    with pytest.raises(QueryError):
        run_query(path, sql.format(other=tmp_path / "other", file=tmp_path / "file.csv"))
    assert path.read_bytes() == before
    assert [found.name for found in tmp_path.iterdir()] == ["file.csv"]


def test_no_extension_is_fetched_or_loaded_on_the_way(path):
    names = "autoinstall_known_extensions", "autoload_known_extensions"
    row = run_query(path, "SELECT " + ", ".join(f"current_setting('{name}') AS {name}" for name in names)).row(0)
    assert row == (False, False)
    with pytest.raises(QueryError, match="sqlite_scan") as caught:
        run_query(path, "FROM sqlite_scan('x', 't')")
    assert "download" not in str(caught.value)


def test_what_does_not_fit_into_memory_is_an_error_and_no_file_beside_the_database(path, monkeypatch):
    little = ("SET memory_limit = '40MB'", "SET threads = 1", *query.LOCK_STATEMENTS)
    monkeypatch.setattr(query, "LOCK_STATEMENTS", little)
    before = sorted(path.parent.iterdir())
    with pytest.raises(QueryError, match="Out of Memory"):
        run_query(
            path, "SELECT max(n) FROM (SELECT row_number() OVER (ORDER BY hash(r)) AS n FROM range(4000000) t(r))"
        )
    assert sorted(path.parent.iterdir()) == before


def test_the_lock_on_settings_does_not_outlive_the_query(path):
    run_query(path, "SELECT 1 AS one")
    run_query(path, "SELECT 1 AS one")
    write_evaluation(path, make_record())


def test_a_missing_database_says_what_to_do_and_is_not_made(tmp_path):
    with pytest.raises(NoResults, match="run `dflash-eval evaluate` first") as caught:
        run_query(tmp_path / "none.duckdb", "SELECT 1")
    assert caught.value.exit_status == 2
    assert list(tmp_path.iterdir()) == []
