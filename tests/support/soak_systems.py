"""What a soak breaks: a watch that computes by itself, or server, workers and watch as `up` starts them."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path

from flows.services import EVALUATE, Services
from tests.support.cutting_proxy import CuttingProxy
from tests.support.soak_disk import Disk
from tests.support.soak_plan import PlannedFault
from tests.support.soak_processes import Watch, kill, kill_group


class System(ABC):
    """Processes that score a run, each of which may be killed; what was killed is started again."""

    kinds: tuple[str, ...]
    """Of faults."""

    def __init__(self, watch: Watch, proxy: CuttingProxy) -> None:
        self.watch, self._proxy = watch, proxy
        self.later: list[tuple[float, Callable[[], None]]] = []
        """What is undone, and when."""

    @abstractmethod
    def start(self) -> None:
        """Start all of it."""

    def revive(self) -> None:
        """Start again what was killed, and undo what has lasted long enough; called all the time."""
        for at, undo in [item for item in self.later if item[0] <= time.monotonic()]:
            self.later.remove((at, undo))
            undo()
        self.watch.revive()

    def harm(self, fault: PlannedFault) -> bool:
        """Do what is planned; False where its victim does not run yet."""
        match fault.kind:
            case "watch killed":
                return self.watch.kill(start_again_after_s=2 * fault.amount)
            case "connections cut":
                self._proxy.cut_after(int(600_000 * fault.amount))
            case "box away":
                self._proxy.go_away(1.0 + 7.0 * fault.amount)
        return True

    @abstractmethod
    def end(self) -> list[str]:
        """End all of it, as a person does, and return what did not end well."""

    def _end_watch(self) -> list[str]:
        status = self.watch.end()
        problems = [f"the watch ended by itself with {code}" for code in self.watch.ended_by_itself]
        return problems if status in (0, 1) else [*problems, f"the watch did not end when it was asked to: {status}"]

    def kill(self) -> None:
        """Leave no process, whatever happened."""
        self.watch.kill(start_again_after_s=float("inf"))


class Direct(System):
    """A watch with a Prefect server of its own; store, results and Prefect's state on one small disk."""

    kinds = ("watch killed", "server killed", "connections cut", "box away", "disk full")

    def __init__(self, watch: Watch, proxy: CuttingProxy, disk: Disk) -> None:
        super().__init__(watch, proxy)
        self._disk = disk

    def start(self) -> None:
        self.watch.revive()

    def harm(self, fault: PlannedFault) -> bool:
        if fault.kind == "server killed":  # at times while it starts
            return self.watch.kill_server(must_answer=fault.amount > 0.25)
        if fault.kind != "disk full":
            return super().harm(fault)
        if self.watch.pid is None:
            return False
        pids = [self.watch.pid]
        self._disk.fill(pids)
        self.later.append((time.monotonic() + 1.0 + 7.0 * fault.amount, lambda: self._disk.free(pids)))
        return True

    def end(self) -> list[str]:
        return self._end_watch()


class Deployed(System):
    """Server and workers of `up`, and a watch that starts runs of the deployment; `up` again after each kill."""

    kinds = ("watch killed", "server killed", "worker killed", "connections cut", "box away")

    def __init__(self, watch: Callable[[Mapping[str, str]], Watch], proxy: CuttingProxy, state: Path, port: int):
        self._services = Services(state, port=port)
        self._upping: threading.Thread | None = None
        self.problems: list[str] = []
        super().__init__(watch(self._services.environment()), proxy)

    @staticmethod
    def options() -> tuple[str, ...]:
        """Return the options of its watch."""
        return ("--deployment", EVALUATE)

    def start(self) -> None:
        self._up()
        self.watch.revive()

    def revive(self) -> None:
        super().revive()
        if self._upping is not None and self._upping.is_alive():
            return
        if len(self._services.running()) < 3:
            self._upping = threading.Thread(target=self._up, name="up", daemon=True)
            self._upping.start()

    def harm(self, fault: PlannedFault) -> bool:
        if fault.kind not in ("server killed", "worker killed"):
            return super().harm(fault)
        if self._upping is not None and self._upping.is_alive():
            return False  # it is only just being started again
        victim = self._services.running().get("server" if fault.kind == "server killed" else "worker-gpu")
        if victim is None:
            return False
        # Half of the time with its children, as where a box loses its power.
        (kill_group if fault.amount < 0.5 else kill)(victim.pid)
        end = time.monotonic() + 30
        while victim.is_alive() and time.monotonic() < end:
            time.sleep(0.01)
        return True

    def end(self) -> list[str]:
        problems = self._end_watch()
        if self._upping is not None:
            self._upping.join(timeout=300)
        self._services.down(say=lambda text: None)
        return problems + self.problems

    def kill(self) -> None:
        super().kill()
        self._services.down(say=lambda text: None)

    def _up(self) -> None:
        try:
            self._services.up(run_url=None, config=None, say=lambda text: None)
        except Exception as error:  # in a thread of its own: told in the end
            self.problems.append(f"`up` failed: {error}")
