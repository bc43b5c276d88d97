"""Runs of the extraction: killed and taken up, two at once, with other layers, and in little memory. Real processes."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_core import progress
from dflash_core.store import Store
from dflash_core.target import runtime
from dflash_core.target.hidden_states import KIND, HiddenStates, extract_hidden_states
from dflash_core.target.loading import Target
from tests.support.extraction_worker import TRANSCRIPTS
from tests.support.large_target import write_large_target
from tests.support.tiny_families import DEPTH, write_family

PROJECT = Path(__file__).parents[3]
DTYPES = {"compute_dtype": "float32", "store_dtype": "float32"}


def start_worker(target: Target, store: Path, layers: list[int], *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.support.extraction_worker", str(target.folder), str(store)]
    return subprocess.Popen([*command, json.dumps(layers), *options], cwd=PROJECT, stdout=subprocess.PIPE, text=True)


def result_of(worker: subprocess.Popen[str]) -> dict[str, Any]:
    output, _ = worker.communicate(timeout=120)
    assert worker.returncode == 0, output
    done: dict[str, Any] = json.loads(output.splitlines()[-1])
    return done


def extract(store: Path, target: Target, layers: list[int]) -> tuple[HiddenStates, list[str]]:
    """Return the states, and the steps that ran for them."""
    steps: list[str] = []
    with progress.listening(lambda *_: steps.append(progress.detail(KIND).partition(",")[0])):
        states = extract_hidden_states(Store(store), target, TRANSCRIPTS, layers, **DTYPES)
    return states, list(dict.fromkeys(steps))


def assert_same(states: HiddenStates, other: HiddenStates) -> None:
    assert set(states.layers) == set(other.layers)
    for layer in states.layers:
        assert torch.equal(states.load_layer(layer), other.load_layer(layer)), layer
    assert torch.equal(states.load_final(), other.load_final())
    assert torch.equal(states.load_margins(), other.load_margins())


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return write_family(tmp_path_factory.mktemp("llama") / "target", "llama", tied=True)


class TestKilled:
    def kill(self, target: Target, store: Path, layers: list[int], place: str) -> None:
        worker = start_worker(target, store, layers, "--kill-at", place)
        worker.communicate(timeout=120)
        assert worker.returncode == -signal.SIGKILL

    def test_a_run_goes_on_after_the_last_finished_layer(self, llama: Target, tmp_path: Path) -> None:
        self.kill(llama, tmp_path / "store", [1, 5], "layer 4 of 6, transcript 2 of 4")
        (unfinished,) = (tmp_path / "store" / "unfinished").iterdir()
        assert len(list((tmp_path / "store" / KIND).iterdir())) == 1, "layer 1 was published"
        states, steps = extract(tmp_path / "store", llama, [1, 5])
        assert steps == ["layer 4 of 6", "layer 5 of 6", "layer 6 of 6", "final norm", "the target's choices"]
        assert not unfinished.exists()
        assert_same(states, extract(tmp_path / "other", llama, [1, 5])[0])

    def test_a_kill_between_the_norm_and_the_choices_costs_no_layer(self, llama: Target, tmp_path: Path) -> None:
        self.kill(llama, tmp_path / "store", [1], "the target's choices")
        states, steps = extract(tmp_path / "store", llama, [1])
        assert steps == ["the target's choices"]
        assert_same(states, extract(tmp_path / "other", llama, [1])[0])

    def test_a_damaged_scratch_file_is_not_gone_on_with(self, llama: Target, tmp_path: Path) -> None:
        self.kill(llama, tmp_path / "store", [5], "layer 4 of 6, transcript 2 of 4")
        for path in (tmp_path / "store" / "unfinished").glob("*/state_*.bin"):
            content = bytearray(path.read_bytes())
            content[100] ^= 1
            path.write_bytes(content)
        states, steps = extract(tmp_path / "store", llama, [5])
        assert steps[0] == "embeddings"
        assert_same(states, extract(tmp_path / "other", llama, [5])[0])

    def test_other_layers_below_where_it_was_killed_are_not_skipped(self, llama: Target, tmp_path: Path) -> None:
        self.kill(llama, tmp_path / "store", [5], "layer 4 of 6, transcript 2 of 4")
        states, steps = extract(tmp_path / "store", llama, [0, 5])
        assert steps[:2] == ["embeddings", "layer 1 of 6"]
        assert_same(states, extract(tmp_path / "other", llama, [0, 5])[0])

    def test_layers_that_read_keys_of_earlier_ones_begin_anew(self, tmp_path: Path) -> None:
        """Keys and values that layer 4 left for layers 5 and 6 died with the process."""
        target = write_family(tmp_path / "target", "gemma4 small", tied=True)
        self.kill(target, tmp_path / "store", [5], "layer 6 of 6, transcript 2 of 4")
        states, steps = extract(tmp_path / "store", target, [5])
        assert steps[0] == "embeddings"
        assert_same(states, extract(tmp_path / "other", target, [5])[0])


class TestTwoAtOnce:
    def run_both(self, target: Target, folder: Path, *layers: list[int]) -> list[dict[str, Any]]:
        options = ("--wait-for", str(folder / "go"), "--pause-s", "0.02")
        workers = [start_worker(target, folder / "store", wanted, *options) for wanted in layers]
        for worker in workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "ready\n"
        (folder / "go").touch()
        return sorted((result_of(worker) for worker in workers), key=lambda done: -done["passes"])

    def test_two_that_want_the_same_run_the_target_once(self, llama: Target, tmp_path: Path) -> None:
        one, other = self.run_both(llama, tmp_path, [1, 4], [1, 4])
        assert (one["passes"], one["was_built"]) == (len(TRANSCRIPTS), True)
        assert other == {"passes": 0, "steps": [], "was_built": False}

    def test_the_second_computes_only_what_it_alone_wants(self, llama: Target, tmp_path: Path) -> None:
        results = self.run_both(llama, tmp_path, [1, 4], [1, 3])
        assert all(done["was_built"] for done in results)
        first = next(done for done in results if "final norm" in done["steps"])
        (second,) = (done for done in results if done is not first)
        assert first["steps"][0] == "embeddings"
        assert second["steps"] in (["layer 3 of 6", "layer 4 of 6"], ["layer 5 of 6"])
        assert_same(*(extract(tmp_path / name, llama, [1, 3, 4])[0] for name in ("store", "other")))


class TestOtherLayers:
    def test_a_stored_layer_spares_those_below_it(self, llama: Target, tmp_path: Path) -> None:
        extract(tmp_path / "store", llama, [1])
        states, steps = extract(tmp_path / "store", llama, [1, 3])
        assert steps == ["layer 3 of 6", "layer 4 of 6"], "neither layers 1 and 2 nor what lies above"
        assert_same(states, extract(tmp_path / "other", llama, [1, 3])[0])

    def test_a_layer_below_is_computed_from_the_start_and_no_further(self, llama: Target, tmp_path: Path) -> None:
        extract(tmp_path / "store", llama, [3])
        states, steps = extract(tmp_path / "store", llama, [1, 3])
        assert steps == ["embeddings", "layer 1 of 6", "layer 2 of 6"]
        assert_same(states, extract(tmp_path / "other", llama, [1, 3])[0])

    def test_rounded_layers_spare_nothing(self, llama: Target, tmp_path: Path) -> None:
        dtypes = {"compute_dtype": "float32", "store_dtype": "bfloat16"}
        for layers in ([1], [1, 3]):
            before = runtime.num_forward_passes
            states = extract_hidden_states(Store(tmp_path / "store"), llama, TRANSCRIPTS, layers, **dtypes)
            assert runtime.num_forward_passes == before + len(TRANSCRIPTS)
        exact, _ = extract(tmp_path / "other", llama, [3])
        assert torch.equal(states.load_layer(3), exact.load_layer(3).bfloat16())

    def test_choices_alone_need_the_head_alone(self, llama: Target, tmp_path: Path) -> None:
        states, _ = extract(tmp_path / "store", llama, [1])
        shutil.rmtree(states.choices.path)
        again, steps = extract(tmp_path / "store", llama, [1])
        assert steps == ["the target's choices"]
        assert_same(again, extract(tmp_path / "other", llama, [1])[0])

    def test_a_store_with_every_layer_runs_nothing(self, llama: Target, tmp_path: Path) -> None:
        extract(tmp_path / "store", llama, list(range(DEPTH)))
        before = runtime.num_forward_passes
        states, steps = extract(tmp_path / "store", llama, [0, 5])
        assert (steps, states.was_built, runtime.num_forward_passes) == ([], False, before)


@pytest.fixture(scope="module")
def large_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("large")
    assert write_large_target(folder / "target") > 1.1e9
    yield folder
    shutil.rmtree(folder)


@pytest.mark.slow
class TestLittleMemory:
    """A target of 1.2 GB in bf16, 2.3 in float32, in a process that may allocate some 250 MB besides its libraries."""

    def run_limited(self, way: str, folder: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tests.support.large_target", way, str(folder / "target"), str(folder / "s")]
        return subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False, timeout=200)

    def test_layer_by_layer_fits_where_the_whole_does_not(self, large_folder: Path) -> None:
        done = self.run_limited("layers", large_folder)
        assert done.returncode == 0, done.stderr[-2000:]
        numbers = json.loads(done.stdout.splitlines()[-1])
        assert numbers["peak_bytes"] <= numbers["allowed_bytes"], numbers
        assert numbers["allowed_bytes"] < 230e6, "the largest layer, its activations and a fifth more"
        whole = self.run_limited("whole", large_folder)
        assert whole.returncode != 0
        assert "Cannot allocate memory" in whole.stderr or "not enough memory" in whole.stderr, whole.stderr[-500:]
