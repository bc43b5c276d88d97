"""Files of torch before 1.6 written by hand, for what no torch of today writes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_core.errors import CheckpointCorrupt, UnsupportedCheckpoint
from tests.support.legacy_files import FakeStorage, FakeTensor, floats, opened, read_all, write_legacy
from tests.support.torch_files import assert_same


def test_a_part_of_a_storage_named_by_view_metadata_is_read_as_torch_reads_it(tmp_path: Path) -> None:
    part = FakeStorage("10", 100, ("11", 20, 50))
    content = {"fc.weight": FakeTensor(part, 5, (3, 4), (4, 1)), "norm.weight": FakeTensor(part, 49, (1,), (1,))}
    path = write_legacy(tmp_path / "c.pt", content, {"10": floats(100)})
    found = read_all(path)
    assert_same(found, torch.load(path, weights_only=False))
    assert found["fc.weight"][0, 0] == 25
    assert found["norm.weight"][0] == 69


@pytest.mark.parametrize(
    ("storage", "offset", "shape", "strides"),
    [
        (FakeStorage("10", 100, ("11", 20, 50)), 5, (46,), (1,)),
        (FakeStorage("10", 100, ("11", 60, 50)), 0, (2,), (1,)),
        (FakeStorage("10", 100, ("11", -20, 50)), 0, (2,), (1,)),
        (FakeStorage("10", 100, ("11", 1 << 60, 1 << 60)), 0, (2,), (1,)),
        (FakeStorage("10", 100, "nonsense"), 0, (2,), (1,)),
        (FakeStorage("10", 100), 90, (11,), (1,)),
        (FakeStorage("10", 100), 0, (2,), (100,)),
        (FakeStorage("10", 100), 1 << 62, (1,), (1,)),
        (FakeStorage("10", 100), 0, (1 << 60,), (1,)),
    ],
)
def test_a_tensor_outside_its_storage_is_corrupt(
    tmp_path: Path, storage: FakeStorage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    content = {"fc.weight": FakeTensor(storage, offset, shape, strides)}
    path = write_legacy(tmp_path / "c.pt", content, {"10": floats(100)})
    with pytest.raises(CheckpointCorrupt, match=r"'fc\.weight'.*outside"), opened(path):
        pass


@pytest.mark.parametrize(("offset", "strides"), [(-1, (1,)), (50, (-1,)), (1 << 70, (1,)), ("x", (1,))])
def test_negative_offsets_and_strides_are_refused(tmp_path: Path, offset: Any, strides: tuple[int, ...]) -> None:
    content = {"fc.weight": FakeTensor(FakeStorage("10", 100), offset, (4,), strides)}
    path = write_legacy(tmp_path / "c.pt", content, {"10": floats(100)})
    with pytest.raises(UnsupportedCheckpoint, match=r"fc\.weight: of an impossible shape"), opened(path):
        pass


@pytest.mark.parametrize("count", [1 << 60, 1 << 80, -1, -(1 << 60), True, "many", None])
def test_impossible_sizes_of_storages_are_corrupt(tmp_path: Path, count: Any) -> None:
    content = {"fc.weight": FakeTensor(FakeStorage("10", count), 0, (4,), (1,))}
    path = write_legacy(tmp_path / "c.pt", content, {"10": floats(100)})
    with pytest.raises(CheckpointCorrupt), opened(path):
        pass


def test_a_storage_that_is_repeated_many_times_over_is_refused(tmp_path: Path) -> None:
    content = {"fc.weight": FakeTensor(FakeStorage("10", 100), 0, (1 << 20, 1 << 20), (0, 0))}
    path = write_legacy(tmp_path / "c.pt", content, {"10": floats(100)})
    with pytest.raises(UnsupportedCheckpoint, match="repeats a storage"), opened(path):
        pass


def test_a_list_of_storages_that_is_not_that_of_the_tensors_is_corrupt(tmp_path: Path) -> None:
    content = {"fc.weight": FakeTensor(FakeStorage("10", 100), 0, (4,), (1,))}
    for storages in ({}, {"11": floats(100)}, {"10": floats(50), "11": floats(50)}):
        path = write_legacy(tmp_path / "c.pt", content, storages)
        with pytest.raises(CheckpointCorrupt, match="storages"), opened(path):
            pass


def test_two_sizes_of_one_storage_are_corrupt(tmp_path: Path) -> None:
    content = {
        "fc.weight": FakeTensor(FakeStorage("10", 100), 0, (4,), (1,)),
        "norm.weight": FakeTensor(FakeStorage("10", 99), 0, (4,), (1,)),
    }
    path = write_legacy(tmp_path / "c.pt", content, {"10": floats(100)})
    with pytest.raises(CheckpointCorrupt, match="two different sizes"), opened(path):
        pass


def test_a_big_endian_file_is_refused_by_name(tmp_path: Path) -> None:
    content = {"fc.weight": FakeTensor(FakeStorage("10", 100), 0, (4,), (1,))}
    path = write_legacy(tmp_path / "c.pt", content, {"10": floats(100)}, machine={"little_endian": False})
    with pytest.raises(UnsupportedCheckpoint, match="big-endian"), opened(path):
        pass


def test_another_version_is_refused_by_name(tmp_path: Path) -> None:
    content = {"fc.weight": FakeTensor(FakeStorage("10", 100), 0, (4,), (1,))}
    path = write_legacy(tmp_path / "c.pt", content, {"10": floats(100)}, version=1002)
    with pytest.raises(UnsupportedCheckpoint, match="another version of its format than 1001"), opened(path):
        pass


def test_a_storage_of_an_unknown_type_is_refused_for_all_that_follow_it(tmp_path: Path) -> None:
    content = {
        "fc.weight": FakeTensor(FakeStorage("10", 100), 0, (4,), (1,)),
        "odd": FakeStorage("11", 3, kind=io.BytesIO),
    }
    path = write_legacy(tmp_path / "c.pt", content, {"10": floats(100), "11": b"abc"})
    with pytest.raises(UnsupportedCheckpoint, match=r"unknown type '_io\.BytesIO'"), opened(path):
        pass
