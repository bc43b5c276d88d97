"""Which rows of the head are tokens is what the tokenizer knows, as transformers loads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dflash_core.errors import TargetError
from dflash_core.target.model_config import read_model_config
from dflash_core.target.vocabulary import num_token_rows, tokenizer_size

WORDS = {f"w{token}": token for token in range(40)}
MODELS: dict[str, Any] = {
    "words": models.WordLevel(WORDS, unk_token="w3"),
    "word pieces": models.WordPiece(WORDS, unk_token="w3"),
    "byte pairs": models.BPE(vocab=WORDS, merges=[]),
    "unigrams": models.Unigram([(word, -1.0) for word in WORDS], unk_id=3, byte_fallback=False),
    "with a gap": models.WordLevel(WORDS | {"far": 60}, unk_token="w3"),
}


def save(folder: Path, model: Any, *, added: int = 0) -> Any:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model))
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<{number}>" for number in range(added)]})
    tokenizer.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def config(**changes: Any) -> Any:
    return read_model_config({"hidden_size": 4, "num_hidden_layers": 1, "vocab_size": 64, **changes})


@pytest.mark.parametrize("added", [0, 3])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_the_size_is_that_of_the_tokenizer_that_transformers_loads(model: Any, added: int, tmp_path: Path) -> None:
    theirs = save(tmp_path, model, added=added)
    largest = max(theirs.get_vocab().values())

    assert tokenizer_size(tmp_path) == largest + 1
    if largest < 60:
        assert tokenizer_size(tmp_path) == len(theirs) == 40 + added


def test_a_token_that_only_the_settings_add_counts(tmp_path: Path) -> None:
    save(tmp_path, MODELS["words"])
    path = tmp_path / "tokenizer_config.json"
    extra = {"40": {"content": "<extra>", "special": True, "lstrip": False, "rstrip": False, "normalized": False}}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"added_tokens_decoder": extra}))

    assert tokenizer_size(tmp_path) == len(AutoTokenizer.from_pretrained(tmp_path)) == 41


def test_rows_beyond_the_tokenizer_are_padding(tmp_path: Path) -> None:
    save(tmp_path, MODELS["words"], added=2)

    assert num_token_rows(tmp_path, config()) == 42
    assert num_token_rows(tmp_path, config(vocab_size=41)) == 41, "a tokenizer may know more than the head has"
    assert num_token_rows(tmp_path, config(unpadded_vocab_size=30)) == 30


def test_of_a_folder_without_a_tokenizer_all_rows_count(tmp_path: Path) -> None:
    assert tokenizer_size(tmp_path) is None
    assert num_token_rows(tmp_path, config()) == 64


@pytest.mark.parametrize("text", ["{", "{}", '{"model": null}', '{"model": {"vocab": {}}}', "[]"])
def test_a_tokenizer_file_without_a_vocabulary_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(text)

    with pytest.raises(TargetError, match="tokenizer.json holds no vocabulary") as refused:
        tokenizer_size(tmp_path)
    assert "\n" not in str(refused.value)
