"""Counting accepted drafts and walking as serving does: by hand, by properties, and against the official loop."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dflash_core.acceptance.walk import (
    COUNTING_RULE,
    RowAlignment,
    count_accepted_drafts,
    counting_rule,
    first_row,
    num_available,
    num_drafted,
    num_drafts,
    num_emitted,
    num_slots,
    serving_walk,
)
from dflash_core.errors import ShapeMismatch

TOKENS = st.integers(0, 2)


def blocks(num_positions: int) -> st.SearchStrategy[tuple[list[list[int]], list[list[int]]]]:
    row = st.lists(TOKENS, min_size=num_positions, max_size=num_positions)
    return st.lists(st.tuples(row, row), min_size=1, max_size=4).map(
        lambda pairs: ([one for one, _ in pairs], [other for _, other in pairs])
    )


PAIRS = st.integers(1, 6).flatmap(blocks)


def accepted(drafts: list[list[int]], references: list[list[int]]) -> list[int]:
    return count_accepted_drafts(torch.tensor(drafts), torch.tensor(references)).tolist()


def plain_prefix(draft: Sequence[int], reference: Sequence[int]) -> int:
    count = 0
    for one, other in zip(draft, reference, strict=True):
        if one != other:
            break
        count += 1
    return count


class TestCounting:
    @pytest.mark.parametrize(
        ("draft", "reference", "expected"),
        [
            ([1, 2, 3], [1, 2, 3], 3),
            ([9, 2, 3], [1, 2, 3], 0),
            ([1, 9, 3], [1, 2, 3], 1),
            ([1, 2, 9], [1, 2, 3], 2),
            ([9, 9, 9], [1, 2, 3], 0),
        ],
        ids=["all", "first misses", "a late match does not count", "last misses", "none"],
    )
    def test_the_longest_matching_prefix(self, draft: list[int], reference: list[int], expected: int) -> None:
        assert accepted([draft], [reference]) == [expected]

    @given(PAIRS)
    def test_it_equals_a_plain_loop_and_lies_within_the_block(
        self, pair: tuple[list[list[int]], list[list[int]]]
    ) -> None:
        drafts, references = pair
        counts = accepted(drafts, references)
        assert counts == [plain_prefix(*rows) for rows in zip(drafts, references, strict=True)]
        assert all(0 <= count <= len(drafts[0]) for count in counts)

    @given(PAIRS, st.data())
    def test_a_change_after_the_first_miss_changes_nothing_and_a_new_miss_never_raises(
        self, pair: tuple[list[list[int]], list[list[int]]], data: st.DataObject
    ) -> None:
        drafts, references = pair
        place = data.draw(st.integers(0, len(drafts[0]) - 1))
        before = accepted(drafts, references)
        missed = [[*row[:place], 99, *row[place + 1 :]] for row in drafts]
        after = accepted(missed, references)
        assert after == [min(count, place) for count in before]

    def test_blocks_of_one_slot_and_no_blocks_at_all_are_counted(self) -> None:
        assert count_accepted_drafts(torch.zeros(3, 0), torch.zeros(3, 0)).tolist() == [0, 0, 0]
        assert count_accepted_drafts(torch.zeros(0, 5), torch.zeros(0, 5)).tolist() == []

    def test_the_counts_are_whole_numbers(self) -> None:
        assert count_accepted_drafts(torch.zeros(1, 2), torch.zeros(1, 2)).dtype == torch.int64

    @pytest.mark.parametrize(
        ("one", "other"), [((2, 3), (2, 4)), ((2, 3), (3,)), ((3,), (3,)), ((1, 2, 3), (1, 2, 3))], ids=str
    )
    def test_shapes_that_do_not_belong_together_are_both_named(
        self, one: tuple[int, ...], other: tuple[int, ...]
    ) -> None:
        with pytest.raises(ShapeMismatch) as refused:
            count_accepted_drafts(torch.zeros(one), torch.zeros(other))
        assert str(list(one)) in str(refused.value)
        assert str(list(other)) in str(refused.value)


class TestLastBlock:
    """Response t0 t1 t2 t3 t4 stop (6 tokens), block size 4, so 3 drafts; the limit is 8 tokens."""

    @pytest.mark.parametrize(
        ("anchor", "drafted", "available", "emitted_if_all_accepted"),
        [
            (0, 3, 3, 4),
            (1, 3, 3, 4),
            (2, 3, 3, 3),  # t3 t4 stop: the stop token is a draft, nothing comes after it
            (3, 3, 2, 2),
            (4, 3, 1, 1),  # only the stop token is left; drafts beyond it are not judged
        ],
    )
    def test_a_stop_token_inside_a_block_ends_it(
        self, anchor: int, drafted: int, available: int, emitted_if_all_accepted: int
    ) -> None:
        assert num_drafted(anchor, block_size=4, max_new_tokens=8) == drafted
        assert num_available(anchor, 6, drafted) == available
        assert num_emitted(anchor, 6, available) == emitted_if_all_accepted

    @pytest.mark.parametrize(
        ("anchor", "drafted", "emitted_if_all_accepted"),
        [(0, 3, 4), (1, 3, 4), (2, 3, 3), (3, 2, 2), (4, 1, 1)],
    )
    def test_near_the_length_limit_fewer_tokens_are_drafted(
        self, anchor: int, drafted: int, emitted_if_all_accepted: int
    ) -> None:
        """A response that runs to its limit of 6: the last token of the limit is a bonus or a draft, never more."""
        assert num_drafted(anchor, block_size=4, max_new_tokens=6) == drafted
        assert num_available(anchor, 6, drafted) == drafted, "what is drafted can be judged"
        assert num_emitted(anchor, 6, drafted) == emitted_if_all_accepted

    def test_a_stop_right_after_the_first_token(self) -> None:
        """Response a, stop with a block of 8 that drafts far beyond: one block, one token, not eight."""
        assert num_available(0, 2, num_drafted(0, block_size=8, max_new_tokens=64)) == 1
        assert num_emitted(0, 2, 1) == 1
        assert num_emitted(0, 2, 0) == 1

    def test_a_block_of_one_slot_drafts_nothing_and_emits_the_targets_token(self) -> None:
        assert num_drafted(0, block_size=1, max_new_tokens=6) == 0
        assert num_available(0, 6, 0) == 0
        assert num_emitted(0, 6, 0) == 1


class TestWalk:
    @pytest.mark.parametrize(
        ("emitted", "anchors"),
        [
            ([2, 1, 3, 1, 1], [0, 2]),
            ([1, 1, 1], [0, 1, 2]),
            ([3, 1, 1], [0]),
            ([1, 2, 1], [0, 1]),
            ([1], [0]),
            ([], []),
        ],
        ids=["jumps", "one by one", "one block", "ends with a jump", "two tokens", "one token or none"],
    )
    def test_it_visits_what_serving_visits(self, emitted: list[int], anchors: list[int]) -> None:
        assert serving_walk(emitted) == anchors

    @given(st.data())
    def test_it_covers_the_response_exactly(self, data: st.DataObject) -> None:
        num_response = data.draw(st.integers(0, 20))
        block_size = data.draw(st.integers(1, 5))
        max_new_tokens = num_response + data.draw(st.integers(0, 3))
        table = []
        for anchor in range(num_response - 1):
            drafted = num_drafted(anchor, block_size=block_size, max_new_tokens=max_new_tokens)
            available = num_available(anchor, num_response, drafted)
            assert 0 <= available <= drafted <= block_size - 1
            count = data.draw(st.integers(0, available))
            table.append(num_emitted(anchor, num_response, count))
            assert 1 <= table[-1] <= min(block_size, count + 1)
        anchors = serving_walk(table)
        assert sum(table[anchor] for anchor in anchors) == max(0, num_response - 1), "the first token is no block's"
        assert anchors == sorted(set(anchors))


def official_walk(
    response: Sequence[int], drafts: Sequence[Sequence[int]], stop: int | None, block_size: int, max_new_tokens: int
) -> list[int]:
    """Count as PyPI dflash 0.1.0 does, over a target that goes on after its stop token.

    Args:
        response: the target's text, long enough for every block.
        drafts: what the drafter proposes at each anchor.
        stop: the token that ends the text.
        block_size: slots of a block.
        max_new_tokens: the limit.
    """
    lengths: list[int] = []
    start, stopped = 0, response[0] == stop
    while start + 1 < max_new_tokens and not stopped:
        verify_size = min(block_size, max_new_tokens - start)
        count = plain_prefix(drafts[start][: verify_size - 1], response[start + 1 : start + verify_size])
        produced = min(count + 1, max_new_tokens - start - 1)
        window = list(response[start + 1 : start + produced + 1])
        if stop in window:
            produced, stopped = window.index(stop) + 1, True
        start += produced
        lengths.append(produced)
    return lengths


@given(st.data())
def test_the_walk_counts_as_the_official_loop_counts(data: st.DataObject) -> None:
    """Stops inside a block, stops at its end, the length limit, and drafts beyond all of them."""
    block_size = data.draw(st.integers(1, 5))
    max_new_tokens = data.draw(st.integers(1, 12))
    stop = 2
    endless = data.draw(st.lists(TOKENS, min_size=20, max_size=20))
    drafts = [
        [
            token if data.draw(st.integers(0, 3)) else data.draw(TOKENS)
            for token in endless[place + 1 : place + block_size]
        ]
        for place in range(max_new_tokens)
    ]
    end = next((place + 1 for place, token in enumerate(endless) if token == stop), max_new_tokens)
    response = endless[: min(end, max_new_tokens)]
    table = []
    for anchor in range(len(response) - 1):
        drafted = num_drafted(anchor, block_size=block_size, max_new_tokens=max_new_tokens)
        available = num_available(anchor, len(response), drafted)
        reference = response[anchor + 1 : anchor + 1 + available]
        count = plain_prefix(drafts[anchor][:available], reference)
        table.append(num_emitted(anchor, len(response), count))
    ours = [table[anchor] for anchor in serving_walk(table)]
    assert ours == official_walk(endless, drafts, stop, block_size, max_new_tokens)


class TestRowAlignments:
    """Blocks of 4 slots under a limit of 6 tokens: anchors 0 to 4 of a response."""

    @pytest.mark.parametrize(
        ("alignment", "whole", "first", "slots", "drafted"),
        [
            ("same_position", 3, 1, [4, 4, 4, 3, 2], [3, 3, 3, 2, 1]),
            ("shifted_short", 3, 0, [4, 4, 4, 3, 2], [3, 3, 3, 2, 1]),
            ("anchor_shifted", 4, 0, [4, 4, 4, 4, 4], [4, 4, 3, 2, 1]),
        ],
    )
    def test_slots_and_drafts_near_the_limit(
        self, alignment: RowAlignment, whole: int, first: int, slots: list[int], drafted: list[int]
    ) -> None:
        limits = {"block_size": 4, "max_new_tokens": 6}
        assert num_drafts(4, alignment) == whole
        assert first_row(alignment) == first
        assert [num_slots(index, row_alignment=alignment, **limits) for index in range(5)] == slots
        assert [num_drafted(index, row_alignment=alignment, **limits) for index in range(5)] == drafted

    def test_no_block_drafts_more_than_may_still_be_emitted_nor_from_a_row_that_it_lacks(self) -> None:
        for alignment in ("same_position", "shifted_short", "anchor_shifted"):
            for block_size in range(1, 6):
                for index in range(9):
                    limits = {"block_size": block_size, "max_new_tokens": 10, "row_alignment": alignment}
                    drafted, slots = num_drafted(index, **limits), num_slots(index, **limits)
                    assert 0 <= drafted <= 9 - index
                    assert first_row(alignment) + drafted <= slots <= block_size

    def test_the_rule_stands_in_the_record(self) -> None:
        assert counting_rule("same_position") == counting_rule("shifted_short") == COUNTING_RULE
        assert counting_rule("anchor_shifted") != COUNTING_RULE
