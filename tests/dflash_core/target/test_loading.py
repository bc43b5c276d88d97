"""From `target.model` to a folder: what is found, what is refused, and what its identity depends on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_core.errors import DoesNotFit, TargetError
from dflash_core.store import Store
from dflash_core.target import cpu, loading, runtime
from dflash_core.target.cpu import cpu_dtype
from dflash_core.target.loading import Target, read_target_folder, resolve_target
from dflash_core.target.runtime import check_memory, load_model
from tests.support import tiny

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return tiny.write_tiny_target(tmp_path_factory.mktemp("target") / "tiny", "qwen3")


@pytest.fixture
def folder(original: Target, tmp_path: Path) -> Path:
    """Return a copy that a test may damage."""
    return Path(shutil.copytree(original.folder, tmp_path / "copy"))


def read(folder: Path) -> Target:
    return read_target_folder(folder, name="tiny")


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / WEIGHTS) | {name: tensor for name, tensor in changes.items() if tensor is not None}
    kept = {name: tensor for name, tensor in tensors.items() if changes.get(name, tensor) is not None}
    save_file(kept, folder / WEIGHTS, metadata={"format": "pt"})


def split_into_shards(folder: Path, num_shards: int) -> None:
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    places: dict[str, str] = {}
    for number in range(num_shards):
        name = f"model-{number + 1:05d}-of-{num_shards:05d}.safetensors"
        part = dict(list(tensors.items())[number::num_shards])
        save_file(part, folder / name, metadata={"format": "pt"})
        places |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


class TestResolving:
    def test_a_folder_is_known_by_its_last_part(self, folder: Path, tmp_path: Path) -> None:
        store = Store(tmp_path / "store")
        target = resolve_target(str(folder), store)
        assert (target.name, target.folder, target.shards) == ("copy", folder, (WEIGHTS,))
        assert target.size_bytes == (folder / WEIGHTS).stat().st_size
        assert resolve_target(f"file://{folder}", store) == target
        assert not store.root.exists(), "a folder needs no copy in the store"

    @pytest.mark.parametrize(
        ("model", "expected"),
        [
            (None, "no target is set"),
            ("", "no target is set"),
            ("s3://bucket/model", "remote targets are not supported yet"),
            ("/no/such/folder", "neither a folder"),
            ("nobody/no-such-model", "neither a folder"),
            ("/no/such/file.gguf", "no such file"),
        ],
        ids=["none", "empty", "remote", "path", "hub id", "gguf"],
    )
    def test_what_is_not_there_is_one_line(self, model: str | None, expected: str, tmp_path: Path) -> None:
        with pytest.raises(TargetError, match=expected) as refused:
            resolve_target(model, Store(tmp_path))
        assert "\n" not in str(refused.value)

    @pytest.mark.parametrize(
        ("content", "expected"),
        [
            (None, "has no readable config.json"),
            ("{", "is not JSON"),
            ("[]", "must hold a JSON object"),
            ("null", "must hold a JSON object"),
            ("{}", "does not state hidden_size"),
        ],
    )
    def test_a_folder_without_a_usable_config_is_refused(
        self, folder: Path, content: str | None, expected: str
    ) -> None:
        (folder / "config.json").unlink()
        if content is not None:
            (folder / "config.json").write_text(content)
        with pytest.raises(TargetError, match=expected) as refused:
            read(folder)
        assert str(folder) in str(refused.value)


class TestShards:
    def test_shards_of_an_index_are_read_and_a_stray_file_is_not(self, folder: Path, original: Target) -> None:
        split_into_shards(folder, 3)
        save_file({"x": torch.zeros(1)}, folder / "adapter.safetensors")
        target = read(folder)
        assert target.shards == tuple(f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3))
        ours = load_model(target, "float32").state_dict()
        theirs = load_model(original, "float32").state_dict()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)

    def test_a_shard_that_the_index_names_must_be_there(self, folder: Path) -> None:
        split_into_shards(folder, 3)
        (folder / "model-00002-of-00003.safetensors").unlink()
        with pytest.raises(TargetError, match="lacks 1 of 3 shards, first 'model-00002-of-00003.safetensors'"):
            read(folder)

    @pytest.mark.parametrize(
        "index", ["{", "{}", '{"weight_map": []}', '{"weight_map": {"a": 5}}', '{"weight_map": {"a": ["x"]}}', "[]"]
    )
    def test_an_index_that_is_none_is_refused(self, folder: Path, index: str) -> None:
        (folder / "model.safetensors.index.json").write_text(index)
        with pytest.raises(TargetError, match="is not an index of shards"):
            read(folder)

    def test_weights_of_another_format_are_refused(self, folder: Path) -> None:
        (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
        with pytest.raises(TargetError, match="holds no .safetensors file"):
            read(folder)


class TestIdentity:
    def test_a_copy_elsewhere_is_the_same_target(self, folder: Path, original: Target) -> None:
        assert read(folder).identity == original.identity

    def test_a_note_in_the_config_changes_nothing(self, folder: Path, original: Target) -> None:
        change_config(folder, _name_or_path="/elsewhere", transformers_version="9.9")
        assert read(folder).identity == original.identity

    def test_a_fact_in_the_config_changes_it(self, folder: Path, original: Target) -> None:
        change_config(folder, rms_norm_eps=1e-5)
        assert read(folder).identity != original.identity

    @pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.3.mlp.up_proj.weight", "model.norm.weight"])
    def test_a_fine_tuned_copy_of_equal_shape_is_another_target(
        self, folder: Path, original: Target, name: str
    ) -> None:
        change_weights(folder, **{name: load_file(folder / WEIGHTS)[name] + 1e-3})
        changed = read(folder)
        assert changed.size_bytes == original.size_bytes
        assert changed.identity != original.identity

    @pytest.mark.parametrize("sample", range(16))
    def test_a_file_larger_than_the_samples_is_looked_at_from_end_to_end(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, sample: int
    ) -> None:
        monkeypatch.setattr(loading, "_SAMPLE_BYTES", 64)
        data = bytearray((folder / WEIGHTS).read_bytes())
        before = read(folder).identity
        data[(len(data) - 64) * sample // 15 + 32] ^= 1
        (folder / WEIGHTS).write_bytes(data)
        assert read(folder).identity != before


class TestLoadingTheModel:
    def test_it_is_ready_for_inference_in_the_dtype_asked_for(self, original: Target) -> None:
        model = load_model(original, "bfloat16")
        assert model.dtype == torch.bfloat16
        assert not model.training
        assert not any(parameter.requires_grad for parameter in model.parameters())

    def test_every_forward_pass_is_counted(self, original: Target) -> None:
        model = load_model(original, "float32")
        before = runtime.num_forward_passes
        for _ in range(3):
            model(torch.tensor([[1, 2]]))
        assert runtime.num_forward_passes == before + 3

    @pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
    def test_a_missing_tensor_is_named_and_not_made_up(self, tmp_path: Path, tied: bool) -> None:
        """transformers would fill the gap with random numbers and only warn."""
        target = tiny.write_tiny_target(tmp_path / "t", "qwen3", tied=tied)
        assert load_model(target, "float32") is not None
        change_weights(target.folder, **{"model.layers.3.mlp.up_proj.weight": None})
        with pytest.raises(TargetError, match=r"lacks 1 tensors .* 'model\.layers\.3\.mlp\.up_proj\.weight'"):
            load_model(read(target.folder), "float32")

    def test_a_tensor_of_another_shape_is_refused(self, folder: Path) -> None:
        change_weights(folder, **{"model.layers.3.mlp.up_proj.weight": torch.zeros(5, 64)})
        with pytest.raises(TargetError, match="cannot be loaded"):
            load_model(read(folder), "float32")

    def test_a_file_that_is_cut_off_is_refused_in_one_line(self, folder: Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        (folder / WEIGHTS).write_bytes(data[:-1000])
        with pytest.raises(TargetError, match="cannot be loaded") as refused:
            load_model(read(folder), "float32")
        assert "\n" not in str(refused.value)

    def test_a_model_of_an_unknown_kind_is_refused_and_no_code_beside_it_runs(self, folder: Path) -> None:
        (folder / "modeling_x.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")
        change_config(
            folder, model_type="x", auto_map={"AutoModelForCausalLM": "modeling_x.X", "AutoConfig": "modeling_x.Y"}
        )
        with pytest.raises(TargetError, match="cannot be loaded"):
            load_model(read(folder), "float32")
        assert not (folder / "ran").exists()


class TestMemory:
    @pytest.mark.parametrize(
        ("stored", "compute", "needed"),
        [
            ("float32", "float32", 1.2),
            ("bfloat16", "float32", 2.4),
            ("float32", "bfloat16", 0.6),
            (None, "float32", 2.4),
        ],
    )
    def test_a_target_that_does_not_fit_is_refused_before_it_is_loaded(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, stored: str | None, compute: str, needed: float
    ) -> None:
        """The weights in the dtype of the computation and a fifth on top; an unknown dtype counts as 16-bit."""
        change_config(folder, dtype=stored)
        target = read(folder)
        monkeypatch.setattr(runtime, "available_memory_bytes", lambda: int(target.size_bytes * needed) + 1)
        check_memory(target, compute)
        monkeypatch.setattr(runtime, "available_memory_bytes", lambda: int(target.size_bytes * needed) - 1)
        before = runtime.num_forward_passes
        with pytest.raises(DoesNotFit, match="GiB of memory"):
            load_model(target, compute)
        assert runtime.num_forward_passes == before

    def test_a_system_that_does_not_say_is_not_a_refusal(
        self, original: Target, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(runtime, "available_memory_bytes", lambda: None)
        check_memory(original, "float32")

    @pytest.mark.parametrize(
        ("configured", "flags", "stored", "expected"),
        [
            ("auto", {"avx2"}, "bfloat16", "float32"),
            ("auto", {"avx512_bf16"}, "bfloat16", "bfloat16"),
            ("auto", {"amx_bf16"}, "bfloat16", "bfloat16"),
            ("auto", {"amx_bf16"}, "float32", "float32"),
            ("auto", set(), None, "float32"),
            ("bfloat16", {"avx2"}, "float32", "bfloat16"),
            ("float32", {"amx_bf16"}, "bfloat16", "float32"),
        ],
    )
    def test_bfloat16_is_computed_only_where_it_is_fast_and_stored(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        configured: str,
        flags: set[str],
        stored: Any,
        expected: str,
    ) -> None:
        change_config(folder, dtype=stored)
        monkeypatch.setattr(cpu, "cpu_flags", lambda: frozenset(flags))
        assert cpu_dtype(configured, read(folder)) == expected

    def test_the_bytes_of_each_dtype_are_those_of_torch(self) -> None:
        assert {name: dtype.itemsize for name, dtype in runtime.DTYPES.items()} == cpu.ITEMSIZES


class TestGguf:
    def test_it_is_converted_once_and_computes_the_same(self, tmp_path: Path) -> None:
        source = tiny.write_tiny_target(tmp_path / "llama", "llama")
        path = write_gguf(tmp_path / "tiny.gguf", source)
        store = Store(tmp_path / "store")
        target = resolve_target(str(path), store)
        assert target.name == "tiny"
        assert target.folder.is_relative_to(store.root)
        assert (target.config.num_layers, target.config.hidden_size, target.config.vocab_size) == (6, 64, tiny.VOCAB)
        ids = torch.randint(8, 150, (1, 12), generator=torch.Generator().manual_seed(0))
        ours = load_model(target, "float32")(ids).logits
        torch.testing.assert_close(ours, load_model(source, "float32")(ids).logits, atol=1e-4, rtol=1e-4)
        (converted,) = (store.root / "target").iterdir()
        before = converted.stat().st_mtime_ns
        assert resolve_target(str(path), store) == target
        path.rename(tmp_path / "moved.gguf")
        assert resolve_target(str(tmp_path / "moved.gguf"), store).identity == target.identity
        assert converted.stat().st_mtime_ns == before, "found by content, not converted again"

    @pytest.mark.parametrize("kind", ["cut off", "header cut off", "empty", "no gguf"])
    def test_a_damaged_file_is_one_line_and_leaves_nothing_in_the_store(self, tmp_path: Path, kind: str) -> None:
        whole = write_gguf(tmp_path / "whole.gguf", tiny.write_tiny_target(tmp_path / "llama", "llama")).read_bytes()
        kinds = {
            "cut off": whole[: len(whole) // 2],
            "header cut off": whole[:100],
            "empty": b"",
            "no gguf": b"x" * 500,
        }
        (tmp_path / "bad.gguf").write_bytes(kinds[kind])
        store = Store(tmp_path / "store")
        with pytest.raises(TargetError, match=r"bad\.gguf cannot be read as GGUF") as refused:
            resolve_target(str(tmp_path / "bad.gguf"), store)
        assert "\n" not in str(refused.value)
        assert list((store.root / "target").iterdir()) == []

    def test_a_missing_tensor_is_named_and_not_made_up(self, tmp_path: Path) -> None:
        source = tiny.write_tiny_target(tmp_path / "llama", "llama")
        change_weights(source.folder, **{"model.layers.2.mlp.up_proj.weight": None})
        path = write_gguf(tmp_path / "gap.gguf", source)
        with pytest.raises(TargetError, match=r"lacks tensors, first 'model\.layers\.2\.mlp\.up_proj\.weight'"):
            resolve_target(str(path), Store(tmp_path / "store"))


def write_gguf(path: Path, target: Target) -> Path:
    """Write a tiny Llama as a GGUF file in float32, with a byte-level tokenizer."""
    import gguf

    config = json.loads((target.folder / "config.json").read_text())
    tensors = {name: tensor.numpy() for name, tensor in load_file(target.folder / WEIGHTS).items()}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(["a", "b", "ab", *(f"<{token}>" for token in range(3, config["vocab_size"]))])
    writer.add_token_types([gguf.TokenType.NORMAL] * config["vocab_size"])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(7)
    writer.add_bos_token_id(1)
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
    }
    parts = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for layer in range(config["num_hidden_layers"]):
        names |= {f"model.layers.{layer}.{ours}": f"blk.{layer}.{theirs}" for ours, theirs in parts.items()}
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, values in tensors.items():
        theirs = names[name.removesuffix(".weight")]
        num_heads = heads.get(theirs.rpartition(".")[2])
        if num_heads is not None:
            # GGUF keeps the two halves of each rotated pair side by side.
            halves = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, values.shape[1])
            values = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
        writer.add_tensor(f"{theirs}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
