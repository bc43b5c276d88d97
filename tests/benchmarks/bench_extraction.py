"""Hidden states of the demo's target: our extraction against transformers' plain forward pass on the same tokens.

Each way runs in a process of its own, so that its peak memory is its own: it loads the model, runs over all
transcripts, keeps the same layers and the final states, and stores them.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file

from dflash_core import evaluation, stages
from dflash_core.store import Store
from dflash_core.target import hidden_states
from dflash_core.target.loading import Target, quiet_transformers
from dflash_core.target.runtime import load_model
from dflash_core.target.transcripts import Transcript
from tests.benchmarks.demo_run import DemoRun
from tests.benchmarks.measuring import load_average, num_threads, show, spread

ROUNDS = 3
TOLERANCE = 1e-3
"""Largest difference of a state, relative to the layer's largest value."""


@dataclass(frozen=True)
class Job:
    """What both ways are given."""

    target: Target
    transcripts: list[Transcript]
    layers: tuple[int, ...]
    num_threads: int


@dataclass(frozen=True)
class Done:
    """What a way took, and where its states lie."""

    seconds: float
    forward_seconds: float
    peak_mb: float
    states: dict[str, torch.Tensor]


def ours(job: Job, folder: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """Extract into a store; return the seconds from the loaded model on, and the states."""
    began: list[float] = []

    def loading(target: Target, compute_dtype: str) -> Any:
        model = load_model(target, compute_dtype)
        began.append(time.perf_counter())
        return model

    with mock.patch.object(hidden_states, "load_model", loading):
        found = hidden_states.extract_hidden_states(
            Store(folder), job.target, job.transcripts, job.layers, compute_dtype="float32", store_dtype="float32"
        )
    seconds = time.perf_counter() - began[0]
    states = {str(layer): found.load_layer(layer) for layer in job.layers}
    return seconds, states | {"final": hidden_states._load(found.final, hidden_states.FINAL, "hidden")}


def transformers_plain(job: Job, folder: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """Call the model with output_hidden_states=True, as one would write it down."""
    return _transformers(job, folder, trim_logits=False)


def transformers_trimmed(job: Job, folder: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """The same, with logits for the response alone, as ours computes them for the margins."""
    return _transformers(job, folder, trim_logits=True)


@torch.inference_mode()
def _transformers(job: Job, folder: Path, *, trim_logits: bool) -> tuple[float, dict[str, torch.Tensor]]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(job.target.folder, dtype=torch.float32, local_files_only=True)
    model.eval()
    begin = time.perf_counter()
    kept: dict[str, list[torch.Tensor]] = {name: [] for name in (*map(str, job.layers), "final")}
    for one in job.transcripts:
        ids = torch.tensor([[*one.prompt_ids, *one.response_ids]])
        keep = len(one.response_ids) + 1 if trim_logits else 0
        output = model(input_ids=ids, use_cache=False, output_hidden_states=True, logits_to_keep=keep)
        for layer in job.layers:
            kept[str(layer)].append(output.hidden_states[layer + 1][0])
        kept["final"].append(output.hidden_states[-1][0])
    states = {name: torch.cat(parts) for name, parts in kept.items()}
    save_file(states, folder / "states.safetensors")
    return time.perf_counter() - begin, load_file(folder / "states.safetensors")


WAYS: dict[str, Callable[[Job, Path], tuple[float, dict[str, torch.Tensor]]]] = {
    "ours": ours,
    "transformers, logits of the response": transformers_trimmed,
    "transformers, all logits": transformers_plain,
}


def work(name: str, job: Job) -> Done:
    """Run one way in this process."""
    torch.set_num_threads(job.num_threads)
    quiet_transformers()  # and import it here: that is not what is measured
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        forward_seconds, states = WAYS[name](job, Path(folder))
        seconds = time.perf_counter() - begin
        return Done(seconds, forward_seconds, _peak_mb(), {key: tensor.clone() for key, tensor in states.items()})


def _peak_mb() -> float:
    """Return the most resident memory of this process so far; not getrusage, which counts the parent's."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024 / 1e6


def test_extraction_against_the_plain_forward_pass(demo_run: DemoRun) -> None:
    config = demo_run.config()
    plan = stages.plan_target(config)
    job = Job(
        target=plan.target,
        transcripts=stages.read_transcripts(config, plan),
        layers=evaluation.configured_layers(config, plan),
        num_threads=num_threads(),
    )
    num_tokens = sum(one.num_tokens for one in job.transcripts)
    begin_load = load_average()
    done: dict[str, list[Done]] = {name: [] for name in WAYS}
    for _ in range(ROUNDS):
        for name in WAYS:
            spawn = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(max_workers=1, mp_context=spawn) as process:
                done[name].append(process.submit(work, name, job).result())
    for name in WAYS:
        for key, expected in done["ours"][0].states.items():
            difference = (done[name][0].states[key] - expected).abs().max() / expected.abs().max()
            assert difference < TOLERANCE, (name, key, float(difference))
    peer = statistics.median(one.forward_seconds for one in done["transformers, logits of the response"])
    rows = [
        {
            "way": name,
            "tokens/s": spread([num_tokens / one.forward_seconds for one in taken], 0),
            "of the second row": peer / statistics.median(one.forward_seconds for one in taken),
            "seconds with loading": spread([one.seconds for one in taken]),
            "peak memory MB": spread([one.peak_mb for one in taken], 0),
        }
        for name, taken in done.items()
    ]
    show(
        f"Hidden states of {len(job.transcripts)} transcripts, {num_tokens} tokens, layers {job.layers} and final",
        rows,
        f"median (least-most) of {ROUNDS} interleaved rounds, each way in a new process; "
        f"load average at the start {begin_load:.1f}",
    )
