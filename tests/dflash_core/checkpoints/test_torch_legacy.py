from __future__ import annotations

import io
import os
import pickle
import struct
import tarfile
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_core.checkpoints.container import FileRead
from dflash_core.checkpoints.legacy_index import MAGIC_NUMBER, PROTOCOL_VERSION, START_BYTES, read_legacy_index
from dflash_core.checkpoints.local_source import LocalSource
from dflash_core.checkpoints.pieces import Write, merged
from dflash_core.checkpoints.source_base import ByteRange, RateLimit, Sink, SourceFile
from dflash_core.checkpoints.torch_legacy import TorchLegacy, is_legacy
from dflash_core.checkpoints.values import CheckpointCutOff, NoDrafter
from dflash_core.errors import CheckpointChanged, CheckpointCorrupt, UnsupportedCheckpoint
from tests.dflash_core.checkpoints.checkpoint_files import adamw_state, drafter_tensors, mixed_checkpoint, training_args


def save_legacy(content: Any, path: Path, **options: Any) -> Path:
    torch.save(content, path, _use_new_zipfile_serialization=False, **options)
    return path


@contextmanager
def opened(path: Path, **options: Any) -> Iterator[TorchLegacy]:
    with LocalSource(RateLimit(None)) as source, source.open(str(path)) as file:
        yield TorchLegacy(file, **options)


def fetch(container: TorchLegacy, names: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
    """Carry out the plan for some tensors of a container, all unless told."""
    places: dict[str, int] = {}
    size = 0
    for name in container.tensors if names is None else names:
        places[name] = size
        size += container.tensors[name].size_bytes
    target = bytearray(size)

    def write(offset: int, data: bytes | memoryview) -> None:
        target[offset : offset + len(data)] = data

    plan = container.plan(places)
    assert sorted(plan.unverified) == sorted(places)
    for read in plan.reads:
        carry_out(read, write)
    found = {}
    for name, at in places.items():
        info = container.tensors[name]
        data = target[at : at + info.size_bytes]
        dtype = getattr(torch, info.element.name)
        found[name] = (torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)).view(info.shape)
    return found


def carry_out(read: FileRead, write: Write) -> None:
    left = iter(read.pieces)
    piece = next(left, None)

    def sink(offset: int, block: bytes) -> None:
        nonlocal piece
        while block:
            assert piece is not None
            assert piece.data.offset <= offset < piece.data.end
            count = min(len(block), piece.data.end - offset)
            piece.take(offset, block[:count], write)
            offset, block = offset + count, block[count:]
            if offset == piece.data.end:
                piece.finish(write)
                piece = next(left, None)

    read.file.read_ranges(merged(piece.data for piece in read.pieces), sink)
    assert piece is None


def read_all(path: Path) -> dict[str, torch.Tensor]:
    with opened(path) as container:
        found = fetch(container)
        container.check_unchanged()
        return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


# What is read.


@pytest.mark.parametrize("protocol", [1, 2, 3, 4, 5])
def test_a_realistic_mixed_file_gives_what_torch_loads(tmp_path: Path, protocol: int) -> None:
    path = save_legacy(mixed_checkpoint(drafter_tensors()), tmp_path / "c.pt", pickle_protocol=protocol)
    assert is_legacy(path.read_bytes()[:START_BYTES])
    assert_same(read_all(path), torch.load(path, weights_only=False)["model_state_dict"])
    with opened(path) as container:
        assert container.layout == "torch_legacy"
        assert container.weights_under == "model_state_dict"
        assert container.facts["args.seed"] == 7
        assert container.facts["best_loss"] == 2.5
        assert container.odd_globals == ()


@pytest.mark.parametrize("key", ["model_state_dict", "draft_model", "anything.inner", ""])
def test_weights_are_found_under_any_key(tmp_path: Path, key: str) -> None:
    tensors = drafter_tensors()
    outer, _, inner = key.partition(".")
    content = {outer: {inner: tensors} if inner else tensors, "step": 1} if key else {**tensors, "step": 1}
    assert_same(read_all(save_legacy(content, tmp_path / "c.pt")), tensors)


def test_each_dtype_is_kept(tmp_path: Path) -> None:
    tensors = drafter_tensors()
    for i, dtype in enumerate((torch.bfloat16, torch.float16, torch.float64)):
        tensors[f"extra.{i}.weight"] = torch.randn(5, 3).to(dtype)
    tensors["scale"] = torch.tensor(2.5)
    tensors["codes"] = torch.randint(-100, 100, (7, 3), dtype=torch.int8)
    tensors["mask"] = torch.tensor([True, False, True])
    tensors["ids"] = torch.arange(9)
    tensors["none"] = torch.empty(0, 4)
    tensors["small"] = torch.randn(4, 4).to(torch.float8_e4m3fn)
    found = read_all(save_legacy({"model": tensors}, tmp_path / "c.pt"))
    assert found.pop("small").view(torch.uint8).equal(tensors.pop("small").view(torch.uint8))
    assert_same(found, tensors)


def test_views_ties_and_strided_tensors_come_out_right(tmp_path: Path) -> None:
    tensors = drafter_tensors()
    flat = torch.randn(100_000)
    tensors["layers.0.self_attn.q_proj.weight"] = flat[7 : 7 + 1024].view(32, 32)
    tensors["layers.0.self_attn.o_proj.weight"] = flat[50_000 : 50_000 + 1024].view(32, 32).t()
    tensors["layers.1.self_attn.q_proj.weight"] = tensors["layers.0.self_attn.q_proj.weight"]
    tensors["layers.1.self_attn.o_proj.weight"] = torch.randn(64, 64)[::2, 1::2]
    tensors["norm.weight"] = torch.ones(1).expand(32)
    tensors["hidden_norm.weight"] = torch.nn.Parameter(tensors["hidden_norm.weight"])
    path = save_legacy({"model": tensors}, tmp_path / "c.pt")
    assert_same(read_all(path), {name: tensor.detach() for name, tensor in tensors.items()})
    with opened(path) as container:
        assert container.extents("layers.0.self_attn.o_proj.weight") == ()


def test_extents_say_where_the_bytes_of_a_tensor_lie(tmp_path: Path) -> None:
    tensors = drafter_tensors()
    tensors["norm.weight"] = torch.randn(100)[40:72]
    path = save_legacy({"model": tensors}, tmp_path / "c.pt")
    data = path.read_bytes()
    with opened(path) as container:
        for name, tensor in tensors.items():
            (extent,) = container.extents(name)
            assert data[extent.data.offset : extent.data.end] == tensor.numpy().tobytes()


def test_a_module_among_the_values_is_only_a_name(tmp_path: Path) -> None:
    tensors = drafter_tensors()
    path = save_legacy({"model": tensors, "net": torch.nn.Linear(2, 2), "step": 3}, tmp_path / "c.pt")
    assert_same(read_all(path), tensors)
    with opened(path) as container:
        assert "torch.nn.modules.linear.Linear" in container.odd_globals


class CountingFile(SourceFile):
    """Counts the requests to a file."""

    def __init__(self, file: SourceFile) -> None:
        super().__init__(file.path, file.display, file.stat)
        self._file = file
        self.requests: list[ByteRange] = []

    def read_ranges(self, ranges: Sequence[ByteRange], sink: Sink) -> None:
        self.requests += ranges
        self._file.read_ranges(ranges, sink)

    def current_stat(self) -> Any:
        return self._file.current_stat()

    def close(self) -> None:
        self._file.close()


def count_requests(path: Path) -> list[ByteRange]:
    with LocalSource(RateLimit(None)) as source, source.open(str(path)) as file:
        counting = CountingFile(file)
        TorchLegacy(counting)
        return counting.requests


def test_a_file_with_an_optimizer_is_indexed_with_a_handful_of_requests(tmp_path: Path) -> None:
    tensors = drafter_tensors(num_layers=60, hidden=8)
    path = save_legacy(mixed_checkpoint(tensors, vocab=100_000), tmp_path / "c.pt")
    assert path.stat().st_size > 6_000_000
    requests = count_requests(path)
    assert len(requests) <= 3
    assert sum(part.size for part in requests) < 1_000_000


def test_an_index_larger_than_the_first_request_is_read_on(tmp_path: Path) -> None:
    tensors = drafter_tensors()
    path = save_legacy({"notes": [str(i) for i in range(100_000)], "model": tensors}, tmp_path / "c.pt")
    requests = count_requests(path)
    assert 3 <= len(requests) <= 6
    assert_same(read_all(path), tensors)


def test_only_the_bytes_of_the_drafter_are_read(tmp_path: Path) -> None:
    tensors = drafter_tensors(hidden=128)
    path = save_legacy(mixed_checkpoint(tensors, vocab=20_000), tmp_path / "c.pt")
    with LocalSource(RateLimit(None)) as source, source.open(str(path)) as file:
        found = fetch(TorchLegacy(file), list(tensors))
        wanted = sum(tensor.nbytes for tensor in tensors.values())
        assert_same(found, tensors)
        assert source.bytes_read <= wanted + 200_000 < path.stat().st_size // 5


def test_identity_follows_the_index_and_the_time(tmp_path: Path) -> None:
    one = save_legacy(mixed_checkpoint(drafter_tensors(), step=1), tmp_path / "a.pt")
    copy, other = tmp_path / "b.pt", tmp_path / "c.pt"
    copy.write_bytes(one.read_bytes())
    other.write_bytes(one.read_bytes().replace(b"epochq", b"Epochq"))
    identities = []
    for path in (one, copy, other, one):
        os.utime(path, (1_000_000, 1_000_000))
        with opened(path) as container:
            identities.append(container.identity)
    assert identities[0] == identities[1] == identities[3] != identities[2]
    os.utime(one, (1_000_001, 1_000_001))
    with opened(one) as container:
        assert container.identity != identities[0]


# Files written by hand, for what no torch of today writes.


class FakeStorage:
    def __init__(self, key: str, num_elements: Any, view: Any = None, kind: Any = torch.FloatStorage) -> None:
        self.pid = ("storage", kind, key, "cpu", num_elements, view)


class FakeTensor:
    def __init__(self, storage: FakeStorage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self.args: tuple[Any, ...] = (storage, offset, shape, strides, False, OrderedDict())

    def __reduce__(self) -> Any:
        return torch._utils._rebuild_tensor_v2, self.args


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return value.pid if isinstance(value, FakeStorage) else None


def write_legacy(
    path: Path,
    content: Any,
    storages: dict[str, bytes],
    *,
    machine: Any = None,
    version: int = PROTOCOL_VERSION,
    counts: dict[str, int] | None = None,
) -> Path:
    """Write a file as torch before 1.6 does, with storages of float32."""
    out = io.BytesIO()
    for value in (MAGIC_NUMBER, version, {"little_endian": True} if machine is None else machine):
        pickle.dump(value, out, protocol=2)
    _Pickler(out, protocol=2).dump(content)
    pickle.dump(list(storages), out, protocol=2)
    for key, data in storages.items():
        out.write(struct.pack("<q", (counts or {}).get(key, len(data) // 4)) + data)
    path.write_bytes(out.getvalue())
    return path


def floats(count: int) -> bytes:
    return torch.arange(count, dtype=torch.float32).numpy().tobytes()


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


@pytest.mark.filterwarnings("ignore")
def test_storages_of_types_that_no_drafter_has_are_passed_over(tmp_path: Path) -> None:
    tensors = drafter_tensors()
    other = {
        "phases": torch.randn(5, dtype=torch.complex128),
        "codes": torch.quantize_per_tensor(torch.randn(9), 0.1, 0, torch.qint8),
    }
    path = save_legacy({"model": tensors, "other": other}, tmp_path / "c.pt")
    assert_same(read_all(path), tensors)


# Files of other kinds.


def test_the_tar_format_is_refused_by_name_and_other_tars_are_not_taken_for_it(tmp_path: Path) -> None:
    def write_tar(name: str, time: float) -> Path:
        (tmp_path / name).write_bytes(b"x" * 100)
        os.utime(tmp_path / name, (time, time))
        with tarfile.open(tmp_path / f"{name}.tar", "w", format=tarfile.PAX_FORMAT) as tar:
            tar.add(tmp_path / name, arcname=name)
        return tmp_path / f"{name}.tar"

    for time in (1000, 1000.5):
        old = write_tar("sys_info", time)
        assert is_legacy(old.read_bytes()[:START_BYTES])
        with pytest.raises(UnsupportedCheckpoint, match=r"torch before 0\.1\.10"), opened(old):
            pass
    assert not is_legacy(write_tar("model_config.yaml", 1000).read_bytes()[:START_BYTES])


def test_the_start_of_a_file_tells_its_kind(tmp_path: Path) -> None:
    whole = save_legacy(drafter_tensors(), tmp_path / "c.pt").read_bytes()
    assert all(is_legacy(whole[:size]) for size in range(1, 40))
    torch.save({"a": torch.zeros(2)}, tmp_path / "zip.pt")
    for other in (
        b"",
        b"\0" * 512,
        pickle.dumps({"a": 1}),
        (tmp_path / "zip.pt").read_bytes()[:START_BYTES],
        b"hello, world",
    ):
        assert not is_legacy(other)


def test_a_whole_module_has_no_names_for_its_tensors(tmp_path: Path) -> None:
    path = save_legacy(torch.nn.Linear(2, 2), tmp_path / "c.pt")
    with pytest.raises(NoDrafter, match=r"torch\.nn\.modules\.linear\.Linear"), opened(path):
        pass


def test_an_optimizer_alone_is_no_drafter(tmp_path: Path) -> None:
    path = save_legacy({"optimizer": adamw_state(drafter_tensors()), "epoch": 1}, tmp_path / "c.pt")
    with pytest.raises(NoDrafter), opened(path):
        pass


def test_pickle_protocol_0_is_refused_by_name(tmp_path: Path) -> None:
    path = save_legacy({"model": drafter_tensors()}, tmp_path / "c.pt", pickle_protocol=0)
    with pytest.raises(UnsupportedCheckpoint, match="protocol 0"), opened(path):
        pass


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


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


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
