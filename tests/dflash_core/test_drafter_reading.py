"""The drafter of a checkpoint on disk: where its config is looked for, and what else in the checkpoint must agree."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dflash_core.checkpoints import inspect_checkpoint
from dflash_core.config import Config, DrafterSettings
from dflash_core.drafter.shapes import expected_shapes
from dflash_core.drafter.spec import DrafterSpec, read_drafter_spec
from dflash_core.drafter_reading import config_in_facts, read_drafter
from dflash_core.errors import CheckpointMismatch, DraftConfigError, UnsupportedCheckpoint
from dflash_core.target.model_config import read_model_config
from flows import inspecting
from tests.support.draft_configs import CONFIG, TARGET, one_line, read, shapes_for

SPECULATORS: dict[str, Any] = {
    "speculators_model_type": "dflash",
    "aux_hidden_state_layer_ids": [4, 2, 6],
    "block_size": 8,
    "draft_vocab_size": 100,
    "mask_token_id": 99,
    "transformer_layer_config": {
        "head_dim": 10,
        "hidden_size": 32,
        "intermediate_size": 48,
        "max_position_embeddings": 256,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rope_theta": 10000.0,
        "vocab_size": 100,
    },
}
DSPARK: dict[str, Any] = {key: value for key, value in CONFIG.items() if key != "dflash_config"} | {
    "architectures": ["Qwen3DSparkModel"],
    "mask_token_id": 99,
    "target_layer_ids": [3, 1, 5],
    "markov_rank": 4,
    "markov_head_type": "gated",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
GATED = {
    "markov_w1.weight": [100, 4],
    "markov_w2.weight": [100, 4],
    "gate_proj.weight": [4, 36],
    "gate_proj.bias": [4],
    "confidence_proj.weight": [1, 36],
    "confidence_proj.bias": [1],
}


def tensors(shapes: dict[str, list[int]] | None = None) -> dict[str, Tensor]:
    """Return tensors of the shapes that `tests.support.draft_configs` writes out, and more."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in (shapes_for() | (shapes or {})).items()}


def release(folder: Path, config: dict[str, Any] | None, weights: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def read_at(path: Path, config: Path | None = None) -> DrafterSpec:
    settings = Config(drafter=DrafterSettings(config=None if config is None else str(config)))
    return read_drafter(inspect_checkpoint(str(path)), settings, TARGET)


def written(path: Path, config: dict[str, Any]) -> Path:
    path.write_text(json.dumps(config))
    return path


class TestWhereTheConfigLies:
    def test_beside_the_weights(self, tmp_path: Path) -> None:
        assert read_at(release(tmp_path / "c", CONFIG, tensors())) == read()

    def test_in_a_speculators_folder_with_copies_of_the_targets_tables(self, tmp_path: Path) -> None:
        frozen = {"embed_tokens.weight": [100, 32], "lm_head.weight": [100, 32], "verifier_norm.weight": [32]}
        spec = read_at(release(tmp_path / "c", SPECULATORS, tensors(frozen)))
        assert spec == read()
        assert spec.dialect == "speculators, by speculators_model_type = 'dflash'"

    @pytest.mark.parametrize("under", ["config", "draft_config"])
    def test_in_one_torch_file_with_the_weights(self, tmp_path: Path, under: str) -> None:
        torch.save({"model": tensors(), "step": 7, under: CONFIG}, tmp_path / "c.pt")
        spec = read_at(tmp_path / "c.pt")
        assert spec == read()
        assert spec.sources["mask_token_id"] == f"{under} in the checkpoint: dflash_config.mask_token_id"

    def test_settings_of_the_run_are_no_config_of_a_model(self, tmp_path: Path) -> None:
        torch.save({"model": tensors(), "config": {"lr": 1e-4, "block_size": 8}}, tmp_path / "c.pt")
        with pytest.raises(DraftConfigError, match=r"carries no config\.json.*set drafter\.config"):
            read_at(tmp_path / "c.pt")
        assert config_in_facts({"args.architectures": ["x"], "args.lr": 1.0}) is None

    def test_a_configured_one_goes_before_all_others(self, tmp_path: Path) -> None:
        torch.save({"model": tensors(), "config": CONFIG | {"block_size": 4}}, tmp_path / "c.pt")
        assert read_at(tmp_path / "c.pt", written(tmp_path / "d.json", CONFIG)).block_size == 8

    def test_of_another_dialect_than_the_checkpoints_own(self, tmp_path: Path) -> None:
        folder = release(tmp_path / "c", SPECULATORS, tensors())
        assert read_at(folder, written(tmp_path / "d.json", CONFIG)) == read()


class TestAgreement:
    def test_nemos_own_facts_complete_its_config_and_must_agree_with_it(self, tmp_path: Path) -> None:
        folder = tmp_path / "epoch_0_step_7"
        silent = {key: value for key, value in CONFIG.items() if key not in ("block_size", "dflash_config")}
        release(folder / "model" / "consolidated", silent, tensors())
        meta = {"global_step": 7, "block_size": 8, "mask_token_id": 99, "target_layer_ids": [3, 1, 5]}
        torch.save(meta, folder / "dflash_meta.pt")
        spec = read_at(folder)
        assert spec == read()
        assert "training args" in spec.sources["target_layer_ids"]
        torch.save(meta | {"target_layer_ids": [1, 3, 5]}, folder / "dflash_meta.pt")
        (folder / "model" / "consolidated" / "config.json").write_text(json.dumps(CONFIG))
        with pytest.raises(DraftConfigError, match=r"\(3, 1, 5\) contradicts .*\[1, 3, 5\]"):
            read_at(folder)

    def test_what_only_a_rule_decided_may_be_said_in_the_configured_one(self, tmp_path: Path) -> None:
        nested = CONFIG["dflash_config"] | {"causal_head": True}
        folder = release(tmp_path / "c", CONFIG | {"dflash_config": nested}, tensors())
        said = CONFIG | {"dflash_config": nested | {"draft_shift": True}}
        assert read_at(folder, written(tmp_path / "d.json", said)).row_alignment == "shifted_short"

    def test_what_the_own_config_states_is_corrected_on_purpose_or_not_at_all(self, tmp_path: Path) -> None:
        folder = release(tmp_path / "c", CONFIG, tensors())
        layers = CONFIG["dflash_config"] | {"target_layer_ids": [2, 0, 4]}
        shifted = CONFIG | {"dflash_config": layers}
        with pytest.raises(DraftConfigError, match=r"\(2, 0, 4\) contradicts .*\(3, 1, 5\).*'corrects'") as error:
            read_at(folder, written(tmp_path / "d.json", shifted))
        assert str(tmp_path / "d.json") in one_line(error)
        corrected = shifted | {"corrects": ["target_layer_ids"]}
        assert read_at(folder, written(tmp_path / "d.json", corrected)).target_layer_ids == (2, 0, 4)

    @pytest.mark.parametrize("bad", ["target_layer_ids", ["layers"], [3]], ids=repr)
    def test_a_correction_of_no_fact_is_named(self, tmp_path: Path, bad: Any) -> None:
        folder = release(tmp_path / "c", CONFIG, tensors())
        with pytest.raises(DraftConfigError, match="corrects = .* must list facts"):
            read_at(folder, written(tmp_path / "d.json", CONFIG | {"corrects": bad}))

    def test_a_config_that_contradicts_itself_is_replaced_by_the_configured_one(self, tmp_path: Path) -> None:
        """NeMo stamps a causal drafter as not causal; the file on the training box stays as it is."""
        nested = CONFIG["dflash_config"] | {"causal": True}
        folder = release(tmp_path / "c", CONFIG | {"is_causal": False, "dflash_config": nested}, tensors())
        with pytest.raises(DraftConfigError, match="is_causal = False contradicts dflash_config.causal = True"):
            read_at(folder)
        right = CONFIG | {"dflash_config": nested}
        assert read_at(folder, written(tmp_path / "d.json", right)).is_causal == (True, True)


class TestTensors:
    def test_a_reduced_vocabulary_is_read_with_its_maps_and_its_head(self, tmp_path: Path) -> None:
        weights = tensors({"lm_head.weight": [40, 32]}) | {
            "d2t": torch.arange(40),
            "t2d": torch.arange(100) < 40,
        }
        path = release(tmp_path / "c", SPECULATORS | {"draft_vocab_size": 40}, weights)
        assert read_at(path).draft_vocab_size == 40
        assert read_drafter(inspect_checkpoint(str(path)), Config(), TARGET).draft_vocab_size == 40

    def test_a_head_of_another_length_than_the_maps_is_refused(self, tmp_path: Path) -> None:
        weights = tensors({"lm_head.weight": [41, 32]}) | {"d2t": torch.arange(40)}
        with pytest.raises(UnsupportedCheckpoint, match=r"lm_head\.weight has the shape \[41, 32\]"):
            read_at(release(tmp_path / "c", SPECULATORS | {"draft_vocab_size": 40}, weights))

    def test_a_reduced_vocabulary_without_a_head_over_it_is_refused_before_the_target_runs(
        self, tmp_path: Path
    ) -> None:
        path = release(tmp_path / "c", SPECULATORS | {"draft_vocab_size": 40}, tensors() | {"d2t": torch.arange(40)})
        with pytest.raises(UnsupportedCheckpoint, match=r"no lm_head\.weight over the 40 tokens") as error:
            read_at(path)
        assert "\n" not in str(error.value)
        assert "config.json: draft_vocab_size" in str(error.value)
        assert "save the whole drafter" in str(error.value)

    def test_a_map_of_another_type_is_named(self, tmp_path: Path) -> None:
        weights = tensors() | {"d2t": torch.zeros(40)}
        with pytest.raises(UnsupportedCheckpoint, match="'d2t' is of type float32, expected int64"):
            read_at(release(tmp_path / "c", CONFIG, weights))

    def test_a_quantised_weight_is_named(self, tmp_path: Path) -> None:
        weights = tensors()
        weights["fc.weight"] = weights["fc.weight"].to(torch.float8_e4m3fn)
        with pytest.raises(UnsupportedCheckpoint, match=r"'fc\.weight' is of type float8_e4m3fn.*scales"):
            read_at(release(tmp_path / "c", CONFIG, weights))

    def test_dsparks_heads_under_flat_names_are_its_heads(self, tmp_path: Path) -> None:
        spec = read_at(release(tmp_path / "c", DSPARK, tensors(GATED)))
        assert (spec.proposal_rule, spec.markov_rank, spec.markov_head_type) == ("dspark", 4, "gated")
        assert (spec.has_confidence_head, spec.confidence_head_with_markov) == (True, True)
        assert spec.num_drafts == 8

    @pytest.mark.parametrize(
        ("config", "more"),
        [(CONFIG, GATED), (DSPARK | {"markov_rank": 0, "confidence_head_with_markov": False}, GATED)],
    )
    def test_heads_that_the_config_does_not_call_for_are_refused_before_anything_is_fetched(
        self, tmp_path: Path, config: dict[str, Any], more: dict[str, list[int]]
    ) -> None:
        with pytest.raises((UnsupportedCheckpoint, CheckpointMismatch), match="_head"):
            read_at(release(tmp_path / "c", config, tensors(more)))


class TestInspect:
    @pytest.fixture
    def inspect(self, tmp_path: Path) -> Callable[..., dict[str, Any]]:
        """Return a function that inspects a checkpoint as `dflash-eval inspect --json` does."""
        target = tmp_path / "target"
        target.mkdir()
        model = {"model_type": "qwen3", "hidden_size": 32, "num_hidden_layers": 36, "vocab_size": 100}
        (target / "config.json").write_text(json.dumps(model))
        save_file({"model.embed_tokens.weight": torch.zeros(100, 32)}, target / "model.safetensors")
        settings = Config.model_validate({"target": {"model": str(target)}, "store": str(tmp_path / "store")})

        def run(config: dict[str, Any], weights: dict[str, Tensor]) -> dict[str, Any]:
            path = release(tmp_path / "c", config, weights)
            return inspecting.inspection_json(inspect_checkpoint(str(path)), settings)

        return run

    def test_a_drafter_with_heads_is_shown_with_them(self, inspect: Callable[..., dict[str, Any]]) -> None:
        document = inspect(DSPARK, tensors(GATED))
        assert document["drafter_problem"] is None
        assert document["drafter"]["markov_rank"] == 4
        assert document["drafter"]["num_drafts"] == 8

    def test_a_drafter_that_cannot_be_read_is_shown_with_the_reason(
        self, inspect: Callable[..., dict[str, Any]]
    ) -> None:
        document = inspect(CONFIG, tensors(GATED))
        assert document["drafter"] is None
        assert "markov_head" in document["drafter_problem"]

    def test_facts_at_their_plain_value_and_all_sources_are_shown(self, inspect: Callable[..., dict[str, Any]]) -> None:
        drafter = inspect(CONFIG, tensors())["drafter"]
        assert drafter["row_alignment"] == "same_position"
        assert drafter["window_rule"] == "row"
        assert drafter["sources"]["row_alignment"] == "rule of DFlash: row j predicts position anchor + j"
        assert set(read().facts()) <= set(drafter["sources"])


def test_a_spec_of_shapes_gives_those_shapes_again() -> None:
    """What a config calls for is what a checkpoint written from it holds, heads and biases included."""
    target = read_model_config({"hidden_size": 32, "num_hidden_layers": 36, "vocab_size": 100})
    names = {"gate_proj.weight", "gate_proj.bias", "markov_w1.weight", "markov_w2.weight"}
    shapes = shapes_for() | {f"markov_head.{name}": GATED[name] for name in names}
    shapes |= {"confidence_head.proj.weight": [1, 36]}
    spec = read_drafter_spec(DSPARK, shapes, target, where="c")
    assert expected_shapes(spec) == shapes
