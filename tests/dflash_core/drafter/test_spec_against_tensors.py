"""A draft config against the checkpoint it came with: tensors, biases, kinds of attention, settings of the run."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.drafter.spec import (
    expected_shapes,
)
from dflash_core.errors import CheckpointMismatch, DraftConfigError, UnsupportedCheckpoint
from dflash_core.store import digest
from tests.support.draft_configs import CONFIG, HEAD_DIM, biases, one_line, read, shapes_for


class TestAttentionKinds:
    SLIDING: ClassVar[dict[str, Any]] = {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 16,
        "use_sliding_window": True,
    }

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

    @pytest.mark.parametrize(
        "name",
        [
            "markov_head.markov_w1.weight",
            "confidence_head.proj.weight",
            "confidence_head.proj.bias",
            "layers.0.attention_conv.base_kernel",
            "candidate_selector.predecessor_codebook",
            "t2d",
        ],
    )
    def test_a_tensor_without_use_is_refused(self, name: str) -> None:
        with pytest.raises(UnsupportedCheckpoint, match=f"holds .*{name}"):
            read(shapes_for() | {name: [4]})

    def test_a_map_to_the_targets_vocabulary_is_a_reduced_vocabulary(self) -> None:
        spec = read(shapes_for() | {"d2t": [4]})
        assert spec.draft_vocab_size == 4
        assert spec.sources["draft_vocab_size"] == "tensor d2t"

    def test_a_stated_head_size_must_be_the_tensors(self) -> None:
        assert read(head_dim=HEAD_DIM).head_dim == HEAD_DIM
        with pytest.raises(CheckpointMismatch, match="head_dim = 8 contradicts .*whose length is 10"):
            read(head_dim=8)

    def test_query_heads_are_a_multiple_of_key_heads(self) -> None:
        with pytest.raises(DraftConfigError, match="heads = 4 must be a multiple of num_key_value_heads = 3"):
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
        st.sampled_from(
            sorted(
                set(CONFIG)
                | {
                    "rope_scaling",
                    "rope_parameters",
                    "layer_types",
                    "sliding_window",
                    "use_sliding_window",
                    "is_causal",
                    "attention_bias",
                    "head_dim",
                }
            )
        ),  # fmt: skip
        st.none()
        | st.booleans()
        | st.integers(-2, 40)
        | st.floats()
        | st.text(max_size=3)
        | st.lists(st.integers(-2, 40) | st.text(max_size=2), max_size=3)
        | st.dictionaries(
            st.sampled_from(["rope_theta", "rope_type", "type", "factor", "block_size", "mask_token_id"]),
            st.none() | st.integers(-2, 40) | st.text(max_size=3) | st.just(math.nan),
            max_size=3,
        ),  # fmt: skip
        max_size=3,
    )
)
def test_any_config_is_read_or_refused_in_one_line(changes: dict[str, Any]) -> None:
    """Whatever stands in the file, nobody sees a traceback, and what is read has an identity."""
    message = ""
    try:
        digest(read(**changes).identity())
    except (DraftConfigError, CheckpointMismatch, UnsupportedCheckpoint) as error:
        message = str(error)
    assert "\n" not in message
