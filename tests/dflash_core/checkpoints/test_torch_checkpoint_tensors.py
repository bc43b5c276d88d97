"""Which tensors of a file of torch.save are the drafter's, under which name, and what is refused by name."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch

from dflash_core.checkpoints import inspect_checkpoint, stream_checkpoint
from dflash_core.errors import CheckpointMismatch, UnsupportedCheckpoint
from tests.dflash_core.checkpoints.checkpoint_files import (
    adamw_state,
    dflash2_tensors,
    drafter_tensors,
)
from tests.support.torch_files import assert_same, refusal, saved, streamed


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
