"""Each trainer's folder, written as it writes it, with the real library: found, read, and complete only when it is."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save, save_file

from dflash_core.checkpoints import check_readiness, inspect_checkpoint, list_checkpoints, stream_checkpoint
from dflash_core.errors import CheckpointNotReady, UnsupportedCheckpoint
from tests.dflash_core.checkpoints.checkpoint_files import adamw_state, drafter_tensors, training_args

Tensors = dict[str, torch.Tensor]
FROZEN = {"embed_tokens.weight": torch.randn(400, 32), "lm_head.weight": torch.randn(400, 32)}
ZLAB_CONFIG = {"architectures": ["DFlashDraftModel"], "block_size": 16, "num_hidden_layers": 2}


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def prefixed(tensors: Tensors, prefix: str) -> Tensors:
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


# Each writes one step into a run's folder, as the named trainer does, and returns the step's folder.


def zlab(run: Path, tensors: Tensors) -> Path:
    run.mkdir(exist_ok=True)
    save_file(tensors, run / "model.safetensors")
    write_json(run / "config.json", ZLAB_CONFIG)
    return run


def speculators(run: Path, tensors: Tensors) -> Path:
    folder = run / "3"
    write_json(folder / "config.json", {"speculators_model_type": "dflash", "block_size": 8})
    save_file(tensors | FROZEN, folder / "model.safetensors")
    torch.save(adamw_state(tensors), folder / "optimizer_state_dict.pt")
    torch.save({"last_epoch": 1}, folder / "scheduler_state_dict.pt")
    write_json(folder / "training_state.json", {"epoch": 3, "local_step": 5, "global_step": 700})
    (run / "checkpoint_best").symlink_to("3")
    (run / "epoch3_step700").symlink_to("3")
    return folder


def specforge(run: Path, tensors: Tensors) -> Path:
    folder = run / "run-step700"
    folder.mkdir(parents=True)
    torch.save(adamw_state(tensors), folder / "training_state_rank0.pt")
    payload = {
        "draft_state_dict": tensors,
        "global_step": 700,
        "epoch": 1,
        "strategy": "dflash",
        "run_id": "run",
        "world_size": 1,
        "replicated_optimizer_state": adamw_state(tensors),
    }
    torch.save(payload, folder / "training_state.pt.tmp")
    os.replace(folder / "training_state.pt.tmp", folder / "training_state.pt")
    (run / "run-latest").symlink_to("run-step700")
    return folder


def old_specforge(run: Path, tensors: Tensors) -> Path:
    folder = run / "epoch_1_step_700"
    folder.mkdir(parents=True)
    torch.save(
        {"epoch": 1, "global_step": 700, "args": training_args(), "optimizer": adamw_state(tensors)},
        folder / "training_state.pt",
    )
    save_file(tensors, folder / "model.safetensors")
    write_json(folder / "config.json", ZLAB_CONFIG)
    return folder


def hf_trainer(run: Path, tensors: Tensors) -> Path:
    folder = run / "checkpoint-700"
    folder.mkdir(parents=True)
    base = prefixed({name: torch.ones(3) for name in tensors if name.startswith("layers.")}, "model.")
    whole = prefixed(tensors, "dflash_module.") | base | {"lm_head.weight": torch.ones(9, 3)}
    save_file(whole, folder / "model.safetensors")
    torch.save(training_args(), folder / "training_args.bin")
    torch.save(adamw_state(tensors), folder / "optimizer.pt")
    torch.save({"last_epoch": 1}, folder / "scheduler.pt")
    torch.save({"cpu": torch.get_rng_state()}, folder / "rng_state.pth")
    write_json(folder / "trainer_state.json", {"global_step": 700, "epoch": 1.5, "log_history": [{"loss": 2.5}]})
    return folder


def hf_trainer_with_torch_shards(run: Path, tensors: Tensors) -> Path:
    folder = run / "checkpoint-700"
    folder.mkdir(parents=True)
    halves = [dict(list(tensors.items())[i::2]) for i in range(2)]
    weight_map = {}
    for number, half in enumerate(halves, 1):
        name = f"pytorch_model-{number:05d}-of-00002.bin"
        torch.save(half, folder / name)
        weight_map |= dict.fromkeys(half, name)
    write_json(folder / "pytorch_model.bin.index.json", {"metadata": {}, "weight_map": weight_map})
    torch.save(adamw_state(tensors), folder / "optimizer.bin")
    write_json(folder / "trainer_state.json", {"global_step": 700})
    return folder


def modelopt(run: Path, tensors: Tensors) -> Path:
    folder = run / "exported-checkpoint-700"
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    write_json(folder / "config.json", {**ZLAB_CONFIG, "dflash_config": {"use_swa": True}})
    return folder


def nemo(run: Path, tensors: Tensors) -> Path:
    folder = run / "epoch_1_step_700"
    consolidated = folder / "model" / "consolidated"
    consolidated.mkdir(parents=True)
    halves = [dict(list(tensors.items())[i::2]) for i in range(2)]
    weight_map = {}
    for number, half in enumerate(halves, 1):
        name = f"model-{number:05d}-of-00002.safetensors"
        save_file(half, consolidated / name)
        weight_map |= dict.fromkeys(half, name)
    write_json(consolidated / "model.safetensors.index.json", {"weight_map": weight_map})
    write_json(consolidated / "config.json", ZLAB_CONFIG)
    save_file(tensors, folder / "model" / "shard-00001-model-00001-of-00001.safetensors")
    (folder / "optim").mkdir()
    (folder / "optim" / ".metadata").write_bytes(b"never read")
    meta = {"global_step": 700, "epoch": 1, "block_size": 16, "mask_token_id": 7, "target_layer_ids": [1, 2, 3]}
    torch.save(meta, folder / "dflash_meta.pt")
    (run / "LATEST").symlink_to("epoch_1_step_700")
    return folder


def deepspec(run: Path, tensors: Tensors) -> Path:
    folder = run / "step_700"
    folder.mkdir(parents=True)
    save_file(tensors | FROZEN, folder / "model.safetensors")
    write_json(folder / "config.json", {"architectures": ["Qwen3DSparkModel"], "block_size": 7})
    (folder / "train_config.py").write_text("lr = 1")
    torch.save(adamw_state(tensors), folder / "training_state.rank0.pt")
    (run / "step_latest").symlink_to("step_700")
    return folder


def verl_speco(run: Path, tensors: Tensors) -> Path:
    folder = run / "draft_step_700"
    folder.mkdir(parents=True)
    torch.save(tensors | {"embed_tokens.weight": FROZEN["embed_tokens.weight"]}, folder / "pytorch_model.bin")
    write_json(folder / "config.json", {"model_type": "dflash", "block_size": 16})
    (folder / "optimizer").mkdir()
    (folder / "optimizer" / ".metadata").write_bytes(b"never read")
    torch.save(adamw_state(tensors), folder / "trainer_state.pt")
    write_json(folder / "metadata.json", {"step": 700, "format": "hf", "complete": True})
    return folder


def torchspec(run: Path, tensors: Tensors) -> Path:
    folder = run / "iter_0000700"
    (folder / "model").mkdir(parents=True)
    (folder / "optimizer").mkdir()
    state = {"model_state": {"draft_model": tensors | {"embed_tokens.weight": FROZEN["embed_tokens.weight"]}}}
    dcp.save(state, checkpoint_id=folder / "model", no_dist=True)
    dcp.save({"optimizer": {"exp_avg": torch.randn(9, 9)}}, checkpoint_id=folder / "optimizer", no_dist=True)
    torch.save({"torch": torch.get_rng_state()}, folder / "rng.pt")
    write_json(folder / "meta.json", {"global_step": 700})
    (run / "latest_checkpointed_iteration.txt").write_text("700")
    return folder


def nemo_shards(run: Path, tensors: Tensors) -> Path:
    folder = nemo(run, tensors)
    shutil.rmtree(folder / "model" / "consolidated")
    write_json(folder / "model" / ".hf_metadata" / "config.json", ZLAB_CONFIG)
    return folder


def custom(run: Path, tensors: Tensors) -> Path:
    run.mkdir(exist_ok=True)
    content = {"draft_model": prefixed(tensors, "module._orig_mod."), "optimizer": adamw_state(tensors), "step": 700}
    torch.save(content, run / "checkpoint-700.pt")
    return run / "checkpoint-700.pt"


WRITERS = {
    "z-lab": zlab,
    "speculators": speculators,
    "SpecForge": specforge,
    "SpecForge (old)": old_specforge,
    "HF Trainer": hf_trainer,
    "HF Trainer, torch shards": hf_trainer_with_torch_shards,
    "Model-Optimizer": modelopt,
    "NeMo": nemo,
    "NeMo, shards alone": nemo_shards,
    "DeepSpec": deepspec,
    "TorchSpec": torchspec,
    "verl-SpeCo": verl_speco,
    "custom": custom,
}


@pytest.mark.parametrize("trainer", WRITERS)
def test_a_trainers_checkpoint_is_found_read_and_told_by_its_name(tmp_path: Path, trainer: str) -> None:
    tensors = drafter_tensors(dtype=torch.bfloat16)
    folder = WRITERS[trainer](tmp_path / "run", tensors)
    found = list_checkpoints(str(tmp_path / "run"))
    assert [one.url for one in found] == [str(folder)]
    readiness = check_readiness(found[0], found[0].signature)
    assert (readiness.ready, readiness.reason) == (True, "unchanged over two looks, and complete")
    inspection = inspect_checkpoint(str(folder))
    assert inspection.dialect == trainer.partition(",")[0]
    assert inspection.refusal is None
    assert inspection.contradictions == ()
    result = stream_checkpoint(str(folder), tmp_path / "out.safetensors")
    assert result.path.read_bytes() == save(tensors)
    assert result.ref.step == (None if trainer == "z-lab" else 700)
    assert result.ref.run == (tmp_path.name if trainer == "z-lab" else "run")
    assert result.bytes_read < result.bytes_wanted + 200_000


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def rewrite_weights(folder: Path) -> None:
    """Begin the next save into the same folder."""
    later = (folder / "training_state.json").stat().st_mtime_ns + 5_000_000_000
    os.utime(folder / "model.safetensors", ns=(later, later))


def point_latest_elsewhere(folder: Path) -> None:
    (folder.parent / "step_latest").unlink()
    (folder.parent / "step_600").mkdir()
    (folder.parent / "step_latest").symlink_to("step_600")


def say_incomplete(folder: Path) -> None:
    write_json(folder / "metadata.json", {"step": 700, "complete": False})


@pytest.mark.parametrize(
    ("trainer", "undo", "reason"),
    [
        ("speculators", remove("training_state.json"), "training_state.json, which speculators writes last"),
        ("speculators", rewrite_weights, "older than its weights"),
        ("HF Trainer", remove("trainer_state.json"), "trainer_state.json, which HF Trainer writes last"),
        ("Model-Optimizer", remove("config.json"), "config.json, which Model-Optimizer writes last"),
        ("NeMo", lambda folder: (folder / ".incomplete").touch(), "marked '.incomplete'"),
        ("DeepSpec", point_latest_elsewhere, "step_latest still leads to step 600"),
        ("TorchSpec", remove("meta.json"), "meta.json, which TorchSpec writes last"),
        ("TorchSpec", remove("model/.metadata"), ".metadata"),
        ("verl-SpeCo", remove("metadata.json"), "metadata.json, which verl-SpeCo writes last"),
        ("verl-SpeCo", say_incomplete, "complete: false"),
        (
            "HF Trainer, torch shards",
            remove("pytorch_model-00002-of-00002.bin"),
            "1 of 2 shards that its index names are missing: 'pytorch_model-00002-of-00002.bin'",
        ),
    ],
)
def test_without_what_the_trainer_writes_last_it_is_not_ready(
    tmp_path: Path, trainer: str, undo: Callable[[Path], None], reason: str
) -> None:
    folder = WRITERS[trainer](tmp_path / "run", drafter_tensors())
    undo(folder)
    inspection = inspect_checkpoint(str(folder))
    assert not inspection.ready
    assert reason in str(inspection.not_ready_reason)
    with pytest.raises(CheckpointNotReady):
        stream_checkpoint(str(folder), tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()
    found = next(one for one in list_checkpoints(str(folder.parent)) if one.url == str(folder))
    readiness = check_readiness(found, found.signature)
    assert not readiness.ready
    assert ".incomplete" in reason or reason in readiness.reason


def test_of_a_copied_folder_the_weights_can_be_named_themselves(tmp_path: Path) -> None:
    tensors = drafter_tensors()
    folder = speculators(tmp_path / "run", tensors)
    rewrite_weights(folder)
    result = stream_checkpoint(str(folder / "model.safetensors"), tmp_path / "out.safetensors")
    assert result.path.read_bytes() == save(tensors)


def test_a_link_is_the_checkpoint_that_it_leads_to(tmp_path: Path) -> None:
    folder = specforge(tmp_path / "run", drafter_tensors())
    link = inspect_checkpoint(str(tmp_path / "run" / "run-latest")).ref
    own = inspect_checkpoint(str(folder)).ref
    assert (link.run, link.step, link.identity) == (own.run, own.step, own.identity)


def test_facts_of_a_state_that_lies_beside_the_weights_are_found(tmp_path: Path) -> None:
    facts = inspect_checkpoint(str(old_specforge(tmp_path / "run", drafter_tensors()))).facts
    assert facts["global_step"] == 700
    assert facts["args.block_size"] == 8


def test_facts_of_nemos_own_file_are_found(tmp_path: Path) -> None:
    inspection = inspect_checkpoint(str(nemo(tmp_path / "run", drafter_tensors())))
    assert inspection.facts["target_layer_ids"] == [1, 2, 3]
    assert inspection.config == ZLAB_CONFIG


# Two containers in one folder.


def test_two_containers_of_the_same_tensors_are_one(tmp_path: Path) -> None:
    tensors = drafter_tensors()
    save_file(tensors, tmp_path / "model.safetensors")
    torch.save({"model": prefixed(tensors, "module.") | FROZEN, "step": 5}, tmp_path / "checkpoint.pt")
    inspection = inspect_checkpoint(str(tmp_path))
    assert inspection.ref.layout == "safetensors"
    assert inspection.ref.step == 5
    assert load_file(stream_checkpoint(str(tmp_path), tmp_path / "o.st").path).keys() == tensors.keys()


def test_two_containers_with_other_contents_are_reported_and_not_decided_between(tmp_path: Path) -> None:
    tensors = drafter_tensors()
    save_file(tensors, tmp_path / "model.safetensors")
    others: dict[str, Tensors] = {
        "the bytes of 'norm.weight'": tensors | {"norm.weight": tensors["norm.weight"] + 1},
        "'fc.weight' is float32": tensors | {"fc.weight": tensors["fc.weight"].bfloat16()},
        "only one of them holds 'layers.1.": {k: v for k, v in tensors.items() if not k.startswith("layers.1.")},
    }
    for difference, other in others.items():
        torch.save({"model": other}, tmp_path / "checkpoint.pt")
        with pytest.raises(UnsupportedCheckpoint, match=r"'model\.safetensors' and 'checkpoint\.pt' differ") as caught:
            inspect_checkpoint(str(tmp_path))
        assert difference in str(caught.value)
        result = stream_checkpoint(str(tmp_path / "model.safetensors"), tmp_path.with_suffix(".st"))
        assert result.path.read_bytes() == save(tensors)


def test_shards_without_an_index_are_put_together_only_when_all_are_there(tmp_path: Path) -> None:
    tensors = drafter_tensors()
    halves = [dict(list(tensors.items())[i::2]) for i in range(2)]
    for number, half in enumerate(halves, 1):
        save_file(half, tmp_path / f"dflash_draft_model-{number:05d}-of-00002.safetensors")
    assert load_file(stream_checkpoint(str(tmp_path), tmp_path / "o.st").path).keys() == tensors.keys()
    (tmp_path / "o.st").unlink()
    (tmp_path / "dflash_draft_model-00002-of-00002.safetensors").unlink()
    inspection = inspect_checkpoint(str(tmp_path))
    assert "'dflash_draft_model-00002-of-00002.safetensors'" in str(inspection.not_ready_reason)


def test_a_learned_mask_vector_beside_the_weights_is_refused(tmp_path: Path) -> None:
    folder = zlab(tmp_path / "run", drafter_tensors())
    torch.save({"weight": torch.ones(32)}, folder / "mask_embedding.pt")
    with pytest.raises(UnsupportedCheckpoint, match="learned mask vector"):
        inspect_checkpoint(str(folder))


def test_contradictions_are_named(tmp_path: Path) -> None:
    folder = old_specforge(tmp_path / "run", drafter_tensors())
    write_json(folder / "config.json", {**ZLAB_CONFIG, "num_hidden_layers": 5})
    shutil.move(folder, tmp_path / "run" / "epoch_1_step_600")
    said = inspect_checkpoint(str(tmp_path / "run" / "epoch_1_step_600")).contradictions
    assert "its name says step 600, its content step 700" in said[0]
    assert "num_hidden_layers = 5, the tensors make 2 layers" in said[1]
