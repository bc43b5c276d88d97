"""Trap 20: what a reduced vocabulary's map holds is told from its content; one that adds up wrongly is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dflash_core.drafter.draft_vocabulary import target_ids
from dflash_core.errors import UnsupportedCheckpoint

VOCAB = 400
KEPT = torch.tensor([token for token in range(150) if token % 3])
"""Tokens with small ids: read as differences, their ids lead to other tokens, each to one and all inside."""


def offsets(kept: Tensor) -> Tensor:
    return kept - torch.arange(len(kept))


def mask(kept: Tensor) -> Tensor:
    found = torch.zeros(VOCAB, dtype=torch.bool)
    found[kept] = True
    return found


@settings(max_examples=60, deadline=None)
@given(
    kept=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=200, unique=True),
    is_sorted=st.booleans(),
    has_mask=st.booleans(),
    narrow=st.booleans(),
)
def test_differences_are_added_in_any_order(kept: list[int], is_sorted: bool, has_mask: bool, narrow: bool) -> None:
    tokens = torch.tensor(sorted(kept) if is_sorted else kept)
    d2t = offsets(tokens)
    if len(kept) >= 64 and bool((d2t.diff() > 0).all()):
        return  # every second token or fewer: asked, see below
    found = target_ids(d2t.int() if narrow else d2t, mask(tokens).byte() if has_mask else None, VOCAB)
    assert found.tolist() == tokens.tolist()


def test_target_ids_in_their_place_are_refused_though_they_make_a_map() -> None:
    read_wrongly = KEPT + torch.arange(len(KEPT))
    assert read_wrongly.max() < VOCAB
    assert len(read_wrongly.unique()) == len(KEPT), "or it would be refused for that"
    for kept in (None, mask(KEPT)):
        with pytest.raises(UnsupportedCheckpoint, match="subtract 0, 1, 2") as error:
            target_ids(KEPT, kept, VOCAB)
        assert "\n" not in str(error.value)


def test_a_mask_of_other_tokens_names_both() -> None:
    others = mask(KEPT)
    others[[1, 399]] = torch.tensor([False, True])
    with pytest.raises(UnsupportedCheckpoint, match="d2t leads to 100 tokens of the target, 1 of which t2d"):
        target_ids(offsets(KEPT), others, VOCAB)


def test_a_mask_that_keeps_more_is_no_map_of_this_drafter() -> None:
    more = mask(KEPT)
    more[399] = True
    with pytest.raises(UnsupportedCheckpoint, match="100 tokens of the target, 0 of which t2d does not keep"):
        target_ids(offsets(KEPT), more, VOCAB)


@pytest.mark.parametrize(
    ("d2t", "named"),
    [([1, 4, 398], "1 tokens outside"), ([-1, 0, 0], "1 tokens outside"), ([1, 0, 0], "1 to a token twice")],
)
def test_what_is_no_map_is_refused(d2t: list[int], named: str) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=named):
        target_ids(torch.tensor(d2t), None, VOCAB)


def test_few_tokens_without_neighbours_are_believed() -> None:
    assert target_ids(torch.tensor([1, 4, 6]), None, VOCAB).tolist() == [1, 5, 8]
