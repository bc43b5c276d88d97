"""A drafter's facts: where each comes from, and what is refused rather than guessed."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from dflash.model import build_target_layer_ids
from hypothesis import given
from hypothesis import strategies as st

from dflash_core.drafter.spec import (
    DrafterSpec,
    default_target_layer_ids,
    target_layer_ids,
)
from dflash_core.errors import CheckpointMismatch, DraftConfigError, UnsupportedCheckpoint
from tests.support.draft_configs import CONFIG, HEAD_DIM, TARGET, one_line, read, shapes_for


class TestFacts:
    def test_every_fact_is_read(self) -> None:
        assert read() == DrafterSpec(
            hidden_size=32,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=HEAD_DIM,
            intermediate_size=48,
            vocab_size=100,
            rms_norm_eps=1e-6,
            rope={"rope_theta": 10000.0, "rope_type": "default"},
            max_position_embeddings=256,
            block_size=8,
            mask_token_id=99,
            target_layer_ids=(3, 1, 5),
            is_causal=(False, False),
            windows=(None, None),
            input_embedding_scale=1.0,
            output_multiplier=1.0,
            final_logit_softcapping=None,
            sources=read().sources,
        )

    def test_the_order_of_the_target_layers_is_kept(self) -> None:
        assert read(nested={"target_layer_ids": [5, 3, 1]}).target_layer_ids == (5, 3, 1)

    @pytest.mark.parametrize(
        ("fact", "source"),
        [
            ("head_dim", "tensor layers.0.self_attn.q_norm.weight"),
            ("block_size", "c.json: block_size"),
            ("mask_token_id", "c.json: dflash_config.mask_token_id"),
            ("target_layer_ids", "c.json: dflash_config.target_layer_ids"),
            ("rope", "c.json: rope_theta"),
            ("num_attention_heads", "c.json: num_attention_heads"),
        ],
    )
    def test_each_fact_says_where_it_came_from(self, fact: str, source: str) -> None:
        assert read().sources[fact] == source

    def test_the_identity_is_plain_data_without_sources(self) -> None:
        spec = read()
        identity = spec.identity()
        assert "sources" not in identity
        assert set(identity) == {field.name for field in dataclasses.fields(DrafterSpec)[:18]} | {"proposal_rule"}
        assert json.loads(json.dumps(identity))["target_layer_ids"] == [3, 1, 5]
        assert dataclasses.replace(spec, sources={}).identity() == identity

    @pytest.mark.parametrize(
        "key",
        [
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "intermediate_size",
            "vocab_size",
            "rms_norm_eps",
            "max_position_embeddings",
            "rope_theta",
            "block_size",
        ],
    )
    def test_a_missing_fact_is_asked_for_by_name(self, key: str) -> None:
        with pytest.raises(DraftConfigError, match=f"c.json lacks .*{key}") as error:
            read(without=(key,))
        assert "add it" in one_line(error)

    @pytest.mark.parametrize("bad", ["8", 8.5, True, [8], 0, -8], ids=repr)
    @pytest.mark.parametrize(
        "key", ["hidden_size", "num_hidden_layers", "num_key_value_heads", "block_size", "max_position_embeddings"]
    )
    def test_a_malformed_size_is_named(self, key: str, bad: Any) -> None:
        with pytest.raises(DraftConfigError, match=rf"c\.json: {key} = ") as error:
            read(**{key: bad})
        assert repr(bad) in one_line(error)

    @pytest.mark.parametrize("bad", ["1e-6", True, [1e-6], 0, -1e-6, math.nan, math.inf], ids=repr)
    @pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta"])
    def test_a_malformed_number_is_named(self, key: str, bad: Any) -> None:
        with pytest.raises(DraftConfigError, match=f"c.json: {key} = "):
            read(**{key: bad})

    @pytest.mark.parametrize("bad", [[], "x", 5], ids=repr)
    def test_dflash_config_holds_keys_and_values(self, bad: Any) -> None:
        with pytest.raises(DraftConfigError, match="dflash_config must hold keys and values"):
            read(dflash_config=bad)


class TestPlaces:
    """Facts that may stand under dflash_config, at the top, or in both."""

    @pytest.mark.parametrize(
        ("key", "value", "attribute"),
        [
            ("block_size", 4, "block_size"),
            ("mask_token_id", 0, "mask_token_id"),
            ("target_layer_ids", [7, 8, 9], "target_layer_ids"),
            ("input_embedding_scale", 2.5, "input_embedding_scale"),
            ("output_multiplier", 0.5, "output_multiplier"),
            ("final_logit_softcapping", 30, "final_logit_softcapping"),
        ],
    )
    def test_one_place_is_enough_and_two_must_agree(self, key: str, value: Any, attribute: str) -> None:
        expected = tuple(value) if isinstance(value, list) else value
        other: Any = [0, 0, 0] if isinstance(value, list) else 3
        assert getattr(read(without=(key,), nested={key: value}), attribute) == expected
        assert getattr(read(nested={key: None}, **{key: value}), attribute) == expected
        assert getattr(read(nested={key: value}, **{key: value}), attribute) == expected
        with pytest.raises(DraftConfigError) as error:
            read(nested={key: value}, **{key: other})
        assert f"dflash_config.{key} = {value!r} contradicts {key} = {other!r}" in one_line(error)

    @pytest.mark.parametrize("key", ["input_embedding_scale", "output_multiplier", "final_logit_softcapping"])
    @pytest.mark.parametrize("bad", ["2", True, [1], math.nan, math.inf], ids=repr)
    def test_a_malformed_factor_is_named(self, key: str, bad: Any) -> None:
        with pytest.raises(DraftConfigError, match=f"{key} = "):
            read(nested={key: bad})

    @pytest.mark.parametrize(("cap", "expected"), [(None, None), (0, None), (-1.0, None), (20, 20.0)])
    def test_a_soft_cap_of_zero_is_none(self, cap: Any, expected: float | None) -> None:
        assert read(nested={"final_logit_softcapping": cap}).final_logit_softcapping == expected

    def test_a_key_that_is_not_understood_is_refused_by_name(self) -> None:
        with pytest.raises(UnsupportedCheckpoint, match=r"holds \['context_residual', 'tree_width'\]") as error:
            read(nested={"tree_width": 3, "context_residual": True})
        assert "mask_token_id" in one_line(error), "it says what is understood"


class TestMaskToken:
    def test_a_missing_mask_token_is_asked_for(self) -> None:
        """A drafter fed with padding or the stop token instead is quietly worse."""
        with pytest.raises(DraftConfigError, match="lacks dflash_config.mask_token_id or mask_token_id"):
            read(nested={"mask_token_id": None}, pad_token_id=5, eos_token_id=6)

    @pytest.mark.parametrize("token", [100, 5000, -1])
    def test_one_outside_the_vocabulary_is_refused(self, token: int) -> None:
        with pytest.raises(DraftConfigError, match=f"mask_token_id = {token} lies outside the vocabulary of 100"):
            read(nested={"mask_token_id": token})

    def test_one_that_is_also_the_stop_token_is_the_trainers_business(self) -> None:
        assert read(nested={"mask_token_id": 6}, eos_token_id=6).mask_token_id == 6


class TestKinds:
    @pytest.mark.parametrize(
        ("changes", "named"),
        [
            ({"speculators_model_type": "eagle3"}, "'eagle3'"),
            ({"speculators_model_type": 7}, "7"),
            ({"architectures": ["LlamaForCausalLMEagle3"]}, "LlamaForCausalLMEagle3"),
            ({"architectures": ["DominoDraftModel"]}, "DominoDraftModel"),
            ({"architectures": None}, "None"),
            ({"architectures": [["DFlashDraftModel"]]}, "DFlashDraftModel"),
            ({"architectures": ["DFlashDraftModel", "Other"]}, "Other"),
            ({"hidden_act": "gelu"}, "'gelu'"),
        ],
        ids=["speculators", "number", "eagle", "domino", "none", "list", "two", "activation"],
    )
    def test_other_drafters_are_refused_by_name(self, changes: dict[str, Any], named: str) -> None:
        with pytest.raises(UnsupportedCheckpoint) as error:
            read(**changes)
        assert named in one_line(error)
        assert "c.json" in str(error.value)

    def test_rows_say_themselves_whether_they_are_shifted(self) -> None:
        assert read(sample_from_anchor=False).row_alignment == "same_position"
        shifted = read(sample_from_anchor=True)
        assert (shifted.row_alignment, shifted.num_drafts) == ("anchor_shifted", 8)
        assert shifted.sources["row_alignment"] == "c.json: sample_from_anchor"


class TestTarget:
    @pytest.mark.parametrize(
        ("changes", "named"),
        [
            ({"hidden_size": 64}, "hidden size is 64 .*, the target's is 32"),
            ({"vocab_size": 151936}, "vocabulary is 151936 .*, the target's is 100"),
            ({"num_target_layers": 64}, "depth of the target is 64 .*, the target's is 36"),
        ],
    )
    def test_a_drafter_for_another_target_names_both_sizes(self, changes: dict[str, Any], named: str) -> None:
        with pytest.raises(CheckpointMismatch, match=named) as error:
            read(**changes)
        assert "another target" in one_line(error)

    def test_the_depth_need_not_be_stated(self) -> None:
        assert read(without=("num_target_layers",)).target_layer_ids == (3, 1, 5)

    @pytest.mark.parametrize("layer", [36, -2, 1000])
    def test_a_layer_outside_the_target_is_named(self, layer: int) -> None:
        with pytest.raises(CheckpointMismatch, match=f"name layer {layer}, but the target has layers 0..35"):
            read(nested={"target_layer_ids": [1, layer, 3]})

    def test_the_last_layer_is_inside_where_it_is_said_how_its_state_was_taken(self) -> None:
        """The official loop takes it after the final norm, serving engines before: no key of a trainer tells."""
        taps = {"target_layer_ids": [1, 2, 35]}
        assert read(nested=taps | {"last_layer_before_norm": True}).target_layer_ids == (1, 2, 35)
        for more in ({}, {"last_layer_before_norm": False}):
            with pytest.raises(UnsupportedCheckpoint, match="35, the target's last layer") as error:
                read(nested=taps | more)
            assert "add last_layer_before_norm: true" in one_line(error)

    def test_the_embeddings_output_is_no_layer(self) -> None:
        with pytest.raises(UnsupportedCheckpoint, match="names -1, the target's embedding output"):
            read(nested={"target_layer_ids": [-1, 2, 35]})

    @pytest.mark.parametrize("bad", [[], [1, "2", 3], [1, True, 3], [1.0, 2, 3], "1,2,3", 5], ids=repr)
    def test_a_malformed_list_is_refused(self, bad: Any) -> None:
        with pytest.raises(DraftConfigError, match="target_layer_ids"):
            read(nested={"target_layer_ids": bad})

    def test_only_the_layers_can_be_asked_for(self) -> None:
        assert target_layer_ids(CONFIG, TARGET, where="c.json") == (3, 1, 5)
        with pytest.raises(UnsupportedCheckpoint):
            target_layer_ids(CONFIG | {"architectures": ["X"]}, TARGET, where="c.json")


class TestDefaultLayers:
    @pytest.mark.parametrize(
        ("depth", "num_layers", "expected"),
        [(64, 5, [1, 16, 31, 46, 61]), (36, 5, [1, 9, 17, 25, 33]), (30, 1, [15]), (7, 1, [3]), (30, 3, [1, 14, 27])],
    )
    def test_the_published_rule(self, depth: int, num_layers: int, expected: list[int]) -> None:
        assert default_target_layer_ids(depth, num_layers) == expected

    @given(st.integers(4, 130), st.integers(1, 12))
    def test_it_is_the_official_one(self, depth: int, num_layers: int) -> None:
        assert default_target_layer_ids(depth, num_layers) == build_target_layer_ids(depth, num_layers)

    def test_a_config_without_the_list_takes_the_rule_and_says_so(self) -> None:
        spec = read(shapes_for(5, 5), num_hidden_layers=5, nested={"target_layer_ids": None})
        assert spec.target_layer_ids == (1, 9, 17, 25, 33)
        assert "z-lab's rule" in spec.sources["target_layer_ids"]
