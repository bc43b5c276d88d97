"""What is read of a file of torch before 1.6, with how few requests, and files of other kinds told apart."""

from __future__ import annotations

import os
import pickle
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_core.checkpoints.legacy_index import START_BYTES
from dflash_core.checkpoints.local_source import LocalSource
from dflash_core.checkpoints.source_base import ByteRange, RateLimit, Sink, SourceFile
from dflash_core.checkpoints.torch_legacy import TorchLegacy, is_legacy
from dflash_core.checkpoints.values import NoDrafter
from dflash_core.errors import UnsupportedCheckpoint
from tests.dflash_core.checkpoints.checkpoint_files import adamw_state, drafter_tensors, mixed_checkpoint
from tests.support.legacy_files import fetch, opened, read_all, save_legacy
from tests.support.torch_files import assert_same

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
