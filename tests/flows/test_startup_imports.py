"""What a command imports: torch and Prefect take seconds, so that only what needs them pays for them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_core.config import load_config
from dflash_core.results.database import write_evaluation
from tests.dflash_core.results.builders import make_prompts, make_record
from tests.support.direct import evaluate_directly
from tests.support.scene import Setup, make_setup

HEAVY = ("torch", "transformers", "tokenizers", "prefect", "asyncssh", "fastapi")
_RUN_ALL = """
import contextlib, io, json, sys
from flows.cli import main
heavy, *commands = json.loads(sys.argv[1])
for command in commands:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = main(command)
    print(json.dumps([command[0], status, [name for name in heavy if name in sys.modules]]))
"""


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    """A set-up with a checkpoint that is known, and rows of two more."""
    made = make_setup(tmp_path_factory.mktemp("startup") / "s")
    config = load_config(str(made.config))
    write_evaluation(config.results, evaluate_directly(config, made.run / "step_1").record)
    for step in (1, 2):
        record = make_record(f"other-{step}", run="other", step=step, seed=step, prompts=make_prompts(4))
        write_evaluation(config.results, record)
    return made


def imported(setup: Setup, *commands: list[str]) -> dict[str, list[str]]:
    """Run commands one after the other in one new process; return each and what heavy is imported after it."""
    typed = [[*command, "--config", str(setup.config)] for command in commands]
    done = subprocess.run(
        [sys.executable, "-c", _RUN_ALL, json.dumps([HEAVY, *typed])],
        cwd=setup.folder,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(commands), done.stderr
    assert [status for _, status, _ in answers] == [0] * len(commands), done.stderr
    return {name: heavy for name, _, heavy in answers}


def test_what_reads_the_results_or_an_index_imports_nothing_heavy(setup: Setup) -> None:
    found = imported(
        setup,
        ["sql", "SELECT 1"],
        ["compare", "other:1", "other:2"],
        ["report", "--no-drafts"],
        ["inspect", str(setup.run / "step_1")],
    )
    assert found == {"sql": [], "compare": [], "report": [], "inspect": []}


def test_a_known_checkpoint_needs_neither_torch_nor_transformers_nor_prefect(setup: Setup) -> None:
    evaluate = ["evaluate", str(setup.run / "step_1")]
    assert imported(setup, evaluate, ["compare"]) == {"evaluate": [], "compare": []}
    shutil.rmtree(setup.folder / "store" / "renderings")
    found = imported(setup, evaluate, ["show", str(setup.run / "step_1")])
    # The prompts are rendered anew, which takes a tokenizer: it would have been seen above.
    assert {"torch", "transformers", "tokenizers"} <= set(found["evaluate"])
    assert {"torch", "transformers"} <= set(found["show"])
    assert "prefect" not in found["show"]
    assert imported(setup, evaluate) == {"evaluate": []}, "it was kept again"
