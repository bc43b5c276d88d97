"""The demo's target, twelve prompts, and a run of the stand-in trainer that learnt them: weak and strong drafters."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from dflash_core import evaluation, stages
from dflash_core.config import Config, parse_config
from examples.stand_in_run.train import parse_arguments, train
from flows.demo import _target_file, _trainer_inputs
from tests.benchmarks.measuring import PROJECT, num_threads

DRAFT_CONFIG = PROJECT / "examples" / "stand_in_run" / "draft_config.json"
MAX_NEW_TOKENS = 96
WEAK, STRONG = 100, 240
"""Training steps at which tau is near 1.3 and near 7."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoRun:
    """Where everything lies."""

    folder: Path

    def config(self, anchors: str = "walk") -> Config:
        """Return the configuration under which the run's checkpoints are scored."""
        return parse_config(self.settings(anchors), where="benchmark")

    def settings(self, anchors: str = "walk") -> dict[str, object]:
        """Return the configuration as it would stand in a file."""
        return {
            "target": {"model": str(_target_file()), "compute_dtype": "float32"},
            "completions": {"max_new_tokens": MAX_NEW_TOKENS},
            "prompts": str(self.folder / "prompts.jsonl"),
            "drafter": {"config": str(DRAFT_CONFIG), "anchors": anchors},
            "device": "cpu",
            "store": str(self.folder / "store"),
            "results": str(self.folder / "acceptance.duckdb"),
        }

    def checkpoint(self, step: int) -> Path:
        """Return the folder of one step: a mixed file of 291 MB, 22 MB of them the drafter."""
        return self.folder / "run" / f"step_{step}"


def make_demo_run(folder: Path) -> DemoRun:
    """Convert the target, write its transcripts and states, and train; what is there is kept."""
    folder.mkdir(parents=True, exist_ok=True)
    run = DemoRun(folder=folder)
    _write_prompts(folder / "prompts.jsonl")
    config = run.config()
    plan = stages.plan_target(config)
    stages.write_transcripts(config)
    stages.extract_hidden_states(config, evaluation.configured_layers(config, plan))
    done = folder / "trained.json"
    wanted = json.dumps({"transcripts": plan.transcripts_key, "steps": STRONG, "config": DRAFT_CONFIG.read_text()})
    if not done.exists() or done.read_text(encoding="utf-8") != wanted:
        _train(run, config)
        done.write_text(wanted, encoding="utf-8")
    return run


def _write_prompts(path: Path) -> None:
    """Write the twelve example prompts that the stand-in run is trained on."""
    lines = (PROJECT / "examples" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    chosen = [line for line in lines if json.loads(line)["group"] == "trained on"]
    path.write_text("\n".join(chosen) + "\n", encoding="utf-8")


def _train(run: DemoRun, config: Config) -> None:
    for name in ("inputs", "run"):
        shutil.rmtree(run.folder / name, ignore_errors=True)
    inputs = _trainer_inputs(run.folder, config)
    train(
        parse_arguments([
            *("--transcripts", str(inputs / "transcripts.jsonl"), "--hidden", str(inputs)),
            *("--embedding", str(inputs / "embedding.safetensors"), "--config", str(DRAFT_CONFIG)),
            *("--out", str(run.folder / "run"), "--steps", str(STRONG), "--save-every", str(WEAK)),
            *("--threads", str(num_threads())),
        ])
    )  # fmt: skip
