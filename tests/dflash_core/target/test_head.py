"""The target's embedding and head are found by name and tie, in one file or many."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from dflash_core.errors import TargetError
from dflash_core.target.head import load_embedding_and_head
from dflash_core.target.loading import Target, read_target_folder

SIZES = {"hidden_size": 4, "num_hidden_layers": 2, "vocab_size": 6}
EMBEDDING = torch.arange(24.0).reshape(6, 4)
HEAD = EMBEDDING + 100
OTHER = EMBEDDING + 1000


def write(folder: Path, config: dict[str, Any], *files: dict[str, Tensor], index: bool = False) -> Target:
    (folder / "config.json").write_text(json.dumps(SIZES | config))
    names: dict[str, str] = {}
    for number, tensors in enumerate(files):
        name = f"model-{number}.safetensors"
        save_file(tensors, folder / name)
        names |= dict.fromkeys(tensors, name)
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return read_target_folder(folder, name="t")


@pytest.mark.parametrize(
    ("tied", "has_head", "expected"),
    [
        (False, True, HEAD),
        (None, True, HEAD),
        (None, False, EMBEDDING),
        (True, False, EMBEDDING),
        (True, True, HEAD),
    ],
    ids=["untied", "not said, with head", "not said, without", "tied", "tied, but with another head"],
)
def test_the_head_is_the_embedding_where_there_is_no_other(
    tmp_path: Path, tied: bool | None, has_head: bool, expected: Tensor
) -> None:
    config = {} if tied is None else {"tie_word_embeddings": tied}
    tensors = {"model.embed_tokens.weight": EMBEDDING} | ({"lm_head.weight": HEAD} if has_head else {})
    found = load_embedding_and_head(write(tmp_path, config, tensors))
    assert torch.equal(found.embedding_VD, EMBEDDING)
    assert torch.equal(found.head_VD, expected)


def test_a_head_beside_tied_embeddings_is_used_where_transformers_uses_it(tmp_path: Path) -> None:
    """transformers ties only what is equal; a fine-tuned head under a forgotten flag is the head."""
    sizes: dict[str, Any] = {"vocab_size": 6, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False))
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    found = load_embedding_and_head(read_target_folder(tmp_path, name="t"))
    assert not torch.equal(found.head_VD, found.embedding_VD)
    assert torch.equal(found.head_VD, theirs.get_output_embeddings().weight)
    assert torch.equal(found.embedding_VD, theirs.get_input_embeddings().weight)


def test_an_untied_familys_missing_head_is_refused_where_the_file_is_silent(tmp_path: Path) -> None:
    target = write(tmp_path, {"model_type": "llama"}, {"model.embed_tokens.weight": EMBEDDING})
    with pytest.raises(TargetError, match="not tied \\(default of model_type = llama\\)"):
        load_embedding_and_head(target)


@pytest.mark.parametrize(
    "config", [{"vocab_size": 7}, {"vocab_size": 5}, {"hidden_size": 8}], ids=["more rows", "fewer rows", "width"]
)
def test_a_table_of_another_shape_than_the_config_says_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    target = write(tmp_path, config, {"model.embed_tokens.weight": EMBEDDING})
    with pytest.raises(TargetError, match=r"embed_tokens.weight has the shape \[6, 4\], the config says"):
        load_embedding_and_head(target)


@pytest.mark.parametrize("index", [False, True], ids=["by their files", "by the index"])
def test_they_are_found_in_whichever_shard_holds_them(tmp_path: Path, index: bool) -> None:
    target = write(
        tmp_path,
        {"tie_word_embeddings": False},
        {"model.layers.0.mlp.up_proj.weight": OTHER},
        {"lm_head.weight": HEAD.bfloat16()},
        {"model.language_model.embed_tokens.weight": EMBEDDING.bfloat16()},
        index=index,
    )
    found = load_embedding_and_head(target)
    assert torch.equal(found.embedding_VD, EMBEDDING.bfloat16()), "in the stored dtype"
    assert torch.equal(found.head_VD, HEAD.bfloat16())


@pytest.mark.parametrize("index", [False, True], ids=["by their files", "by the index"])
@pytest.mark.parametrize("prefix", ["model.visual", "mtp", "model.mtp.layers.0", "vision_tower.text", "audio_tower"])
def test_towers_for_vision_sound_and_extra_tokens_do_not_count(tmp_path: Path, prefix: str, index: bool) -> None:
    others = {f"{prefix}.embed_tokens.weight": OTHER, f"{prefix}.lm_head.weight": OTHER + 1}
    tensors = {"model.language_model.embed_tokens.weight": EMBEDDING, "lm_head.weight": HEAD}
    found = load_embedding_and_head(write(tmp_path, {}, others, tensors, index=index))
    assert torch.equal(found.embedding_VD, EMBEDDING)
    assert torch.equal(found.head_VD, HEAD)


def test_a_name_that_merely_ends_alike_is_not_the_head(tmp_path: Path) -> None:
    tensors = {"model.embed_tokens.weight": EMBEDDING, "medusa_lm_head.weight": OTHER}
    assert torch.equal(load_embedding_and_head(write(tmp_path, {}, tensors)).head_VD, EMBEDDING)


def test_an_untied_target_without_a_head_is_refused(tmp_path: Path) -> None:
    target = write(tmp_path, {"tie_word_embeddings": False}, {"model.embed_tokens.weight": EMBEDDING})
    with pytest.raises(TargetError, match="holds no 'lm_head.weight', yet its config says that it is not tied"):
        load_embedding_and_head(target)


def test_a_target_without_an_embedding_is_refused(tmp_path: Path) -> None:
    target = write(tmp_path, {}, {"lm_head.weight": HEAD, "visual.embed_tokens.weight": OTHER})
    with pytest.raises(TargetError, match="no tensor that ends in 'embed_tokens.weight'"):
        load_embedding_and_head(target)


@pytest.mark.parametrize("index", [False, True], ids=["by their files", "by the index"])
def test_a_shard_that_is_cut_off_is_named(tmp_path: Path, index: bool) -> None:
    target = write(tmp_path, {}, {"model.embed_tokens.weight": EMBEDDING}, index=index)
    path = tmp_path / "model-0.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(TargetError, match=f"{path} cannot be read") as refused:
        load_embedding_and_head(target)
    assert "\n" not in str(refused.value)


def test_an_index_that_names_a_tensor_its_shard_lacks_is_refused(tmp_path: Path) -> None:
    target = write(tmp_path, {}, {"model.embed_tokens.weight": EMBEDDING}, index=True)
    path = tmp_path / "model.safetensors.index.json"
    names = {"model.embed_tokens.weight": "model-0.safetensors", "lm_head.weight": "model-0.safetensors"}
    path.write_text(json.dumps({"weight_map": names}))
    with pytest.raises(TargetError, match="cannot be read"):
        load_embedding_and_head(target)
