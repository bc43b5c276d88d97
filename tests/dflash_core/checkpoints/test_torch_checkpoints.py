from __future__ import annotations

import contextlib
import io
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file, save

from dflash_core.checkpoints import inspect_checkpoint, stream_checkpoint, weights_digest
from dflash_core.checkpoints.inert_pickle import read_inert
from dflash_core.errors import CheckpointCorrupt, CheckpointMismatch, UnsupportedCheckpoint
from tests.dflash_core.checkpoints.checkpoint_files import (
    adamw_state,
    dflash2_tensors,
    drafter_tensors,
    mixed_checkpoint,
    save_mixed,
    training_args,
)


def saved(path: Path, content: Any, **options: Any) -> str:
    torch.save(content, path, **options)
    return str(path)


def streamed(url: str, folder: Path) -> dict[str, torch.Tensor]:
    return load_file(stream_checkpoint(url, folder / "out.safetensors").path)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


# What is read.


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


@pytest.mark.parametrize(
    "prefix",
    [
        "module.",
        "_orig_mod.",
        "draft_model.",
        "dflash_module.",
        "model.",
        "trainer_module.module._orig_mod.draft_model.model.",
    ],
)
def test_prefixes_of_wrappers_are_stripped(tmp_path: Path, prefix: str) -> None:
    tensors = drafter_tensors()
    wrapped = {prefix + name: tensor for name, tensor in tensors.items()}
    assert_same(streamed(saved(tmp_path / "c.pt", {"model": wrapped}), tmp_path), tensors)


def test_parts_that_wrappers_insert_inside_are_stripped(tmp_path: Path) -> None:
    tensors = drafter_tensors()
    wrapped = {
        name.replace("layers.0.", "layers.0._checkpoint_wrapped_module.").replace("mlp.", "mlp._orig_mod."): tensor
        for name, tensor in tensors.items()
    }
    wrapped["lm_head.weight"] = torch.zeros(5, 32)
    wrapped = {name if name == "lm_head.weight" else f"model.{name}": tensor for name, tensor in wrapped.items()}
    assert_same(streamed(saved(tmp_path / "c.pt", {"model": wrapped}), tmp_path), tensors)


def test_dflash2_tensors_belong_to_the_drafter(tmp_path: Path) -> None:
    tensors = drafter_tensors()
    added = dflash2_tensors(tensors)
    found = streamed(saved(tmp_path / "c.pt", {**tensors, **added}), tmp_path)
    expected = {
        name.removesuffix(".weight") if "codebook" in name else name: tensor
        for name, tensor in (tensors | added).items()
    }
    assert_same(found, expected)


def test_rotary_buffers_are_ignored_with_a_reason(tmp_path: Path) -> None:
    tensors = {**drafter_tensors(), "rotary_emb.inv_freq": torch.ones(4)}
    found = inspect_checkpoint(saved(tmp_path / "c.pt", tensors))
    buffer = next(entry for entry in found.tensors if entry.name == "rotary_emb.inv_freq")
    assert (buffer.role, buffer.reason) == ("ignored", "computed from the config")


def test_attention_biases_belong_to_the_drafter(tmp_path: Path) -> None:
    tensors = {**drafter_tensors(), "layers.0.self_attn.q_proj.bias": torch.ones(32)}
    assert_same(streamed(saved(tmp_path / "c.pt", tensors), tmp_path), tensors)


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


# What is refused, by name.


def refusal(content: Any, path: Path) -> str:
    with pytest.raises(UnsupportedCheckpoint) as caught:
        stream_checkpoint(saved(path, content), path.with_suffix(".safetensors"))
    assert not path.with_suffix(".safetensors").exists()
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "known_as"),
    [
        ("prefix_gru.weight_ih_l0", "Domino"),
        ("embed_proj.0.weight", "Domino"),
        ("mask_embedding", "mask vector"),
        ("layers.0.self_attn.g_proj.weight", "gate"),
        ("layers.0.self_attn.qkv_proj.weight", "split its rows into q_proj, k_proj and v_proj"),
        ("layers.0.self_attn.attention_sink_bias", "sink"),
        ("aux_hidden_norms.0.weight", "norm"),
        ("markov_head.extra.weight", ""),
        ("confidence_head.hidden.weight", ""),
    ],
)
def test_an_optional_head_is_refused_by_name(tmp_path: Path, name: str, known_as: str) -> None:
    message = refusal({**drafter_tensors(), name: torch.ones(3)}, tmp_path / "c.pt")
    assert repr(name) in message
    assert known_as in message


MARKOV = {"markov_head.markov_w1.weight": torch.ones(9, 2), "markov_head.markov_w2.weight": torch.ones(9, 2)}
GATES = {"markov_head.gate_proj.weight": torch.ones(2, 6), "markov_head.gate_proj.bias": torch.ones(2)}
CONFIDENCE = {"confidence_head.proj.weight": torch.ones(1, 6), "confidence_head.proj.bias": torch.ones(1)}
FLAT = {
    "markov_w1.weight": "markov_head.markov_w1.weight",
    "markov_w2.weight": "markov_head.markov_w2.weight",
    "gate_proj.weight": "markov_head.gate_proj.weight",
    "gate_proj.bias": "markov_head.gate_proj.bias",
    "confidence_proj.weight": "confidence_head.proj.weight",
    "confidence_proj.bias": "confidence_head.proj.bias",
}


def test_dsparks_heads_are_fetched(tmp_path: Path) -> None:
    """Whether the config calls for them is asked against its facts, before anything is fetched."""
    tensors = drafter_tensors() | MARKOV | GATES | CONFIDENCE
    assert_same(streamed(saved(tmp_path / "c.pt", tensors), tmp_path), tensors)


@pytest.mark.parametrize("prefix", ["", "dflash_module.", "logit_head.", "module.logit_head."])
def test_dsparks_heads_have_one_name_whatever_the_trainer_calls_them(tmp_path: Path, prefix: str) -> None:
    heads = MARKOV | GATES | CONFIDENCE
    scope = "dflash_module." if prefix.startswith("dflash") else "module." if prefix.startswith("module") else ""
    tensors = {f"{scope}{name}": tensor for name, tensor in drafter_tensors().items()}
    tensors |= {f"{prefix}{name}": heads[canonical] for name, canonical in FLAT.items()}
    assert_same(streamed(saved(tmp_path / "c.pt", tensors), tmp_path), drafter_tensors() | heads)


def test_a_heads_module_inside_an_old_head_keeps_its_own_name(tmp_path: Path) -> None:
    tensors = drafter_tensors() | {f"logit_head.{name}": tensor for name, tensor in (MARKOV | CONFIDENCE).items()}
    assert_same(streamed(saved(tmp_path / "c.pt", tensors), tmp_path), drafter_tensors() | MARKOV | CONFIDENCE)


@pytest.mark.parametrize("lost", [*MARKOV, "confidence_head.proj.weight"])
def test_half_a_dspark_is_refused(tmp_path: Path, lost: str) -> None:
    tensors = drafter_tensors() | MARKOV | GATES | CONFIDENCE
    del tensors[lost]
    with pytest.raises(CheckpointMismatch, match=lost):
        stream_checkpoint(saved(tmp_path / "c.pt", tensors), tmp_path / "out")


def test_what_is_the_verifiers_is_ignored(tmp_path: Path) -> None:
    extra = {f"verifier_{name}.weight": torch.ones(3) for name in ("norm", "lm_head", "embed_tokens")}
    url = saved(tmp_path / "c.pt", drafter_tensors() | extra)
    assert_same(streamed(url, tmp_path), drafter_tensors())
    roles = {entry.name: entry.role for entry in inspect_checkpoint(url).tensors}
    assert {roles[name] for name in extra} == {"ignored"}


def test_many_unknown_tensors_are_counted_and_three_are_named(tmp_path: Path) -> None:
    extra = {f"extra.{i}": torch.ones(1) for i in range(9)}
    message = refusal({**drafter_tensors(), **extra}, tmp_path / "c.pt")
    assert "9 tensors" in message
    assert "'extra.0', 'extra.1', 'extra.2' and 6 more" in message


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    tensors = drafter_tensors()
    del tensors["layers.1.mlp.up_proj.weight"]
    with pytest.raises(CheckpointMismatch, match=r"layers\.1\.mlp\.up_proj\.weight"):
        stream_checkpoint(saved(tmp_path / "c.pt", tensors), tmp_path / "out")
    inspection = inspect_checkpoint(str(tmp_path / "c.pt"))
    assert "layers.1.mlp.up_proj.weight" in str(inspection.refusal)
    assert len(inspection.tensors) == len(tensors)


def test_a_gap_in_the_layers_is_named(tmp_path: Path) -> None:
    tensors = {name.replace("layers.1.", "layers.2."): tensor for name, tensor in drafter_tensors().items()}
    with pytest.raises(CheckpointMismatch, match=r"\[0, 2\]"):
        stream_checkpoint(saved(tmp_path / "c.pt", tensors), tmp_path / "out")


def test_half_a_dflash2_is_refused(tmp_path: Path) -> None:
    tensors = drafter_tensors()
    added = dflash2_tensors(tensors)
    del added["layers.1.mlp_conv.base_kernel"]
    with pytest.raises(CheckpointMismatch, match=r"layers\.1\.mlp_conv\.base_kernel"):
        stream_checkpoint(saved(tmp_path / "c.pt", tensors | added), tmp_path / "out")


def test_two_sets_of_weights_are_reported_and_not_decided_between(tmp_path: Path) -> None:
    content = {"model": drafter_tensors(), "ema_model": drafter_tensors(seed=1)}
    message = refusal(content, tmp_path / "c.pt")
    assert "'model'" in message
    assert "'ema_model'" in message


def test_one_set_of_weights_listed_twice_is_one(tmp_path: Path) -> None:
    tensors = drafter_tensors()
    assert_same(streamed(saved(tmp_path / "c.pt", {"model": tensors, "state_dict": tensors}), tmp_path), tensors)


def test_two_names_of_one_tensor_are_refused(tmp_path: Path) -> None:
    tensors = drafter_tensors()
    both = {f"module.{name}": tensor for name, tensor in tensors.items()}
    both |= {name: tensor for name, tensor in tensors.items() if name.startswith("layers.")}
    assert "means the same tensor 'layers.0." in refusal({"model": both}, tmp_path / "c.pt")


@pytest.mark.parametrize("scope", ["dflash_module", "draft_model", "module.dflash_module", "model_state.draft_model"])
def test_of_a_whole_model_only_the_drafters_module_is_taken(tmp_path: Path, scope: str) -> None:
    tensors = drafter_tensors()
    base = {f"model.{name}": torch.ones(3) for name in tensors if name.startswith("layers.")}
    base |= {"model.embed_tokens.weight": torch.ones(9, 3), "lm_head.weight": torch.ones(9, 3)}
    base |= {"model.norm.weight": torch.ones(3), "model.visual.blocks.0.weight": torch.ones(3)}
    whole = base | {f"{scope}.{name}": tensor for name, tensor in tensors.items()}
    url = saved(tmp_path / "c.pt", {"model": whole})
    assert_same(streamed(url, tmp_path), tensors)
    roles = {entry.name: entry.role for entry in inspect_checkpoint(url).tensors}
    assert {roles[name] for name in base} == {"ignored"}


def test_a_part_of_the_drafter_outside_its_module_is_refused(tmp_path: Path) -> None:
    tensors = {f"dflash_module.{name}": tensor for name, tensor in drafter_tensors().items()}
    message = refusal({"model": tensors | {"markov_head.markov_w1.weight": torch.ones(3)}}, tmp_path / "c.pt")
    assert "'markov_head.markov_w1.weight'" in message


def test_state_of_the_training_in_one_flat_dict_is_ignored_with_a_reason(tmp_path: Path) -> None:
    tensors = drafter_tensors()
    state = {"rng_state": torch.get_rng_state(), "optimizer.state.0.exp_avg": torch.ones(3)}
    url = saved(tmp_path / "c.pt", tensors | state)
    assert_same(streamed(url, tmp_path), tensors)
    reasons = {entry.name: entry.reason for entry in inspect_checkpoint(url).tensors}
    assert {reasons[name] for name in state} == {"state of the training"}


def test_a_name_that_only_begins_like_an_optimizer_is_no_state_of_the_training(tmp_path: Path) -> None:
    tensors = drafter_tensors() | {"optimal_head.weight": torch.ones(3)}
    assert "'optimal_head.weight'" in refusal(tensors, tmp_path / "c.pt")


def test_the_map_of_a_reduced_vocabulary_is_fetched(tmp_path: Path) -> None:
    tensors = drafter_tensors() | {"d2t": torch.arange(7), "t2d": torch.ones(50, dtype=torch.bool)}
    assert_same(streamed(saved(tmp_path / "c.pt", tensors), tmp_path), tensors)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_files_of_other_kinds_are_refused_by_their_name(tmp_path: Path) -> None:
    tensors = drafter_tensors()
    assert "torch.nn.modules.linear.Linear" in refusal(torch.nn.Linear(2, 2), tmp_path / "module.pt")
    assert "_rebuild_sparse_tensor" in refusal(
        {**tensors, "fc.weight": torch.eye(4).to_sparse()}, tmp_path / "sparse.pt"
    )
    assert "no drafter" in refusal({"optimizer": adamw_state(tensors), "epoch": 1}, tmp_path / "optimizer.pt")
    (tmp_path / "text.pt").write_text("hello, this is no checkpoint at all")
    with pytest.raises(UnsupportedCheckpoint, match="begins with b'hell'"):
        inspect_checkpoint(str(tmp_path / "text.pt"))
    with zipfile.ZipFile(tmp_path / "packed.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"x" * 1000)
    with pytest.raises(UnsupportedCheckpoint, match="compressed"):
        inspect_checkpoint(str(tmp_path / "packed.pt"))
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "script.pt")
    with pytest.raises(UnsupportedCheckpoint, match="TorchScript"):
        inspect_checkpoint(str(tmp_path / "script.pt"))


# What is in it is never run.


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


def test_an_evil_pickle_runs_nothing_and_still_yields_its_tensors(tmp_path: Path) -> None:
    tensors = drafter_tensors()
    marker = tmp_path / "evil_was_here"
    content = {"model": tensors, "trap": Evil(marker), "args": training_args(trap=Evil(marker)), "step": 4}
    url = saved(tmp_path / "c.pt", content)
    found = inspect_checkpoint(url)
    assert found.odd_globals == ("posix.system",)
    assert_same(streamed(url, tmp_path), tensors)
    assert not marker.exists()


def test_an_evil_value_among_the_weights_is_refused_and_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "evil_was_here"
    message = refusal({"model": {**drafter_tensors(), "trap": Evil(marker)}}, tmp_path / "c.pt")
    assert "'trap'" in message
    assert not marker.exists()


HOSTILE = {
    "reduce": b"cos\nsystem\n(X\x0a\x00\x00\x00touch evil!tR.",
    "inst": b"(X\x0a\x00\x00\x00touch evil!ios\nsystem\n.",
    "obj": b"(cos\nsystem\nX\x0a\x00\x00\x00touch evil!o.",
    "stack_global": b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x0atouch evil!\x85R.",
    "newobj": b"\x80\x02cos\nsystem\nX\x0a\x00\x00\x00touch evil!\x85\x81.",
    "getattr_chain": b"cbuiltins\ngetattr\n(cbuiltins\n__import__\n(X\x02\x00\x00\x00ostR"
    b"X\x06\x00\x00\x00systemtR(X\x0a\x00\x00\x00touch evil!tR.",
    "build_on_a_function": b"\x80\x02cos\nsystem\n}X\x08\x00\x00\x00__code__K\x01sb.",
    "extension_code": b"\x80\x02\x82\x01.",
    "memo_bomb": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "huge_bytearray": b"\x80\x05\x96\x00\x00\x00\x00\x00\x01\x00\x00.",
    "huge_frame": b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7fN.",
    "appends_to_a_name": b"cos\nsystem\n(K\x01e.",
    "cut_off": b"\x80\x02}q\x00(X\x05\x00",
    "nothing": b"",
    "deep": b"(" * 1000 + b"l" * 1000 + b".",
}


@pytest.mark.parametrize("program", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_pickle_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: bytes) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("system", "remove"):
        monkeypatch.setattr(os, name, lambda *_: pytest.fail("something in the pickle was run"))
    with contextlib.suppress(CheckpointCorrupt, UnsupportedCheckpoint):
        read_inert(program, where="hostile.pt")
    assert list(tmp_path.iterdir()) == []


def test_laughs_by_the_billion_stay_small() -> None:
    laughs: Any = ["ha"] * 10
    for _ in range(60):
        laughs = [laughs] * 10
    held = read_inert(pickle.dumps({"args": {"laughs": laughs}, "step": 1}), where="laughs.pt")
    assert held.root["step"] == 1


def test_a_pickle_that_copies_without_end_is_refused() -> None:
    pairs = pickle.dumps([(str(i), i) for i in range(20_000)], protocol=2).removesuffix(b".") + b"r\0\0\1\0"
    again = b"ccollections\nOrderedDict\nj\0\0\1\0\x85R0"
    with pytest.raises(UnsupportedCheckpoint, match="copies more than"):
        read_inert(pairs + again * 10_000 + b".", where="copies.pt")


def test_a_tensor_outside_its_storage_is_corrupt(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    torch.save(drafter_tensors(), path)
    rebuilt = tmp_path / "outside.pt"
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(rebuilt, "w") as changed:
        for info in archive.infolist():
            data = archive.read(info)
            if info.filename.endswith("data.pkl"):
                # fc.weight is 32 x 96: BININT1 32, BININT1 96 become 255 x 96.
                data = data.replace(b"K\x20K\x60\x86", b"K\xffK\x60\x86")
            changed.writestr(info.filename, data)
    with pytest.raises(CheckpointCorrupt, match=r"'fc\.weight'.*outside its storage"):
        inspect_checkpoint(str(rebuilt))


def test_containers_and_numbers_of_other_libraries_are_read_as_plain_values() -> None:
    content = {"o": OrderedDict(a=1), "n": numpy.int32(-5), "f": numpy.float64(0.25), "b": numpy.bool_(True)}
    for protocol in (2, 4):
        held = read_inert(pickle.dumps(content, protocol=protocol), where="plain.pt")
        assert held.root == {"o": {"a": 1}, "n": -5, "f": 0.25, "b": True}
