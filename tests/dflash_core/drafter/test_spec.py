"""A drafter's facts: where each comes from, and what is refused rather than guessed."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from dflash.model import build_target_layer_ids
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.drafter.spec import (
    DrafterSpec,
    default_target_layer_ids,
    expected_shapes,
    read_drafter_spec,
    target_layer_ids,
)
from dflash_core.errors import CheckpointMismatch, DraftConfigError, UnsupportedCheckpoint
from dflash_core.store import digest
from dflash_core.target.model_config import ModelConfig, read_model_config

TARGET = read_model_config({"hidden_size": 32, "num_hidden_layers": 36, "vocab_size": 100})
CONFIG: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "vocab_size": 100,
    "num_target_layers": 36,
    "block_size": 8,
    "dflash_config": {"mask_token_id": 99, "target_layer_ids": [3, 1, 5]},
}
HEAD_DIM = 10
ATTENTION = ("q", "k", "v", "o")


def shapes_for(num_layers: int = 2, num_selected: int = 3) -> dict[str, list[int]]:
    """Return the tensors of the config above, written out here and not by the code under test."""
    shapes = {"fc.weight": [32, 32 * num_selected], "hidden_norm.weight": [32], "norm.weight": [32]}
    per_layer = {
        "input_layernorm.weight": [32],
        "post_attention_layernorm.weight": [32],
        "self_attn.q_proj.weight": [40, 32],
        "self_attn.k_proj.weight": [20, 32],
        "self_attn.v_proj.weight": [20, 32],
        "self_attn.o_proj.weight": [32, 40],
        "self_attn.q_norm.weight": [10],
        "self_attn.k_norm.weight": [10],
        "mlp.gate_proj.weight": [48, 32],
        "mlp.up_proj.weight": [48, 32],
        "mlp.down_proj.weight": [32, 48],
    }
    for layer in range(num_layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in per_layer.items()}
    return shapes


def biases(num_layers: int = 2, only: str = "qkvo") -> dict[str, list[int]]:
    lengths = {"q": [40], "k": [20], "v": [20], "o": [32]}
    return {f"layers.{layer}.self_attn.{part}_proj.bias": lengths[part] for layer in range(num_layers) for part in only}


def read(
    shapes: dict[str, list[int]] | None = None,
    target: ModelConfig = TARGET,
    training_args: dict[str, Any] | None = None,
    without: tuple[str, ...] = (),
    nested: dict[str, Any] | None = None,
    **changes: Any,
) -> DrafterSpec:
    config = {key: value for key, value in (CONFIG | changes).items() if key not in without}
    if nested is not None:
        config["dflash_config"] = {**CONFIG["dflash_config"], **nested}
        config["dflash_config"] = {key: value for key, value in config["dflash_config"].items() if value is not None}
    return read_drafter_spec(
        config, shapes_for() if shapes is None else shapes, target, where="c.json", training_args=training_args
    )


def one_line(error: pytest.ExceptionInfo[Exception]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


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
        assert set(identity) == {field.name for field in dataclasses.fields(DrafterSpec)} - {"sources"}
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
        other = [0, 0, 0] if isinstance(value, list) else 3
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
        with pytest.raises(UnsupportedCheckpoint, match=r"holds \['causal_head', 'use_swa'\]") as error:
            read(nested={"use_swa": True, "causal_head": True})
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
            ({"speculators_model_type": "dflash"}, "speculators config ('dflash')"),
            ({"speculators_model_type": "dflash2", "architectures": ["DFlash2DraftModel"]}, "('dflash2')"),
            ({"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel"),
            ({"architectures": ["Qwen3DSparkModel"]}, "Qwen3DSparkModel"),
            ({"architectures": None}, "None"),
            ({"architectures": ["DFlashDraftModel", "Other"]}, "Other"),
            ({"hidden_act": "gelu"}, "'gelu'"),
            ({"sample_from_anchor": True}, "sample_from_anchor"),
        ],
        ids=["speculators", "speculators 2", "dflash 2", "dspark", "none", "two", "activation", "shifted rows"],
    )
    def test_other_drafters_are_refused_by_name(self, changes: dict[str, Any], named: str) -> None:
        with pytest.raises(UnsupportedCheckpoint) as error:
            read(**changes)
        assert named in one_line(error)
        assert "c.json" in str(error.value)

    def test_rows_that_are_not_shifted_may_say_so(self) -> None:
        assert read(sample_from_anchor=False).block_size == 8


class TestRope:
    YARN = {"factor": 4.0, "original_max_position_embeddings": 64}

    @pytest.mark.parametrize(
        ("changes", "theta"),
        [
            ({"rope_theta": 1e7}, 1e7),
            ({"rope_theta": None, "rope_parameters": {"rope_theta": 1e6}}, 1e6),
            ({"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}}, 1e6),
            ({"rope_theta": 500000, "rope_scaling": None}, 5e5),
        ],
        ids=["old form", "new form", "both alike", "null scaling"],
    )
    def test_either_form_gives_the_base(self, changes: dict[str, Any], theta: float) -> None:
        assert read(**changes).rope == {"rope_theta": theta, "rope_type": "default"}

    @pytest.mark.parametrize(
        ("changes", "named"),
        [
            ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, ("10000.0", "1000000.0")),
            ({"rope_scaling": {"type": "yarn", **YARN}, "rope_parameters": {"rope_type": "default"}}, ("yarn", "default")),
            ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_parameters": {"factor": 8.0}}, ("4.0", "8.0")),
            ({"rope_scaling": {"type": "linear", "rope_type": "yarn", **YARN}}, ("linear", "yarn")),
        ],
        ids=["two bases", "two types", "two factors", "old and new type"],
    )
    def test_forms_that_disagree_are_an_error_that_names_both(
        self, changes: dict[str, Any], named: tuple[str, str]
    ) -> None:
        with pytest.raises(DraftConfigError, match="contradict") as error:
            read(**changes)
        assert all(name in one_line(error) for name in named)

    @pytest.mark.parametrize(
        "changes",
        [
            {"rope_scaling": {"type": "yarn", **YARN}},
            {"rope_scaling": {"rope_type": "yarn", **YARN}},
            {"rope_theta": None, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "yarn", **YARN}},
            {"rope_scaling": {"type": "yarn", "rope_type": "yarn", **YARN}},
        ],
        ids=["old key", "old form", "new form", "both keys alike"],
    )
    def test_yarn_is_read_from_every_form_alike(self, changes: dict[str, Any]) -> None:
        assert read(**changes).rope == {"rope_theta": 10000.0, "rope_type": "yarn", **self.YARN}

    @pytest.mark.parametrize(
        "parameters",
        [
            {"rope_theta": 1e4, "rope_type": "longrope"},
            {"rope_theta": 1e4, "rope_type": "dynamic"},
            {"rope_theta": 1e4, "partial_rotary_factor": 0.25},
            {"sliding_attention": {"rope_theta": 1e4}, "full_attention": {"rope_theta": 1e6}},
        ],
        ids=["longrope", "dynamic", "half heads", "per layer type"],
    )
    def test_kinds_that_are_not_computed_are_refused(self, parameters: dict[str, Any]) -> None:
        with pytest.raises(UnsupportedCheckpoint):
            read(rope_theta=None, rope_parameters=parameters)

    @pytest.mark.parametrize(
        ("changes", "named"),
        [
            ({"rope_scaling": {"rope_type": "yarn"}}, "needs factor"),
            ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "needs low_freq_factor"),
            ({"rope_scaling": {"rope_type": "linear", "factor": "4"}}, "rope_parameters.factor = '4'"),
            ({"rope_theta": "1e4"}, "rope_theta = '1e4'"),
            ({"rope_theta": None, "rope_parameters": {"rope_theta": "x"}}, "rope_parameters.rope_theta = 'x'"),
            ({"rope_parameters": [1]}, r"rope_parameters = \[1\]"),
            ({"rope_scaling": "yarn"}, "rope_scaling = 'yarn'"),
        ],
    )
    def test_what_a_kind_cannot_do_without_is_named(self, changes: dict[str, Any], named: str) -> None:
        with pytest.raises(DraftConfigError, match=named):
            read(**changes)


class TestAttentionKinds:
    SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16, "use_sliding_window": True}

    def test_sliding_layers_are_causal_and_full_ones_are_not(self) -> None:
        spec = read(**self.SLIDING)
        assert (spec.is_causal, spec.windows) == ((True, False), (16, None))

    @pytest.mark.parametrize("is_causal", [True, False])
    def test_an_explicit_flag_holds_for_every_layer(self, is_causal: bool) -> None:
        spec = read(**self.SLIDING, is_causal=is_causal)
        assert (spec.is_causal, spec.windows) == ((is_causal, is_causal), (16, None))
        assert read(is_causal=is_causal).is_causal == (is_causal, is_causal)

    @pytest.mark.parametrize("bad", ["false", 0, [True]], ids=repr)
    def test_a_flag_is_true_or_false(self, bad: Any) -> None:
        with pytest.raises(DraftConfigError, match="is_causal = .*expected true or false"):
            read(is_causal=bad)

    @pytest.mark.parametrize(
        "changes",
        [
            {"layer_types": ["full_attention"]},
            {"layer_types": ["full_attention"] * 3},
            {"layer_types": ["full_attention", "chunked_attention"]},
            {"layer_types": "full_attention"},
            {"layer_types": [["full_attention"], "full_attention"]},
            {"use_sliding_window": True, "sliding_window": 16},
            SLIDING | {"use_sliding_window": False},
            SLIDING | {"use_sliding_window": None},
            SLIDING | {"sliding_window": None},
            SLIDING | {"sliding_window": 0},
            SLIDING | {"sliding_window": "16"},
        ],
        ids=[
            "too few layers",
            "too many layers",
            "unknown kind",
            "no list",
            "list in a list",
            "window without sliding layer",
            "switched off",
            "switch missing",
            "window missing",
            "window of nothing",
            "window as text",
        ],
    )
    def test_what_does_not_add_up_is_refused(self, changes: dict[str, Any]) -> None:
        with pytest.raises(DraftConfigError, match="c.json") as error:
            read(**changes)
        assert one_line(error)

    def test_a_window_beside_full_layers_is_ignored_as_transformers_does(self) -> None:
        assert read(sliding_window=16, use_sliding_window=False).windows == (None, None)


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

    @pytest.mark.parametrize("layer", [36, -1, 1000])
    def test_a_layer_outside_the_target_is_named(self, layer: int) -> None:
        with pytest.raises(CheckpointMismatch, match=f"name layer {layer}, but the target has layers 0..35"):
            read(nested={"target_layer_ids": [1, layer, 3]})

    def test_the_last_layer_is_inside(self) -> None:
        assert read(nested={"target_layer_ids": [1, 2, 35]}).target_layer_ids == (1, 2, 35)

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


class TestTensors:
    def test_the_shapes_called_for_are_those_written_out_here(self) -> None:
        assert expected_shapes(read()) == shapes_for()

    @pytest.mark.parametrize("name", sorted(shapes_for()))
    def test_a_missing_tensor_is_named(self, name: str) -> None:
        with pytest.raises(CheckpointMismatch, match=f"lacks {name}"):
            read({other: shape for other, shape in shapes_for().items() if other != name})

    @pytest.mark.parametrize("name", sorted(shapes_for()))
    def test_a_tensor_of_another_shape_is_named(self, name: str) -> None:
        shapes = shapes_for()
        shapes[name] = [length + 1 for length in shapes[name]]
        with pytest.raises(CheckpointMismatch, match="c.json"):
            read(shapes)

    def test_the_width_of_fc_and_the_number_of_layers_are_both_named(self) -> None:
        with pytest.raises(CheckpointMismatch) as error:
            read(shapes_for(num_selected=5))
        message = one_line(error)
        assert "fc.weight reads 5 target layers of width 32" in message
        assert "[3, 1, 5] (c.json: dflash_config.target_layer_ids) are 3" in message

    def test_fewer_layers_than_the_checkpoint_has_is_refused(self) -> None:
        with pytest.raises(UnsupportedCheckpoint, match=r"layers\.2\..*refused, not dropped"):
            read(shapes_for(num_layers=3))

    @pytest.mark.parametrize("name", ["markov_head.markov_w1.weight", "layers.0.attention_conv.base_kernel", "d2t"])
    def test_a_tensor_without_use_is_refused(self, name: str) -> None:
        with pytest.raises(UnsupportedCheckpoint, match=f"holds .*{name}"):
            read(shapes_for() | {name: [4]})

    def test_a_stated_head_size_must_be_the_tensors(self) -> None:
        assert read(head_dim=HEAD_DIM).head_dim == HEAD_DIM
        with pytest.raises(CheckpointMismatch, match="head_dim = 8 contradicts .*whose length is 10"):
            read(head_dim=8)

    def test_query_heads_are_a_multiple_of_key_heads(self) -> None:
        with pytest.raises(DraftConfigError, match="num_attention_heads = 4 a multiple of num_key_value_heads = 3"):
            read(num_key_value_heads=3)

    @pytest.mark.parametrize("stated", [True, None], ids=["stated", "not stated"])
    def test_biases_of_attention_are_used(self, stated: bool | None) -> None:
        assert read(shapes_for() | biases(), attention_bias=stated).num_layers == 2

    @pytest.mark.parametrize(
        ("extra", "stated", "named"),
        [
            (biases(), False, r"attention_bias = False, but the checkpoint holds layers\.0\.self_attn\.q_proj\.bias"),
            ({}, True, r"attention_bias = True, but the checkpoint holds no bias"),
            (biases(only="qkv"), True, r"lacks layers\.0\.self_attn\.o_proj\.bias"),
            (biases(only="qkv"), None, r"lacks layers\.0\.self_attn\.o_proj\.bias"),
            (biases(num_layers=1), True, r"lacks layers\.1\.self_attn\.q_proj\.bias"),
            (biases() | {"layers.1.self_attn.k_proj.bias": [21]}, True, r"k_proj\.bias has shape \[21\]"),
        ],
        ids=["not called for", "missing", "in part", "in part, not stated", "one layer only", "length"],
    )
    def test_biases_that_do_not_match_the_config_are_refused(
        self, extra: dict[str, list[int]], stated: bool | None, named: str
    ) -> None:
        """A bias left out in silence would score another drafter than the one that was trained."""
        with pytest.raises(CheckpointMismatch, match=named) as error:
            read(shapes_for() | extra, attention_bias=stated)
        one_line(error)


class TestTrainingArgs:
    @pytest.mark.parametrize(
        "args",
        [
            {},
            {"block_size": 8, "mask_token_id": 99, "target_layer_ids": [3, 1, 5]},
            {"target_layer_ids": (3, 1, 5)},
            {"target_layer_ids": "3,1,5"},
            {"target_layer_ids": "[3, 1, 5]", "block_size": "8"},
            {"block_size": None, "learning_rate": 1e-4},
        ],
        ids=["none", "alike", "tuple", "text", "text of a list", "other settings"],
    )
    def test_settings_of_the_run_that_agree_are_taken(self, args: dict[str, Any]) -> None:
        assert read(training_args=args).block_size == 8

    @pytest.mark.parametrize(
        ("args", "named"),
        [
            ({"block_size": 16}, "block_size = 8 contradicts .* block_size = 16"),
            ({"mask_token_id": 1}, "mask_token_id = 99 contradicts .* mask_token_id = 1"),
            ({"target_layer_ids": [1, 3, 5]}, r"target_layer_ids = \(3, 1, 5\) contradicts .*\[1, 3, 5\]"),
            ({"target_layer_ids": "3,1"}, "target_layer_ids"),
        ],
        ids=["block", "mask", "order of layers", "text"],
    )
    def test_settings_of_the_run_that_contradict_are_named_with_the_configs(
        self, args: dict[str, Any], named: str
    ) -> None:
        with pytest.raises(DraftConfigError, match=named) as error:
            read(training_args=args)
        assert "the checkpoint's own training args" in one_line(error)


@settings(max_examples=400)
@given(
    st.dictionaries(
        st.sampled_from(sorted(set(CONFIG) | {"rope_scaling", "rope_parameters", "layer_types", "sliding_window",
                                              "use_sliding_window", "is_causal", "attention_bias", "head_dim"})),  # fmt: skip
        st.none() | st.booleans() | st.integers(-2, 40) | st.floats() | st.text(max_size=3)
        | st.lists(st.integers(-2, 40) | st.text(max_size=2), max_size=3)
        | st.dictionaries(st.sampled_from(["rope_theta", "rope_type", "type", "factor", "block_size", "mask_token_id"]),
                          st.none() | st.integers(-2, 40) | st.text(max_size=3) | st.just(math.nan), max_size=3),  # fmt: skip
        max_size=3,
    )
)
def test_any_config_is_read_or_refused_in_one_line(changes: dict[str, Any]) -> None:
    """Whatever stands in the file, nobody sees a traceback, and what is read has an identity."""
    try:
        digest(read(**changes).identity())
    except (DraftConfigError, CheckpointMismatch, UnsupportedCheckpoint) as error:
        assert "\n" not in str(error)
