"""Every dialect of draft configs becomes the canonical facts that its trainer meant."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3Config

from dflash_core.drafter.dialects.speculators import QWEN3_DEFAULTS
from dflash_core.drafter.spec import DrafterSpec, expected_shapes, target_layer_ids
from dflash_core.errors import CheckpointMismatch, DraftConfigError, UnsupportedCheckpoint
from dflash_core.store import digest
from dflash_core.target.model_config import ModelConfig
from tests.support import dialect_configs as dialects
from tests.support.dialect_configs import MUSE, QWEN3_8B, QWEN36, large, read_with, small
from tests.support.draft_configs import read as read_small

CAUSAL_SLIDING = {"windows": (2048,) * 4 + (None,), "is_causal": (True,) * 4 + (False,)}
DSPARK_8B: dict[str, Any] = {
    "row_alignment": "anchor_shifted",
    "proposal_rule": "dspark",
    "markov_rank": 256,
    "has_confidence_head": True,
    "confidence_head_with_markov": True,
}
SELECTOR = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
ONE_LAYER = {"num_layers": 1, "is_causal": (False,), "windows": (None,)}
MARKOV = {
    "markov_rank": 256,
    "markov_head_type": "gated",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
SPARK_TOKENS = dialects.tokens_per_block(8)

CASES: dict[str, tuple[dict[str, Any], DrafterSpec, ModelConfig]] = {
    "z-lab, Qwen3.6-27B": (dialects.qwen36_zlab(), large(**CAUSAL_SLIDING), QWEN36),
    "z-lab, first form, Qwen3-8B": (dialects.qwen3_8b_zlab(), small(), QWEN3_8B),
    "z-lab DFlash2, Qwen3.8-27B": (dialects.qwen38_dflash2(), dialects.DFLASH2_38, QWEN36),
    "z-lab DFlash2, Muse-Glimmer-30B": (dialects.muse_dflash2(), dialects.DFLASH2_MUSE, MUSE),
    "SpecForge DSpark with YaRN, Qwen3.8-27B": (dialects.radixark_dspark(), dialects.DSPARK_38, QWEN36),
    "Model-Optimizer, sliding by a switch": (
        dialects.modelopt_swa(),
        small(block_size=8, windows=(1024,) * 5),
        QWEN3_8B,
    ),
    "NeMo, sliding": (dialects.nemo_sliding(), small(windows=(4096,) * 5), QWEN3_8B),
    "JetSpec": (dialects.jetspec(), small(is_causal=(True,) * 5), QWEN3_8B),
    "speculators DFlash": (dialects.speculators("dflash"), small(), QWEN3_8B),
    "speculators DFlash, sliding and causal": (
        dialects.sliding_layers(dialects.speculators("dflash", sliding_window_non_causal=False)),
        small(**CAUSAL_SLIDING, window_rule="anchor"),
        QWEN3_8B,
    ),
    "speculators DFlash, reduced vocabulary": (
        dialects.speculators("dflash", draft_vocab_size=32000),
        small(draft_vocab_size=32000),
        QWEN3_8B,
    ),
    "speculators DFlash2": (
        dialects.sliding_layers(
            dialects.speculators("dflash2", architectures=["DFlash2DraftModel"], **SELECTOR, sample_from_anchor=False)
        ),
        small(windows=(2048,) * 4 + (None,), window_rule="anchor", proposal_rule="dflash2", **SELECTOR),
        QWEN3_8B,
    ),
    "speculators DSpark": (
        dialects.speculators("dspark", block_size=8, num_anchors=256, speculators_config=SPARK_TOKENS, **MARKOV),
        small(block_size=8, markov_head_type="gated", **DSPARK_8B),
        QWEN3_8B,
    ),
    "DeepSpec DFlash, blocks of 7": (
        dialects.deepspec_block7(),
        small(block_size=7, row_alignment="anchor_shifted"),
        QWEN3_8B,
    ),
    "DeepSpec DSpark, recurrent": (
        dialects.deepspec_block7(**MARKOV | {"markov_head_type": "rnn"}),
        small(block_size=7, markov_head_type="rnn", **DSPARK_8B),
        QWEN3_8B,
    ),
    "TorchSpec": (dialects.torchspec(), small(**ONE_LAYER), QWEN3_8B),
    "TorchSpec DSpark": (
        dialects.torchspec(
            architectures=["Qwen3DSparkModel"],
            model_type="qwen3_dspark",
            **MARKOV | {"markov_head_type": "classical"},
        ),
        small(**ONE_LAYER, markov_head_type="vanilla", **DSPARK_8B),
        QWEN3_8B,
    ),
    "verl-SpeCo": (dialects.verl(), small(), QWEN3_8B),
}


@pytest.fixture(params=CASES, ids=lambda name: name)
def case(request: pytest.FixtureRequest) -> tuple[dict[str, Any], DrafterSpec, ModelConfig]:
    return CASES[request.param]


class TestMeaning:
    def test_the_config_means_these_facts(self, case: tuple[dict[str, Any], DrafterSpec, ModelConfig]) -> None:
        config, meaning, target = case
        assert read_with(config, meaning, target) == meaning

    def test_every_fact_has_a_source_that_is_in_the_config_the_tensors_or_a_rule(
        self, case: tuple[dict[str, Any], DrafterSpec, ModelConfig]
    ) -> None:
        config, meaning, target = case
        spec = read_with(config, meaning, target)
        assert set(spec.facts()) <= set(spec.sources)
        kinds = r"config\.json: |(no )?tensor |the tensors|default( |: )|no draft_vocab_size|rule of |.*'s rule "
        assert [fact for fact in spec.facts() if not re.match(kinds, spec.sources[fact])] == []

    def test_only_the_layers_can_be_read_without_tensors(
        self, case: tuple[dict[str, Any], DrafterSpec, ModelConfig]
    ) -> None:
        config, meaning, target = case
        assert target_layer_ids(config, target, where="config.json") == meaning.target_layer_ids

    def test_fewer_columns_in_fc_than_layers_name_both(
        self, case: tuple[dict[str, Any], DrafterSpec, ModelConfig]
    ) -> None:
        """Trap 3 and 49: fc says how many layers are read."""
        config, meaning, target = case
        shapes = expected_shapes(meaning)
        shapes["fc.weight"] = [meaning.hidden_size, 4 * meaning.hidden_size]
        with pytest.raises(CheckpointMismatch, match="fc.weight reads 4 target layers .* are 5"):
            read_with(config, meaning, target, shapes=shapes)

    def test_a_tensor_too_many_is_refused_and_one_too_few_is_missed(
        self, case: tuple[dict[str, Any], DrafterSpec, ModelConfig]
    ) -> None:
        """Trap 26: whatever the dialect, no tensor is dropped."""
        config, meaning, target = case
        shapes = expected_shapes(meaning)
        with pytest.raises(UnsupportedCheckpoint, match=r"holds \['layers\.0\.extra'\]"):
            read_with(config, meaning, target, shapes=shapes | {"layers.0.extra": [1]})
        for name in shapes:
            fewer = {other: shape for other, shape in shapes.items() if other != name}
            with pytest.raises((CheckpointMismatch, DraftConfigError)):
                read_with(config, meaning, target, shapes=fewer)

    def test_the_same_drafter_in_two_dialects_is_one(self) -> None:
        """Trap 1: layers are counted from 0, or from the embedding's output."""
        zlab = read_with(dialects.qwen3_8b_zlab(), small(), QWEN3_8B)
        others = [
            read_with(dialects.speculators("dflash"), small(), QWEN3_8B),
            read_with(dialects.verl(), small(), QWEN3_8B),
        ]
        for other in others:
            assert other == zlab
            assert other.identity() == zlab.identity()

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.integers(0, 34), min_size=1, max_size=8, unique=True), st.integers(1, 24))
    def test_counting_from_the_embedding_adds_one_to_each_layer_and_keeps_the_order(
        self, taps: list[int], block_size: int
    ) -> None:
        meaning = small(target_layer_ids=tuple(taps), block_size=block_size)
        nested = {"mask_token_id": 151669, "target_layer_ids": taps}
        zlab = dialects.qwen3_8b_zlab() | {"block_size": block_size, "dflash_config": nested}
        theirs = dialects.speculators(
            "dflash",
            block_size=block_size,
            aux_hidden_state_layer_ids=[layer + 1 for layer in taps],
            speculators_config=dialects.tokens_per_block(block_size - 1),
        )
        assert read_with(zlab, meaning, QWEN3_8B) == read_with(theirs, meaning, QWEN3_8B) == meaning

    @pytest.mark.parametrize(
        ("alignment", "expected"), [("same_position", 6), ("anchor_shifted", 7), ("shifted_short", 6)]
    )
    def test_the_number_of_drafts_follows_from_the_alignment(self, alignment: Any, expected: int) -> None:
        """Trap 5: a block of B holds B - 1 drafts, or B where the anchor's row drafts too."""
        assert small(block_size=7, row_alignment=alignment).num_drafts == expected

    def test_a_block_of_one_is_a_block_without_drafts(self) -> None:
        config = dialects.qwen3_8b_zlab() | {"block_size": 1}
        assert read_with(config, small(), QWEN3_8B).num_drafts == 0


class TestIdentity:
    """Evaluations that were made before a fact was known keep their identity."""

    def test_a_plain_drafters_identity_is_pinned(self) -> None:
        assert digest("pin", read_small().identity()) == "13c207233c4e9806543c78ac944d3e2c"
        sliding: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
        identity = read_small(**sliding, use_sliding_window=True).identity()
        assert digest("pin", identity) == "29a3539795c0f23443f3692cc4148cd2"

    def test_biases_are_told_by_the_weights_and_change_no_identity(self) -> None:
        assert dataclasses.replace(small(), attention_bias=True).identity() == small().identity()

    @pytest.mark.parametrize(
        "changes",
        [
            {"window_rule": "anchor"},
            {"row_alignment": "anchor_shifted"},
            {"draft_vocab_size": 32000},
            {"proposal_rule": "dflash2"},
            {"markov_rank": 8},
            {"markov_head_type": "rnn"},
            {"has_confidence_head": True},
            {"selector_top_k": 4},
        ],
        ids=lambda changes: next(iter(changes)),
    )
    def test_any_other_fact_makes_another_identity(self, changes: dict[str, Any]) -> None:
        identity = small(**changes).identity()
        assert identity != small().identity()
        assert next(iter(changes)) in identity


def test_what_speculators_leaves_out_is_the_default_of_transformers_own_class() -> None:
    config = Qwen3Config()
    assert {key: getattr(config, key) for key in QWEN3_DEFAULTS} == QWEN3_DEFAULTS
    spec = read_with(dialects.speculators("dflash"), small(), QWEN3_8B)
    assert spec.sources["num_heads"] == "default of Qwen3Config"
    assert spec.sources["num_kv_heads"] == "config.json: transformer_layer_config.num_key_value_heads"


FIELDS = sorted(
    {key for config, _, _ in CASES.values() for key in config}
    | {key for config, _, _ in CASES.values() for key in config.get("dflash_config", {})}
    | {"causal", "draft_shift", "dspark_bonus_anchor", "shift_label", "sample_from_anchor", "num_context_layers"}
)
VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-2, 40)
    | st.floats()
    | st.text(max_size=3)
    | st.sampled_from(["dspark", "dflash", "gated", "rnn", "domino"])
    | st.lists(st.integers(-2, 40) | st.text(max_size=2), max_size=5)
    | st.dictionaries(st.sampled_from(["rope_theta", "mask_token_id", "x", "proposal_methods"]), st.integers(-1, 9))
)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(sorted(CASES)), st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3), st.booleans())
def test_any_config_of_any_dialect_is_read_or_refused_in_one_line(
    name: str, changes: dict[str, Any], in_nested: bool
) -> None:
    """Nobody sees a traceback, and what is read has an identity."""
    config, meaning, target = CASES[name]
    if in_nested and "dflash_config" in config:
        changed = config | {"dflash_config": config["dflash_config"] | changes}
    else:
        changed = config | changes
    message = ""
    try:
        digest(read_with(changed, meaning, target).identity())
    except (DraftConfigError, CheckpointMismatch, UnsupportedCheckpoint) as error:
        message = str(error)
    assert "\n" not in message
