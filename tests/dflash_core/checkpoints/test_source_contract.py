"""What must hold in every place that a checkpoint may lie in: a disk, an SSH host, memory, an object store."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save, save_file

from dflash_core.checkpoints import (
    StreamedCheckpoint,
    check_readiness,
    inspect_checkpoint,
    list_checkpoints,
    stream_checkpoint,
)
from dflash_core.checkpoints.source_base import BLOCK_BYTES, ByteRange, Source
from dflash_core.config import HostSettings
from dflash_core.errors import CheckpointChanged, CheckpointError, CheckpointNotFound, CheckpointVanished
from tests.dflash_core.checkpoints.checkpoint_files import drafter_tensors, save_mixed
from tests.support.object_store import ObjectStore
from tests.support.places import PLACES, FolderPlace, Place, SftpPlace, empty_place

ODD_NAMES = ("with space.pt", "hash#1.pt", "what?.pt", "50%20off.pt", "naïve-模型.pt", "a+b&c=d.pt", "q?versions=1#x")
MIXED, SHARDED = "run_a/step_9/checkpoint.pt", "run_a/step_10"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on this machine: one mixed file of torch.save, and one sharded folder of safetensors."""
    folder = tmp_path_factory.mktemp("runs")
    save_mixed(folder / MIXED, step=9, hidden=64)
    tensors = drafter_tensors(seed=1)
    (folder / SHARDED).mkdir()
    names = sorted(tensors)
    shards = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for shard, held in shards.items():
        save_file({name: tensors[name] for name in held}, folder / SHARDED / shard)
    index = {"weight_map": {name: shard for shard, held in shards.items() for name in held}}
    (folder / SHARDED / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / SHARDED / "config.json").write_text('{"block_size": 16}')
    (folder / SHARDED / "trainer_state.json").write_text('{"global_step": 10, "epoch": 2.5}')
    return folder


@pytest.fixture(scope="module")
def object_store() -> Iterator[ObjectStore]:
    with ObjectStore() as running:
        yield running


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    store = request.getfixturevalue("object_store") if request.param == "s3" else None
    folder = tmp_path / "there"
    folder.mkdir()
    with empty_place(request.param, folder, store, monkeypatch) as ready:
        yield ready


@pytest.fixture
def source(place: Place) -> Iterator[Source]:
    with place.open() as opened:
        yield opened


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.safetensors"


def listed_and_streamed(url: str, hosts: dict[str, HostSettings], out: Path) -> list[StreamedCheckpoint]:
    """Do what a watch does: list, look twice, inspect, fetch."""
    first, second = list_checkpoints(url, hosts=hosts), list_checkpoints(url, hosts=hosts)
    assert first == second
    results = []
    for found, again in zip(first, second, strict=True):
        readiness = check_readiness(again, found.signature, hosts=hosts)
        assert readiness.ready, readiness.reason
        inspected = inspect_checkpoint(found.url, hosts=hosts)
        assert inspected.ready
        streamed = stream_checkpoint(found.url, out, hosts=hosts, expected_identity=inspected.ref.identity)
        assert streamed.bytes_wanted == inspected.bytes_wanted
        results.append(streamed)
    return results


def told(result: StreamedCheckpoint) -> dict[str, object]:
    """Return what must not depend on the place; the identity of safetensors holds the files' times."""
    ref = result.ref
    identity = ref.identity if ref.layout.startswith("torch") else None
    about = (result.weights_sha256, result.bytes_wanted, result.bytes_total, result.bytes_read, result.facts)
    return {
        "ref": (ref.run, ref.step, ref.layout, ref.bytes_total, identity),
        "result": (*about, result.config, result.unverified_tensors),
    }


def refusal(url: str, hosts: dict[str, HostSettings], out: Path) -> type[Exception]:
    """Check that a checkpoint is not ready and not fetched, and return the class of the refusal."""
    (found,) = list_checkpoints(url, hosts=hosts)
    assert not check_readiness(found, found.signature, hosts=hosts).ready
    assert not inspect_checkpoint(found.url, hosts=hosts).ready
    with pytest.raises(CheckpointError) as caught:
        stream_checkpoint(found.url, out, hosts=hosts)
    assert list(out.parent.glob("*.safetensors*")) == []
    return caught.type


def parts_of(source: Source, path: str, ranges: list[ByteRange]) -> list[tuple[int, bytes]]:
    got: list[tuple[int, bytes]] = []
    with source.open(path) as file:
        file.read_ranges(ranges, lambda offset, data: got.append((offset, bytes(data))))
    return got


class TestEveryPlace:
    def test_stat_tells_files_from_folders_and_says_what_is_missing(self, place: Place, source: Source) -> None:
        place.put("run/step_1/a.pt", b"12345")
        file, folder = (source.stat(source.path_of(place.url(path))) for path in ("run/step_1/a.pt", "run/step_1"))
        assert (file.kind, file.size) == ("file", 5)
        assert folder.kind == "folder"
        assert source.stat(source.path_of(place.url("run/step_1/"))) == folder
        for missing in ("run/step_2", "run/step_1/b.pt", "run/step_1/a.pt/b", "run/step"):
            with pytest.raises(CheckpointNotFound, match="nothing lies at"):
                source.stat(source.path_of(place.url(missing)))

    def test_a_folder_is_listed_by_name_with_sizes(self, place: Place, source: Source) -> None:
        for name, size in {"b": 3, "a.pt": 0, "a/x": 1, "a/deep/y": 2, "Z": 7, "a0": 4}.items():
            place.put(f"run/{name}", b"x" * size)
        path = source.path_of(place.url("run"))
        entries = source.list_dir(path)
        assert [entry.name for entry in entries] == ["Z", "a", "a.pt", "a0", "b"]
        stats = {entry.name: entry.stat for entry in entries}
        assert {name: stat.size for name, stat in stats.items() if stat and stat.kind == "file"} == {
            "Z": 7,
            "a.pt": 0,
            "a0": 4,
            "b": 3,
        }
        assert not any(entry.is_link for entry in entries)
        # What a listing says of a file is what a look at it says.
        assert all(entry.stat == source.stat(entry.path) for entry in entries if entry.name != "a")

    def test_what_is_no_folder_cannot_be_listed(self, place: Place, source: Source) -> None:
        place.put("run/a.pt", b"12345")
        path = source.path_of(place.url("run"))
        for other in (f"{path}/a.pt", f"{path}/gone"):
            with pytest.raises(CheckpointNotFound):
                source.list_dir(other)
        listed = source.list_dirs([path, f"{path}/gone"])
        assert [entry.name for entry in listed[path]] == ["a.pt"]
        assert listed[f"{path}/gone"] == []

    def test_a_listing_is_never_an_old_one(self, place: Place, source: Source) -> None:
        place.put("run/step_1/a.pt", b"1")
        path = source.path_of(place.url("run"))
        assert [entry.name for entry in source.list_dir(path)] == ["step_1"]
        place.put("run/step_2/a.pt", b"22")
        place.put("run/step_1/a.pt", b"333")
        assert [entry.name for entry in source.list_dir(path)] == ["step_1", "step_2"]
        assert source.stat(f"{path}/step_1/a.pt").size == 3
        place.delete("run/step_1")
        assert [entry.name for entry in source.list_dir(path)] == ["step_2"]
        with pytest.raises(CheckpointNotFound):
            source.stat(f"{path}/step_1")

    def test_exactly_what_is_asked_for_is_read(self, place: Place, source: Source) -> None:
        data = os.urandom(100_000)
        place.put("file", data)
        with source.open(source.path_of(place.url("file"))) as file:
            for offset, size in ((0, 10), (0, 1), (50_000, 12_345), (99_999, 1), (0, 100_000)):
                assert file.read_at(offset, size) == data[offset : offset + size]
            for offset in (0, 500, 100_000):
                assert file.read_at(offset, 0) == b""
            for offset, size in ((99_999, 2), (100_000, 1), (200_000, 5), (0, 100_001)):
                with pytest.raises(CheckpointChanged, match="ended at byte"):
                    file.read_at(offset, size)

    def test_ranges_come_in_order_and_whole(self, place: Place, source: Source) -> None:
        data = os.urandom(2 * BLOCK_BYTES + 1000)
        place.put("file", data)
        wanted = [
            ByteRange(offset=7, size=BLOCK_BYTES + 5),
            ByteRange(offset=3, size=0),
            ByteRange(offset=len(data) - 9, size=9),
            ByteRange(offset=11, size=300),
            *(ByteRange(offset=start, size=3) for start in range(0, 100, 5)),
        ]
        got = parts_of(source, source.path_of(place.url("file")), wanted)
        assert b"".join(block for _, block in got) == b"".join(data[part.offset : part.end] for part in wanted)
        assert all(data[offset : offset + len(block)] == block for offset, block in got)
        starts = [offset for offset, _ in got]
        assert [start for start in starts if start in {part.offset for part in wanted}] == [
            part.offset for part in wanted if part.size
        ]

    def test_bytes_are_counted_as_they_come_and_none_come_unasked(self, place: Place, source: Source) -> None:
        place.put("file", os.urandom(1_000_000))
        path = source.path_of(place.url("file"))
        source.stat(path)
        source.list_dir(source.path_of(place.url()))
        assert source.bytes_read == 0
        parts_of(source, path, [ByteRange(offset=500_000, size=100), ByteRange(offset=0, size=11)])
        assert source.bytes_read == 111
        assert source.read_at(path, 999_990, 10)
        assert source.bytes_read == 121
        assert place.bytes_sent in (None, 121)

    def test_the_read_rate_is_kept(self, place: Place) -> None:
        place.put("file", os.urandom(4_000_000))
        with place.open(max_read_mb_s=4.0) as source, source.open(source.path_of(place.url("file"))) as file:
            began = time.monotonic()
            assert len(file.read_at(0, 4_000_000)) == 4_000_000
            seconds = time.monotonic() - began
        assert 0.9 < seconds < 1.5

    def test_a_change_under_an_open_file_is_seen(self, place: Place, source: Source) -> None:
        path = source.path_of(place.url("run/file"))
        for before, after in ((b"12345", b"54321"), (b"12345", b"123456"), (b"12345", b"1")):
            place.put("run/file", before)
            with source.open(path) as file:
                assert file.read_at(0, 5) == b"12345"
                file.check_unchanged()
                place.put("run/file", after)
                with pytest.raises(CheckpointChanged, match="changed while it was read"):
                    file.check_unchanged()

    def test_the_only_change_that_is_not_seen_is_one_within_a_second_of_sftp(
        self, place: Place, source: Source
    ) -> None:
        place.put("file", b"12345")
        path = source.path_of(place.url("file"))
        with source.open(path) as file:
            before = file.stat
            place.put("file", b"54321")
            if isinstance(place, SftpPlace):
                os.utime(place.folder / "file", ns=(before.mtime_ns, before.mtime_ns + 999_999_999))
                file.check_unchanged()
                return
            if isinstance(place, FolderPlace):
                os.utime(path, ns=(before.mtime_ns, before.mtime_ns))
            with pytest.raises(CheckpointChanged):
                file.check_unchanged()

    def test_a_file_that_vanishes_while_it_is_open_is_said_to_have_vanished(self, place: Place, source: Source) -> None:
        place.put("run/file", b"x" * 1000)
        with source.open(source.path_of(place.url("run/file"))) as file:
            assert file.read_at(0, 10) == b"x" * 10
            place.delete("run")
            with pytest.raises(CheckpointVanished, match="deleted or renamed"):
                file.check_unchanged()

    def test_what_is_no_file_cannot_be_opened(self, place: Place, source: Source) -> None:
        place.put("run/file", b"x")
        for missing in ("gone", "run/gone", "run/file/deeper"):
            with pytest.raises(CheckpointNotFound):
                source.open(source.path_of(place.url(missing)))
        # Some servers open a folder like a file, and none reads it.
        with pytest.raises(CheckpointError):
            source.read_at(source.path_of(place.url("run")), 0, 1)

    def test_any_name_is_found_again_by_its_url(self, place: Place, source: Source) -> None:
        for name in ODD_NAMES:
            place.put(f"run 1#/{name}", name.encode())
        folder = source.path_of(place.url("run 1#"))
        entries = source.list_dir(folder)
        assert [entry.name for entry in entries] == sorted(ODD_NAMES)
        for entry in entries:
            path = source.path_of(source.url_of(entry.path))
            assert path == entry.path == source.path_of(place.url(f"run 1#/{entry.name}"))
            size = len(entry.name.encode())
            assert source.read_at(path, 0, size) == entry.name.encode()
            with Place.open(place) as other:
                assert other.stat(other.path_of(source.url_of(entry.path))).size == size

    def test_the_real_path_of_a_plain_path_leads_to_the_same_file(self, place: Place, source: Source) -> None:
        place.put("run/file", b"x")
        path = source.path_of(place.url("run/file"))
        real = source.realpath(path)
        assert source.stat(real) == source.stat(path)
        assert source.realpath(real) == real

    def test_a_run_yields_the_same_everywhere(self, place: Place, runs: Path, out: Path) -> None:
        place.put_tree(runs / "run_a", "run_a")
        results = listed_and_streamed(place.url("run_a"), place.hosts(), out)
        expected = listed_and_streamed(str(runs / "run_a"), {}, out)
        assert [told(result) for result in results] == [told(result) for result in expected]
        assert [(one.ref.step, one.ref.layout) for one in results] == [(9, "torch_zip"), (10, "safetensors_sharded")]
        assert out.read_bytes() == save(drafter_tensors(seed=1))
        assert results[0].bytes_read < results[0].bytes_total / 3

    def test_only_the_bytes_that_are_told_leave_the_place(self, place: Place, runs: Path, out: Path) -> None:
        place.put("step_9/checkpoint.pt", (runs / MIXED).read_bytes())
        result = stream_checkpoint(place.url("step_9"), out, hosts=place.hosts())
        assert place.bytes_sent in (None, result.bytes_read)
        assert load_file(out).keys() == drafter_tensors().keys()

    @pytest.mark.parametrize("kept", [1.0 - 1e-9, 0.99, 0.5, 0.0])
    def test_a_file_that_is_cut_off_is_refused_in_the_same_way(
        self, place: Place, runs: Path, out: Path, tmp_path: Path, kept: float
    ) -> None:
        data = (runs / MIXED).read_bytes()
        local = FolderPlace(tmp_path / "local", by_url=False)
        for one in (local, place):
            one.put("run/checkpoint-9.pt", data[: int(len(data) * kept)])
        expected = refusal(local.url("run"), {}, out)
        assert refusal(place.url("run"), place.hosts(), out) == expected

    def test_a_missing_shard_is_refused_in_the_same_way(
        self, place: Place, runs: Path, out: Path, tmp_path: Path
    ) -> None:
        local = FolderPlace(tmp_path / "local", by_url=False)
        for one in (local, place):
            one.put_tree(runs / SHARDED, "run/step_10")
            one.delete("run/step_10/model-00002-of-00002.safetensors")
        expected = refusal(local.url("run"), {}, out)
        assert refusal(place.url("run"), place.hosts(), out) == expected

    def test_a_checkpoint_that_is_rotated_away_during_the_read_has_vanished(
        self, place: Place, runs: Path, out: Path
    ) -> None:
        place.put("run/step_9/checkpoint.pt", (runs / MIXED).read_bytes())
        deleted: list[bool] = []

        def rotate(_done: int, _wanted: int) -> None:
            if not deleted:
                place.delete("run/step_9")
                deleted.append(True)

        with pytest.raises(CheckpointVanished):
            stream_checkpoint(place.url("run/step_9"), out, hosts=place.hosts(), on_progress=rotate)
        assert deleted
        assert list(out.parent.glob("*.safetensors*")) == []

    def test_a_checkpoint_that_is_replaced_during_the_read_yields_nothing(
        self, place: Place, runs: Path, out: Path
    ) -> None:
        data = (runs / MIXED).read_bytes()
        place.put("run/step_9/checkpoint.pt", data)
        replaced: list[bool] = []

        def replace(_done: int, _wanted: int) -> None:
            if not replaced:
                place.put("run/step_9/checkpoint.pt", data[: len(data) // 2] + bytes(len(data) - len(data) // 2))
                replaced.append(True)

        with pytest.raises(CheckpointChanged):
            stream_checkpoint(place.url("run/step_9"), out, hosts=place.hosts(), on_progress=replace)
        assert replaced
        assert list(out.parent.glob("*.safetensors*")) == []

    def test_a_checkpoint_that_is_gone_before_it_is_read_is_said_to_be_gone(
        self, place: Place, runs: Path, out: Path
    ) -> None:
        place.put_tree(runs / "run_a", "run_a")
        (first, second) = list_checkpoints(place.url("run_a"), hosts=place.hosts())
        place.delete("run_a/step_9")
        with pytest.raises((CheckpointNotFound, CheckpointVanished)):
            stream_checkpoint(first.url, out, hosts=place.hosts())
        assert not check_readiness(first, first.signature, hosts=place.hosts()).ready
        assert list_checkpoints(place.url("run_a"), hosts=place.hosts()) == [second]
        place.delete("run_a")
        with pytest.raises(CheckpointNotFound):
            list_checkpoints(place.url("run_a"), hosts=place.hosts(), allow_empty=True)
