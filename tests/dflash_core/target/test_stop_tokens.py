"""Stop tokens are found where serving finds them, and places that disagree are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from dflash_core.errors import TargetError
from dflash_core.target.stop_tokens import read_stop_tokens


def write(folder: Path, **files: Any) -> Path:
    for name, data in files.items():
        (folder / f"{name}.json").write_text(json.dumps(data))
    return folder


def test_what_generation_is_told_goes_before_what_the_model_was_trained_with(tmp_path: Path) -> None:
    found = read_stop_tokens(
        write(tmp_path, generation_config={"eos_token_id": [106, 1, 1]}, config={"eos_token_id": 1})
    )

    assert found is not None
    assert found.token_ids == (1, 106)
    assert found.source == "generation_config.json: eos_token_id"
    assert found.conflicts == (), "the one of training is among them"


@pytest.mark.parametrize(
    ("config", "ids", "source"),
    [
        ({"eos_token_id": 2}, (2,), "config.json: eos_token_id"),
        ({"text_config": {"eos_token_id": [5, 3]}}, (3, 5), "config.json: text_config.eos_token_id"),
        ({"text_config": None, "eos_token_id": 0}, (0,), "config.json: eos_token_id"),
        ({"text_config": {"eos_token_id": None}, "eos_token_id": 4}, (4,), "config.json: eos_token_id"),
    ],
    ids=["flat", "nested", "text_config is null", "nested null"],
)
@pytest.mark.parametrize("generation", [None, {}, {"eos_token_id": None}], ids=["no file", "silent", "null"])
def test_config_json_is_asked_where_generation_says_nothing(
    config: dict[str, Any], ids: tuple[int, ...], source: str, generation: dict[str, Any] | None, tmp_path: Path
) -> None:
    files = {"config": config} | ({} if generation is None else {"generation_config": generation})
    found = read_stop_tokens(write(tmp_path, **files))

    assert found is not None
    assert (found.token_ids, found.source, found.conflicts) == (ids, source, ())


def test_places_that_name_other_tokens_are_told(tmp_path: Path) -> None:
    config = {"eos_token_id": 8, "text_config": {"eos_token_id": 9}}
    found = read_stop_tokens(write(tmp_path, generation_config={"eos_token_id": 7}, config=config))

    assert found is not None
    assert found.token_ids == (7,)
    assert found.conflicts == (
        "config.json: eos_token_id = [8] contradicts generation_config.json: eos_token_id = [7], which holds",
        "config.json: text_config.eos_token_id = [9] contradicts generation_config.json: eos_token_id = [7], "
        "which holds",
    )


@pytest.mark.parametrize(
    "config",
    [
        {"eos_token_id": 2},
        {"eos_token_id": 8, "text_config": {"eos_token_id": 9}},
        {"text_config": {"eos_token_id": [3, 5]}},
        {"eos_token_id": None, "text_config": {"eos_token_id": 4}},
    ],
    ids=["flat", "both levels", "nested", "null above"],
)
def test_without_a_generation_config_they_are_those_that_transformers_derives(
    config: dict[str, Any], tmp_path: Path
) -> None:
    found = read_stop_tokens(write(tmp_path, config=config))
    theirs = GenerationConfig.from_model_config(dict(config)).eos_token_id

    assert found is not None
    assert list(found.token_ids) == (theirs if isinstance(theirs, list) else [theirs])


def test_where_no_file_names_one_none_comes_back(tmp_path: Path) -> None:
    assert read_stop_tokens(write(tmp_path, config={"text_config": {}})) is None
    assert read_stop_tokens(tmp_path / "absent") is None


@pytest.mark.parametrize("value", [-1, True, "2", 1.5, [], [1, None], {}], ids=repr)
def test_what_is_no_token_is_not_used_and_told(value: Any, tmp_path: Path) -> None:
    found = read_stop_tokens(write(tmp_path, generation_config={"eos_token_id": value}, config={"eos_token_id": 3}))

    assert found is not None
    assert found.token_ids == (3,)
    assert "cannot be used as stop tokens" in found.conflicts[0]


@pytest.mark.parametrize("text", ["{", "[]", "\xff"], ids=["cut off", "a list", "no text"])
def test_a_file_that_is_no_object_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_bytes(text.encode("latin-1"))

    with pytest.raises(TargetError, match="generation_config.json") as refused:
        read_stop_tokens(tmp_path)
    assert "\n" not in str(refused.value)
