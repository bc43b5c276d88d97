"""A queue before the results database: who comes first opens it first, and nobody is passed over again and again.

DuckDB refuses to open a file that another process holds; it has no queue. Processes that merely try again
overtake one another by chance: of ten that wrote all the time, one found the file held for a whole minute.
So here only the first in the queue tries, and the others sleep in the kernel until it is their turn.

    queue      E  D  C  B ──► B tries until A has closed, opens, and lets C come to the front
    database                  A

The queue is an flock on a file beside the database, which the kernel frees when its holder dies. It is about
order alone: what keeps writers apart is DuckDB's own lock. Readers queue too, and let the next one come
when they have opened, so that many read at once and a writer behind them is not kept out by new ones.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

SUFFIX = ".queue"


@contextmanager
def turn(path: str | os.PathLike[str], *, deadline: float) -> Iterator[None]:
    """Hold the front of the queue before a database; go on without it where that cannot be had in time.

    Args:
        path: of the database. Where no file can be made beside it, as on a read-only disk, there is no queue.
        deadline: on the monotonic clock, in seconds.
    """
    try:
        descriptor = os.open(os.fspath(path) + SUFFIX, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:
        yield
        return
    waiting = _Waiting(descriptor)
    try:
        waiting.wait(deadline)
        yield
    finally:
        waiting.leave()


class _Waiting:
    """One place in the queue. Its descriptor is closed by whoever has it last, which frees the lock."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._mutex = threading.Lock()
        self._has_come = threading.Event()
        self._has_left = False
        self._is_in_thread = False

    def wait(self, deadline: float) -> None:
        """Wait for the front of the queue; flock itself knows no time limit, so a thread waits in it."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._is_in_thread = True
            threading.Thread(target=self._wait_in_kernel, name="results-queue", daemon=True).start()
            self._has_come.wait(max(0.0, deadline - time.monotonic()))
        except OSError:
            return  # A file system without locks has no queue.

    def leave(self) -> None:
        """Let the next one come to the front, also while still waiting."""
        with self._mutex:
            self._has_left = True
            if not self._is_in_thread or self._has_come.is_set():
                os.close(self._descriptor)

    def _wait_in_kernel(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        finally:
            with self._mutex:
                self._has_come.set()
                if self._has_left:
                    os.close(self._descriptor)
