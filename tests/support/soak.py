"""A soak: checkpoints appear while everything around them breaks; then the faults stop, and all is counted."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dflash_core.config import Config, load_config
from tests.support.cutting_proxy import CuttingProxy
from tests.support.scene import Setup, make_setup
from tests.support.sftp_server import RecordingSFTPServer
from tests.support.soak_disk import small_disk
from tests.support.soak_plan import Plan, PlannedFault
from tests.support.soak_processes import MARK, ROOT, Watch, wait_until_none
from tests.support.soak_systems import Deployed, Direct, System
from tests.support.soak_training import TrainingRun, Weights
from tests.support.soak_verdict import Judge, Verdict

TICK_S = 0.05
LOOK_EVERY_S = 2.0
LONGEST_PACE_S = 120.0
Kind = Literal["direct", "deployed"]
KINDS: dict[Kind, tuple[str, ...]] = {"direct": Direct.kinds, "deployed": Deployed.kinds}


@dataclass
class Outcome:
    """What a soak was, and what came of it."""

    plan: Plan
    faults: Counter[str]
    verdict: Verdict
    seconds: float
    disk: str
    num_started: int
    """Watches that were started, the first one among them."""
    num_cut: int
    """Connections that broke."""


def run_soak(
    folder: Path, plan: Plan, *, settle_s: float, kind: Kind = "direct", say: Callable[[str], None] = print
) -> Outcome:
    """Run a plan in a folder and judge it.

    Args:
        folder: an empty one; a small disk is mounted in it where that is allowed.
        plan: what happens.
        settle_s: how long after the last fault all must be well.
        kind: `direct`: one watch that computes by itself. `deployed`: server, workers and watch.
        say: is told each fault.
    """
    begin, mark = time.monotonic(), uuid.uuid4().hex
    with ExitStack() as stack:
        disk = stack.enter_context(small_disk(folder / "disk"))
        setup, training, server = stack.enter_context(_scene(folder))
        judge = Judge(load_config(str(setup.config)))
        server.faults.before_read = training.note_read
        proxy = stack.enter_context(CuttingProxy(server.port))
        config = _configure(setup, server, proxy, folder / "disk")
        stack.enter_context(_environment(mark))

        def watch(environment: dict[str, str], *options: str) -> Watch:
            url = f"ssh://reader@127.0.0.1:{proxy.port}/a"
            return Watch(mark, url, setup.config, folder, environment, options)

        system: System
        if kind == "direct":
            system = Direct(watch(dict(os.environ)), proxy, disk)
        else:
            state = folder / "state"
            system = Deployed(lambda own: watch(dict(own), *Deployed.options()), proxy, state, _free_port())
        try:
            system.start()
            faults = _happen(plan, training, system, say)
            say("no more faults")
            _settle(judge, config, training, system, settle_s)
            damage = system.end()
        finally:
            system.kill()
            left = wait_until_none(mark)
        verdict = judge.judge(config, training.contents, training.gone, system.watch.log)
        verdict.damage += damage + [f"a process is left: {command}" for command in left.values()]
        verdict.damage += [f"written to the training box: {operation}" for operation in server.write_attempts]
        judge.inspect_damage(config, verdict)
        return Outcome(
            plan=plan,
            faults=faults,
            verdict=verdict,
            seconds=time.monotonic() - begin,
            disk=disk.kind,
            num_started=system.watch.num_started,
            num_cut=proxy.num_cut,
        )


class Pace:
    """Keeps kills so far apart that a slow machine does more between them than start again."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._num_scored, self._at = 0, float("-inf")

    def allows(self, fault: PlannedFault) -> bool:
        """Tell whether some checkpoints were scored since the last kill, or time enough has passed."""
        if not fault.kind.endswith("killed") or time.monotonic() - self._at > LONGEST_PACE_S:
            return True
        return self._watch.num_scored >= self._num_scored + int(1 + 4 * fault.amount)

    def note(self, fault: PlannedFault) -> None:
        """Remember when a fault came."""
        if fault.kind.endswith("killed"):
            self._num_scored, self._at = self._watch.num_scored, time.monotonic()


def _happen(plan: Plan, training: TrainingRun, system: System, say: Callable[[str], None]) -> Counter[str]:
    """Let the plan happen; a fault whose victim does not run yet waits for it, and the others behind it."""
    begin = time.monotonic()
    doing = [(one.at_s, lambda one=one: training.appear(one)) for one in plan.checkpoints]
    doing += [(one.then_s, lambda one=one: training.go_on(one)) for one in plan.checkpoints]
    doing.sort(key=lambda item: item[0])
    faults, done, pace = list(plan.faults), Counter[str](), Pace(system.watch)
    while doing or faults or system.later:
        passed = time.monotonic() - begin
        while doing and doing[0][0] <= passed:
            doing.pop(0)[1]()
        if faults and faults[0].at_s <= passed and pace.allows(faults[0]) and system.harm(faults[0]):
            fault = faults.pop(0)
            pace.note(fault)
            done[fault.kind] += 1
            say(f"{passed:6.1f} s  {fault.kind}; {len(training.contents)} appeared")
        system.revive()
        time.sleep(TICK_S)
    training.keep_the_rest()
    return done


@contextmanager
def _scene(folder: Path) -> Iterator[tuple[Setup, TrainingRun, RecordingSFTPServer]]:
    """Make target, weights, a run that is still empty, and its box."""
    setup = make_setup(folder / "scene")
    training = TrainingRun(folder / "box" / "a", folder / "training", Weights(setup))
    with RecordingSFTPServer(folder / "box") as server:
        yield setup, training, server


@contextmanager
def _environment(mark: str) -> Iterator[None]:
    """Mark every process that is started in the block; a worker asks for work each second."""
    before = dict(os.environ)
    os.environ.update(
        {MARK: mark, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PREFECT_WORKER_QUERY_SECONDS": "1"}
    )
    for name in ("PREFECT_API_URL", "PREFECT_HOME", "PREFECT_SERVER_DATABASE_CONNECTION_URL"):
        os.environ.pop(name, None)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _configure(setup: Setup, server: RecordingSFTPServer, proxy: CuttingProxy, disk: Path) -> Config:
    """Have the watch reach the box through the proxy and keep everything on the small disk."""
    known_hosts = setup.folder / "known_hosts"
    known_hosts.write_text(server.known_hosts.read_text().replace(f":{server.port} ", f":{proxy.port} "))
    box = {"url": f"ssh://reader@127.0.0.1:{proxy.port}/", "read_only": True, "known_hosts": str(known_hosts)}
    setup.change_config(
        hosts={"box": box | {"timeout_s": 10.0}},
        store=str(disk / "store"),
        results=str(disk / "results" / "acceptance.duckdb"),
    )
    return load_config(str(setup.config))


def _settle(judge: Judge, config: Config, training: TrainingRun, system: System, limit_s: float) -> Verdict:
    """Wait until nothing is lost and everything has its reason, or the time is over."""
    end = time.monotonic() + limit_s
    for content in list(training.contents):  # the clean run goes on beside what is still to be scored
        judge.sha(content)
        system.revive()
    while True:
        system.revive()
        verdict = judge.judge(config, training.contents, training.gone, system.watch.log)
        if not verdict.is_open or time.monotonic() > end:
            return verdict
        time.sleep(LOOK_EVERY_S)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
