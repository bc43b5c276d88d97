"""Rows for other programs."""

import json

import polars
import pytest

from dflash_core.errors import InputError, ResultsError
from dflash_core.results.database import write_evaluation
from dflash_core.results.export import plain, to_csv, write_parquet
from dflash_core.results.query import run_query
from tests.dflash_core.results.builders import make_record


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("results") / "acceptance.duckdb"
    write_evaluation(path, make_record())
    return path


def test_every_table_and_view_can_be_exported_and_read_again(path, tmp_path):
    names = run_query(path, "SELECT table_name FROM information_schema.tables")["table_name"].to_list()
    assert len(names) > 8
    for name in names:
        frame = run_query(path, f'FROM "{name}"')
        size = write_parquet(frame, tmp_path / "rows.parquet")
        assert size == (tmp_path / "rows.parquet").stat().st_size
        assert polars.read_parquet(tmp_path / "rows.parquet").equals(frame)
        assert to_csv(frame).splitlines()[0].split(",") == frame.columns
    assert [found.name for found in tmp_path.iterdir()] == ["rows.parquet"]


def test_csv_tells_what_is_missing_and_keeps_texts_lists_and_bytes(path):
    texts = """NULL AS nothing, '' AS empty, 'a "b", c' || chr(10) || 'd' AS text"""
    nested = "[1, NULL] AS list, {'x': 1e0 / 0} AS pair, '\\xAB'::BLOB AS bytes"
    frame = run_query(path, f"SELECT {texts}, {nested}")
    header, rest = to_csv(frame).split("\n", 1)
    assert header == "nothing,empty,text,list,pair,bytes"
    assert rest == ',"","a ""b"", c\nd","[1, null]","{""x"": null}",ab\n'
    assert polars.read_csv(to_csv(frame).encode())["text"][0] == 'a "b", c\nd'


def test_integers_wider_than_parquet_has_are_text(path, tmp_path):
    frame = run_query(path, "SELECT 170141183460469231731687303715884105727 AS huge")
    write_parquet(frame, tmp_path / "rows.parquet")
    assert polars.read_parquet(tmp_path / "rows.parquet")["huge"][0] == str(2**127 - 1)


def test_a_file_that_cannot_be_written_is_one_line_and_leaves_what_was_there(path, tmp_path):
    frame = run_query(path, "SELECT 1 AS one")
    with pytest.raises(InputError, match="there is no folder"):
        write_parquet(frame, tmp_path / "nowhere" / "rows.parquet")
    (tmp_path / "taken" / "full").mkdir(parents=True)
    with pytest.raises(ResultsError, match="cannot be written to"):
        write_parquet(frame, tmp_path / "taken")
    assert [found.name for found in tmp_path.iterdir()] == ["taken"]


def test_json_cannot_say_nan_at_any_depth():
    value = {"a": [float("nan"), {"b": float("inf")}], "c": 1.5, "d": "text"}
    assert json.dumps(plain(value), allow_nan=False) == '{"a": [null, {"b": null}], "c": 1.5, "d": "text"}'
