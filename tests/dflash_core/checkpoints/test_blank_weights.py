"""Bytes that never arrived: right size, right header, zeros."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file

from dflash_core.checkpoints import stream_checkpoint
from dflash_core.checkpoints.blank import BlankFinder
from dflash_core.errors import CheckpointCorrupt
from tests.dflash_core.checkpoints.checkpoint_files import drafter_tensors


def test_a_whole_header_with_zeros_behind_it_gives_nothing(tmp_path: Path) -> None:
    data = save(drafter_tensors(hidden=512))
    header_end = 8 + int.from_bytes(data[:8], "little")
    path = tmp_path / "model.safetensors"
    for kept in (header_end, header_end + (len(data) - header_end) // 3, len(data) - 300_000):
        path.write_bytes(data[:kept] + bytes(len(data) - kept))
        with pytest.raises(CheckpointCorrupt, match="is blank: only zeros from its byte"):
            stream_checkpoint(str(path), tmp_path / "out.st")
        assert not (tmp_path / "out.st").exists()
        assert [entry.name for entry in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_legacy_file_with_zeros_in_its_middle_gives_nothing(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    torch.save(drafter_tensors(hidden=256), path, _use_new_zipfile_serialization=False)
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 400_000] = bytes(400_000)
    path.write_bytes(data)
    with pytest.raises(CheckpointCorrupt):
        stream_checkpoint(str(path), tmp_path / "out.st")
    assert not (tmp_path / "out.st").exists()


def test_projections_that_are_zero_as_a_whole_are_no_damage(tmp_path: Path) -> None:
    tensors = drafter_tensors(hidden=512)
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight", "fc.weight")):
            tensors[name] = torch.zeros_like(tensors[name])
    save_file(tensors, tmp_path / "model.safetensors")
    result = stream_checkpoint(str(tmp_path / "model.safetensors"), tmp_path / "out.st")
    assert result.path.read_bytes() == save(tensors)


def test_a_hole_in_the_middle_of_a_matrix_gives_nothing(tmp_path: Path) -> None:
    data = bytearray(save(drafter_tensors(hidden=512)))
    middle = len(data) // 2
    data[middle : middle + 700_000] = bytes(700_000)
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointCorrupt, match="is blank"):
        stream_checkpoint(str(tmp_path / "model.safetensors"), tmp_path / "out.st")


def test_zeros_in_a_file_with_checksums_are_believed(tmp_path: Path) -> None:
    tensors = drafter_tensors() | {"fc.weight": torch.zeros(32, 96)}
    torch.save(tensors, tmp_path / "c.pt")
    assert stream_checkpoint(str(tmp_path / "c.pt"), tmp_path / "out.st").path.read_bytes() == save(tensors)


def test_a_run_of_zeros_is_found_wherever_the_blocks_are_cut() -> None:
    data = b"\1" * 10_000 + bytes(300_000) + b"\1" * 5_000
    for size in (1000, 4096, 30_000, len(data)):
        finder = BlankFinder("layers.0.mlp.up_proj.weight")

        def look(finder: BlankFinder = finder, size: int = size) -> None:
            for start in range(0, len(data), size):
                finder.take(data[start : start + size])
            finder.finish()

        with pytest.raises(CheckpointCorrupt, match="up_proj"):
            look()


def test_short_runs_of_zeros_are_weights() -> None:
    finder = BlankFinder("fc.weight")
    finder.take((b"\1" + bytes(20_000)) * 10)
    finder.finish()
