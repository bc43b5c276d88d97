from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_core.checkpoints.dcp_safetensors import DcpSafetensors
from dflash_core.checkpoints.values import CheckpointCutOff
from dflash_core.errors import (
    CheckpointChanged,
    CheckpointCorrupt,
    CheckpointNotReady,
    CheckpointVanished,
    UnsupportedCheckpoint,
)
from tests.dflash_core.checkpoints.checkpoint_files import drafter_tensors
from tests.dflash_core.checkpoints.dcp_reading import (
    assert_same,
    fetch,
    opened,
    raw,
)


@pytest.fixture
def shards(two_ranks: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(two_ranks / "hf", tmp_path / "hf"))


def test_the_missing_file_of_the_first_rank_is_not_ready(shards: Path) -> None:
    (shards / "shard-00001-model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointNotReady, match="the file of a rank is missing"), opened(shards, DcpSafetensors):
        pass


def test_a_part_of_the_model_that_no_rank_has_is_not_ready(shards: Path) -> None:
    for path in shards.glob("*-model-00001-of-00002.safetensors"):
        path.unlink()
    with pytest.raises(CheckpointNotReady, match=r"numbered \[1\] are missing"), opened(shards, DcpSafetensors):
        pass


def test_a_shard_that_ends_early_is_cut_off(shards: Path) -> None:
    path = shards / "shard-00002-model-00001-of-00002.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(CheckpointCutOff, match="shard-00002-model-00001"), opened(shards, DcpSafetensors):
        pass


def test_files_that_hold_the_same_part_are_refused(shards: Path) -> None:
    shutil.copy(
        shards / "shard-00002-model-00001-of-00002.safetensors", shards / "shard-00003-model-00001-of-00002.safetensors"
    )
    with pytest.raises(CheckpointCorrupt, match="hold the same elements"), opened(shards, DcpSafetensors):
        pass


def test_files_of_another_model_beside_them_are_refused(shards: Path) -> None:
    save_file({"fc.weight": torch.ones(2)}, shards / "model.safetensors")
    with pytest.raises(UnsupportedCheckpoint, match=r"'model\.safetensors'"), opened(shards, DcpSafetensors):
        pass


def test_files_without_sharding_information_hold_whole_tensors(tmp_path: Path) -> None:
    tensors = drafter_tensors(num_layers=1)
    names = sorted(tensors)
    for number, part in enumerate((names[:4], names[4:]), start=1):
        save_file(
            {name: tensors[name] for name in part}, tmp_path / f"shard-0000{number}-model-00001-of-00001.safetensors"
        )
    with opened(tmp_path, DcpSafetensors) as held:
        assert_same(fetch(held.container).tensors, tensors)


@pytest.mark.parametrize(
    "info",
    [
        "[]",
        "{",
        '{"a": {"saved_offsets": [0]}}',
        '{"a": {"saved_offsets": [-1, 0]}}',
        '{"a": {"saved_offsets": [0, "x"]}}',
        "{}",
    ],
)
def test_impossible_sharding_information_is_refused(tmp_path: Path, info: str) -> None:
    save_file(
        {"a": torch.ones(2, 3)}, tmp_path / "shard-00001-model-00001-of-00001.safetensors", {"DCP_SHARDING_INFO": info}
    )
    with pytest.raises(CheckpointCorrupt, match="DCP_SHARDING_INFO"), opened(tmp_path, DcpSafetensors):
        pass


def test_a_part_far_outside_takes_no_memory(tmp_path: Path) -> None:
    info = json.dumps({"a": {"saved_offsets": [1 << 60, 0]}})
    save_file(
        {"a": torch.ones(2, 3)}, tmp_path / "shard-00001-model-00001-of-00001.safetensors", {"DCP_SHARDING_INFO": info}
    )
    with pytest.raises(CheckpointNotReady, match="are in no file"), opened(tmp_path, DcpSafetensors):
        pass


def test_a_shard_that_comes_or_changes_while_it_is_read_is_noticed(shards: Path) -> None:
    with opened(shards, DcpSafetensors) as held:
        held.container.check_unchanged()
        path = shards / "shard-00001-model-00001-of-00002.safetensors"
        shutil.copy(path, shards / "shard-00009-model-00001-of-00002.safetensors")
        with pytest.raises(CheckpointChanged, match="shard-00009"):
            held.container.check_unchanged()
        (shards / "shard-00009-model-00001-of-00002.safetensors").unlink()
        path.unlink()
        with pytest.raises(CheckpointVanished):
            held.container.check_unchanged()


def test_safetensors_of_two_ranks_are_joined_byte_for_byte(two_ranks: Path) -> None:
    with opened(two_ranks / "hf", DcpSafetensors) as held:
        found = fetch(held.container)
        assert held.container.layout == "dcp_safetensors"
        assert len(held.container.files) == 4
    assert_same(found.tensors, load_file(two_ranks / "hf.safetensors"))
    assert sorted(found.unverified) == sorted(found.tensors)


def test_extents_in_safetensors_shards_are_runs_of_the_tensor(two_ranks: Path) -> None:
    expected = load_file(two_ranks / "hf.safetensors")
    with opened(two_ranks / "hf", DcpSafetensors) as held:
        extents = held.container.extents("fc.weight")
        data = b"".join(extent.file.read_at(extent.data.offset, extent.data.size) for extent in extents)
        assert data == raw(expected["fc.weight"])
        assert held.container.extents("uneven_columns.weight") == ()


def test_metadata_that_is_no_table_is_refused(tmp_path: Path) -> None:
    header = json.dumps(
        {"__metadata__": ["DCP_SHARDING_INFO"], "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    )
    data = struct.pack("<Q", len(header)) + header.encode() + b"x"
    (tmp_path / "shard-00001-model-00001-of-00001.safetensors").write_bytes(data)
    with pytest.raises(CheckpointCorrupt, match="DCP_SHARDING_INFO"), opened(tmp_path, DcpSafetensors):
        pass
