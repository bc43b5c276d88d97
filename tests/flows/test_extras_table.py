"""Extra numbers reach a person: every number of the slice over all prompts is on the screen, and no other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dflash_core.results.database import read_evaluation, write_evaluation
from dflash_core.results.records import Extras
from flows.extras_table import extras_lines
from tests.dflash_core.results.builders import make_extras, make_record


@pytest.fixture
def result(tmp_path: Path) -> dict[str, Any]:
    """Return an evaluation with all extras, as it is read back from a database."""
    path = tmp_path / "acceptance.duckdb"
    write_evaluation(path, make_record(extras=make_extras()))
    found = read_evaluation(path, "eval-a")
    assert found is not None
    return found


def of_all(result: dict[str, Any], name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = result["extras"][name]["datasets"]["all"]
    return rows


def line_with(result: dict[str, Any], words: str) -> str:
    (line,) = [line for line in extras_lines(result) if words in line]
    return line


def test_nothing_is_said_where_nothing_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "acceptance.duckdb"
    write_evaluation(path, make_record())
    plain = read_evaluation(path, "eval-a")
    assert plain is not None
    assert extras_lines(plain) == []
    failed = {"datasets": {}, "groups": {}, "status": "failed"}
    assert extras_lines(failed) == []


@pytest.mark.parametrize(("name", "key", "words"), [("sweep", "block_size", "shorter"), ("trees", "budget", "trees")])
def test_taus_stand_beside_their_setting_in_order(result: dict[str, Any], name: str, key: str, words: str) -> None:
    rows = sorted(of_all(result, name), key=lambda row: row[key])
    assert len(rows) > 1
    told = re.findall(r"([\d.]+) at (\d+)", line_with(result, words))
    assert told == [(f"{row['tau_pooled']:.2f}", str(row[key])) for row in rows]


def test_trees_are_told_from_the_chain_of_the_same_drafter(result: dict[str, Any]) -> None:
    chain = result["datasets"]["all"]["tau_pooled"]
    assert f"no speed beside the chain's {chain:.2f}" in line_with(result, "trees")


def test_recall_is_a_row_for_each_position_and_a_column_for_each_k(result: dict[str, Any]) -> None:
    lines = extras_lines(result)
    head = next(number for number, line in enumerate(lines) if line.split()[:1] == ["position"])
    ks = [int(word[2:]) for word in lines[head].split() if word.startswith("k=")]
    rows = of_all(result, "recall")
    assert ks == sorted({row["k"] for row in rows})
    for offset, position in enumerate(sorted({row["draft_position"] for row in rows}), start=1):
        wanted = [row for k in ks for row in rows if row["draft_position"] == position and row["k"] == k]
        shares = ["-" if row["recall_conditional"] is None else f"{row['recall_conditional']:.0%}" for row in wanted]
        assert lines[head + offset].split() == [str(position), *shares, str(wanted[0]["num_reached"])]


def test_both_rules_at_every_temperature_and_the_greedy_number_beside_them(result: dict[str, Any]) -> None:
    slice_ = result["datasets"]["all"]
    greedy = slice_["num_accepted_drafts"] / slice_["num_verification_steps"]
    for row in of_all(result, "sampled"):
        if row["rule"] == "sampled":  # the rows at hand have the same numbers under both rules
            row["expected_accepted_teacher_forced"] += 0.5
            row["first_acceptance"] += 0.1
    text = "\n".join(extras_lines(result))
    for row in of_all(result, "sampled"):
        title = (
            f"temperature {row['temperature']:g}, accepted drafts per step on the greedy text (greedy: {greedy:.2f})"
        )
        part = text.partition(title)[2].partition("temperature ")[0]
        rule = {"one_hot": "largest probability", "sampled": "drawn"}[row["rule"]]
        numbers = (
            f"{row['expected_accepted_teacher_forced']:.2f} expected, "
            f"at least {row['expected_accepted_at_least']:.2f}; the first with {row['first_acceptance']:.0%}"
        )
        assert any(rule in line and numbers in line for line in part.splitlines())


def test_what_was_not_measured_is_a_dash_and_no_number(tmp_path: Path) -> None:
    path = tmp_path / "acceptance.duckdb"
    rows = make_extras().recall
    assert rows is not None
    blank = rows.with_columns(num_reached=rows["num_reached"] * 0, num_reached_recalled=rows["num_reached"] * 0)
    write_evaluation(path, make_record(extras=Extras(recall=blank)))
    found = read_evaluation(path, "eval-a")
    assert found is not None
    body = [line for line in extras_lines(found) if re.match(r" +\d+ ", line)]
    assert body
    for line in body:
        assert set(line.split()[1:-1]) == {"-"}
        assert line.split()[-1] == "0"


def test_lines_fit_a_log(result: dict[str, Any]) -> None:
    assert max(map(len, extras_lines(result))) <= 110
