"""Numbers that were right once stay as they are, or a version says that they changed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.golden import tiny_qwen3 as golden


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return json.loads(json.dumps(golden.compute(tmp_path_factory.mktemp("golden"))))


@pytest.fixture(scope="module")
def document() -> Any:
    return json.loads(golden.PATH.read_text())


class TestGolden:
    def test_the_versions_are_those_of_the_file(self, document: Any) -> None:
        assert document["versions"] == golden.versions(), f"write the golden file again: {golden.COMMAND}"

    def test_numbers_change_only_with_a_version(self, numbers: Any, document: Any) -> None:
        """Equal to the last token, but for ranks: two logits closer than rounding may swap places."""
        why = f"numbers changed but no version did; if that was meant, raise METRICS_VERSION and run {golden.COMMAND}"
        if document["versions"] != golden.versions():
            pytest.fail(f"a version was raised; write the golden file again: {golden.COMMAND}")
        expected = document["numbers"]
        assert numbers["responses"] == expected["responses"], why
        for name in ("random", "repeating"):
            assert numbers[name]["walks"] == expected[name]["walks"], why
            assert numbers[name]["tau"] == expected[name]["tau"], why
            for prompt, rows in expected[name]["blocks"].items():
                found = numbers[name]["blocks"][prompt]
                assert [row[:4] for row in found] == [row[:4] for row in rows], why
                for row, other in zip(found, rows, strict=True):
                    ranks = (row[4] or 0, other[4] or 0)
                    assert abs(ranks[0] - ranks[1]) <= 1, why

    def test_the_scene_is_worth_its_name(self, document: Any) -> None:
        """Blocks from nothing to all accepted, both ways to end, near ties, and ranks all over the vocabulary."""
        walks = document["numbers"]["repeating"]["walks"]
        assert {emitted for walk_ in walks.values() for emitted in walk_} >= {1, 2, 3, 8}
        lengths = [sum(walk_) + 1 for walk_ in walks.values()]
        assert golden.MAX_NEW_TOKENS in lengths
        assert min(lengths) < golden.MAX_NEW_TOKENS
        rows = [row for rows in document["numbers"]["random"]["blocks"].values() for row in rows]
        assert {row[3] for row in rows} == {True, False}
        assert len({row[4] for row in rows}) > 50
