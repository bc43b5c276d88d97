"""A whole tiny set-up on disk: target with tokenizer, prompts, a run with checkpoints, a configuration."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.support import tiny

NUM_PROMPTS = 4
MAX_NEW_TOKENS = 24


@dataclass(frozen=True)
class Setup:
    """Paths of a tiny set-up."""

    folder: Path
    config: Path
    run: Path

    @property
    def results(self) -> Path:
        """Return the database."""
        return self.folder / "results" / "acceptance.duckdb"

    def add_step(self, step: int, *, seed: int | None = None) -> Path:
        """Write one more checkpoint of the run and return its folder."""
        target = tiny.read_target_folder(self.folder / "target", name="tiny")
        config = tiny.draft_config(target)
        weights = tiny.random_weights(config, target, seed=step if seed is None else seed)[1]
        return tiny.write_drafter(self.run / f"step_{step}", config, weights)

    def cli(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `dflash-eval` with this configuration, in this process: the imports are the slowest part of it."""
        from flows.cli import main

        command = [*arguments, "--config", str(self.config)]
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = main(command)
            except SystemExit as ended:  # argparse ends the process when the arguments are wrong
                status = int(ended.code or 0)
        return subprocess.CompletedProcess(command, status, out.getvalue(), err.getvalue())

    def process(self, *arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run `dflash-eval` with this configuration in a process of its own."""
        command = [sys.executable, "-m", "flows.cli", *arguments, "--config", str(self.config)]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"} | (env or {})
        return subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=300)

    def json(self, *arguments: str) -> Any:
        """Run a command with `--json` and return what it printed; it must succeed."""
        done = self.cli(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def change_config(self, **changes: Any) -> None:
        """Set top-level keys of the configuration file."""
        data = yaml.safe_load(self.config.read_text()) | changes
        self.config.write_text(yaml.safe_dump(data))


def make_setup(folder: Path, *, family: str = "qwen3", steps: tuple[int, ...] = (1,)) -> Setup:
    """Write a tiny set-up; everything the configuration names lies in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tiny.write_tiny_target(folder / "target", family)
    tiny.add_tokenizer(folder / "target")
    tiny.write_prompts(folder / "prompts.jsonl", NUM_PROMPTS)
    data = {
        "target": {"model": str(folder / "target"), "compute_dtype": "float32"},
        "completions": {"max_new_tokens": MAX_NEW_TOKENS},
        "prompts": str(folder / "prompts.jsonl"),
        "store": str(folder / "store"),
        "results": str(folder / "results" / "acceptance.duckdb"),
    }
    (folder / "dflash.yaml").write_text(yaml.safe_dump(data))
    setup = Setup(folder, folder / "dflash.yaml", folder / "runs" / "a")
    for step in steps:
        setup.add_step(step)
    return setup
