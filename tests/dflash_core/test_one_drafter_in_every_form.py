"""One drafter, saved as each trainer saves it, drafts the same; and every fact of its config has a say in the end.

From the files to the scored blocks, nothing in between replaced: a shift by one layer costs a trained drafter a few
per cent, which nobody notices, so it is compared bit by bit (traps 1, 3, 4, 6, 8, 10 to 17, 19, 24, 25, 42, 44, 45).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import polars
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_core import stages
from dflash_core.config import Config, parse_config
from dflash_core.drafter.model import Drafter
from dflash_core.target.runtime import load_model
from tests.golden import tiny_qwen3 as golden
from tests.support import tiny
from tests.support.direct import Evaluated, evaluate_directly

Tensors = dict[str, Tensor]
LAYERS = [1, 2, 4]
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "max_position_embeddings",
    "vocab_size",
)


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")


def flat(config: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """Return a z-lab config with its nested facts at the top."""
    return {key: value for key, value in config.items() if key != "dflash_config"} | config["dflash_config"] | changes


# Each saves the drafter of a z-lab config into a folder, as the named trainer does, with the target's tables at hand,
# and returns the checkpoint and the draft config that has to be given beside it, if any.
Saved = tuple[Path, Path | None]


def zlab(folder: Path, config: Mapping[str, Any], tensors: Tensors, tables: Tensors) -> Saved:
    return tiny.write_drafter(folder, dict(config), tensors), None


def old_zlab(folder: Path, config: Mapping[str, Any], tensors: Tensors, tables: Tensors) -> Saved:
    return tiny.write_drafter(folder, flat(config), tensors), None


def speculators(folder: Path, config: Mapping[str, Any], tensors: Tensors, tables: Tensors) -> Saved:
    written = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_config": {"proposal_methods": [{"speculative_tokens": config["block_size"] - 1}]},
        "transformer_layer_config": {key: config[key] for key in SIZES} | {"model_type": "qwen3"},
        "aux_hidden_state_layer_ids": [layer + 1 for layer in LAYERS],
        "block_size": config["block_size"],
        "draft_vocab_size": config["vocab_size"],
        "mask_token_id": config["dflash_config"]["mask_token_id"],
    }
    return tiny.write_drafter(folder, written, tensors | tables), None


def verl(folder: Path, config: Mapping[str, Any], tensors: Tensors, tables: Tensors) -> Saved:
    """Flat facts, a torch file, the embedding along, layers counted twice."""
    more = {"target_num_hidden_layers": 6, "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in LAYERS]}
    write_json(folder / "config.json", flat(config, **more))
    embedding = {"embed_tokens.weight": tables["embed_tokens.weight"]}
    torch.save(
        {f"draft_model.{name}": tensor for name, tensor in (tensors | embedding).items()}, folder / "pytorch_model.bin"
    )
    write_json(folder / "metadata.json", {"step": 1, "format": "hf", "complete": True})
    return folder, None


def specforge(folder: Path, config: Mapping[str, Any], tensors: Tensors, tables: Tensors) -> Saved:
    """The weights and the optimizer in one file, the config elsewhere."""
    draft_config = folder.parent / f"{folder.name}.draft.json"
    nested = config["dflash_config"] | {"projector_type": "dflash", "num_anchors": 512}
    write_json(draft_config, dict(config) | {"dflash_config": nested})
    folder.mkdir()
    noise = {name: torch.randn_like(tensor) for name, tensor in tensors.items()}
    torch.save(noise, folder / "training_state_rank0.pt")
    payload = {"draft_state_dict": tensors, "global_step": 1, "replicated_optimizer_state": {"exp_avg": noise}}
    torch.save(payload, folder / "training_state.pt")
    return folder, draft_config


def model_optimizer(folder: Path, config: Mapping[str, Any], tensors: Tensors, tables: Tensors) -> Saved:
    """A checkpoint of the trainer with the whole target beside the drafter's module, under the same layer names."""
    write_json(folder / "config.json", dict(config))
    own = {f"module.dflash_module.{name}": tensor for name, tensor in tensors.items()}
    target = {f"model.{name}": torch.randn_like(tensor) for name, tensor in tensors.items() if "layers." in name}
    save_file(own | target | {"lm_head.weight": torch.randn(9, 9)}, folder / "model.safetensors")
    write_json(folder / "trainer_state.json", {"global_step": 1})
    return folder, None


def nemo(folder: Path, config: Mapping[str, Any], tensors: Tensors, tables: Tensors) -> Saved:
    consolidated = folder / "model" / "consolidated"
    write_json(consolidated / "config.json", dict(config) | {"is_causal": False})
    names = sorted(tensors)
    parts = {f"model-0000{i}-of-00002.safetensors": names[i - 1 :: 2] for i in (1, 2)}
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, consolidated / file)
    weight_map = {name: file for file, held in parts.items() for name in held}
    write_json(consolidated / "model.safetensors.index.json", {"weight_map": weight_map})
    meta = {"global_step": 1, "block_size": 8, "mask_token_id": tiny.MASK_TOKEN_ID, "target_layer_ids": LAYERS}
    torch.save(meta, folder / "dflash_meta.pt")
    return folder, None


def own_script(folder: Path, config: Mapping[str, Any], tensors: Tensors, tables: Tensors) -> Saved:
    """One torch file with everything: wrapped names, optimizer, arguments, and the model's config as a dict."""
    folder.mkdir()
    wrapped = {f"module._orig_mod.{name}": tensor for name, tensor in (tensors | tables).items()}
    content = {
        "model_state_dict": wrapped,
        "optimizer": {"state": {0: {"exp_avg": torch.randn(9)}}},
        "args": argparse.Namespace(block_size=8, lr=1e-4),
        "model_config": dict(config),
    }
    torch.save(content, folder / "checkpoint.pt")
    return folder, None


FORMS: dict[str, Callable[[Path, Mapping[str, Any], Tensors, Tensors], Saved]] = {
    "z-lab": zlab,
    "z-lab, old": old_zlab,
    "speculators": speculators,
    "verl-SpeCo": verl,
    "SpecForge": specforge,
    "Model-Optimizer": model_optimizer,
    "NeMo": nemo,
    "own script": own_script,
}


class Scene:
    """A target, a random drafter of it, and the drafter's blocks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = golden.make_config(folder)
        self.target = tiny.read_target_folder(folder / "target", name="tiny-qwen3")
        self.draft_config = tiny.draft_config(self.target)
        self.tensors = tiny.random_weights(self.draft_config, self.target, seed=4)[1]
        (path,) = (folder / "target").glob("*.safetensors")
        table = load_file(path)["model.embed_tokens.weight"]
        self.tables = {"embed_tokens.weight": table, "lm_head.weight": table.clone()}
        self.plain = self.rows(self.save("plain", zlab)[0])

    def save(self, name: str, form: Callable[..., Saved], **changes: Any) -> Saved:
        config = self.draft_config | changes
        return form(self.folder / "forms" / name, config, self.tensors, self.tables)

    def with_drafter(self, draft_config: Path | None) -> Config:
        drafter = {"anchors": "all"} | ({} if draft_config is None else {"config": str(draft_config)})
        return parse_config(self.config.model_dump() | {"drafter": drafter}, where="test")

    def evaluate(self, checkpoint: Path, draft_config: Path | None = None) -> Evaluated:
        return evaluate_directly(self.with_drafter(draft_config), checkpoint)

    def rows(self, checkpoint: Path, draft_config: Path | None = None) -> polars.DataFrame:
        blocks = self.evaluate(checkpoint, draft_config).record.blocks
        assert blocks is not None
        return blocks.sort("prompt_id", "anchor_index")


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    torch.set_num_threads(1)
    made = tmp_path_factory.mktemp("forms")
    (made / "forms").mkdir()
    return Scene(made)


def test_the_rows_tell_drafters_apart(scene: Scene) -> None:
    """The rank of the target's token at the first miss: hardly two blocks have the same."""
    assert scene.plain.height > 100
    assert scene.plain["miss_rank"].n_unique() > 60


@pytest.mark.parametrize("form", FORMS)
def test_the_same_drafter_in_another_form_gives_the_same_rows(scene: Scene, form: str) -> None:
    saved = scene.save(f"as {form}", FORMS[form])
    evaluated = scene.evaluate(*saved)
    assert evaluated.record.blocks is not None
    assert evaluated.record.blocks.sort("prompt_id", "anchor_index").equals(scene.plain)
    assert evaluated.manifests["drafter"]["meta"]["own_tables"] == [], "copies of the target's are left where they are"


@pytest.mark.parametrize(("form", "block_size"), [("z-lab", 7), ("speculators", 6), ("verl-SpeCo", 5)])
def test_each_form_feeds_transformers_hidden_states_of_the_layer_after(
    scene: Scene, form: str, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers 1, 2, 4 are `hidden_states[2]`, `[3]`, `[5]`, however the form counts, side by side in this order."""
    fed: list[Tensor] = []
    read = Drafter.read_context

    def watched(drafter: Drafter, features_TF: Tensor) -> Any:
        fed.append(features_TF)
        return read(drafter, features_TF)

    monkeypatch.setattr(Drafter, "read_context", watched)
    # Each with blocks of another size, or the second would be found in the store: it is the same drafter.
    saved = scene.save(f"fed by {form}", FORMS[form], block_size=block_size)
    scene.evaluate(*saved)
    model = load_model(scene.target, "float32")
    config = scene.with_drafter(None)
    transcripts = stages.read_transcripts(config, stages.plan_target(config))
    assert len(fed) == len(transcripts)
    for features_TF, transcript in zip(fed, transcripts, strict=True):
        ids = torch.tensor([[*transcript.prompt_ids, *transcript.response_ids]])
        with torch.inference_mode():
            states = model(ids, output_hidden_states=True).hidden_states
        expected = torch.cat([states[index][0] for index in (2, 3, 5)], dim=-1)
        torch.testing.assert_close(features_TF, expected, rtol=1e-5, atol=1e-5)


def nested(**changes: Any) -> dict[str, Any]:
    return {"dflash_config": {"mask_token_id": tiny.MASK_TOKEN_ID, "target_layer_ids": LAYERS} | changes}


SLIDING = {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True, "sliding_window": 6}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
SAID_OTHERWISE: dict[str, dict[str, Any]] = {
    "one layer deeper": nested(target_layer_ids=[2, 3, 5], last_layer_before_norm=True),
    "one layer less deep": nested(target_layer_ids=[0, 1, 3]),
    "layers in another order": nested(target_layer_ids=[4, 2, 1]),
    "another mask token": nested(mask_token_id=5),
    "a scaled embedding": nested(input_embedding_scale=3.0),
    "rows that draft the next position": {"sample_from_anchor": True},
    "rows of JetSpec's shift": nested(draft_shift=True),
    "slots that see none after them": {"is_causal": True},
    "the same by JetSpec's key": nested(causal_head=True),
    "a window, slots causal": SLIDING,
    "a window, slots free": SLIDING | {"is_causal": False},
    "a window by Model-Optimizer's switch": nested(use_swa=True, swa_window_size=9, causal=False),
    "a window one wider": SLIDING | {"sliding_window": 7},
    "another base of the rotation": {"rope_theta": 500.0},
    "another base in the new form": {"rope_theta": None, "rope_parameters": {"rope_theta": 500.0}},
    "YaRN": {"rope_scaling": YARN},
    "YaRN without its scale": {"rope_scaling": YARN | {"attention_factor": 1.0}},
    "another epsilon": {"rms_norm_eps": 0.5},
    "shorter blocks": {"block_size": 5},
}


@pytest.fixture(scope="module")
def seen() -> dict[str, polars.DataFrame]:
    return {}


@pytest.mark.parametrize("name", SAID_OTHERWISE)
def test_what_the_config_says_otherwise_makes_other_rows(
    scene: Scene, seen: dict[str, polars.DataFrame], name: str
) -> None:
    rows = scene.rows(*scene.save(name, zlab, **SAID_OTHERWISE[name]))
    assert not rows.equals(scene.plain), "the fact was dropped on the way"
    same = [other for other, theirs in seen.items() if theirs.equals(rows)]
    alike = {
        "the same by JetSpec's key": ["slots that see none after them"],
        "another base in the new form": ["another base of the rotation"],
    }
    assert same == alike.get(name, [])
    seen[name] = rows
