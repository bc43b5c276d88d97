"""A second `dflash-eval evaluate` of a known checkpoint, against starting Python with torch and transformers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import yaml

from tests.benchmarks.demo_run import STRONG, DemoRun
from tests.benchmarks.measuring import PROJECT, load_average, num_threads, show, spread

ROUNDS = 5


def run(command: list[str], home: Path) -> float:
    """Run a command in a process of its own and return its wall seconds."""
    environment = os.environ | {
        "PYTHONPATH": str(PROJECT),
        "PREFECT_HOME": str(home),
        "OMP_NUM_THREADS": str(num_threads()),
    }
    begin = time.perf_counter()
    done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return time.perf_counter() - begin


def test_a_known_checkpoint_against_importing_torch_and_transformers(demo_run: DemoRun, tmp_path: Path) -> None:
    config = tmp_path / "dflash.yaml"
    config.write_text(yaml.safe_dump(demo_run.settings() | {"results": str(tmp_path / "acceptance.duckdb")}))
    evaluate = [
        sys.executable,
        "-m",
        "flows.cli",
        "evaluate",
        str(demo_run.checkpoint(STRONG)),
        "--config",
        str(config),
    ]
    ways = {
        "dflash-eval evaluate, known": evaluate,
        'python -c "import torch, transformers"': [sys.executable, "-c", "import torch, transformers"],
        'python -c "import torch, transformers; transformers.AutoModelForCausalLM"': [
            *(sys.executable, "-c", "import torch, transformers; transformers.AutoModelForCausalLM"),
        ],
        'python -c "pass"': [sys.executable, "-c", "pass"],
    }
    begin_load = load_average()
    first = run(evaluate, tmp_path)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(ROUNDS + 1):
        for name, command in ways.items():
            taken = run(command, tmp_path)
            if number > 0:  # the first round fills the page cache
                seconds[name].append(taken)
    peer = sorted(seconds['python -c "import torch, transformers"'])[ROUNDS // 2]
    rows = [
        {"command": name, "seconds": spread(taken), "of the import": sorted(taken)[ROUNDS // 2] / peer}
        for name, taken in seconds.items()
    ]
    show(
        "Start-up",
        rows,
        f"the first evaluate, which scored the checkpoint or found its blocks, took {first:.1f} s",
        f"median (least-most) of {ROUNDS} interleaved rounds after one to warm up; "
        f"load average at the start {begin_load:.1f}",
    )
