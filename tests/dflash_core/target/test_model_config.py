"""Sizes are found in flat and nested configs, and nothing is guessed."""

from __future__ import annotations

import contextlib
import json
import math
from typing import Any

import pytest
import transformers
from huggingface_hub.errors import StrictDataclassError
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dflash_core.errors import TargetError
from dflash_core.target.model_config import read_model_config
from dflash_core.target.rope_forms import RopeForm

SIZES = {"hidden_size": 64, "num_hidden_layers": 3, "vocab_size": 500}
# The text part of a hybrid 27 B model and its wrapper: the keys a flat reader would miss or mistake.
NESTED: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "image_token_id": 248056,
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen3_5_text",
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "intermediate_size": 17408,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 248320,
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "max_position_embeddings": 262144,
        "mtp_num_hidden_layers": 1,
        "rope_parameters": {"rope_theta": 10000000, "rope_type": "default", "partial_rotary_factor": 0.25},
    },
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27, "intermediate_size": 4304, "num_heads": 16},
}


def test_a_nested_config_gives_the_text_parts_sizes_and_says_where_they_were() -> None:
    config = read_model_config(NESTED)

    assert (config.hidden_size, config.num_layers, config.vocab_size) == (5120, 64, 248320)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (24, 4, 256)
    assert (config.architecture, config.model_type) == ("Qwen3_5ForConditionalGeneration", "qwen3_5_text")
    assert (config.intermediate_size, config.dtype, config.rope_theta) == (17408, "bfloat16", 1e7)
    assert config.tie_word_embeddings is False
    assert config.sources["num_layers"] == "text_config.num_hidden_layers"
    assert config.sources["rope_theta"] == "text_config.rope_parameters.rope_theta"
    assert config.sources["architecture"] == "architectures"
    assert config.sources["model_type"] == "text_config.model_type"
    assert config.conflicts == ()


@pytest.mark.parametrize("extra", [{}, {"text_config": None}], ids=["flat", "text_config is null"])
def test_a_flat_config_is_read_at_the_top(extra: dict[str, Any]) -> None:
    config = read_model_config({**SIZES, **extra, "torch_dtype": "torch.float32", "rope_theta": 10000.0})

    assert (config.hidden_size, config.num_layers, config.vocab_size) == (64, 3, 500)
    assert config.sources["hidden_size"] == "hidden_size"
    assert (config.dtype, config.sources["dtype"]) == ("float32", "torch_dtype")
    assert config.rope_theta == 10000.0


def test_the_nested_level_holds_against_a_conflicting_top_and_the_conflict_is_told() -> None:
    config = read_model_config({"hidden_size": 4096, "vocab_size": 500, "dtype": "float32", "text_config": {**SIZES}})

    assert config.hidden_size == 64
    assert config.sources["hidden_size"] == "text_config.hidden_size"
    assert config.conflicts == ("hidden_size = 4096 contradicts text_config.hidden_size = 64, which holds",)
    assert config.dtype == "float32", "what only the top level states is taken from there"


def test_two_forms_of_the_rotary_base_that_disagree_are_told() -> None:
    config = read_model_config({**SIZES, "rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}})

    assert config.rope_theta == 1e6
    assert config.conflicts == ("rope_theta = 10000.0 contradicts rope_parameters.rope_theta = 1000000.0, which holds",)


def test_the_rotary_base_of_full_attention_is_taken_where_layer_kinds_differ() -> None:
    kinds = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    config = read_model_config({**SIZES, "rope_parameters": kinds})

    assert config.rope_theta == 1e6
    assert config.sources["rope_theta"] == "rope_parameters.full_attention.rope_theta"
    assert config.conflicts == ()


YARN = {"rope_type": "yarn", "factor": 4.0}
KINDS = {"full_attention": {"rope_theta": 1e6, "rope_type": "yarn"}, "sliding_attention": {"rope_theta": 1e4}}
ROPE: dict[str, tuple[dict[str, Any], list[RopeForm]]] = {
    "nothing": ({}, []),
    "old": ({"rope_theta": 5e5}, [RopeForm("all layers", 5e5, "default")]),
    "old, scaled": ({"rope_theta": 5e5, "rope_scaling": {"type": "linear"}}, [RopeForm("all layers", 5e5, "linear")]),
    "new": ({"rope_parameters": {"rope_theta": 1e6, **YARN}}, [RopeForm("all layers", 1e6, "yarn")]),
    "new, base beside": ({"rope_theta": 5e5, "rope_parameters": YARN}, [RopeForm("all layers", 5e5, "yarn")]),
    "per kind": (
        {"rope_parameters": KINDS},
        [RopeForm("full_attention", 1e6, "yarn"), RopeForm("sliding_attention", 1e4, "default")],
    ),
    "old Gemma 3": (
        {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear"}},
        [RopeForm("full_attention", 1e6, "linear"), RopeForm("sliding_attention", 1e4, "default")],
    ),
    "null": ({"rope_parameters": None, "rope_theta": None, "rope_scaling": None}, []),
}


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
@pytest.mark.parametrize(("stated", "forms"), ROPE.values(), ids=ROPE)
def test_every_form_of_the_rotary_embedding_is_read(
    stated: dict[str, Any], forms: list[RopeForm], nested: bool
) -> None:
    config = read_model_config({"text_config": SIZES | stated} if nested else SIZES | stated)

    assert list(config.rope) == forms
    assert config.rope_theta == (forms[0].theta if forms else None)
    assert config.conflicts == ()


def test_an_old_scaling_beside_new_parameters_of_another_kind_is_told() -> None:
    config = read_model_config({**SIZES, "rope_scaling": YARN, "rope_parameters": {"rope_theta": 1e6}})

    (conflict,) = config.conflicts
    assert conflict.startswith("rope_scaling = {")
    assert conflict.endswith("contradicts rope_parameters, whose kind is default; libraries differ in which holds")


def test_layer_types_of_another_length_than_the_depth_are_told_and_not_used() -> None:
    kinds = ["linear_attention", "full_attention"]

    assert read_model_config({**SIZES, "num_hidden_layers": 2, "layer_types": kinds}).layer_types == tuple(kinds)
    config = read_model_config({**SIZES, "layer_types": kinds})
    assert config.layer_types is None
    assert config.conflicts == ("layer_types names 2 layers, num_hidden_layers = 3",)


def test_tying_that_levels_disagree_on_is_told_and_left_to_the_shards() -> None:
    data = {"tie_word_embeddings": True, "text_config": {**SIZES, "tie_word_embeddings": False, "model_type": "llama"}}
    config = read_model_config(data)

    assert config.tie_word_embeddings is None
    assert config.conflicts == (
        "text_config.tie_word_embeddings = False contradicts tie_word_embeddings = True; "
        "whether the shards hold a head decides",
    )


@pytest.mark.parametrize(
    ("stated", "factor"),
    [
        ({"output_multiplier": 0.2}, 0.2),
        ({"model_type": "granite", "logits_scaling": 8}, 0.125),
        ({"model_type": "hyperclovax", "logits_scaling": 8}, 8.0),
        ({"model_type": "minicpm3", "dim_model_base": 16}, 0.25),
        ({"logits_mup_width_multiplier": 24.0}, 1 / 24),
        ({"model_type": "cohere"}, 0.0625),
        ({"model_type": "cohere", "logit_scale": 1.0}, 1.0),
        ({"model_type": "mpt", "logit_scale": "inv_sqrt_d_model"}, None),
        ({}, None),
    ],
    ids=str,
)
def test_what_logits_are_multiplied_with_is_one_factor(stated: dict[str, Any], factor: float | None) -> None:
    assert read_model_config({**SIZES, **stated}).logit_multiplier == factor


def test_what_the_file_does_not_state_is_none() -> None:
    config = read_model_config(SIZES)

    absent = ("architecture", "model_type", "num_attention_heads", "num_key_value_heads", "head_dim", "dtype")
    assert [getattr(config, field) for field in absent] == [None] * len(absent)
    assert (config.tie_word_embeddings, config.rope_theta, config.embedding_scale) == (None, None, None)
    assert set(config.sources) == {"hidden_size", "num_layers", "vocab_size"}


@pytest.mark.parametrize("missing", list(SIZES))
def test_a_missing_size_is_an_error_that_names_the_keys_looked_for(missing: str) -> None:
    part = {key: value for key, value in SIZES.items() if key != missing}

    with pytest.raises(TargetError, match=rf"does not state {missing}: looked for text_config\.{missing}.*, {missing}"):
        read_model_config({"text_config": part, "vision_config": {missing: 7}})


@pytest.mark.parametrize(
    "value", ["64", 0, -1, True, 6.5, [64, 32], {"a": 1}, 2**60, 10**5000], ids=lambda v: str(type(v))
)
def test_a_size_that_is_no_count_is_refused_by_key_and_value(value: Any) -> None:
    with pytest.raises(TargetError, match="hidden_size = .*expected a whole number above 0") as caught:
        read_model_config({**SIZES, "hidden_size": value})
    assert len(str(caught.value)) < 200
    assert "\n" not in str(caught.value)


def test_one_value_per_layer_counts_when_all_are_equal_and_is_told_otherwise() -> None:
    config = read_model_config({**SIZES, "intermediate_size": [128, 128, 128], "num_attention_heads": [4, 8, 4]})

    assert config.intermediate_size == 128
    assert config.num_attention_heads is None
    assert config.conflicts == ("num_attention_heads = [4, 8, 4] cannot be used as num_attention_heads",)


def test_gemma_scales_its_embeddings_by_the_root_of_the_width() -> None:
    nested = {"model_type": "gemma3_text", **SIZES, "final_logit_softcapping": 30.0}
    config = read_model_config({"model_type": "gemma3", "text_config": nested})

    assert config.embedding_scale == math.sqrt(64)
    assert config.sources["embedding_scale"] == "text_config.model_type = gemma3_text"
    assert config.final_logit_softcapping == 30.0


def test_a_stated_embedding_scale_is_taken() -> None:
    config = read_model_config({**SIZES, "model_type": "granite", "embedding_multiplier": 12})

    assert (config.embedding_scale, config.sources["embedding_scale"]) == (12.0, "embedding_multiplier")


def test_a_drafter_nested_by_speculators_is_read() -> None:
    config = read_model_config({"draft_vocab_size": 100, "transformer_layer_config": SIZES})

    assert config.vocab_size == 500
    assert config.sources["num_layers"] == "transformer_layer_config.num_hidden_layers"


def test_gpt2_style_names_are_understood() -> None:
    config = read_model_config({"n_embd": 768, "n_layer": 12, "vocab_size": 50257, "n_head": 12, "n_positions": 1024})

    assert (config.hidden_size, config.num_layers, config.num_attention_heads) == (768, 12, 12)
    assert config.max_position_embeddings == 1024


@pytest.mark.parametrize(
    "cls",
    [transformers.LlamaConfig, transformers.Qwen3Config, transformers.Gemma3TextConfig, transformers.GptOssConfig],
    ids=lambda cls: cls.__name__,
)
def test_what_transformers_writes_is_read_as_transformers_reads_it(cls: Any, tmp_path: Any) -> None:
    written = cls(
        hidden_size=64, num_hidden_layers=2, vocab_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16
    )
    written.save_pretrained(tmp_path)
    config = read_model_config(json.loads((tmp_path / "config.json").read_text()))

    assert (config.hidden_size, config.num_layers, config.vocab_size) == (64, 2, 96)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 16)
    assert config.intermediate_size == written.intermediate_size
    assert config.tie_word_embeddings in (written.tie_word_embeddings, None)
    assert config.rope_theta in {
        entry["rope_theta"]
        for entry in [written.rope_parameters, *written.rope_parameters.values()]
        if isinstance(entry, dict) and "rope_theta" in entry
    }
    assert config.conflicts == ()


_ENCODER_DECODER = (
    "bart",
    "marian",
    "pegasus",
    "whisper",
    "prophetnet",
    "mbart",
    "kosmos",
    "musicgen",
    "blenderbot",
    "t5",
    "trocr",
    "mvp",
    "plbart",
)
# Layers counted twice by their class, or only listed; none of them is a target of a published drafter.
_COUNTED_OTHERWISE = ("dory", "longcat_flash", "nemotron_h", "blt", "xlm")


def _decoders() -> list[str]:
    others = (*_ENCODER_DECODER, *_COUNTED_OTHERWISE)
    names = [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if not any(part in name for part in others)]
    return sorted(name for name in names if name in CONFIG_MAPPING)


def test_every_decoder_that_transformers_has_is_read_as_its_own_class_reads_it() -> None:
    """With the sizes of the class's defaults: no family's names of them are missed, and nothing is a false alarm."""
    num_read = 0
    for name in _decoders():
        try:
            theirs = CONFIG_MAPPING[name]()
        except StrictDataclassError:  # a class whose own defaults do not go together
            continue
        text = theirs.get_text_config(decoder=True)
        if theirs.is_encoder_decoder or not getattr(text, "num_hidden_layers", None):
            continue
        ours = read_model_config(json.loads(theirs.to_json_string(use_diff=False)), where=name)
        assert ours.num_layers == text.num_hidden_layers, name
        assert (ours.hidden_size, ours.vocab_size) == (text.hidden_size, text.vocab_size), name
        if ours.tie_word_embeddings is not None:
            assert ours.tie_word_embeddings == text.tie_word_embeddings, name
        assert not any("cannot be used" in conflict for conflict in ours.conflicts), (name, ours.conflicts)
        num_read += 1
    assert num_read > 120


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*SIZES, "text_config", "rope_parameters", "architectures", "dtype"]), inner)
    ),
    max_leaves=12,
)


@given(JSON_VALUES)
def test_whatever_the_file_holds_only_a_target_error_comes_out(data: Any) -> None:
    with contextlib.suppress(TargetError):
        config = read_model_config(data)
        assert min(config.hidden_size, config.num_layers, config.vocab_size) > 0
