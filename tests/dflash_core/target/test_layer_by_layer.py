"""Layer by layer is bit for bit what transformers' own forward pass computes, in every family, at every layer."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dflash_core import progress
from dflash_core.errors import DoesNotFit, TargetError
from dflash_core.hosts import memory
from dflash_core.store import Store
from dflash_core.target import extraction_plan, layer_weights
from dflash_core.target.bare_model import CannotSplit
from dflash_core.target.hidden_states import KIND, HiddenStates, extract_hidden_states
from dflash_core.target.layer_weights import LayerWeights
from dflash_core.target.loading import Target, read_target_folder
from dflash_core.target.runtime import decoder_of, load_model
from dflash_core.target.transcripts import Transcript
from tests.support.extraction_worker import TRANSCRIPTS, make_transcripts
from tests.support.tiny_families import DEPTH, MAKERS, write_family, write_mxfp4_gpt_oss

DTYPES = {"compute_dtype": "float32", "store_dtype": "float32"}
ALL = range(DEPTH)


@dataclasses.dataclass(frozen=True)
class Expected:
    """What transformers says: its tuple, the last layer by a hook, and logits."""

    layers: list[Tensor]
    last: Tensor
    final: Tensor
    logits: Tensor


def run_transformers(target: Target, transcripts: list[Transcript], dtype: str = "float32") -> Expected:
    model = load_model(target, dtype)
    caught: list[Tensor] = []
    decoder_of(model).layers[-1].register_forward_hook(
        lambda _module, _inputs, output: caught.append((output[0] if isinstance(output, tuple) else output)[0].clone())
    )
    outputs = []
    with torch.inference_mode():
        for one in transcripts:
            ids = torch.tensor([[*one.prompt_ids, *one.response_ids]])
            outputs.append(model(ids, output_hidden_states=True, use_cache=False))
    states = [torch.cat([output.hidden_states[index][0] for output in outputs]) for index in range(DEPTH + 1)]
    assert all(len(output.hidden_states) == DEPTH + 1 for output in outputs)
    logits = torch.cat([output.logits[0] for output in outputs])
    return Expected(states[1:-1], torch.cat(caught), states[-1], logits)


def assert_equal(states: HiddenStates, expected: Expected) -> None:
    for layer, hidden in enumerate(expected.layers):
        assert torch.equal(states.load_layer(layer), hidden), layer
    assert torch.equal(states.load_layer(DEPTH - 1), expected.last), "the last layer, before the final norm"
    assert torch.equal(states.load_final(), expected.final), "after the final norm"
    assert not torch.equal(expected.last, expected.final)


def assert_choices(states: HiddenStates, expected: Expected, transcripts: list[Transcript]) -> None:
    choices, start = states.load_choices(), 0
    for one in transcripts:
        ids = [*one.prompt_ids, *one.response_ids]
        for place in range(len(one.prompt_ids) - 1, len(ids) - 1):
            logits, token, at = expected.logits[start + place].double(), ids[place + 1], start + place
            others = torch.cat([logits[:token], logits[token + 1 :]])
            assert int(choices.chosen[at]) == int(logits.argmax())
            assert float(choices.margin[at]) == pytest.approx(float(logits[token] - others.max()), abs=2e-4)
            assert int(choices.rank[at]) == int((logits > logits[token]).sum())
            expected_log = float(logits.log_softmax(dim=0)[token])
            assert float(choices.log_probability[at]) == pytest.approx(expected_log, abs=2e-4)
        judged = slice(start + len(one.prompt_ids) - 1, start + len(ids) - 1)
        rest = torch.ones(len(ids), dtype=torch.bool)
        rest[judged.start - start : judged.stop - start] = False
        assert (choices.rank[start : start + len(ids)][rest] == -1).all()
        assert (choices.chosen[start : start + len(ids)][rest] == -1).all()
        start += len(ids)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", MAKERS)
def test_every_state_is_transformers_own_number(family: str, tied: bool, tmp_path: Path) -> None:
    target = write_family(tmp_path / "target", family, tied=tied, shard_size=None if tied else "60KB")
    assert (len(target.shards) > 2) is not tied
    states = extract_hidden_states(Store(tmp_path / "store"), target, TRANSCRIPTS, ALL, **DTYPES)
    assert states.choices.meta["method"] == "layer by layer", states.warnings
    expected = run_transformers(target, TRANSCRIPTS)
    assert_equal(states, expected)
    assert_choices(states, expected, TRANSCRIPTS)


@pytest.mark.parametrize("family", ["llama", "qwen3.5", "gemma3", "gpt-oss"])
def test_bfloat16_is_transformers_own_number_too(family: str, tmp_path: Path) -> None:
    target = write_family(tmp_path / "target", family, tied=False, dtype=torch.bfloat16)
    states = extract_hidden_states(
        Store(tmp_path / "store"), target, TRANSCRIPTS, ALL, compute_dtype="bfloat16", store_dtype="bfloat16"
    )
    assert states.choices.meta["method"] == "layer by layer"
    assert_equal(states, run_transformers(target, TRANSCRIPTS, "bfloat16"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_published_gpt_oss_is_dequantised_layer_by_layer(dtype: str, tmp_path: Path) -> None:
    target = write_mxfp4_gpt_oss(tmp_path / "target")
    states = extract_hidden_states(
        Store(tmp_path / "store"), target, TRANSCRIPTS, ALL, compute_dtype=dtype, store_dtype=dtype
    )
    assert states.choices.meta["method"] == "layer by layer", states.warnings
    assert_equal(states, run_transformers(target, TRANSCRIPTS, dtype))


@pytest.mark.parametrize("family", ["gemma3", "gemma4 small", "gpt-oss", "qwen3.5"])
def test_arguments_that_take_too_much_memory_are_made_anew(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "argument_bytes", lambda _: 0)
    target = write_family(tmp_path / "target", family, tied=True)
    states = extract_hidden_states(Store(tmp_path / "store"), target, TRANSCRIPTS, ALL, **DTYPES)
    assert_equal(states, run_transformers(target, TRANSCRIPTS))


def test_a_head_read_in_many_slices_says_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = write_family(tmp_path / "target", "gemma4", tied=True)
    whole = extract_hidden_states(Store(tmp_path / "whole"), target, TRANSCRIPTS, [], **DTYPES).load_choices()
    monkeypatch.setattr(extraction_plan, "_LEAST_SLICE_BYTES", 0)
    monkeypatch.setattr(extraction_plan, "_SHARE_OF_LAYER", 0.03)
    plan = extraction_plan.make_extraction_plan(LayerWeights(target, "float32"), [[1, 2]], "float32")
    assert 1 < plan.head_rows < 20, "of 160"
    sliced = extract_hidden_states(Store(tmp_path / "sliced"), target, TRANSCRIPTS, [], **DTYPES)
    assert_choices(sliced, run_transformers(target, TRANSCRIPTS), TRANSCRIPTS)
    assert torch.equal(sliced.load_choices().chosen, whole.chosen)
    assert torch.equal(sliced.load_choices().rank, whole.rank)
    torch.testing.assert_close(sliced.load_choices().log_probability, whole.log_probability, equal_nan=True)


def test_every_weight_of_a_layer_is_read_once_and_of_the_embedding_the_rows_that_occur(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[LayerWeights] = []
    original = LayerWeights.__init__

    def keep(self: LayerWeights, target: Target, compute_dtype: str) -> None:
        original(self, target, compute_dtype)
        made.append(self)

    monkeypatch.setattr(LayerWeights, "__init__", keep)
    target = write_family(tmp_path / "target", "llama", tied=False, shard_size="60KB")
    transcripts = make_transcripts((5, 12), (3, 1))
    extract_hidden_states(Store(tmp_path / "store"), target, transcripts, [2], **DTYPES)
    (weights,) = made
    layers = sum(weights.stored[name].size_bytes for layer in ALL for name in weights.layer_names(layer))
    row = 64 * 4
    tokens = {token for one in transcripts for token in (*one.prompt_ids, *one.response_ids)}
    head = 160 * row
    # The head twice: random transcripts are not the arg-max, and ranks are counted in a second reading.
    assert weights.stored.bytes_read == layers + len(tokens) * row + 2 * head + row


class TestWhatCannotBeSplit:
    def test_layers_that_are_no_chain_are_run_as_a_whole_and_that_is_said(self, tmp_path: Path) -> None:
        """Gemma 3n keeps four residual streams and joins them after its last layer."""
        from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

        config = Gemma3nTextConfig(
            vocab_size=160,
            vocab_size_per_layer_input=160,
            hidden_size=64,
            hidden_size_per_layer_input=8,
            intermediate_size=96,
            num_hidden_layers=DEPTH,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            laurel_rank=8,
            num_kv_shared_layers=0,
            activation_sparsity_pattern=[0.0] * DEPTH,
            layer_types=["sliding_attention", "full_attention"] * (DEPTH // 2),
            sliding_window=5,
            max_position_embeddings=256,
        )
        torch.manual_seed(0)
        Gemma3nForCausalLM(config).save_pretrained(tmp_path / "target")
        target = read_target_folder(tmp_path / "target", name="odd")
        states = extract_hidden_states(Store(tmp_path / "store"), target, TRANSCRIPTS, [], **DTYPES)
        assert states.choices.meta["method"] == "whole model"
        assert states.warnings[0].startswith("target 'odd' was held in memory as a whole, for its layers do not form")
        model = load_model(target, "float32")
        with torch.inference_mode():
            ids = [torch.tensor([[*one.prompt_ids, *one.response_ids]]) for one in TRANSCRIPTS]
            expected = torch.cat([decoder_of(model)(one, use_cache=False).last_hidden_state[0] for one in ids])
        assert torch.equal(states.load_final(), expected)

    def test_the_whole_model_says_the_same_as_layer_by_layer(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        target = write_family(tmp_path / "target", "gemma4 small", tied=True)
        split = extract_hidden_states(Store(tmp_path / "split"), target, TRANSCRIPTS, ALL, **DTYPES)
        monkeypatch.setattr(layer_weights, "decoder_of", _refuse)
        whole = extract_hidden_states(Store(tmp_path / "whole"), target, TRANSCRIPTS, ALL, **DTYPES)
        assert (split.choices.meta["method"], whole.choices.meta["method"]) == ("layer by layer", "whole model")
        assert torch.equal(split.load_final(), whole.load_final())
        for layer in ALL:
            assert torch.equal(split.load_layer(layer), whole.load_layer(layer)), layer
        assert torch.equal(split.load_choices().chosen, whole.load_choices().chosen)
        assert torch.equal(split.load_choices().rank, whole.load_choices().rank)
        torch.testing.assert_close(split.load_margins(), whole.load_margins())

    def test_a_transformers_whose_rules_are_not_known_is_run_whole(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from transformers import core_model_loading

        target = write_family(tmp_path / "target", "llama", tied=True)
        monkeypatch.delattr(core_model_loading, "dot_natural_key")
        with pytest.raises(CannotSplit, match=r"the conversion rules of transformers \d+\.\d+"):
            LayerWeights(target, "float32")

    def test_quantised_weights_are_left_to_transformers(self, tmp_path: Path) -> None:
        import json

        write_family(tmp_path / "target", "llama", tied=True)
        path = tmp_path / "target" / "config.json"
        data = json.loads(path.read_text()) | {"quantization_config": {"quant_method": "fp8"}}
        path.write_text(json.dumps(data))
        with pytest.raises(CannotSplit, match=r"its weights are quantised \(fp8\)"):
            LayerWeights(read_target_folder(tmp_path / "target", name="t"), "float32")


def _refuse(_model: object) -> object:
    raise CannotSplit("a test says so")


class TestBeforeAnythingIsLoaded:
    def test_what_does_not_fit_is_refused_with_the_numbers(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        target = write_family(tmp_path / "target", "llama", tied=True)
        monkeypatch.setattr(extraction_plan, "available_memory_bytes", lambda: 10 << 20)
        with pytest.raises(DoesNotFit, match=r"'llama' in float32 need 0\.1 GiB of memory, its largest layer 0\.0 GiB"):
            extract_hidden_states(Store(tmp_path / "store"), target, TRANSCRIPTS, [1], **DTYPES)

    def test_scratch_that_fits_on_no_disk_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        target = write_family(tmp_path / "target", "llama", tied=True)
        plan = extraction_plan.make_extraction_plan(LayerWeights(target, "float32"), [[1] * 10], "float32")
        assert plan.scratch_bytes == 2 * 10 * 64 * 4
        monkeypatch.setattr(extraction_plan.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 100}))
        with pytest.raises(DoesNotFit, match="of disk while they are computed"):
            extract_hidden_states(Store(tmp_path / "store"), target, TRANSCRIPTS, [1], **DTYPES)

    @pytest.mark.parametrize("change", ["missing", "shape", "cut"])
    def test_weights_that_do_not_belong_are_an_error(self, change: str, tmp_path: Path) -> None:
        from safetensors.torch import load_file, save_file

        write_family(tmp_path / "target", "llama", tied=True)
        path = tmp_path / "target" / "model.safetensors"
        tensors, name = load_file(path), "model.layers.3.mlp.up_proj.weight"
        if change == "missing":
            del tensors[name]
        elif change == "shape":
            tensors[name] = tensors[name][:-1].clone()
        save_file(tensors, path, metadata={"format": "pt"})
        if change == "cut":
            path.write_bytes(path.read_bytes()[:-8])
        expected = {
            "missing": r"lacks 1 tensors that its config calls for, first 'model\.layers\.3\.mlp\.up_proj",
            "shape": r"up_proj\.weight' has the shape \[95, 64\], its config calls for \[96, 64\]",
            "cut": "is cut off or damaged",
        }
        target = read_target_folder(tmp_path / "target", name="t")
        with pytest.raises(TargetError, match=expected[change]):
            extract_hidden_states(Store(tmp_path / "store"), target, TRANSCRIPTS, [5], **DTYPES)


def test_progress_says_which_layer_and_transcript(tmp_path: Path) -> None:
    target = write_family(tmp_path / "target", "llama", tied=True)
    seen: list[tuple[float, float, str]] = []
    with progress.listening(lambda _stage, done, total: seen.append((done, total, progress.detail(KIND)))):
        extract_hidden_states(Store(tmp_path / "store"), target, TRANSCRIPTS, [2], **DTYPES)
    details = [detail for _, _, detail in seen]
    assert details[0] == "embeddings, transcript 1 of 4"
    assert "layer 3 of 6, transcript 2 of 4" in details
    assert details[-1] == "the target's choices"
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    assert seen[-1][0] == pytest.approx(seen[-1][1])
