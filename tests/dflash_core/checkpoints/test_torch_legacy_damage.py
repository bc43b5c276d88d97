"""Files of torch before 1.6 that are damaged or hostile: each is refused, and nothing in it is run."""

from __future__ import annotations

import io
import os
import pickle
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_core.checkpoints.legacy_index import MAGIC_NUMBER, PROTOCOL_VERSION, read_legacy_index
from dflash_core.checkpoints.local_source import LocalSource
from dflash_core.checkpoints.source_base import RateLimit
from dflash_core.checkpoints.values import CheckpointCutOff
from dflash_core.errors import CheckpointChanged, CheckpointCorrupt, UnsupportedCheckpoint
from tests.dflash_core.checkpoints.checkpoint_files import drafter_tensors, mixed_checkpoint, training_args
from tests.support.legacy_files import fetch, opened, read_all, save_legacy
from tests.support.torch_files import Evil, assert_same

# Files that are damaged.


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small mixed file."""
    content = mixed_checkpoint(drafter_tensors(num_layers=1, hidden=8), vocab=10)
    return save_legacy(content, tmp_path_factory.mktemp("mixed") / "c.pt")


def boundaries(path: Path) -> list[int]:
    """Return the offsets in a file at which something ends or begins."""
    with LocalSource(RateLimit(None)) as source, source.open(str(path)) as file:
        index = read_legacy_index(file)
    places = index.storages.values()
    ends = {0, index.size_bytes, *(place.offset for place in places), *(place.data_offset for place in places)}
    stream, at = io.BytesIO(path.read_bytes()), 0
    while at < index.size_bytes:
        pickle.Unpickler.load(_Tolerant(stream))
        at = stream.tell()
        ends.add(at)
    return sorted(ends)


class _Tolerant(pickle.Unpickler):
    def persistent_load(self, pid: Any) -> Any:
        return None

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return (lambda *_: None) if name.startswith("_rebuild") else found


def test_a_file_cut_at_any_boundary_is_cut_off(mixed: Path, tmp_path: Path) -> None:
    data, cut = mixed.read_bytes(), tmp_path / "cut.pt"
    ends = boundaries(mixed)
    assert len(ends) > 60
    for end in sorted({end + by for end in ends for by in (-1, 0, 1) if 0 <= end + by < len(data)}):
        cut.write_bytes(data[:end])
        with pytest.raises(CheckpointCutOff), opened(cut):
            pass


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_anywhere_is_cut_off(mixed: Path, tmp_path: Path, share: float) -> None:
    data, cut = mixed.read_bytes(), tmp_path / "cut.pt"
    cut.write_bytes(data[: int(share * len(data))])
    with pytest.raises(CheckpointCutOff), opened(cut):
        pass


def test_bytes_behind_the_last_storage_are_corrupt(mixed: Path, tmp_path: Path) -> None:
    longer = tmp_path / "longer.pt"
    longer.write_bytes(mixed.read_bytes() + b"\0")
    with pytest.raises(CheckpointCorrupt, match="1 more than its index says"), opened(longer):
        pass


def test_zeros_behind_the_index_are_found_when_the_weights_are_fetched(mixed: Path, tmp_path: Path) -> None:
    data, holed = mixed.read_bytes(), tmp_path / "holed.pt"
    with opened(mixed) as container:
        index_end, tensors = container._index.size_bytes, dict(container.tensors)
    holed.write_bytes(data[:index_end] + bytes(len(data) - index_end))
    with opened(holed) as container:
        assert container.tensors == tensors  # nothing in the index shows it
        for name in tensors:
            with pytest.raises(CheckpointCorrupt, match="count 0"):
                fetch(container, [name])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1, exclude_max=True))
def test_zeros_from_anywhere_to_the_end_never_come_out_as_weights(mixed: Path, tmp_path: Path, share: float) -> None:
    data, holed = mixed.read_bytes(), tmp_path / "holed.pt"
    with opened(mixed) as container:
        index_end, last = container._index.size_bytes, list(container._index.storages.values())[-1]
        expected = fetch(container)
    # Behind the last count nothing tells zeros from data.
    start = index_end + int(share * (last.offset - index_end))
    holed.write_bytes(data[:start] + bytes(len(data) - start))
    with opened(holed) as container:
        try:
            found = fetch(container)
        except CheckpointCorrupt:
            return
    assert_same(found, expected)


def test_a_changed_count_is_found_for_each_storage_that_is_read(mixed: Path, tmp_path: Path) -> None:
    data, changed = bytearray(mixed.read_bytes()), tmp_path / "changed.pt"
    with opened(mixed) as container:
        for name, tensor in container._weights.items():
            place = container._index.storages[tensor.storage.key]
            damaged = bytearray(data)
            damaged[place.offset] ^= 1
            changed.write_bytes(damaged)
            with opened(changed) as other, pytest.raises(CheckpointCorrupt, match="begins with the count"):
                fetch(other, [name])


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_in_the_index_never_escapes_as_another_error(
    mixed: Path, tmp_path: Path, share: float, bit: int
) -> None:
    data, damaged = bytearray(mixed.read_bytes()), tmp_path / "damaged.pt"
    with opened(mixed) as container:
        index_end = container._index.size_bytes
    data[int(share * index_end)] ^= 1 << bit
    damaged.write_bytes(data)
    with suppress(CheckpointCorrupt, UnsupportedCheckpoint):
        read_all(damaged)


def test_a_file_that_is_rewritten_in_place_is_noticed_by_its_index(mixed: Path, tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    path.write_bytes(mixed.read_bytes())
    os.utime(path, (1_000_000, 1_000_000))
    with opened(path) as container:
        container.check_unchanged()
        with path.open("r+b") as file:
            file.seek(container._index.size_bytes - 3)
            file.write(b"x")
        os.utime(path, (1_000_000, 1_000_000))
        with pytest.raises(CheckpointChanged, match="rewritten"):
            container.check_unchanged()


# What is in it is never run.


def test_an_evil_pickle_runs_nothing_and_still_yields_its_tensors(tmp_path: Path) -> None:
    tensors, marker = drafter_tensors(), tmp_path / "evil_was_here"
    content = {"trap": Evil(marker), "model": tensors, "args": training_args(trap=Evil(marker)), "step": 4}
    path = save_legacy(content, tmp_path / "c.pt")
    assert_same(read_all(path), tensors)
    with opened(path) as container:
        assert container.odd_globals == ("posix.system",)
    assert not marker.exists()


@pytest.mark.parametrize("place", range(5))
def test_no_pickle_at_the_front_is_run(tmp_path: Path, place: int) -> None:
    marker = tmp_path / "evil_was_here"
    values: list[Any] = [MAGIC_NUMBER, PROTOCOL_VERSION, {"little_endian": True}, {}, []]
    values[place] = Evil(marker)
    path = tmp_path / "c.pt"
    path.write_bytes(b"".join(pickle.dumps(value, protocol=2) for value in values))
    with pytest.raises((CheckpointCorrupt, UnsupportedCheckpoint)), opened(path):
        pass
    assert not marker.exists()


def test_a_frame_of_2_to_the_62_bytes_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    path.write_bytes(pickle.dumps(MAGIC_NUMBER, protocol=4) + b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b"N.")
    with pytest.raises(CheckpointCutOff), opened(path):
        pass


def test_an_index_without_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    with path.open("wb") as file:
        file.write(pickle.dumps(MAGIC_NUMBER, protocol=2) + b"\x80\x04B" + struct.pack("<I", 100 << 20))
        file.truncate(1 << 30)
    with pytest.raises(UnsupportedCheckpoint, match="more than 67108864 bytes"), opened(path):
        pass
