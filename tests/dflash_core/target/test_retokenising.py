"""From text back to ids: never another text, and told where the ids may be others."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE, Unigram
from transformers import PreTrainedTokenizerFast

from dflash_core.target.retokenising import retokenise

CORPUS = [
    "The answer is 4. The answers are four and five, and the question was what it is.",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))\n",
    "Ein Schäfer zählt Schafe: eins, zwei, drei – 日本語のテキスト 🙂",
] * 4


def byte_level() -> Any:
    """As Llama 3's and Qwen's: bytes, merged; any text comes back."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<end>", "<tool>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", additional_special_tokens=["<tool>"])


def sentence_piece() -> Any:
    """As Llama 2's: a text's first word gets a space that decoding takes away again."""
    pieces = [("<unk>", 0.0), ("▁", -3.0), ("▁the", -1.0), ("▁answer", -1.0), ("the", -2.0)]
    pieces += [(letter, -6.0) for letter in "abcdefghijklmnopqrstuvwxyz."]
    tokenizer = Tokenizer(Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


BYTES = byte_level()
PIECES = sentence_piece()


@given(text=st.text(st.characters(codec="utf-8", exclude_characters="�"), max_size=40))
def test_any_text_of_a_byte_level_tokenizer_comes_back(text: str) -> None:
    found = retokenise(BYTES, BYTES.encode("What? "), text, has_special_tokens=True)
    assert found is not None
    assert found.is_sure
    assert BYTES.decode(found.ids) == text


def test_the_count_tells_which_tokenisation_it_was() -> None:
    whole = BYTES.encode("The answer")
    assert len(whole) < len("The answer")
    found = retokenise(BYTES, [], "The answer", counts=(len(whole),), has_special_tokens=False)
    assert found is not None
    assert (list(found.ids), found.is_sure) == (whole, True)
    letters = retokenise(BYTES, [], "The answer", counts=(10,), has_special_tokens=False)
    assert letters is not None
    assert not letters.is_sure, "the target wrote it in other tokens"


@pytest.mark.parametrize(("num_emitted", "pieces"), [(2, ["▁answer", "."]), (7, [*"answer", "."])])
def test_a_first_word_may_be_written_in_two_ways_and_the_count_tells(num_emitted: int, pieces: list[str]) -> None:
    """Alone it gets a space of its own, which decoding takes away again; after the prompt it gets none."""
    prompt = PIECES.encode("the", add_special_tokens=False)
    found = retokenise(PIECES, prompt, "answer.", counts=(num_emitted,), has_special_tokens=False)
    assert found is not None
    assert found.is_sure
    assert PIECES.convert_ids_to_tokens(list(found.ids)) == pieces


def test_words_that_the_tokenizer_lacks_do_not_come_back() -> None:
    assert retokenise(PIECES, [], "日本", has_special_tokens=False) is None


def test_special_tokens_that_were_left_out_make_the_ids_unsure() -> None:
    tool = BYTES.convert_tokens_to_ids("<tool>")
    ids = [*BYTES.encode("The"), tool, *BYTES.encode(" answer")]
    text = BYTES.decode(ids, skip_special_tokens=True)
    found = retokenise(BYTES, [], text, counts=(len(ids),), has_special_tokens=False)
    assert found is not None
    assert not found.is_sure
    with_them = retokenise(BYTES, [], BYTES.decode(ids), counts=(len(ids),), has_special_tokens=True)
    assert with_them is not None
    assert (list(with_them.ids), with_them.is_sure) == (ids, True)


@pytest.mark.parametrize("num_cut", [1, 2, 3])
def test_half_a_character_at_the_end_is_left_out_and_told(num_cut: int) -> None:
    ids = BYTES.encode("is 𐍈", add_special_tokens=False)
    assert len(ids) >= 6, "one token a byte: this character was never learned"
    text = BYTES.decode(ids[:-num_cut])
    assert text.endswith("�")
    found = retokenise(BYTES, [], text, counts=(len(ids) - num_cut,), has_special_tokens=True)
    assert found is not None
    assert list(found.ids) == ids[: len(found.ids)], "what is kept is what was emitted"
    assert not found.is_sure


def test_no_text_has_no_ids() -> None:
    found = retokenise(BYTES, [1, 2], "", counts=(0,), has_special_tokens=False)
    assert found is not None
    assert (found.ids, found.is_sure) == ((), True)
