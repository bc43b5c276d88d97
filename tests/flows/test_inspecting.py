"""What `dflash-eval inspect` shows of checkpoints that cannot be scored, and of such that contradict themselves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flows import cli
from tests.support.scene import Setup, make_setup


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return make_setup(tmp_path / "s")


def run(setup: Setup, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = cli.main([*words, "--config", str(setup.config)])
    return status, *capsys.readouterr()


def test_a_refused_checkpoint_is_shown_whole_with_the_reason(setup: Setup, capsys: pytest.CaptureFixture[str]) -> None:
    path = setup.run / "step_1" / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"prefix_gru.weight_hh_l0": torch.ones(3)}, path)
    status, shown, errors = run(setup, capsys, "inspect", str(setup.run / "step_1"), "--json")
    document = json.loads(shown)
    assert status == 2
    assert "'prefix_gru.weight_hh_l0'" in document["refusal"]
    assert document["ready"] is True
    assert len(document["tensors"]) == len(tensors) + 1
    (unknown,) = [entry for entry in document["tensors"] if entry["role"] == "unknown"]
    assert unknown["name"] == "prefix_gru.weight_hh_l0"
    assert errors.count("\n") == 1
    status, shown, _ = run(setup, capsys, "inspect", str(setup.run / "step_1"))
    assert status == 2
    assert "prefix_gru.weight_hh_l0" in shown
    assert "fc.weight" in shown


def test_dialect_and_contradictions_are_shown(setup: Setup, capsys: pytest.CaptureFixture[str]) -> None:
    folder = setup.run / "step_1"
    (folder / "training_state.json").write_text('{"global_step": 7}')
    status, shown, errors = run(setup, capsys, "inspect", str(folder))
    assert status == 0
    assert "z-lab" in shown
    assert "contradiction: its name says step 1, its content step 7" in errors


def test_quantised_weights_are_listed_but_the_drafter_is_not_read(
    setup: Setup, capsys: pytest.CaptureFixture[str]
) -> None:
    path = setup.run / "step_1" / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"fc.weight": tensors["fc.weight"].to(torch.float8_e4m3fn)}, path)
    _, shown, _ = run(setup, capsys, "inspect", str(setup.run / "step_1"), "--json")
    document = json.loads(shown)
    assert document["drafter"] is None
    assert "float8_e4m3fn" in document["drafter_problem"]
