"""What is read of a family is what transformers has: its config's attributes, and what its model really computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from dflash_core.target import families
from dflash_core.target.head import load_embedding_and_head
from dflash_core.target.loading import read_target_folder
from dflash_core.target.model_config import ModelConfig, read_model_config
from dflash_core.target.runtime import decoder_of
from dflash_core.target.stop_tokens import read_stop_tokens

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "eos_token_id": 7,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
HYBRID: dict[str, Any] = {
    **LINEAR,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}
GEMMA_4 = {"hidden_size_per_layer_input": 0, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# Families that differ in what they do to embeddings and logits, each with numbers that are not neutral.
FLAT: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {}),
    "qwen3.5": ("Qwen3_5TextConfig", HYBRID),
    "gemma2": ("Gemma2Config", {}),
    "gemma3": ("Gemma3TextConfig", {"final_logit_softcapping": 5.0}),
    "gemma4": ("Gemma4TextConfig", GEMMA_4 | {"final_logit_softcapping": 30.0}),
    "gpt-oss": ("GptOssConfig", EXPERTS),
    "cohere": ("CohereConfig", {}),
    "granite": ("GraniteConfig", {"logits_scaling": 8.0, "embedding_multiplier": 12.0}),
    "falcon-h1": (
        "FalconH1Config",
        {
            "lm_head_multiplier": 0.25,
            "embedding_multiplier": 5.5,
            "mamba_n_heads": 4,
            "mamba_d_head": 24,
            "mamba_d_ssm": 96,
        },
    ),
    "hyperclovax": ("HyperCLOVAXConfig", {"logits_scaling": 0.125, "embedding_multiplier": 10.0}),
    "minicpm3": ("MiniCPM3Config", {"dim_model_base": 16, "scale_emb": 12, "num_key_value_heads": 4}),
    "nanochat": ("NanoChatConfig", {}),
}
NESTED: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5": ("Qwen3_5Config", HYBRID),
    "gemma3": ("Gemma3Config", {}),
    "gemma4": ("Gemma4Config", GEMMA_4 | {"final_logit_softcapping": 30.0}),
    "muse-glimmer": ("MuseGlimmerConfig", {}),
}

TINY_VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def make(name: str, form: str) -> Any:
    """Return a tiny config of a family, flat or nested in that of its multimodal wrapper."""
    cls, changes = (FLAT if form == "flat" else NESTED)[name]
    sizes = {key: value for key, value in (SIZES | changes).items() if not (name == "minicpm3" and key == "head_dim")}
    if form == "flat":
        return getattr(transformers, cls)(**sizes)
    towers = {"vision_config": TINY_VISION} if name in ("gemma3", "muse-glimmer") else {}
    return getattr(transformers, cls)(text_config=sizes, **towers)


CASES = [("flat", name) for name in FLAT] + [("nested", name) for name in NESTED]


def written(config: Any, folder: Path) -> dict[str, Any]:
    config.save_pretrained(folder)
    data: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return data


@pytest.mark.parametrize(("form", "name"), CASES)
def test_every_fact_is_what_transformers_reads_from_the_same_file(form: str, name: str, tmp_path: Path) -> None:
    data = written(make(name, form), tmp_path)
    ours = read_model_config(data)
    theirs = AutoConfig.from_pretrained(tmp_path).get_text_config(decoder=True)

    assert ours.hidden_size == theirs.hidden_size
    assert ours.num_layers == theirs.num_hidden_layers == 4
    assert ours.vocab_size == theirs.vocab_size
    assert ours.model_type == theirs.model_type
    for fact in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "max_position_embeddings"):
        assert getattr(ours, fact) == getattr(theirs, fact), fact
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    softcapping = getattr(theirs, "final_logit_softcapping", None)
    assert ours.final_logit_softcapping == softcapping
    if ours.layer_types is not None:
        assert list(ours.layer_types) == theirs.layer_types
    assert rope_of(ours) == rope_as_transformers_has_it(theirs)
    assert ours.eos_token_ids == (7,)
    assert ours.conflicts == ()


def rope_of(config: ModelConfig) -> dict[str, tuple[float | None, str]]:
    return {form.layers: (form.theta, form.kind) for form in config.rope}


def rope_as_transformers_has_it(config: Any) -> dict[str, tuple[float, str]]:
    parameters = config.rope_parameters
    if "rope_theta" in parameters:
        parameters = {"all layers": parameters}
    return {name: (part["rope_theta"], part["rope_type"]) for name, part in parameters.items()}


@pytest.mark.parametrize(("form", "name"), CASES)
def test_a_file_that_leaves_out_the_defaults_means_the_same(form: str, name: str, tmp_path: Path) -> None:
    """Files on hubs state what differs from the class's defaults, and not always that."""
    data = written(make(name, form), tmp_path)
    silent = ("tie_word_embeddings", "final_logit_softcapping", "logit_scale", "output_multiplier")
    for level in (data, data.get("text_config", {})):
        for key in silent:
            level.pop(key, None)
    (tmp_path / "config.json").write_text(json.dumps(data))
    theirs = AutoConfig.from_pretrained(tmp_path).get_text_config(decoder=True)
    ours = read_model_config(data)

    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.sources["tie_word_embeddings"].startswith("default of ")
    assert ours.final_logit_softcapping == getattr(theirs, "final_logit_softcapping", None)
    for key in ("logit_scale", "output_multiplier"):
        if hasattr(theirs, key):
            assert ours.logit_multiplier == getattr(theirs, key)


def random_model(config: Any, folder: Path, dtype: torch.dtype) -> Any:
    """Save a random model of a config, and load it as the target is loaded."""
    torch.manual_seed(0)
    # A model that is only registered as one of images and text computes text alike.
    auto = AutoModelForImageTextToText if config.model_type == "muse_glimmer" else AutoModelForCausalLM
    model: Any = auto.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(3.0)
    model.to(dtype).save_pretrained(folder)
    loaded: Any = auto.from_pretrained(folder, dtype=dtype)
    return loaded.eval()


def observed(model: Any, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what enters the first layer, what leaves the final norm, and the logits."""
    decoder = decoder_of(model)
    seen: dict[str, torch.Tensor] = {}

    def first(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen["embedded"] = args[0] if args else kwargs["hidden_states"]

    def last(module: Any, args: Any, output: torch.Tensor) -> None:
        seen["final"] = output

    decoder.layers[0].register_forward_pre_hook(first, with_kwargs=True)
    decoder.norm.register_forward_hook(last)
    with torch.no_grad():
        logits = model(input_ids=token_ids, use_cache=False).logits
    return seen["embedded"][0], seen["final"][0], logits[0]


# The final norm of Falcon-H1 has another name, so that it is no target; NanoChat norms its embeddings.
COMPUTED = [case for case in CASES if case[1] not in ("falcon-h1", "nanochat")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("form", "name"), COMPUTED)
def test_scale_head_multiplier_and_soft_capping_are_what_the_model_computes(
    form: str, name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = random_model(make(name, form), tmp_path, dtype)
    target = read_target_folder(tmp_path, name=name)
    config, tables = target.config, load_embedding_and_head(target)
    assert config.dtype == str(dtype).removeprefix("torch.")
    assert torch.equal(tables.embedding_VD, model.get_input_embeddings().weight)
    assert torch.equal(tables.head_VD, model.get_output_embeddings().weight)

    token_ids = torch.tensor([[3, 9, 14, 5, 60, 95, 3, 2]])
    embedded_TD, final_TD, logits_TV = observed(model, token_ids)
    scale = config.embedding_scale_in(config.dtype)
    rows_TD = tables.embedding_VD[token_ids[0]]
    if name != "muse-glimmer":  # which norms its embeddings
        assert torch.equal(rows_TD * (1.0 if scale is None else scale), embedded_TD), "bit for bit"

    ours_TV = torch.nn.functional.linear(final_TD.float(), tables.head_VD.float()) * (config.logit_multiplier or 1.0)
    if config.final_logit_softcapping is not None:
        ours_TV = torch.tanh(ours_TV / config.final_logit_softcapping) * config.final_logit_softcapping
    # In bfloat16 the model rounds after the head, the multiplier and the capping.
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    spread = float(logits_TV.float().std())
    torch.testing.assert_close(ours_TV / spread, logits_TV.float() / spread, atol=tolerance, rtol=tolerance)


def test_gemmas_scale_is_rounded_as_its_weights_are() -> None:
    config = read_model_config(
        {"model_type": "gemma3_text", "hidden_size": 5376, "num_hidden_layers": 1, "vocab_size": 9}
    )

    assert config.embedding_scale == 5376**0.5
    assert config.embedding_scale_in("bfloat16") == 73.5
    assert config.embedding_scale_in("float32") == pytest.approx(5376**0.5, rel=1e-7)


def test_a_scale_that_is_a_plain_number_is_not_rounded() -> None:
    config = read_model_config(
        {
            "model_type": "granite",
            "hidden_size": 8,
            "num_hidden_layers": 1,
            "vocab_size": 9,
            "embedding_multiplier": 1.1,
        }
    )

    assert config.embedding_scale_in("bfloat16") == 1.1


@pytest.mark.parametrize("is_mup", [True, False])
def test_afmoe_scales_only_where_its_file_says_mup(is_mup: bool) -> None:
    config = read_model_config(
        {"model_type": "afmoe", "hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 9, "mup_enabled": is_mup}
    )

    assert config.embedding_scale == (8.0 if is_mup else None)


def _default(model_type: str, key: str) -> Any:
    return getattr(CONFIG_MAPPING[model_type], key, None)


@pytest.mark.parametrize("model_type", sorted(families.TIED | families.UNTIED))
def test_the_default_of_tying_is_that_of_transformers_class(model_type: str) -> None:
    assert _default(model_type, "tie_word_embeddings") is families.tied_by_default(model_type)


@pytest.mark.parametrize("model_type", sorted(families.SOFTCAPPING))
def test_the_default_of_soft_capping_is_that_of_transformers_class(model_type: str) -> None:
    key = "logits_soft_cap" if model_type == "recurrent_gemma" else "final_logit_softcapping"
    assert _default(model_type, key) == families.SOFTCAPPING[model_type]


@pytest.mark.parametrize("model_type", sorted(families.LOGIT_MULTIPLIER))
def test_the_default_of_the_multiplier_is_that_of_transformers_class(model_type: str) -> None:
    key = "logit_scale" if model_type.startswith("cohere") else "output_multiplier"
    assert _default(model_type, key) == families.LOGIT_MULTIPLIER[model_type]


def test_an_unknown_family_has_no_defaults() -> None:
    config = read_model_config({"model_type": "new", "hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 9})

    assert (config.tie_word_embeddings, config.final_logit_softcapping, config.logit_multiplier) == (None, None, None)
    assert config.embedding_scale is None


def test_null_switches_a_default_off() -> None:
    data = {"model_type": "gemma2", "hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 9}

    assert read_model_config(data).final_logit_softcapping == 30.0
    assert read_model_config({**data, "final_logit_softcapping": None}).final_logit_softcapping is None


@pytest.mark.parametrize("form", ["flat", "nested"])
def test_a_models_own_files_name_its_stop_tokens(form: str, tmp_path: Path) -> None:
    random_model(make("gemma3", form), tmp_path, torch.float32)
    found = read_stop_tokens(tmp_path)

    assert found is not None
    assert found.token_ids == (7,)
    assert found.conflicts == ()
