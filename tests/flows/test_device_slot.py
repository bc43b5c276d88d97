"""One drafter at a time on a GPU, whoever is killed meanwhile. The tests name a GPU; the lock does not know better."""

from __future__ import annotations

import contextvars
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from dflash_core import stages
from dflash_core.config import Config, load_config
from dflash_core.errors import InputError
from dflash_core.store import Store
from dflash_core.store_opening import store_of
from tests.support.scene import make_setup

ROOT = Path(__file__).parents[2]
WAIT_S = 120.0

_USE = """
import os, sys, time
from pathlib import Path
from dflash_core.config import Config
from flows import device_slot

folder, name, times = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
device_slot.gpu_name = lambda configured: "gpu-of-the-test"
for _ in range(times):
    with device_slot.device_slot(Config(store=str(folder / "store")), (folder / f"{name}.waits").write_text):
        os.close(os.open(folder / "occupied", os.O_CREAT | os.O_EXCL))
        (folder / f"{name}.inside").touch()
        if name == "holder":
            time.sleep(1000)
        time.sleep(0.002)
        os.unlink(folder / "occupied")
"""


def use(folder: Path, name: str, times: int = 1) -> subprocess.Popen[str]:
    """Start a process that takes the slot some times; it fails where it is not alone in there."""
    return subprocess.Popen(
        [sys.executable, "-c", _USE, str(folder), name, str(times)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(path: Path) -> None:
    end = time.monotonic() + WAIT_S
    while not path.exists():
        assert time.monotonic() < end, f"{path.name} did not come"
        time.sleep(0.02)


def ended(process: subprocess.Popen[str]) -> None:
    _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, errors[-2000:]


def test_two_processes_are_never_inside_together(tmp_path: Path) -> None:
    processes = [use(tmp_path, name, 100) for name in ("a", "b")]
    for process in processes:
        ended(process)
    assert [(tmp_path / f"{name}.inside").exists() for name in ("a", "b")] == [True, True]


def test_a_killed_holder_gives_way_at_once(tmp_path: Path) -> None:
    with ExitStack() as stack:
        holder = stack.enter_context(use(tmp_path, "holder"))
        stack.callback(holder.kill)
        wait_for(tmp_path / "holder.inside")
        other = stack.enter_context(use(tmp_path, "other"))
        stack.callback(other.kill)
        wait_for(tmp_path / "other.waits")
        assert "waiting for gpu-of-the-test: another drafter runs on it" in (tmp_path / "other.waits").read_text()
        assert not (tmp_path / "other.inside").exists()
        (tmp_path / "occupied").unlink()
        os.kill(holder.pid, signal.SIGKILL)
        ended(other)


@pytest.mark.usefixtures("prefect_api")
def test_the_flow_holds_it_while_the_drafter_runs_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows import device_slot
    from flows.evaluate_checkpoint import evaluate_checkpoint

    setup = make_setup(tmp_path / "s")
    store = store_of(load_config(setup.config))
    seen = {}

    def watched(name: str) -> Any:
        original = getattr(stages, name)

        def run(*arguments: Any) -> Any:
            seen[name] = is_held(store)
            return original(*arguments)

        return run

    monkeypatch.setattr(device_slot, "gpu_name", lambda configured: "gpu-of-the-test")
    for name in ("extract_hidden_states", "run_drafter"):
        monkeypatch.setattr(stages, name, watched(name))
    evaluate_checkpoint(str(setup.run / "step_1"), str(setup.config))
    assert seen == {"extract_hidden_states": False, "run_drafter": True}
    assert not is_held(store)


def test_what_torch_keeps_of_the_gpu_is_given_back_before_the_next_one_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a watch between two checkpoints would send the next process to the CPU."""
    from flows import device_slot

    config, told = Config(store=str(tmp_path)), list[bool]()
    monkeypatch.setattr(device_slot, "gpu_name", lambda configured: "gpu-of-the-test")
    monkeypatch.setattr(device_slot, "give_back_unused", lambda: told.append(is_held(store_of(config))))
    with pytest.raises(RuntimeError, match="out of luck"), device_slot.device_slot(config, print):
        raise RuntimeError("out of luck")
    assert told == [True]
    assert not is_held(store_of(config))


def is_held(store: Store) -> bool:
    try:
        with store.lock("device", "gpu-of-the-test", wait=False):
            return False
    except BlockingIOError:
        return True


@pytest.mark.usefixtures("prefect_api")
class TestLimitOfTheServer:
    def test_it_is_taken_where_the_environment_names_one(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from prefect.client.orchestration import get_client
        from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate

        from flows.device_slot import LIMIT_VARIABLE, device_slot

        name, config = f"gpu-{uuid.uuid4().hex[:8]}", Config(store=str(tmp_path), device="cpu")
        monkeypatch.setenv(LIMIT_VARIABLE, name)
        with pytest.raises(InputError, match=f"prefect gcl create {name} --limit 1"), device_slot(config, print):
            pytest.fail("there is no such limit")

        with get_client(sync_client=True) as client:
            client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=1))
        said: list[str] = []
        waits, inside = threading.Event(), threading.Event()

        def tell(text: str) -> None:
            said.append(text)
            waits.set()

        def second() -> None:
            with device_slot(config, tell):
                inside.set()

        with ThreadPoolExecutor(1) as executor:
            with device_slot(config, print):
                later = executor.submit(contextvars.copy_context().run, second)
                assert waits.wait(WAIT_S)
                assert not inside.is_set()
            later.result(WAIT_S)
        assert said == [f"waiting for a slot of the concurrency limit {name}: 1 of 1 are taken"]
