"""Hidden states of two targets: our extraction against transformers' plain forward pass on the same tokens.

Each way runs in a process of its own, so that its peak memory is its own: it loads the model, runs over all
transcripts, keeps the same layers and the final states, and stores them. The states must be equal to the last bit.
One target is the demo's, the other is random, of 1.2 GB.
"""

from __future__ import annotations

import multiprocessing
import shutil
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
from dflash_core.target import extraction, hidden_states
from dflash_core.target.layer_weights import LayerWeights
from dflash_core.target.loading import Target, quiet_transformers, read_target_folder
from dflash_core.target.transcripts import Transcript
from tests.benchmarks.demo_run import DemoRun
from tests.benchmarks.measuring import load_average, num_threads, show, spread
from tests.support.large_target import write_large_target

ROUNDS = 3
LARGE_LENGTHS = ((40, 88), (25, 71), (90, 38), (33, 95))
"""Prompt and response tokens of the large target's transcripts."""


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
    cpu_seconds: float
    """Of this process, loading included: what other processes on the machine hardly change."""
    forward_seconds: float
    before_mb: float
    """Resident before the model was touched."""
    peak_mb: float
    states: dict[str, torch.Tensor]


def ours(job: Job, folder: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """Extract into a store; return the seconds from the built, empty model on, and the states."""
    began: list[float] = []

    class Timed(LayerWeights):
        def __init__(self, target: Target, compute_dtype: str) -> None:
            super().__init__(target, compute_dtype)
            began.append(time.perf_counter())

    with mock.patch.object(extraction, "LayerWeights", Timed):
        found = hidden_states.extract_hidden_states(
            Store(folder), job.target, job.transcripts, job.layers, compute_dtype="float32", store_dtype="float32"
        )
    seconds = time.perf_counter() - began[0]
    assert found.choices.meta["method"] == "layer by layer"
    return seconds, {str(layer): found.load_layer(layer) for layer in job.layers} | {"final": found.load_final()}


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
    before_mb = _status_mb("VmRSS")
    with tempfile.TemporaryDirectory() as folder:
        begin, cpu_begin = time.perf_counter(), time.process_time()
        forward_seconds, states = WAYS[name](job, Path(folder))
        seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
        peak_mb = _status_mb("VmHWM")
        copies = {key: tensor.clone() for key, tensor in states.items()}
        return Done(seconds, cpu_seconds, forward_seconds, before_mb, peak_mb, copies)


def _status_mb(field: str) -> float:
    """Return resident memory, or its most so far (VmHWM); not getrusage, which counts the parent's."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) * 1024 / 1e6


def compare(title: str, job: Job) -> None:
    """Run all ways in turns, compare their states, and print a table."""
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
            assert torch.equal(done[name][0].states[key], expected), (name, key)
    peer = statistics.median(one.cpu_seconds for one in done["transformers, logits of the response"])
    rows = [
        {
            "way": name,
            "seconds": spread([one.seconds for one in taken]),
            "CPU seconds": spread([one.cpu_seconds for one in taken]),
            "second row's CPU divided by this": peer / statistics.median(one.cpu_seconds for one in taken),
            "seconds without loading": spread([one.forward_seconds for one in taken]),
            "tokens/s": spread([num_tokens / one.forward_seconds for one in taken], 0),
            "peak memory MB": spread([one.peak_mb for one in taken], 0),
            "of it beside libraries MB": spread([one.peak_mb - one.before_mb for one in taken], 0),
        }
        for name, taken in done.items()
    ]
    show(
        f"{title}: {len(job.transcripts)} transcripts, {num_tokens} tokens, layers {job.layers} and final",
        rows,
        f"median (least-most) of {ROUNDS} interleaved rounds, each way in a new process; "
        f"load average at the start {begin_load:.1f}",
    )


def test_extraction_of_the_demos_target(demo_run: DemoRun) -> None:
    config = demo_run.config()
    plan = stages.plan_target(config)
    job = Job(
        target=plan.target,
        transcripts=stages.read_transcripts(config, plan),
        layers=evaluation.configured_layers(config, plan),
        num_threads=num_threads(),
    )
    compare("Hidden states of the demo's target", job)


def test_extraction_of_a_large_target(tmp_path: Path) -> None:
    size = write_large_target(tmp_path / "target")
    generator = torch.Generator().manual_seed(0)
    transcripts = [
        Transcript(
            id=f"p{number}",
            prompt_ids=tuple(torch.randint(0, 32000, (num_prompt,), generator=generator).tolist()),
            response_ids=tuple(torch.randint(0, 32000, (num_response,), generator=generator).tolist()),
            stop_reason="length",
        )
        for number, (num_prompt, num_response) in enumerate(LARGE_LENGTHS)
    ]
    target = read_target_folder(tmp_path / "target", name="large")
    compare(f"A random Llama of {size / 1e6:.0f} MB in bf16", Job(target, transcripts, (1, 5, 8), num_threads()))
    shutil.rmtree(tmp_path / "target")
