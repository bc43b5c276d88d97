"""Shorter blocks as prefixes of a longer draft, and walks of their own: against plain loops over tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_core.acceptance.own_walk import WalkCounts, add_steps, count_steps, follow
from dflash_core.acceptance.sweep import choose_method, shorter_walk


def plain_walk(response: list[int], drafts: list[list[int]], num_drafts: int, limit: int) -> WalkCounts:
    """Walk by tokens: what a drafter that drafts `num_drafts` tokens at a time would emit."""
    anchor, steps = 0, []
    while anchor < len(response) - 1:
        allowed = min(num_drafts, limit - anchor - 1)
        accepted = 0
        for draft, token in zip(drafts[anchor][:allowed], response[anchor + 1 :], strict=False):
            if draft != token:
                break
            accepted += 1
        emitted = min(accepted + 1, len(response) - 1 - anchor)
        steps.append((accepted, emitted))
        anchor += emitted
    return WalkCounts(
        num_verification_steps=len(steps),
        num_accepted_drafts=sum(one for one, _ in steps),
        num_emitted_tokens=sum(one for _, one in steps),
    )


@given(st.data())
def test_a_prefix_of_the_longer_draft_gives_the_walk_of_the_shorter_block(data: st.DataObject) -> None:
    alignment = data.draw(st.sampled_from(["same_position", "anchor_shifted", "shifted_short"]))
    block_size = data.draw(st.integers(2, 7))
    response = data.draw(st.lists(st.integers(0, 2), max_size=24))
    limit = len(response) + data.draw(st.integers(0, 3))
    drafts = [[data.draw(st.integers(0, 2)) for _ in range(block_size)] for _ in response]
    extra = alignment == "anchor_shifted"
    accepted = {}
    for anchor in range(len(response) - 1):
        matches = zip(
            drafts[anchor][: min(block_size - 1 + extra, limit - anchor - 1)], response[anchor + 1 :], strict=False
        )
        hits = [draft == token for draft, token in matches]
        accepted[anchor] = (*hits, False).index(False)
    for shorter in range(1, block_size + 1):
        found = shorter_walk(
            accepted.__getitem__, len(response), block_size=shorter, max_new_tokens=limit, row_alignment=alignment
        )
        assert found == plain_walk(response, drafts, shorter - 1 + extra, limit)
        assert found.num_emitted_tokens == max(0, len(response) - 1)


def test_a_walk_that_stops_at_an_unknown_anchor_says_which() -> None:
    accepted = {0: 2, 3: 0}
    assert list(follow(9, accepted.get)) == [(0, 2), (3, 0), (4, None)]
    with pytest.raises(AssertionError, match="4"):
        count_steps(9, accepted.get)


@pytest.mark.parametrize("num_response", [0, 1])
def test_a_response_without_a_block_has_no_step(num_response: int) -> None:
    assert count_steps(num_response, {}.get) == add_steps([])


def test_the_last_step_is_cut_by_its_bonus() -> None:
    """Response of 4: 2 drafts and the bonus, which is its last token; then again with one more accepted."""
    assert count_steps(4, {0: 2}.get) == add_steps([(2, 3)])
    assert count_steps(4, {0: 3}.get) == add_steps([(3, 3)])


@pytest.mark.parametrize(
    ("is_causal", "has_all_anchors", "method"),
    [
        ([True, True], True, "prefix"),
        ([True, False], True, "redrafted"),
        ([True, True], False, "redrafted"),
        ([False], False, "redrafted"),
    ],
    ids=["causal, all anchors", "one layer sees ahead", "walk alone", "bidirectional"],
)
def test_a_prefix_is_taken_only_where_no_slot_sees_a_later_one(
    is_causal: list[bool], has_all_anchors: bool, method: str
) -> None:
    assert choose_method(is_causal, has_all_anchors=has_all_anchors) == method
