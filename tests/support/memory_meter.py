"""What a piece of work holds at its fullest moment, as torch's own allocator tells its profiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch.profiler import ProfilerActivity, profile

T = TypeVar("T")


def peak_bytes(work: Callable[[], T]) -> tuple[int, T]:
    """Return the most bytes that tensors made by the work held at once, and what it returned.

    What kernels allocate inside themselves counts too; what was there before does not, nor files mapped into memory.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as taken:
        result = work()
    events = [event for event in taken.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    assert events, "the profiler saw no memory taken"
    return most, result
