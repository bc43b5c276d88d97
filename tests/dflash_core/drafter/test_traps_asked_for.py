"""Facts that two readers take differently where the file is silent: they are asked for, never guessed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dflash.model as official
import pytest
import torch

from dflash_core.drafter.model import Drafter
from dflash_core.drafter.spec import target_layer_ids
from dflash_core.errors import DraftConfigError, UnsupportedCheckpoint
from dflash_core.store import Store
from dflash_core.target.hidden_states import extract_hidden_states
from dflash_core.target.model_config import ModelConfig, read_model_config
from dflash_core.target.runtime import load_model
from dflash_core.target.transcripts import RenderedPrompt, generate
from tests.support import dialect_configs as dialects
from tests.support import tiny
from tests.support.dialect_configs import QWEN3_8B, fails, nested, read_with, small
from tests.support.draft_configs import TARGET, one_line, read

YARN = {"rope_type": "yarn", "factor": 4.0}


class TestTrap02TheLastLayer:
    def test_the_official_loop_reads_it_after_the_final_norm_and_the_store_holds_it_before(
        self, tmp_path: Path
    ) -> None:
        """So that a drafter of that layer must say which it was trained on."""
        target = tiny.write_tiny_target(tmp_path / "target", "llama")
        model = load_model(target, "float32")
        (transcript,) = generate(
            model,
            [RenderedPrompt(id="p0", prompt_ids=(10, 20, 30))],
            stop_token_ids=[],
            max_new_tokens=6,
            batch_size=1,
        )
        states = extract_hidden_states(
            Store(tmp_path / "store"), target, [transcript], (4, 5), compute_dtype="float32", store_dtype="float32"
        )
        ids = torch.tensor([[*transcript.prompt_ids, *transcript.response_ids]])
        with torch.inference_mode():
            everything = model(ids, output_hidden_states=True).hidden_states
        theirs = official.extract_context_feature(everything, [4, 5])[0]
        torch.testing.assert_close(theirs[:, :64], states.load_layer(4), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(theirs[:, 64:], states.load_final(), rtol=1e-5, atol=1e-5)
        assert not torch.allclose(theirs[:, 64:], states.load_layer(5), rtol=0.1, atol=0.1)

    @pytest.mark.parametrize("config", [dialects.qwen3_8b_zlab(), dialects.verl(), dialects.deepspec_block7()])
    def test_it_is_asked_for_in_every_form_that_leaves_it_open(self, config: dict[str, Any]) -> None:
        config = {key: value for key, value in config.items() if key != "eagle_aux_hidden_state_layer_ids"}
        config |= {"target_layer_ids": [1, 9, 17, 25, 35]}
        with pytest.raises(UnsupportedCheckpoint, match="35, the target's last layer"):
            target_layer_ids(config, QWEN3_8B, where="c.json")
        assert target_layer_ids(config | {"last_layer_before_norm": True}, QWEN3_8B, where="c.json")[-1] == 35


class TestTrap14TheLengthBeforeYarn:
    def test_without_it_readers_disagree_so_it_is_asked_for(self) -> None:
        """transformers takes max_position_embeddings, which many exports have scaled already; vLLM fails."""
        for changes in ({"rope_scaling": YARN}, {"rope_theta": None, "rope_parameters": YARN | {"rope_theta": 1e4}}):
            with pytest.raises(DraftConfigError, match="'yarn' needs original_max_position_embeddings") as error:
                read(**changes)
            assert "add it" in one_line(error)

    def test_it_may_stand_at_the_top_but_not_say_otherwise_there(self) -> None:
        inside = read(rope_scaling=YARN | {"original_max_position_embeddings": 64})
        assert read(rope_scaling=YARN, original_max_position_embeddings=64).rope == inside.rope
        with pytest.raises(DraftConfigError, match="original_max_position_embeddings = 32 contradicts 64"):
            read(rope_scaling=YARN | {"original_max_position_embeddings": 64}, original_max_position_embeddings=32)

    def test_it_turns_keys_and_queries(self) -> None:
        """Or nothing would be lost by guessing."""
        turned = []
        for length in (16, 256):
            spec = read(rope_scaling=YARN | {"original_max_position_embeddings": length})
            drafter = Drafter(spec, {}, torch.zeros(100, 32), device=torch.device("cpu"), dtype=torch.float32)
            turned.append(drafter._rotate(torch.ones(1, 1, 10), torch.tensor([7])))
        assert not torch.allclose(*turned, atol=0.01)

    def test_a_plain_rotation_is_the_same_whatever_stands_beside_it(self) -> None:
        assert read(original_max_position_embeddings=64).identity() == read().identity()


class TestTrap18TheScaleOfEmbeddings:
    @pytest.fixture
    def gemma(self) -> ModelConfig:
        sizes = {"hidden_size": 32, "num_hidden_layers": 36, "vocab_size": 100}
        config = read_model_config(sizes | {"model_type": "gemma3_text"})
        assert config.embedding_scale == pytest.approx(32**0.5)
        return config

    def test_it_is_asked_for_where_the_target_has_one(self, gemma: ModelConfig) -> None:
        with pytest.raises(DraftConfigError, match=r"dflash_config.input_embedding_scale, .* 5.65685") as error:
            read(target=gemma)
        assert "1.0 where on the bare table" in one_line(error)
        for stated in (1.0, 5.65685):
            assert read(target=gemma, nested={"input_embedding_scale": stated}).input_embedding_scale == stated
            assert read(target=gemma, input_embedding_scale=stated).input_embedding_scale == stated

    def test_the_layers_alone_need_no_scale(self, gemma: ModelConfig) -> None:
        config = dialects.qwen3_8b_zlab() | {"target_layer_ids": [1, 5]}
        assert target_layer_ids(config, gemma, where="c.json") == (1, 5)

    def test_where_the_target_has_none_it_is_one(self) -> None:
        assert read(target=TARGET).input_embedding_scale == 1.0

    def test_trainers_with_an_embedding_of_their_own_have_the_bare_one(self) -> None:
        scaled = read_model_config(
            {"hidden_size": 4096, "num_hidden_layers": 36, "vocab_size": 151936, "model_type": "gemma3_text"}
        )
        for config in (dialects.speculators("dflash"), dialects.verl()):
            assert read_with(config, small(), scaled).input_embedding_scale == 1.0


class TestTrap10WindowsOfSpeculators:
    def config(self, *without: str, **layers: Any) -> dict[str, Any]:
        config = dialects.sliding_layers(dialects.speculators("dflash", sliding_window_non_causal=False))
        inner = {key: value for key, value in config["transformer_layer_config"].items() if key not in without}
        return config | {"transformer_layer_config": inner | layers}

    def test_without_its_switch_transformers_config_has_no_window(self) -> None:
        """`Qwen3Config`, from which speculators builds the layers, then takes the window for none."""
        from transformers import Qwen3Config

        layers = {"layer_types": ["sliding_attention"], "num_hidden_layers": 1, "sliding_window": 2048}
        assert Qwen3Config(**layers).sliding_window is None
        assert Qwen3Config(**layers, use_sliding_window=True).sliding_window == 2048
        for config in (self.config("use_sliding_window"), self.config(use_sliding_window=False)):
            fails(DraftConfigError, "transformer_layer_config.use_sliding_window is", "set it to true", config=config)
        assert read_with(self.config(), small(), QWEN3_8B).windows == (2048,) * 4 + (None,)

    def test_a_switch_without_kinds_of_layers_counts_layers_and_is_asked(self) -> None:
        """Then the layers from `max_window_layers` on slide."""
        config = self.config("layer_types", max_window_layers=2)
        fails(DraftConfigError, "use_sliding_window is true, but layer_types names no sliding layer", config=config)


class TestTraps01And13Doubts:
    def test_what_no_file_tells_is_a_doubt_and_what_changes_nothing_is_none(self) -> None:
        spec = read_with(nested(dialects.jetspec(), loss_decay_gamma=4.0), small(), QWEN3_8B)
        (doubt,) = spec.doubts
        assert "draft_shift" in doubt
        assert set(spec.notes) == {doubt, "without influence on proposals: dflash_config.loss_decay_gamma"}
        assert read_with(dialects.qwen3_8b_zlab(), small(), QWEN3_8B).doubts == ()
