"""Reading shards by tensor and by row: equal to the safetensors library, and strict with what is damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dflash_core.errors import TargetError
from dflash_core.target import stored_tensors
from dflash_core.target.loading import Target
from dflash_core.target.state_files import read_tensors, write_rows
from dflash_core.target.stored_tensors import StoredTensors
from tests.support.tiny_families import write_family


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("stored") / "target"
    return write_family(folder, "llama", tied=False, shard_size="60KB", dtype=torch.bfloat16)


def test_tensors_and_rows_are_those_of_the_library(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_tensors, "_CHUNK_BYTES", 1000)
    stored = StoredTensors(target)
    expected = {name: tensor for shard in target.shards for name, tensor in load_file(target.folder / shard).items()}
    assert set(stored) == set(expected)
    assert len(target.shards) > 2
    for name, tensor in expected.items():
        assert torch.equal(stored.read(name), tensor)
        cast = torch.empty(tensor.shape)
        stored.read_into(cast, name)
        assert torch.equal(cast, tensor.float())
    name = "model.embed_tokens.weight"
    rows = torch.empty(7, 64)
    stored.read_into(rows, name, first=90)
    assert torch.equal(rows, expected[name][90:97].float())
    assert torch.equal(stored.gather_rows(name, [3, 159, 0], torch.float32), expected[name][[3, 159, 0]].float())


def test_what_is_read_is_counted(target: Target) -> None:
    stored = StoredTensors(target)
    stored.gather_rows("model.embed_tokens.weight", [1, 2], torch.float32)
    assert stored.bytes_read == 2 * 64 * 2
    stored.read("model.norm.weight")
    assert stored.bytes_read == 3 * 64 * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "F4"}, "is of type F4, which is not known"),
        ({"shape": [3, 4]}, "lies outside the file or has another size"),
        ({"data_offsets": [0, 4000]}, "lies outside the file or has another size"),
        ({"data_offsets": [-4, 28]}, "lies outside the file or has another size"),
        ({"data_offsets": None}, "is not a safetensors file"),
    ],
    ids=str,
)
def test_an_index_that_cannot_be_true_is_refused(change: dict[str, object], message: str, tmp_path: Path) -> None:
    target = write_family(tmp_path / "target", "llama", tied=True)
    path = tmp_path / "target" / "model.safetensors"
    header = json.dumps({"x": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]} | change}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(32))
    with pytest.raises(TargetError, match=message):
        StoredTensors(target)


@pytest.mark.parametrize("content", [b"", b"123", b"\xff" * 40, (5).to_bytes(8, "little") + b"[1,2]"], ids=len)
def test_what_is_no_safetensors_file_is_refused(content: bytes, tmp_path: Path) -> None:
    target = write_family(tmp_path / "target", "llama", tied=True)
    (tmp_path / "target" / "model.safetensors").write_bytes(content)
    with pytest.raises(TargetError, match="is not a safetensors file"):
        StoredTensors(target)


def test_a_shard_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    target = write_family(tmp_path / "target", "llama", tied=True)
    stored = StoredTensors(target)
    path = tmp_path / "target" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(TargetError, match=r"is cut off inside 'model\.norm\.weight'"):
        stored.read("model.norm.weight")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_written_in_parts_are_a_file_that_the_library_reads(dtype: torch.dtype, tmp_path: Path) -> None:
    hidden = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    write_rows(tmp_path / "a.safetensors", "hidden", (7, 5), dtype, [hidden[:3], hidden[3:3], hidden[3:]])
    assert torch.equal(load_file(tmp_path / "a.safetensors")["hidden"], hidden.to(dtype))
    assert torch.equal(read_tensors(tmp_path / "a.safetensors", "hidden")[0], hidden.to(dtype))
