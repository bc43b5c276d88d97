"""The target's choices, slice by slice, against a plain loop over whole rows of logits."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dflash_core.store import Store
from dflash_core.target import choices
from dflash_core.target.choices import Choices, HeadSlice, Rows, judge, judged_places
from dflash_core.target.hidden_states import CHOICES, extract_hidden_states, layer_key
from tests.support.extraction_worker import TRANSCRIPTS
from tests.support.tiny_families import VOCAB, write_family


def judge_rows(logits_RV: Tensor, next_ids: list[int], width: int, limit: int | None = None) -> Choices:
    """Judge rows of given logits, asked in slices of a width; the rows' numbers stand for hidden states."""
    num_tokens = min(logits_RV.shape[1], limit or logits_RV.shape[1])

    def slices() -> Iterator[HeadSlice]:
        for first in range(0, num_tokens, width):
            last = min(first + width, num_tokens)
            yield HeadSlice(first, last, lambda rows, _ids, first=first, last=last: logits_RV[rows[:, 0], first:last])

    def rows(numbers: Tensor) -> Rows:
        return Rows(numbers[:, None], numbers, torch.tensor(next_ids)[numbers])

    return judge(slices, rows, len(next_ids))


def test_a_small_example_by_hand() -> None:
    """Prompt 0 1, response 2 0: place 1 chooses 2, place 2 has a tie of 0 and 1, place 3 has no next token."""
    places = judged_places([(2, 2)])
    assert places.tolist() == [1, 2]
    found = judge_rows(torch.tensor([[1.0, 4.0, 6.5], [3.0, 3.0, -1.0]]), [2, 0], 2).spread(places, 4)
    assert found.margin.tolist() == [math.inf, 2.5, 0.0, math.inf]
    assert found.chosen.tolist() == [-1, 2, 0, -1]
    assert found.rank.tolist() == [-1, 0, 0, -1]
    assert found.log_probability[1] == pytest.approx(6.5 - math.log(math.exp(1) + math.exp(4) + math.exp(6.5)))
    assert math.isnan(found.log_probability[0])


@given(st.data())
def test_any_example_agrees_with_a_plain_loop(data: st.DataObject) -> None:
    vocab, num_rows = data.draw(st.integers(2, 6)), data.draw(st.integers(1, 5))
    limit, width = data.draw(st.integers(2, vocab)), data.draw(st.integers(1, vocab))
    rows = [[float(data.draw(st.integers(-5, 5))) for _ in range(vocab)] for _ in range(num_rows)]
    next_ids = [data.draw(st.integers(0, limit - 1)) for _ in range(num_rows)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choices, "LOGITS_AT_ONCE", 1)
        patch.setattr(choices, "_LEAST_ROWS", data.draw(st.integers(1, 3)))
        found = judge_rows(torch.tensor(rows), next_ids, width, limit)
    for number, (row, token) in enumerate(zip(rows, next_ids, strict=True)):
        known = row[:limit]
        others = [value for other, value in enumerate(known) if other != token]
        assert found.chosen[number] == known.index(max(known))
        assert found.margin[number] == known[token] - max(others)
        assert found.rank[number] == sum(value > known[token] for value in known)
        total = math.log(sum(math.exp(value) for value in known))
        assert float(found.log_probability[number]) == pytest.approx(known[token] - total, abs=1e-5)


def test_rows_that_are_no_token_never_win() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.0, 9.0, 8.0]])
    found = judge_rows(logits, [1], 2, limit=3)
    assert (int(found.chosen), float(found.margin), int(found.rank)) == (1, 1.0, 0)
    beyond = judge_rows(logits, [3], 2, limit=3)
    assert (int(beyond.chosen), float(beyond.margin), int(beyond.rank)) == (1, -math.inf, 3)


class TestTheTokenizersVocabulary:
    def write(self, folder: Path, size: int) -> None:
        words = {f"w{number}": number for number in range(size - 1)}
        added = [{"id": size - 1, "content": "<x>"}]
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": words}, "added_tokens": added}))

    def test_it_bounds_the_choices_and_changes_their_key_alone(self, tmp_path: Path) -> None:
        target = write_family(tmp_path / "target", "llama", tied=False)
        dtypes = {"compute_dtype": "float32", "store_dtype": "float32"}
        free = extract_hidden_states(Store(tmp_path / "store"), target, TRANSCRIPTS, [], **dtypes).load_choices()
        keys = {part: layer_key(target, "t", part, **dtypes) for part in (CHOICES, 1)}
        assert int(free.chosen.max()) >= 100
        self.write(target.folder, 100)
        bounded = extract_hidden_states(Store(tmp_path / "store"), target, TRANSCRIPTS, [], **dtypes).load_choices()
        assert int(bounded.chosen.max()) < 100
        assert layer_key(target, "t", CHOICES, **dtypes) != keys[CHOICES]
        assert layer_key(target, "t", 1, **dtypes) == keys[1]
        self.write(target.folder, VOCAB)
        assert layer_key(target, "t", CHOICES, **dtypes) == keys[CHOICES]
