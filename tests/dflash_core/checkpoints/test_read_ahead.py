from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_core.checkpoints.host_errors import PROGRESS_BYTES, RECONNECT_WAITS_S, Patience, ReceiverError
from dflash_core.checkpoints.read_ahead import BLOCK_BYTES, MAX_DEPTH, MIN_DEPTH, Delivery, Depth, split_blocks
from dflash_core.checkpoints.source_base import ByteRange, RateLimit

RANGES = st.lists(
    st.builds(
        lambda offset, size: ByteRange(offset=offset, size=size), st.integers(0, 2**40), st.integers(0, 3 * BLOCK_BYTES)
    ),
    max_size=6,
)


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)


def depth_at(clock: Clock, *, bytes_per_s: float, round_trip_s: float) -> int:
    """Return how many blocks are under way once many have come at a steady rate."""
    depth = Depth(round_trip_s)
    for _ in range(500):
        clock.now_s += BLOCK_BYTES / bytes_per_s
        depth.note(BLOCK_BYTES)
    return depth.blocks


@pytest.mark.parametrize(
    ("bytes_per_s", "round_trip_s", "blocks"),
    [
        (300e6, 0.0002, MIN_DEPTH),  # a short link: more would only fill buffers on the host
        (50e6, 0.08, 31),
        (300e6, 0.08, MAX_DEPTH),
        (1e6, 0.3, MIN_DEPTH),
    ],
)
def test_what_is_under_way_is_twice_the_rate_times_the_round_trip(
    monkeypatch: pytest.MonkeyPatch, bytes_per_s: float, round_trip_s: float, blocks: int
) -> None:
    found = depth_at(Clock(monkeypatch), bytes_per_s=bytes_per_s, round_trip_s=round_trip_s)
    assert abs(found - blocks) <= 1


def test_a_long_link_begins_with_many_blocks_and_a_short_one_with_few() -> None:
    assert Depth(0.0).blocks == MIN_DEPTH
    assert MIN_DEPTH < Depth(0.08).blocks < MAX_DEPTH


@given(RANGES, st.sampled_from([0, 1, 32768, 261120, 4 << 20]), st.sampled_from([None, 0.5, 5.0, 500.0]))
def test_blocks_cover_the_ranges_in_order(ranges: list[ByteRange], max_read: int, limit: float | None) -> None:
    blocks = list(split_blocks(ranges, max_read_bytes=max_read, limit=RateLimit(limit)))
    assert all(0 < block.size <= BLOCK_BYTES for block in blocks)
    assert all(block.size <= max(max_read, 4096) for block in blocks if max_read)
    left = iter(blocks)
    for part in ranges:
        position = part.offset
        while position < part.end:
            block = next(left)
            assert block.offset == position
            position = block.end
        assert position == part.end
    assert next(left, None) is None


@given(RANGES, st.lists(st.integers(1, BLOCK_BYTES), min_size=1))
def test_what_was_delivered_is_not_due_any_more(ranges: list[ByteRange], sizes: list[int]) -> None:
    got: list[tuple[int, int]] = []
    delivery = Delivery(ranges, lambda offset, data: got.append((offset, len(data))))
    total = sum(part.size for part in ranges)
    turn = 0
    while delivery.due:
        size = min(sizes[turn % len(sizes)], delivery.due[0].size)
        assert delivery.num_bytes + sum(part.size for part in delivery.due) == total
        delivery.hand_over(bytes(size))
        turn += 1
    covered = iter(got)
    for part in ranges:
        position = part.offset
        while position < part.end:
            offset, size = next(covered)
            assert offset == position
            position += size
    assert delivery.num_bytes == total


def test_what_the_receiver_refused_stays_due() -> None:
    def refuse(_offset: int, _data: bytes) -> None:
        raise OSError("full")

    part = ByteRange(offset=3, size=4)
    delivery = Delivery([part], refuse)
    with pytest.raises(ReceiverError):
        delivery.hand_over(b"12")
    assert (delivery.due, delivery.num_bytes) == ([part], 0)


def test_patience_ends_unless_there_is_progress() -> None:
    received = 0
    patience = Patience(lambda: received)
    waits = [patience.next_wait_s() for _ in range(4)]
    assert waits == [*RECONNECT_WAITS_S, None]
    received += PROGRESS_BYTES - 1
    assert patience.next_wait_s() is None
    received += 1
    assert [patience.next_wait_s() for _ in range(4)] == waits
