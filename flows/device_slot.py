"""One drafter at a time on a GPU: whoever finds it taken waits, also before it looks how much memory is free.

All processes that use a GPU run on its box, so a lock of that box will do: the store's, in its folder or mirror
there. The kernel frees it when its holder dies, at once, and no server is needed. Where processes share a GPU and no
folder (containers, other stores), DFLASH_EVAL_DEVICE_LIMIT names a concurrency limit on the Prefect server, which
all of them take too. Its slots are leases: that of a killed holder comes back after a minute or so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prefect.client.orchestration import get_client
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectNotFound

from dflash_core.config import Config
from dflash_core.drafter.device_names import give_back_unused, gpu_name
from dflash_core.errors import InputError
from dflash_core.store_opening import store_of

LIMIT_VARIABLE = "DFLASH_EVAL_DEVICE_LIMIT"
LEASE_S = 60.0


@contextmanager
def device_slot(config: Config, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the GPU that a drafter may run on while the block lasts; nothing is held where it runs on the CPU.

    Args:
        config: device and store.
        say: is told once where one has to wait.

    Raises:
        InputError: the limit that the environment names does not exist.
    """
    with _lock(config, say), _limit(os.environ.get(LIMIT_VARIABLE), say):
        yield


@contextmanager
def _lock(config: Config, say: Callable[[str], None]) -> Iterator[None]:
    name = gpu_name(config.device)
    if name is None:
        yield
        return
    store = store_of(config)
    try:
        # Entered by hand: an error of the block must not look like a lock that others hold.
        held = store.lock("device", name, wait=False)
        held.__enter__()
    except BlockingIOError:
        say(f"waiting for {name}: another drafter runs on it")
        held = store.lock("device", name)
        held.__enter__()
    try:
        yield
    finally:
        give_back_unused()  # a watch keeps running, and whose turn is next looks how much memory is free
        held.__exit__(None, None, None)


@contextmanager
def _limit(name: str | None, say: Callable[[str], None]) -> Iterator[None]:
    if not name:
        yield
        return
    with get_client(sync_client=True) as client:
        try:
            limit = client.read_global_concurrency_limit_by_name(name)
        except ObjectNotFound as error:
            raise InputError(
                f"{LIMIT_VARIABLE} = {name!r}: the Prefect server has no concurrency limit of this name; make it with "
                f"`prefect gcl create {name} --limit 1`"
            ) from error
    if limit.active_slots >= limit.limit:
        say(f"waiting for a slot of the concurrency limit {name}: {limit.active_slots} of {limit.limit} are taken")
    # A server that is away for longer than the lease costs the exclusion, not the evaluation.
    with concurrency(name, occupy=1, lease_duration=LEASE_S, raise_on_lease_renewal_failure=False):
        yield
