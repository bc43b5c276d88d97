"""What is read of a file of torch.save: weights and facts, in every type, view and size, byte for byte."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

from dflash_core.checkpoints import inspect_checkpoint, stream_checkpoint, weights_digest
from dflash_core.errors import UnsupportedCheckpoint
from tests.dflash_core.checkpoints.checkpoint_files import (
    adamw_state,
    drafter_tensors,
    mixed_checkpoint,
    save_mixed,
)
from tests.support.torch_files import assert_same, saved, streamed


def test_a_realistic_mixed_file_gives_the_drafter_byte_for_byte_as_safetensors_would_write_it(tmp_path: Path) -> None:
    tensors = save_mixed(tmp_path / "step_100" / "checkpoint.pt")
    result = stream_checkpoint(str(tmp_path / "step_100"), tmp_path / "out.safetensors")
    assert result.path.read_bytes() == save(tensors)
    assert result.bytes_wanted == sum(t.numel() * t.element_size() for t in tensors.values())
    assert result.bytes_read <= result.bytes_wanted + max(result.bytes_wanted // 100, 1_000_000)
    assert result.bytes_total == (tmp_path / "step_100" / "checkpoint.pt").stat().st_size
    assert result.unverified_tensors == ()
    assert (result.ref.run, result.ref.step, result.ref.layout) == (tmp_path.name, 100, "torch_zip")


def test_facts_are_the_plain_values_beside_the_weights(tmp_path: Path) -> None:
    save_mixed(tmp_path / "step_100" / "checkpoint.pt", step=101)
    found = inspect_checkpoint(str(tmp_path / "step_100"))
    assert found.facts == {
        "epoch": 3,
        "step": 101,
        "best_loss": 2.5,
        "args.block_size": 8,
        "args.target_layer_ids": [1, 14, 27],
        "args.mask_token_id": 0,
        "args.output_dir": "/data/runs/a",
        "args.seed": 7,
        "args.lr": 0.5,
        "args.name": "drafter",
        "args.use_cache": False,
    }
    assert found.ref.step == 101  # the content knows better than the folder's name
    assert found.odd_globals == ()


def test_roles_tell_the_drafter_from_the_frozen_copies(tmp_path: Path) -> None:
    tensors = save_mixed(tmp_path / "c.pt")
    found = inspect_checkpoint(str(tmp_path / "c.pt"))
    roles = {entry.name: entry.role for entry in found.tensors}
    assert roles.pop("embed_tokens.weight") == "embedding"
    assert roles.pop("lm_head.weight") == "head"
    assert roles == dict.fromkeys(tensors, "drafter")
    fc = next(entry for entry in found.tensors if entry.name == "fc.weight")
    assert (fc.dtype, fc.shape, fc.size_bytes) == ("float32", (32, 96), 32 * 96 * 4)
    assert found.bytes_read < 200_000


@pytest.mark.parametrize(
    "key", ["model_state_dict", "state_dict", "model", "draft_state_dict", "draft_model", "anything.inner"]
)
def test_weights_are_found_under_any_key(tmp_path: Path, key: str) -> None:
    tensors = drafter_tensors()
    outer, _, inner = key.partition(".")
    content = {outer: {inner: tensors} if inner else tensors, "optimizer": adamw_state(tensors)}
    assert_same(streamed(saved(tmp_path / "c.pt", content), tmp_path), tensors)


def test_weights_at_the_top_level_are_found_beside_plain_values(tmp_path: Path) -> None:
    tensors = drafter_tensors()
    assert_same(streamed(saved(tmp_path / "c.pt", {**tensors, "step": 5}), tmp_path), tensors)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_pickle_protocol_is_read(tmp_path: Path, protocol: int) -> None:
    tensors = drafter_tensors()
    url = saved(tmp_path / "c.pt", mixed_checkpoint(tensors), pickle_protocol=protocol)
    assert_same(streamed(url, tmp_path), tensors)


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float32, torch.bfloat16, torch.float16, torch.float64),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.int8),
    ],
)
def test_each_dtype_is_kept(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {name: tensor.mul(9).to(dtype) for name, tensor in drafter_tensors().items()}
    assert_same(streamed(saved(tmp_path / "c.pt", tensors), tmp_path), tensors)


def test_views_ties_and_shared_storages_come_out_right(tmp_path: Path) -> None:
    tensors = drafter_tensors()
    flat = torch.randn(100_000)
    tensors["layers.0.self_attn.q_proj.weight"] = flat[7 : 7 + 1024].view(32, 32)
    tensors["layers.0.self_attn.o_proj.weight"] = flat[5000 : 5000 + 1024].view(32, 32).t()
    tensors["layers.1.self_attn.q_proj.weight"] = tensors["layers.0.self_attn.q_proj.weight"]
    tensors["layers.1.self_attn.o_proj.weight"] = torch.randn(64, 64)[::2, 1::2]
    tensors["norm.weight"] = torch.ones(1).expand(32)
    tensors["hidden_norm.weight"] = torch.nn.Parameter(tensors["hidden_norm.weight"])
    result = stream_checkpoint(saved(tmp_path / "c.pt", tensors), tmp_path / "out.safetensors")
    assert_same(load_file(result.path), {name: t.detach().contiguous() for name, t in tensors.items()})
    expected = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    assert result.path.read_bytes() == save(expected)


def test_a_large_view_that_cannot_be_put_in_order_piece_by_piece_is_refused(tmp_path: Path) -> None:
    tensors = drafter_tensors()
    with torch.serialization.skip_data():
        tensors["fc.weight"] = torch.empty(60 << 20).as_strided((3, 20 << 20), (1, 2))
        torch.save(tensors, tmp_path / "c.pt")
    with pytest.raises(UnsupportedCheckpoint, match=r"strides \[1, 2\] would have to be held in memory"):
        inspect_checkpoint(str(tmp_path / "c.pt"))


def test_a_small_view_into_a_large_storage_is_read_alone_and_reported_as_unverified(tmp_path: Path) -> None:
    tensors = drafter_tensors()
    flat = torch.randn(2_000_000)
    tensors["layers.0.self_attn.q_proj.weight"] = flat[1_000_000 : 1_000_000 + 1024].view(32, 32)
    tensors["layers.1.self_attn.q_proj.weight"] = flat[1_500_000 : 1_500_000 + 1024].view(32, 32).t()
    result = stream_checkpoint(saved(tmp_path / "c.pt", tensors), tmp_path / "out.safetensors")
    assert_same(load_file(result.path), {name: t.contiguous() for name, t in tensors.items()})
    assert result.bytes_read < 1_000_000 < result.bytes_total
    assert result.unverified_tensors == ("layers.0.self_attn.q_proj.weight", "layers.1.self_attn.q_proj.weight")


def test_a_file_saved_without_checksums_is_read_and_all_of_it_reported_as_unverified(tmp_path: Path) -> None:
    tensors = drafter_tensors()
    torch.serialization.set_crc32_options(False)
    try:
        url = saved(tmp_path / "c.pt", tensors)
    finally:
        torch.serialization.set_crc32_options(True)
    result = stream_checkpoint(url, tmp_path / "out.safetensors")
    assert_same(load_file(result.path), tensors)
    assert set(result.unverified_tensors) == set(tensors)


def test_a_zip64_index_is_read(tmp_path: Path) -> None:
    tensors = drafter_tensors()
    content = io.BytesIO()
    torch.save(tensors, content)
    path = tmp_path / "c.pt"
    with zipfile.ZipFile(content) as narrow, zipfile.ZipFile(path, "w") as wide:
        for info in narrow.infolist():
            with wide.open(info.filename, "w", force_zip64=True) as record:
                record.write(narrow.read(info))
    data = path.read_bytes()
    end = data.rindex(b"PK\x05\x06")
    count, size, offset = struct.unpack_from("<HII", data, end + 10)
    end64 = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, offset)
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, end, 1)
    full = struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    path.write_bytes(data[:end] + end64 + locator + full)
    assert_same(streamed(str(path), tmp_path), tensors)


def test_a_record_beyond_4_gib_is_found(tmp_path: Path) -> None:
    tensors = drafter_tensors()
    path = tmp_path / "c.pt"
    with torch.serialization.skip_data():
        torch.save({"optimizer": {"moment": torch.empty(1 << 30, 5, dtype=torch.int8)}, "model": tensors}, path)
    # Only the index of such a file is written in full here; its data are holes in a sparse file.
    assert path.stat().st_size > 5 << 30
    found = inspect_checkpoint(str(path))
    assert {entry.name for entry in found.tensors} == set(tensors)
    assert found.bytes_read < 200_000


class SparseFile:
    """Takes what torch.save writes; long runs that begin with zeros become holes."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("wb")

    def write(self, data: bytes) -> int:
        view = memoryview(data)
        if len(view) > 1 << 20 and not any(view[:4096]):
            self.file.seek(len(view), os.SEEK_CUR)
        else:
            self.file.write(view)
        return len(view)

    def flush(self) -> None:
        self.file.flush()


def test_a_drafter_that_lies_beyond_4_gib_is_fetched(tmp_path: Path) -> None:
    tensors = drafter_tensors()
    moment = torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage((4 << 30) + 12345))
    out = SparseFile(tmp_path / "c.pt")
    torch.save({"optimizer": {"moment": moment}, "model": tensors}, out)
    out.file.close()
    assert (tmp_path / "c.pt").stat().st_size > 4 << 30
    assert_same(streamed(str(tmp_path / "c.pt"), tmp_path), tensors)


def test_the_config_beside_the_weights_is_given(tmp_path: Path) -> None:
    save_mixed(tmp_path / "step_1" / "checkpoint.pt")
    (tmp_path / "step_1" / "config.json").write_text('{"block_size": 8}')
    assert inspect_checkpoint(str(tmp_path / "step_1")).config == {"block_size": 8}


def test_identity_follows_the_content_and_not_the_name(tmp_path: Path) -> None:
    one, copy, other = (tmp_path / name for name in ("a.pt", "b.pt", "c.pt"))
    save_mixed(one)
    copy.write_bytes(one.read_bytes())
    save_mixed(other, seed=1)
    identities = [inspect_checkpoint(str(path)).ref.identity for path in (one, copy, other)]
    assert identities[0] == identities[1] != identities[2]


def test_the_digest_of_the_weights_does_not_depend_on_the_file_they_came_in(tmp_path: Path) -> None:
    tensors = drafter_tensors()
    shuffled = dict(reversed(tensors.items()))
    one = stream_checkpoint(saved(tmp_path / "a.pt", tensors), tmp_path / "a.safetensors").weights_sha256
    two = stream_checkpoint(saved(tmp_path / "b.pt", {"model": shuffled}), tmp_path / "b.safetensors").weights_sha256
    (tmp_path / "c.safetensors").write_bytes(save(tensors, metadata={"note": "other header"}))
    assert one == two == weights_digest(tmp_path / "c.safetensors")
    tensors["norm.weight"] = tensors["norm.weight"] + 1
    other = stream_checkpoint(saved(tmp_path / "d.pt", tensors), tmp_path / "d.safetensors").weights_sha256
    assert other != one
