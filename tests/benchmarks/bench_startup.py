"""Commands that answer from what is there, against starting Python with torch and transformers."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.benchmarks.demo_run import STRONG, DemoRun
from tests.benchmarks.measuring import PROJECT, load_average, num_threads, show, spread

ROUNDS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """What one command took, the processes that it started and waited for included."""

    wall: float
    cpu: float
    """What other work on the machine hardly changes."""


def run(command: list[str], home: Path) -> Taken:
    """Run a command in a process of its own and return its seconds."""
    environment = os.environ | {
        "PYTHONPATH": str(PROJECT),
        "PREFECT_HOME": str(home),
        "OMP_NUM_THREADS": str(num_threads()),
    }
    begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Taken(wall=time.perf_counter() - begin, cpu=cpu)


def test_a_known_checkpoint_against_importing_torch_and_transformers(demo_run: DemoRun, tmp_path: Path) -> None:
    config = tmp_path / "dflash.yaml"
    config.write_text(yaml.safe_dump(demo_run.settings() | {"results": str(tmp_path / "acceptance.duckdb")}))
    checkpoint = str(demo_run.checkpoint(STRONG))

    def dflash_eval(*arguments: str) -> list[str]:
        return [sys.executable, "-m", "flows.cli", *arguments]

    options = ("--config", str(config))
    evaluate = dflash_eval("evaluate", checkpoint, *options)
    ways = {
        "dflash-eval evaluate, known": evaluate,
        "dflash-eval --help": dflash_eval("--help"),
        "dflash-eval inspect": dflash_eval("inspect", checkpoint, *options),
        "dflash-eval sql": dflash_eval("sql", "SELECT count(*) FROM blocks", *options),
        "dflash-eval compare STEP": dflash_eval("compare", checkpoint, *options),
        "dflash-eval compare": dflash_eval("compare", *options),
        "dflash-eval report": dflash_eval("report", *options),
        "dflash-eval show": dflash_eval("show", checkpoint, *options),
        'python -c "import torch, transformers"': [sys.executable, "-c", "import torch, transformers"],
        'python -c "import torch, transformers; transformers.AutoModelForCausalLM"': [
            *(sys.executable, "-c", "import torch, transformers; transformers.AutoModelForCausalLM"),
        ],
        'python -c "pass"': [sys.executable, "-c", "pass"],
    }
    begin_load = load_average()
    first = run(evaluate, tmp_path)
    seconds: dict[str, list[Taken]] = {name: [] for name in ways}
    for number in range(ROUNDS + 1):
        for name, command in ways.items():
            taken = run(command, tmp_path)
            if number > 0:  # the first round fills the page cache
                seconds[name].append(taken)
    rows = [
        {
            "command": name,
            "seconds": spread([one.wall for one in taken]),
            "CPU seconds": spread([one.cpu for one in taken]),
        }
        for name, taken in seconds.items()
    ]
    show(
        "Start-up",
        rows,
        f"the first evaluate, which scored the checkpoint or found its blocks, took {first.wall:.1f} s",
        f"median (least-most) of {ROUNDS} interleaved rounds after one to warm up; "
        f"load average at the start {begin_load:.1f}",
    )
