"""The traps of draft configs about heads, vocabularies and kinds of drafters, each by its number and in words.

A head that is present is used or refused, never dropped; a config and its tensors that speak of two
drafters are an error that names both.
"""

from __future__ import annotations

from typing import Any

import pytest

from dflash_core.drafter.shapes import check_tables, expected_shapes
from dflash_core.errors import CheckpointMismatch, DraftConfigError, UnsupportedCheckpoint
from tests.support import dialect_configs as dialects
from tests.support.dialect_configs import (
    DFLASH2_38,
    DSPARK_38,
    QWEN3_8B,
    QWEN36,
    fails,
    large,
    nested,
    read_with,
    small,
    without,
)


class TestHeads:
    @pytest.mark.parametrize("key", ["input_embedding_scale", "output_multiplier", "final_logit_softcapping"])
    def test_trap_18_scales_are_read_in_every_dialect(self, key: str) -> None:
        for config in (nested(dialects.jetspec(), **{key: 2.5}), dialects.speculators("dflash", **{key: 2.5})):
            assert getattr(read_with(config, small(), QWEN3_8B), key) == 2.5
        assert getattr(read_with(dialects.verl(**{key: 2.5}), small(), QWEN3_8B), key) == 2.5

    def test_trap_19_and_20_tables_must_fit_the_vocabulary_that_is_drafted(self) -> None:
        check_tables(small(), {"embed_tokens.weight": [151936, 4096], "lm_head.weight": [151936, 4096]}, "c")
        check_tables(small(draft_vocab_size=32000), {"lm_head.weight": [32000, 4096]}, "c")
        for spec, tables in (
            (small(), {"lm_head.weight": [32000, 4096]}),
            (small(draft_vocab_size=32000), {"lm_head.weight": [151936, 4096]}),
            (small(draft_vocab_size=32000), {"embed_tokens.weight": [32000, 4096]}),
        ):
            with pytest.raises(UnsupportedCheckpoint, match="has the shape .* expected"):
                check_tables(spec, tables, "c")

    def test_trap_20_a_map_between_vocabularies_tells_how_many_tokens_are_drafted(self) -> None:
        meaning = small(draft_vocab_size=32000)
        for more in ({}, {"t2d": [151936]}):
            spec = read_with(dialects.qwen3_8b_zlab(), meaning, QWEN3_8B, shapes=expected_shapes(meaning) | more)
            assert (spec.draft_vocab_size, spec.sources["draft_vocab_size"]) == (32000, "tensor d2t")
        config = dialects.speculators("dflash", draft_vocab_size=16000)
        fails(DraftConfigError, "draft_vocab_size = 16000", "32000", config=config, shapes=expected_shapes(meaning))
        config = dialects.speculators("dflash", draft_vocab_size=32000)
        fails(CheckpointMismatch, "lacks d2t", config=config, shapes=expected_shapes(small()))
        wrong = expected_shapes(meaning) | {"t2d": [5]}
        fails(CheckpointMismatch, "t2d has shape [5]", config=config, shapes=wrong)

    def test_trap_20_dflash2_needs_the_whole_vocabulary(self) -> None:
        config = dialects.qwen38_dflash2() | {"draft_vocab_size": 32000}
        shapes = expected_shapes(DFLASH2_38) | {"d2t": [32000]}
        fails(DraftConfigError, "32000", "DFlash2", config=config, target=QWEN36, shapes=shapes)

    def test_trap_22_and_23_the_tensors_of_a_published_dflash2(self) -> None:
        """Sizes as in the release of Muse-Glimmer's drafter: 81 tensors."""
        shapes = expected_shapes(dialects.DFLASH2_MUSE)
        assert shapes["fc.weight"] == [6656, 33280]
        assert shapes["layers.4.mlp_conv.kernel_projection.weight"] == [1664, 6656]
        assert shapes["layers.0.attention_conv.base_kernel"] == [2, 2, 6656]
        assert shapes["candidate_selector.successor_codebook"] == [202048, 256]
        assert shapes["candidate_selector.hidden_projection.weight"] == [256, 6656]
        assert len(shapes) == 3 + 5 * (11 + 4) + 3

    def test_the_tensors_of_published_drafters_are_as_many(self) -> None:
        """58 in z-lab's of Qwen3.6-27B, 62 in the DSpark of Qwen3.8-27B: two of Markov, two of confidence."""
        assert len(expected_shapes(large())) == 58
        shapes = expected_shapes(DSPARK_38) | {"confidence_head.proj.bias": [1]}
        assert len(shapes) == 62
        assert read_with(dialects.radixark_dspark(), DSPARK_38, QWEN36, shapes=shapes) == DSPARK_38
        assert shapes["markov_head.markov_w1.weight"] == shapes["markov_head.markov_w2.weight"] == [248320, 256]
        assert shapes["confidence_head.proj.weight"] == [1, 5120 + 256]

    @pytest.mark.parametrize(
        ("kind", "expected"),
        [
            ("vanilla", {}),
            ("gated", {"gate_proj.weight": [256, 4096 + 256], "gate_proj.bias": [256]}),
            ("rnn", {"joint_proj.weight": [768, 512 + 4096], "joint_proj.bias": [768]}),
        ],
    )
    def test_each_kind_of_markov_head_has_its_tensors(self, kind: Any, expected: dict[str, list[int]]) -> None:
        spec = small(proposal_rule="dspark", markov_rank=256, markov_head_type=kind, draft_vocab_size=32000)
        found = {name: shape for name, shape in expected_shapes(spec).items() if name.startswith("markov_head.")}
        tables = {"markov_w1.weight": [151936, 256], "markov_w2.weight": [32000, 256]}
        assert found == {f"markov_head.{name}": shape for name, shape in (tables | expected).items()}

    def test_trap_24_dflash2_of_speculators_shares_the_architectures_name_with_z_labs(self) -> None:
        kernels = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
        meaning = small(proposal_rule="dflash2", **kernels)
        config = dialects.speculators("dflash2", architectures=["DFlash2DraftModel"], **kernels)
        spec = read_with(config, meaning, QWEN3_8B)
        assert spec.target_layer_ids == dialects.TAPS_8B, "less 1"
        assert spec.dialect.startswith("speculators")

    @pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
    @pytest.mark.parametrize("with_markov", [True, False])
    def test_trap_26_heads_that_a_dspark_config_does_not_describe_are_told_by_their_tensors(
        self, kind: Any, with_markov: bool
    ) -> None:
        meaning = small(
            block_size=7,
            row_alignment="anchor_shifted",
            proposal_rule="dspark",
            markov_rank=64,
            markov_head_type=kind,
            has_confidence_head=True,
            confidence_head_with_markov=with_markov,
        )
        silent = without(dialects.deepspec_block7(), "markov_rank", "enable_confidence_head")
        spec = read_with(silent, meaning, QWEN3_8B)
        assert spec == meaning
        assert spec.sources["markov_rank"] == "tensor markov_head.markov_w1.weight"

    @pytest.mark.parametrize(
        ("config", "meaning"),
        [
            (dialects.deepspec_block7(), {"markov_rank": 64, "markov_head_type": "vanilla"}),
            (dialects.deepspec_block7(), {"has_confidence_head": True}),
            (dialects.verl(), {"markov_rank": 64, "markov_head_type": "vanilla"}),
            (dialects.verl(), {"has_confidence_head": True}),
            (dialects.speculators("dflash"), {"has_confidence_head": True}),
            (dialects.qwen3_8b_zlab(), {"markov_rank": 64, "markov_head_type": "rnn"}),
        ],
        ids=["rank 0", "switched off", "flat", "flat, confidence", "speculators", "z-lab"],
    )
    def test_trap_26_a_head_that_the_config_does_not_call_for_is_refused(
        self, config: dict[str, Any], meaning: dict[str, Any]
    ) -> None:
        fails(UnsupportedCheckpoint, "holds ['", "_head.", "not dropped", config=config, meaning=small(**meaning))

    def test_trap_26_a_confidence_head_of_another_width_than_the_config_says_names_both(self) -> None:
        config = nested(dialects.radixark_dspark(), confidence_head_with_markov=False)
        fails(CheckpointMismatch, "[1, 5376]", "[1, 5120]", config=config, meaning=DSPARK_38, target=QWEN36)
        config = dialects.deepspec_block7(enable_confidence_head=True, confidence_head_with_markov=True)
        fails(DraftConfigError, "confidence_head_with_markov", "markov_rank is 0", config=config)

    @pytest.mark.parametrize(
        ("config", "named"),
        [
            (nested(dialects.jetspec(), projector_type="domino"), "'domino'"),
            (nested(dialects.jetspec(), projector_type="dflare"), "'dflare'"),
            (dialects.verl(projector_type="domino"), "'domino'"),
            (dialects.speculators("dflash", projector_type="domino"), "'domino'"),
            (dialects.speculators("eagle3"), "'eagle3'"),
            (dialects.speculators("jetspec"), "'jetspec'"),
            (dialects.verl(architectures=["DominoDraftModel"]), "DominoDraftModel"),
            (dialects.jetspec() | {"architectures": ["DFlareDraftModel"]}, "DFlareDraftModel"),
            (dialects.jetspec() | {"attention_sink_bias": True}, "attention_sink_bias = True"),
            (nested(dialects.jetspec(), attention_mode="mla"), "'mla'"),
            (nested(dialects.jetspec(), attention_sink_bias=True), "attention_sink_bias = True"),
            (dialects.deepspec_block7(query_pre_attn_scalar=168), "query_pre_attn_scalar = 168"),
            (dialects.deepspec_block7(markov_rank=4, markov_head_type="lstm"), "'lstm'"),
            (nested(dialects.jetspec(), tree_width=3), "['tree_width']"),
            (dialects.speculators("dflash", dflash_context_residual=True), "['dflash_context_residual']"),
        ],
        ids=lambda value: value.strip("[]'") if isinstance(value, str) else "",
    )
    def test_trap_26_what_is_not_computed_is_refused_by_name(self, config: dict[str, Any], named: str) -> None:
        fails(UnsupportedCheckpoint, named, "config.json", config=config)

    @pytest.mark.parametrize(
        ("config", "named"),
        [
            (nested(dialects.jetspec(), markov_rank=64), ("dflash_config.markov_rank = 64", "DFlashDraftModel")),
            (nested(dialects.jetspec(), selector_top_k=16), ("selector_top_k = 16", "DFlashDraftModel")),
            (dialects.verl(markov_rank=64), ("markov_rank = 64", "DFlashDraftModel")),
            (dialects.speculators("dflash", enable_confidence_head=True), ("enable_confidence_head", "'dflash'")),
            (
                nested(dialects.jetspec() | {"architectures": ["DFlash2DraftModel"]}, projector_type="dspark"),
                ("'dspark'", "DFlash2DraftModel"),
            ),
            (nested(dialects.radixark_dspark(), dspark_markov_rank=8), ("markov_rank", "256", "8")),
        ],
        ids=["markov", "selector", "flat", "speculators", "projector", "two ranks"],
    )
    def test_trap_26_a_config_that_speaks_of_two_kinds_names_both(
        self, config: dict[str, Any], named: tuple[str, ...]
    ) -> None:
        target = QWEN36 if config.get("vocab_size") == 248320 else QWEN3_8B
        fails(DraftConfigError, *named, config=config, target=target)

    def test_what_is_switched_off_or_only_shaped_the_training_is_no_contradiction(self) -> None:
        off = {"markov_rank": 0, "tree_width": None, "attention_sink_bias": False, "attention_mode": "gqa"}
        config = nested(dialects.jetspec(), num_anchors=512, loss_decay_gamma=7.0, **off)
        notes = read_with(config, small(is_causal=(True,) * 5), QWEN3_8B).notes
        assert notes[:2] == tuple(
            f"without influence on proposals: dflash_config.{key}" for key in ("loss_decay_gamma", "num_anchors")
        )
