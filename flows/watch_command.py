"""The `watch` command: what it watches for, its signals, and what it says."""

from __future__ import annotations

import argparse
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dflash_core.config import Config
from dflash_core.errors import HostUnreachable, InputError, one_line
from dflash_core.store_opening import store_of
from flows import screen
from flows.watch_choice import Choice
from flows.watch_values import Runs, WatchEvent
from flows.watching import LONGEST_IDLE_S, LONGEST_PAUSE_S, SETTLE_S, Watch

if TYPE_CHECKING:
    from flows.watch_runs import DeployedRuns


def run_watch(config: Config, options: argparse.Namespace, evaluate: Callable[[str], dict[str, Any]]) -> Watch:
    """Watch until Ctrl-C or SIGTERM, or once; SIGUSR1 has it say what it waits for.

    Args:
        config: the configuration, with the command line's conditions.
        options: of the command.
        evaluate: scores one checkpoint here.

    Returns:
        The watch as it ended.

    Raises:
        InputError: an option is impossible.
        CheckpointNotFound, HostError: with `--once`, the folder cannot be listed.
    """
    idle_s = LONGEST_IDLE_S if options.every_idle is None else options.every_idle
    for name, value in (("--every", options.every), ("--every-idle", idle_s)):
        if value <= 0:
            raise InputError(f"{name} {value:g} must be a number of seconds above 0")
    choice = Choice(
        each=options.each,
        multiple_of=options.multiple_of,
        from_step=options.from_step,
        match=tuple(options.match),
        max_backlog=options.max_backlog,
        order=options.order,
    )
    with _runs(config, options) as runs:
        watch = Watch(
            run_url=options.run_url, config=config, evaluate=evaluate, tell=say_event, choice=choice, runs=runs
        )
        with _signals(watch):
            try:
                watch.run(once=options.once, every_s=options.every, idle_s=idle_s)
            except KeyboardInterrupt:
                screen.say("watch ended; what was scored is in the results")
    return watch


def say_event(event: WatchEvent) -> None:
    """Print one line for a person, on standard error."""
    tau = "" if event.result is None else f"tau {screen.tau_text(event.result['datasets']['all'])}"
    screen.say(f"{time.strftime('%H:%M:%S')} {event.kind:8} {event.name}  {event.message}{tau}")


@contextmanager
def _runs(config: Config, options: argparse.Namespace) -> Iterator[Runs | None]:
    """Give what starts evaluations elsewhere, where a deployment was named."""
    if options.deployment is None:
        yield None
        return
    from flows.orchestration import prepare_environment

    prepare_environment(str(store_of(config).root), debug=options.debug)
    from flows.watch_runs import DeployedRuns

    conditions = {"config": options.config, "block_size": options.block_size, "device": options.device}
    runs = DeployedRuns(options.deployment, config=config, parameters=conditions)
    _require_deployment(runs, must_answer=options.once)
    yield runs


def _require_deployment(runs: DeployedRuns, *, must_answer: bool) -> None:
    """Refuse a deployment that does not exist; a server that is away is waited for, as later on."""
    pause_s = SETTLE_S
    while True:
        try:
            runs.require_deployment()
        except HostUnreachable as error:
            if must_answer:
                raise
            message = f"{one_line(error)}; asking again in {pause_s:.0f} s"
            say_event(WatchEvent(kind="unreachable", name=runs.deployment, message=message))
            time.sleep(pause_s)
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
        else:
            return


@contextmanager
def _signals(watch: Watch) -> Iterator[None]:
    """End well on SIGTERM, as on Ctrl-C, and say the status on SIGUSR1."""

    def end(_signal: int, _frame: object) -> None:
        raise KeyboardInterrupt

    def say_status(_signal: int, _frame: object) -> None:
        say_event(WatchEvent(kind="status", name=watch.run_url, message=watch.status()))

    if threading.current_thread() is not threading.main_thread():  # only that one may handle signals
        yield
        return
    handlers = {signal.SIGTERM: end, signal.SIGUSR1: say_status}
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
