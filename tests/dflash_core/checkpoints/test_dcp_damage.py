from __future__ import annotations

import contextlib
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from dflash_core.checkpoints.values import CheckpointCutOff
from dflash_core.errors import (
    CheckpointChanged,
    CheckpointCorrupt,
    CheckpointError,
    CheckpointNotReady,
    CheckpointVanished,
    UnsupportedCheckpoint,
)
from tests.dflash_core.checkpoints.dcp_files import save_alone, save_small
from tests.dflash_core.checkpoints.dcp_reading import (
    assert_same,
    edit_metadata,
    fetch,
    opened,
)

DATA_FILE = "__0_0.distcp"


@pytest.fixture
def train(two_ranks: Path, tmp_path: Path) -> Path:
    """A copy of the two ranks' checkpoint that a test may damage."""
    return Path(shutil.copytree(two_ranks / "train", tmp_path / "train"))


@pytest.fixture
def alone(tmp_path: Path) -> Path:
    """A small checkpoint of one process."""
    folder = tmp_path / "alone"
    save_small(folder)
    return folder


# Hostile and damaged indices.


class Attack:
    """Makes pickle run a command."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self.path}",)


def test_an_index_with_a_command_inside_runs_nothing_and_is_read(alone: Path, tmp_path: Path) -> None:
    edit_metadata(alone, lambda metadata: setattr(metadata, "planner_data", Attack(tmp_path / "ran")))
    with opened(alone) as held:
        assert set(fetch(held.container).tensors) == {"model.fc.weight", "model.norm.weight"}
        assert held.container.odd_globals == ("posix.system",)
    assert not (tmp_path / "ran").exists()
    pickle.loads((alone / ".metadata").read_bytes())
    assert (tmp_path / "ran").exists(), "the attack itself works"


def test_an_index_that_is_a_command_runs_nothing_and_is_refused(alone: Path, tmp_path: Path) -> None:
    (alone / ".metadata").write_bytes(pickle.dumps(Attack(tmp_path / "ran")))
    with pytest.raises(UnsupportedCheckpoint, match=r"holds a posix.system, expected the Metadata"), opened(alone):
        pass
    assert not (tmp_path / "ran").exists()


def test_an_object_with_a_command_inside_runs_nothing(tmp_path: Path) -> None:
    save_alone(tmp_path / "evil", {"w": torch.ones(2), "global_step": Attack(tmp_path / "ran")})
    with opened(tmp_path / "evil") as held:
        assert held.container.facts == {}
        assert "posix.system" in held.container.odd_globals
        fetch(held.container)
    assert not (tmp_path / "ran").exists()


FC = "model.fc.weight"


def place_of(metadata: Any, name: str = FC) -> Any:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == name)


def entry(metadata: Any) -> Any:
    return metadata.state_dict_metadata[FC]


def set_entry(metadata: Any, size: tuple[int, ...], *boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    entry(metadata).size = torch.Size(size)
    set_chunks(metadata, *boxes)


def set_chunks(metadata: Any, *boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    entry(metadata).chunks = [ChunkStorageMetadata(torch.Size(corner), torch.Size(sizes)) for corner, sizes in boxes]
    for corner, _ in boxes:
        metadata.storage_data.setdefault(MetadataIndex(FC, corner), place_of(metadata))


def set_place(**fields: Any) -> Callable[[Any], None]:
    def edit(metadata: Any) -> None:
        for name, value in fields.items():
            setattr(place_of(metadata), name, value)

    return edit


def set_size(*size: int) -> Callable[[Any], None]:
    return lambda metadata: setattr(entry(metadata), "size", torch.Size(size))


IMPOSSIBLE: dict[str, tuple[Callable[[Any], object], str]] = {
    "parent folder": (set_place(relative_path="../secret.distcp"), r"'\.\./secret\.distcp', expected the name"),
    "absolute path": (set_place(relative_path="/etc/passwd"), "'/etc/passwd', expected the name"),
    "sub-folder": (set_place(relative_path="a/b.distcp"), "expected the name of a file"),
    "dots": (set_place(relative_path=".."), "expected the name of a file"),
    "no path": (set_place(relative_path=None), "expected the name of a file"),
    "negative offset": (set_place(offset=-1), "impossible place"),
    "negative length": (set_place(length=-5), "impossible place"),
    "length in words": (set_place(length="many"), "impossible place"),
    "2^60 bytes": (
        lambda metadata: setattr(place_of(metadata, "model.norm.weight"), "length", 1 << 60),
        "cut off: .* has .* bytes, the index needs",
    ),
    "2^60 bytes over others": (set_place(length=1 << 60), "two items overlap"),
    "2^62 rows": (set_size(1 << 62, 16), "lie in no chunk"),
    "shape in words": (lambda metadata: setattr(entry(metadata), "size", ("a",)), "impossible shape"),
    "negative rows": (lambda metadata: setattr(entry(metadata), "size", (-8, 16)), "impossible shape"),
    "too short a place": (set_place(length=100), "needs 512 bytes, its place has 100"),
    "another item's place": (set_place(offset=0), "cut off: .* has no zip end record"),
    "gap": (lambda metadata: set_chunks(metadata, ((0, 0), (3, 16)), ((4, 0), (4, 16))), "16 of 128 elements"),
    "missing columns": (lambda metadata: set_chunks(metadata, ((0, 0), (8, 15))), "8 of 128 elements"),
    "no chunk": (lambda metadata: set_chunks(metadata), "128 of 128 elements"),
    "overlap": (lambda metadata: set_chunks(metadata, ((0, 0), (5, 16)), ((4, 0), (4, 16))), "overlap"),
    "outside": (lambda metadata: set_chunks(metadata, ((4, 0), (8, 16))), "is not inside tensor"),
    "other dimensions": (lambda metadata: set_chunks(metadata, ((0,), (8,))), "is not inside tensor"),
    "two chunks in one place": (
        lambda metadata: set_chunks(metadata, ((0, 0), (4, 16)), ((4, 0), (4, 16))),
        "two items overlap",
    ),
    "no place": (lambda metadata: metadata.storage_data.pop(MetadataIndex(FC, (0, 0))), "has no place in any file"),
    "another type": (
        lambda metadata: setattr(entry(metadata).properties, "dtype", torch.int32),
        "the index says int32",
    ),
    "another shape": (
        lambda metadata: set_entry(metadata, (16, 8), ((0, 0), (16, 8))),
        r"the index says float32 \[16, 8\]",
    ),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_an_index_that_contradicts_itself_or_the_files_is_refused(alone: Path, case: str) -> None:
    edit, message = IMPOSSIBLE[case]
    edit_metadata(alone, edit)
    with pytest.raises(CheckpointCorrupt, match=message), opened(alone) as held:
        fetch(held.container)


REFUSED: dict[str, tuple[Callable[[Any], object], str]] = {
    "compressed": (set_place(transform_descriptors=["stream.zstd"]), "written through 'stream.zstd'"),
    "complex": (lambda metadata: setattr(entry(metadata).properties, "dtype", torch.complex128), "of torch.complex128"),
    "unknown entry": (
        lambda metadata: metadata.state_dict_metadata.__setitem__("x", Path("unknown")),
        "'x' is stored as str",
    ),
    "other storage": (lambda metadata: metadata.storage_data.__setitem__("key", "value"), "in a way that"),
    "no storage": (lambda metadata: setattr(metadata, "storage_data", None), "expected the Metadata"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_read_is_refused_by_name(alone: Path, case: str) -> None:
    edit, message = REFUSED[case]
    edit_metadata(alone, edit)
    with pytest.raises(UnsupportedCheckpoint, match=message), opened(alone):
        pass


def test_two_tensors_in_one_place_are_refused(tmp_path: Path) -> None:
    save_alone(tmp_path / "two", {"a": torch.randn(4, 4), "b": torch.randn(4, 4)})
    edit_metadata(
        tmp_path / "two", lambda metadata: setattr(place_of(metadata, "b"), "offset", place_of(metadata, "a").offset)
    )
    with opened(tmp_path / "two") as held, pytest.raises(CheckpointCorrupt, match="two chunks lie in the same place"):
        fetch(held.container)


def test_an_index_cut_off_at_any_byte_is_refused(alone: Path) -> None:
    data = (alone / ".metadata").read_bytes()
    for size in range(0, len(data), 37):
        (alone / ".metadata").write_bytes(data[:size])
        with pytest.raises(CheckpointCorrupt), opened(alone):
            pass


def test_changed_bytes_in_the_index_give_no_wrong_tensor_and_no_other_error(alone: Path) -> None:
    with opened(alone) as held:
        expected = fetch(held.container).tensors
    data = (alone / ".metadata").read_bytes()
    numbers = random.Random(0)
    for _ in range(300):
        changed = bytearray(data)
        for _ in range(numbers.choice((1, 1, 2, 5))):
            changed[numbers.randrange(len(data))] = numbers.randrange(256)
        (alone / ".metadata").write_bytes(changed)
        with contextlib.suppress(CheckpointError), opened(alone) as held:
            for name, tensor in fetch(held.container).tensors.items():
                # A name may have changed: the names of drafters are checked elsewhere.
                assert name not in expected or torch.equal(tensor, expected[name])


# Damaged and missing data files.


def test_a_missing_data_file_is_named_and_not_ready(train: Path) -> None:
    (train / "__1_0.distcp").unlink()
    with pytest.raises(CheckpointNotReady, match=r"'__1_0\.distcp', which its index names, is missing"), opened(train):
        pass


@pytest.mark.parametrize("num_bytes", [1, 600, 5000])
def test_a_data_file_that_ends_early_is_named(train: Path, num_bytes: int) -> None:
    os.truncate(train / "__1_0.distcp", (train / "__1_0.distcp").stat().st_size - num_bytes)
    with pytest.raises(CheckpointCutOff, match=r"cut off: .*'__1_0\.distcp' has"), opened(train):
        pass


def test_a_missing_index_is_not_ready(train: Path) -> None:
    (train / ".metadata").rename(train / "other")
    with pytest.raises(CheckpointNotReady, match=r"holds no '\.metadata', which torch writes last"), opened(train):
        pass


def test_an_index_that_is_about_to_be_replaced_is_not_ready(train: Path) -> None:
    (train / ".metadata.tmp").write_bytes(b"")
    with pytest.raises(CheckpointNotReady, match=r"\.metadata\.tmp"), opened(train):
        pass


def test_indices_of_each_rank_are_refused_by_name(train: Path) -> None:
    (train / ".metadata").rename(train / "__0.metadata")
    with pytest.raises(UnsupportedCheckpoint, match="use_collectives=False"), opened(train):
        pass


def test_a_flipped_byte_anywhere_in_the_data_files_gives_the_right_tensors_or_an_error(alone: Path) -> None:
    path = alone / DATA_FILE
    data = path.read_bytes()
    with opened(alone) as held:
        expected = fetch(held.container).tensors
        names = {
            index.fqn: item for index, item in pickle.loads((alone / ".metadata").read_bytes()).storage_data.items()
        }
    refused = 0
    for position in range(0, len(data), 7):
        path.write_bytes(data[:position] + bytes([data[position] ^ 0x40]) + data[position + 1 :])
        try:
            with opened(alone) as held:
                assert_same(fetch(held.container).tensors, expected)
        except CheckpointError:
            refused += 1
    assert refused > sum(item.length for item in names.values()) / 7 / 4


def test_a_flipped_byte_of_a_tensor_fails_its_checksum(alone: Path) -> None:
    path = alone / DATA_FILE
    with opened(alone) as held:
        (extent,) = held.container.extents(FC)
    data = bytearray(path.read_bytes())
    data[extent.data.offset + 100] ^= 1
    path.write_bytes(data)
    with opened(alone) as held, pytest.raises(CheckpointCorrupt, match=r"'data/0' \('model\.fc\.weight'\) have CRC-32"):
        fetch(held.container)


@pytest.mark.parametrize("part", ["all", "the tensor", "the second half"])
def test_zeros_in_a_data_file_are_found(alone: Path, part: str) -> None:
    path = alone / DATA_FILE
    with opened(alone) as held:
        (extent,) = held.container.extents(FC)
    size = path.stat().st_size
    ranges = {
        "all": (0, size),
        "the tensor": (extent.data.offset, extent.data.end),
        "the second half": (size // 2, size),
    }
    start, end = ranges[part]
    data = bytearray(path.read_bytes())
    data[start:end] = bytes(end - start)
    path.write_bytes(data)
    with pytest.raises(CheckpointCorrupt), opened(alone) as held:
        fetch(held.container)


# Changes while it is read.


def test_an_untouched_checkpoint_is_unchanged_and_keeps_its_identity(train: Path) -> None:
    with opened(train) as held:
        held.container.check_unchanged()
        first = held.container.identity
    with opened(train) as held:
        assert held.container.identity == first


def test_a_data_file_that_is_written_anew_is_noticed(train: Path) -> None:
    with opened(train) as held:
        first = held.container.identity
        shutil.copy(train / "__1_0.distcp", train / "copy")
        (train / "copy").replace(train / "__1_0.distcp")
        with pytest.raises(CheckpointChanged, match="__1_0"):
            held.container.check_unchanged()
    with opened(train) as held:
        assert held.container.identity != first


def test_a_save_over_the_old_one_in_the_same_second_is_noticed_by_its_id(train: Path) -> None:
    path = train / ".metadata"
    with opened(train) as held:
        stat, data = path.stat(), path.read_bytes()
        at = data.index(pickle.loads(data).storage_meta.save_id.encode())
        with path.open("r+b") as file:
            file.seek(at)
            file.write(b"ffffffff")
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        with pytest.raises(CheckpointChanged, match="was rewritten"):
            held.container.check_unchanged()


def test_a_folder_or_file_that_is_gone_is_vanished(train: Path) -> None:
    with opened(train) as held:
        (train / "__1_0.distcp").unlink()
        with pytest.raises(CheckpointVanished, match="__1_0"):
            held.container.check_unchanged()
        shutil.rmtree(train)
        with pytest.raises(CheckpointVanished):
            held.container.check_unchanged()


def test_a_file_that_is_gone_before_it_is_first_read_is_vanished(tmp_path: Path) -> None:
    save_alone(tmp_path / "one", {"w": torch.ones(4)})
    with opened(tmp_path / "one") as held:
        (tmp_path / "one" / DATA_FILE).unlink()
        with pytest.raises(CheckpointVanished):
            fetch(held.container)
