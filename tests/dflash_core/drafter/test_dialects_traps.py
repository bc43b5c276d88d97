"""The traps of draft configs, each by its number in the list of traps and in words.

What a reader that guesses would get wrong in silence is an error here that names both sides, or a
question that names the key.
"""

from __future__ import annotations

from typing import Any

import pytest

from dflash_core.drafter.shapes import expected_shapes
from dflash_core.drafter.spec import target_layer_ids
from dflash_core.errors import CheckpointMismatch, DraftConfigError, UnsupportedCheckpoint
from tests.support import dialect_configs as dialects
from tests.support.dialect_configs import QWEN3_8B, QWEN36, fails, large, nested, read_with, small, without


class TestLayers:
    def test_trap_01_layers_for_serving_beside_the_trained_ones_must_be_the_same_layers(self) -> None:
        config = dialects.verl(eagle_aux_hidden_state_layer_ids=list(dialects.TAPS_8B))
        fails(DraftConfigError, "target_layer_ids = [1, 9", "eagle_aux_hidden_state_layer_ids = [1, 9", config=config)

    def test_trap_01_layers_for_serving_alone_are_counted_from_the_embedding(self) -> None:
        config = nested(dialects.nemo_sliding(), "target_layer_ids")
        config |= {"eagle_aux_hidden_state_layer_ids": [2, 10, 18, 26, 34]}
        spec = read_with(config, small(), QWEN3_8B)
        assert spec.target_layer_ids == dialects.TAPS_8B
        assert "less 1" in spec.sources["target_layer_ids"]

    def test_trap_01_verl_specos_shift_is_told_as_a_doubt_because_no_file_tells_it(self) -> None:
        spec = read_with(dialects.verl(), small(), QWEN3_8B)
        (doubt,) = spec.doubts
        assert "one layer less deep" in doubt
        assert "drafter.config" in doubt
        assert spec.notes == spec.doubts
        assert "doubts" not in spec.identity() | spec.facts()

    def test_trap_02_the_last_layer_is_refused_where_its_state_is_ambiguous(self) -> None:
        for config in (dialects.deepspec_block7(target_layer_ids=[1, 35]), dialects.verl(target_layer_ids=[35])):
            config.pop("eagle_aux_hidden_state_layer_ids", None)
            fails(UnsupportedCheckpoint, "35", "last layer", "final norm", config=config)

    def test_trap_03_the_embeddings_output_is_no_decoder_layer(self) -> None:
        fails(UnsupportedCheckpoint, "-1", "embedding", config=dialects.deepspec_block7(target_layer_ids=[-1, 5]))
        config = dialects.speculators("dflash", aux_hidden_state_layer_ids=[0, 10])
        fails(UnsupportedCheckpoint, "[0, 10]", "embedding", config=config)

    @pytest.mark.parametrize(("layer", "is_inside"), [(36, True), (37, False), (43, False)])
    def test_trap_03_a_layer_beyond_the_target_is_named_as_the_config_counts(self, layer: int, is_inside: bool) -> None:
        """The card of one DFlash2 names layer 43 of a target with 36."""
        config = dialects.speculators("dflash", aux_hidden_state_layer_ids=[3, 11, 19, 27, layer])
        if is_inside:
            assert target_layer_ids(config, QWEN3_8B, where="c")[-1] == 35
            return
        fails(CheckpointMismatch, f"name layer {layer}", "1..36", config=config)

    def test_trap_48_num_target_layers_counts_features_in_torchspec_and_layers_elsewhere(self) -> None:
        assert read_with(dialects.torchspec(), small(num_layers=1, is_causal=(False,), windows=(None,)), QWEN3_8B)
        fails(DraftConfigError, "num_target_layers = 6", "36", config=dialects.verl(num_target_layers=6))
        fails(CheckpointMismatch, "target is 48", config=dialects.deepspec_block7(num_target_layers=48))
        fails(CheckpointMismatch, "is 48", config=dialects.verl(target_num_hidden_layers=48, num_target_layers=5))

    def test_trap_49_a_tap_that_was_dropped_by_a_converter_is_found_by_fc(self) -> None:
        shapes = expected_shapes(small(target_layer_ids=(*dialects.TAPS_8B, 35)))
        config = dialects.speculators("dflash")
        fails(CheckpointMismatch, "reads 6", "are 5", "converter", config=config, shapes=shapes)


class TestBlocks:
    def test_trap_04_and_25_deepspecs_dflash_is_anchor_shifted_and_proposes_a_whole_block(self) -> None:
        spec = read_with(dialects.deepspec_block7(), small(block_size=7), QWEN3_8B)
        assert (spec.row_alignment, spec.num_drafts, spec.proposal_rule) == ("anchor_shifted", 7, "argmax")
        assert "DSpark" in spec.sources["row_alignment"]

    @pytest.mark.parametrize(
        ("stated", "expected"),
        [
            ({"sample_from_anchor": True}, "anchor_shifted"),
            ({"sample_from_anchor": False}, "same_position"),
            ({"draft_shift": True}, "shifted_short"),
            ({"sample_from_anchor": True, "shift_label": True}, "anchor_shifted"),
            ({"sample_from_anchor": False, "dspark_bonus_anchor": True}, "same_position"),
        ],
        ids=str,
    )
    def test_trap_04_a_stated_alignment_goes_before_the_rule(self, stated: dict[str, Any], expected: str) -> None:
        spec = read_with(nested(dialects.nemo_sliding(), **stated), small(windows=(4096,) * 5), QWEN3_8B)
        assert spec.row_alignment == expected
        assert spec.sources["row_alignment"] == f"config.json: dflash_config.{next(iter(stated))}"

    def test_trap_04_what_leaves_the_alignment_open_or_contradicts_is_asked(self) -> None:
        config = dialects.nemo_sliding()
        fails(DraftConfigError, "shift_label", "sample_from_anchor", config=nested(config, shift_label=True))
        both = nested(config, sample_from_anchor=False, draft_shift=True)
        fails(DraftConfigError, "sample_from_anchor = False", "draft_shift = True", config=both)

    def test_trap_05_a_count_of_drafts_that_the_block_cannot_hold_names_both(self) -> None:
        config = dialects.speculators("dflash", speculators_config=dialects.tokens_per_block(16))
        fails(DraftConfigError, "speculative_tokens = 16", "15 drafts", "sample_from_anchor", config=config)
        fewer = dialects.speculators("dflash", speculators_config=dialects.tokens_per_block(4))
        assert read_with(fewer, small(), QWEN3_8B).notes == ("serving is set to 4 of the 15 drafts",)

    def test_trap_05_dsparks_config_that_counts_one_less_than_its_block_is_asked(self) -> None:
        config = dialects.speculators("dspark", markov_rank=0)
        fails(DraftConfigError, "speculative_tokens = 15", "16 drafts", config=config)
        spec = read_with(config | {"sample_from_anchor": False}, small(), QWEN3_8B)
        assert (spec.row_alignment, spec.num_drafts) == ("same_position", 15)

    def test_trap_16_two_levels_that_disagree_are_named(self) -> None:
        config = nested(dialects.qwen36_zlab(), block_size=8)
        fails(DraftConfigError, "dflash_config.block_size = 8", "block_size = 16", config=config, target=QWEN36)

    @pytest.mark.parametrize(
        ("config", "key"),
        [
            (without(dialects.speculators("dflash"), "block_size"), "block_size"),
            (dialects.speculators("dflash", mask_token_id=None), "mask_token_id"),
            (without(dialects.speculators("dflash"), "draft_vocab_size"), "draft_vocab_size"),
            (without(dialects.speculators("dflash"), "transformer_layer_config"), "transformer_layer_config"),
            (without(dialects.torchspec(), "block_size"), "block_size"),
            (without(dialects.torchspec(), "num_target_layers"), "target_layer_ids"),
            (without(dialects.deepspec_block7(), "target_layer_ids"), "target_layer_ids"),
            (without(dialects.deepspec_block7(), "mask_token_id"), "mask_token_id"),
            (nested(dialects.qwen38_dflash2(), "block_size"), "block_size"),
            (nested(dialects.qwen38_dflash2(), "selector_top_k"), "selector_top_k"),
            (nested(dialects.qwen38_dflash2(), "conv_group_size"), "conv_group_size"),
            (without(nested(dialects.jetspec(), "mask_token_id"), "mask_token_id"), "mask_token_id"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_trap_16_and_17_what_no_tensor_tells_is_asked_for_by_its_key(
        self, config: dict[str, Any], key: str
    ) -> None:
        target = QWEN36 if config.get("vocab_size") == 248320 else QWEN3_8B
        fails(DraftConfigError, "lacks", key, "config.json", config=config, target=target)

    def test_what_the_config_is_silent_about_is_taken_from_the_checkpoints_own_settings(self) -> None:
        training = {"block_size": 16, "mask_token_id": 151669, "target_layer_ids": "[1, 9, 17, 25, 33]"}
        config = without(dialects.torchspec(num_hidden_layers=5, num_target_layers=5), "block_size", "mask_token_id")
        spec = read_with(config, small(), QWEN3_8B, training=training)
        assert spec == small()
        assert spec.sources["block_size"] == "the checkpoint's own training args: block_size"
        assert spec.sources["target_layer_ids"] == "the checkpoint's own training args: target_layer_ids"

    def test_settings_of_the_run_count_layers_as_the_runs_config_does(self) -> None:
        aux = {"target_layer_ids": [2, 10, 18, 26, 34]}
        assert read_with(dialects.speculators("dflash"), small(), QWEN3_8B, training=aux) == small()
        for config in (dialects.verl(), dialects.nemo_sliding()):
            meaning = small(windows=(4096,) * 5) if "dflash_config" in config else small()
            fails(DraftConfigError, "[2, 10", "(1, 9", config=config, meaning=meaning, training=aux)


class TestAttention:
    def test_trap_10_and_13_two_statements_about_causality_must_agree(self) -> None:
        """NeMo stamps its causal drafters as not causal at the top level."""
        for key in ("causal", "causal_head"):
            config = nested(dialects.nemo_sliding(), **{key: True})
            fails(DraftConfigError, "is_causal = False", f"dflash_config.{key} = True", config=config)
        agreeing = nested(dialects.nemo_sliding(), causal=False)
        assert read_with(agreeing, small(windows=(4096,) * 5), QWEN3_8B).is_causal == (False,) * 5

    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({}, (True,) * 4 + (False,)),
            ({"is_causal": False}, (False,) * 5),
            ({"is_causal": True}, (True,) * 5),
            ({"causal": False}, (False,) * 5),
        ],
        ids=str,
    )
    def test_trap_10_a_stated_causality_goes_before_the_kind_of_layer(
        self, changes: dict[str, Any], expected: tuple[bool, ...]
    ) -> None:
        spec = read_with(dialects.qwen36_zlab() | changes, large(), QWEN36)
        assert spec.is_causal == expected
        assert spec.windows == (2048,) * 4 + (None,)

    def test_trap_10_a_trainer_without_a_rule_for_sliding_layers_is_asked(self) -> None:
        sliding = {"layer_types": ["sliding_attention"] * 5, "sliding_window": 64, "use_sliding_window": True}
        config = dialects.deepspec_block7(**sliding)
        fails(DraftConfigError, "is_causal", "add", config=config)
        spec = read_with(config | {"is_causal": False}, small(block_size=7), QWEN3_8B)
        assert (spec.windows, spec.is_causal) == ((64,) * 5, (False,) * 5)

    def test_trap_11_windows_from_the_anchor_are_a_fact_and_only_where_there_are_windows(self) -> None:
        config = dialects.speculators("dflash", sliding_window_non_causal=True)
        assert read_with(config, small(), QWEN3_8B).window_rule == "row"
        spec = read_with(dialects.sliding_layers(config), small(), QWEN3_8B)
        assert (spec.window_rule, spec.is_causal) == ("anchor", (False,) * 5)
        assert "anchor" in spec.sources["window_rule"]

    def test_trap_11_a_missing_causality_of_windows_has_two_readings_and_is_asked(self) -> None:
        config = dialects.sliding_layers(dialects.speculators("dflash"))
        fails(DraftConfigError, "sliding_window_non_causal", "speculators takes false and vLLM true", config=config)

    def test_trap_11_a_causality_of_all_layers_beside_the_windows_own_must_agree(self) -> None:
        config = dialects.sliding_layers(dialects.speculators("dflash", sliding_window_non_causal=True))
        fails(DraftConfigError, "is_causal = True", "sliding_window_non_causal", config=config | {"is_causal": True})

    def test_trap_12_a_switch_makes_layers_slide_that_are_called_full(self) -> None:
        spec = read_with(dialects.modelopt_swa(), small(block_size=8), QWEN3_8B)
        assert (spec.windows, spec.is_causal) == ((1024,) * 5, (False,) * 5)
        assert spec.sources["windows"] == "config.json: dflash_config.swa_window_size, by dflash_config.use_swa"
        off = read_with(nested(dialects.modelopt_swa(), use_swa=False), small(block_size=8), QWEN3_8B)
        assert off.windows == (None,) * 5

    def test_trap_12_the_switch_needs_its_window_and_its_causality(self) -> None:
        config = dialects.modelopt_swa()
        fails(DraftConfigError, "lacks dflash_config.swa_window_size", config=nested(config, "swa_window_size"))
        fails(DraftConfigError, "is_causal", "dflash_config.causal", config=nested(config, "causal"))
        short = nested(config, swa_window_size=4)
        fails(UnsupportedCheckpoint, "swa_window_size = 4", "block_size = 8", config=short)

    def test_trap_12_two_windows_contradict(self) -> None:
        layers = {"layer_types": ["sliding_attention"] * 5, "sliding_window": 512, "use_sliding_window": True}
        fails(DraftConfigError, "= 1024", "sliding_window = 512", config=dialects.modelopt_swa() | layers)

    def test_trap_13_jetspecs_shift_flag_is_told_as_a_doubt_because_no_file_tells_it(self) -> None:
        spec = read_with(dialects.jetspec(), small(), QWEN3_8B)
        assert [note for note in spec.notes if "draft_shift" in note]
        assert spec.sources["is_causal"] == "config.json: dflash_config.causal_head"
        shifted = read_with(nested(dialects.jetspec(), draft_shift=True), small(), QWEN3_8B)
        assert (shifted.row_alignment, shifted.num_drafts, shifted.notes) == ("shifted_short", 15, ())


class TestRope:
    def test_trap_14_what_was_copied_from_a_multimodal_target_changes_nothing_on_text(self) -> None:
        axes = {"rope_theta": 1e7, "rope_type": "default", "mrope_section": [11, 11, 10], "mrope_interleaved": True}
        config = without(dialects.qwen36_zlab(), "rope_theta", "rope_scaling") | {"rope_parameters": axes}
        assert read_with(config, large(), QWEN36).rope == {"rope_theta": 1e7, "rope_type": "default"}

    @pytest.mark.parametrize("place", ["rope_parameters", "top"])
    def test_trap_14_a_partial_rotation_that_leaked_from_the_target_is_refused(self, place: str) -> None:
        leaked: dict[str, Any] = {"partial_rotary_factor": 0.25}
        if place == "rope_parameters":
            leaked = {"rope_parameters": {"rope_theta": 1e7} | leaked}
        config = dialects.qwen36_zlab() | leaked
        fails(UnsupportedCheckpoint, "partial_rotary_factor = 0.25", "remove it", config=config, target=QWEN36)

    def test_trap_14_speculators_rotates_all_layers_by_the_sliding_entry(self) -> None:
        by_kind = {
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
            "full_attention": {"rope_theta": 1e6, "rope_type": "default"},
        }
        config = dialects.speculators("dflash")
        layers = without(config["transformer_layer_config"], "rope_theta") | {"rope_parameters": by_kind}
        spec = read_with(config | {"transformer_layer_config": layers}, small(), QWEN3_8B)
        assert spec.rope["rope_theta"] == 1e4

    def test_trap_14_a_base_that_speculators_left_out_is_transformers_own(self) -> None:
        config = dialects.speculators("dflash")
        layers = without(config["transformer_layer_config"], "rope_theta")
        spec = read_with(config | {"transformer_layer_config": layers}, small(), QWEN3_8B)
        assert spec.rope == {"rope_theta": 10000.0, "rope_type": "default"}
        assert spec.sources["rope"] == "default of Qwen3Config"

    def test_trap_14_other_ways_to_rotate_are_refused(self) -> None:
        config = dialects.qwen36_zlab() | {"rope_is_neox_style": False}
        fails(UnsupportedCheckpoint, "rope_is_neox_style = False", config=config, target=QWEN36)
