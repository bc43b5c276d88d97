"""The stand-in trainer: it learns, its files are those of a real run, and its drafter is the real kind."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from examples.stand_in_run.data import draw_batch, read_training_data
from examples.stand_in_run.loss import draft_loss, position_weights
from examples.stand_in_run.model import Drafter, read_draft_config
from examples.stand_in_run.train import lr_factor, main, parse_arguments, train

PROJECT = Path(__file__).parents[3]
VOCAB, HIDDEN, DEPTH, MASK = 300, 64, 6, 299
LAYERS = [1, 3, 4]


@dataclass(frozen=True)
class Inputs:
    """Files as the pipeline's store holds them, made by a tiny random target."""

    folder: Path

    def arguments(self, *more: str) -> list[str]:
        return [
            *("--transcripts", str(self.folder / "transcripts.jsonl"), "--hidden", str(self.folder / "hidden")),
            *("--embedding", str(self.folder / "embedding.safetensors"), "--out", str(self.folder / "run")),
            *("--config", str(self.folder / "draft_config.json"), "--transcripts-per-step", "2", *more),
        ]


def draft_config(**changes: Any) -> dict[str, Any]:
    config = json.loads((PROJECT / "examples/stand_in_run/draft_config.json").read_text())
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    nested = {"mask_token_id": MASK, "target_layer_ids": LAYERS}
    more = {"head_dim": 16, "vocab_size": VOCAB, "num_target_layers": DEPTH, "block_size": 5, "dflash_config": nested}
    return {**config, **sizes, **more, **changes}


def tiny_target() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=DEPTH,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    folder = tmp_path_factory.mktemp("inputs")
    target = tiny_target()
    rows, hidden = [], []
    with torch.inference_mode():
        for number in range(6):
            prompt = torch.randint(0, VOCAB - 1, (1, 5 + number))
            tokens = target.generate(prompt, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
            hidden.append(target(tokens, output_hidden_states=True).hidden_states)
            ids = tokens[0].tolist()
            group = "never seen" if number % 3 == 2 else "trained on"
            row = {"id": f"chat-{number}", "dataset": "chat", "group": group, "stop_reason": "length"}
            rows.append({**row, "prompt_ids": ids[: 5 + number], "response_ids": ids[5 + number :]})
    (folder / "transcripts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "draft_config.json").write_text(json.dumps(draft_config()))
    (folder / "hidden").mkdir()
    for layer in LAYERS:
        states = torch.cat([per_layer[layer + 1][0] for per_layer in hidden])
        save_file({"hidden": states.contiguous()}, str(folder / "hidden" / f"layer_{layer:04d}.safetensors"))
    save_file({"weight": target.get_input_embeddings().weight.detach()}, str(folder / "embedding.safetensors"))
    return Inputs(folder)


def official_drafter(config_file: Path) -> Any:
    from dflash.model import DFlashDraftModel
    from transformers import Qwen3Config

    return DFlashDraftModel(Qwen3Config(**json.loads(config_file.read_text()))).eval()


def test_three_steps_write_the_mixed_files_of_a_real_run(inputs: Inputs, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.stand_in_run.train"]
    command += [*inputs.arguments("--steps", "3", "--save-every", "2"), "--out", str(tmp_path / "run")]
    result = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True, env=os.environ)
    assert "step 3/3" in result.stdout
    files = sorted((tmp_path / "run").rglob("*"))
    assert {str(file.relative_to(tmp_path / "run")) for file in files if file.is_file()} == {
        f"step_{step}/checkpoint.pt" for step in (0, 2, 3)
    }
    saved = torch.load(tmp_path / "run" / "step_3" / "checkpoint.pt", weights_only=False)
    assert set(saved) == {"model_state_dict", "optimizer_state_dict", "epoch", "step", "args", "rng_state"}
    assert (saved["step"], saved["epoch"]) == (3, 1)
    assert isinstance(saved["args"], argparse.Namespace)
    assert (saved["args"].block_size, saved["args"].mask_token_id, saved["args"].target_layer_ids) == (5, MASK, LAYERS)
    assert isinstance(saved["args"].out, PurePath)
    assert set(saved["rng_state"]) == {"torch", "python", "numpy"}
    np.random.RandomState().set_state(saved["rng_state"]["numpy"])
    torch.Generator().set_state(saved["rng_state"]["torch"])
    weights = saved["model_state_dict"]
    names = {name.removeprefix("draft_model.") for name in weights} - {"embed_tokens.weight", "lm_head.weight"}
    official = official_drafter(inputs.folder / "draft_config.json")
    assert {name: list(weights[f"draft_model.{name}"].shape) for name in names} == {
        name: list(tensor.shape) for name, tensor in official.state_dict().items()
    }
    assert torch.equal(weights["embed_tokens.weight"], weights["lm_head.weight"])
    assert len(saved["optimizer_state_dict"]["state"]) == len(names)
    steps = {float(state["step"]) for state in saved["optimizer_state_dict"]["state"].values()}
    assert steps == {3.0}


def test_the_loss_falls_and_the_untrained_step_is_kept(inputs: Inputs, tmp_path: Path) -> None:
    arguments = inputs.arguments("--steps", "60", "--save-every", "60", "--out", str(tmp_path), "--lr", "3e-3")
    losses = train(parse_arguments([*arguments, "--warmup-steps", "5", "--random-tokens", "64"]))
    assert len(losses) == 60
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
    first, last = (
        torch.load(tmp_path / f"step_{step}" / "checkpoint.pt", weights_only=False)["model_state_dict"]
        for step in (0, 60)
    )
    assert not torch.equal(first["draft_model.fc.weight"], last["draft_model.fc.weight"])
    assert torch.equal(first["lm_head.weight"], last["lm_head.weight"])


def test_the_same_seed_gives_the_same_losses(inputs: Inputs, tmp_path: Path) -> None:
    def losses(seed: str) -> list[float]:
        return train(parse_arguments(inputs.arguments("--steps", "3", "--seed", seed, "--out", str(tmp_path / seed))))

    assert losses("1") == losses("1")
    assert losses("1") != losses("2")


def test_many_anchors_in_one_pass_give_what_the_official_drafter_gives_for_each(inputs: Inputs) -> None:
    config = read_draft_config(inputs.folder / "draft_config.json")
    torch.manual_seed(3)
    drafter = Drafter(config).eval()
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.1)
    official = official_drafter(inputs.folder / "draft_config.json")
    official.load_state_dict(drafter.state_dict())
    data = read_data(inputs)
    batch = draw_batch(data.transcripts, num_transcripts=3, num_anchors=4, config=config)
    embeddings_BAKD = data.embedding_VD[batch.block_ids_BAK]
    with torch.inference_mode():
        ours_BAKD = drafter(batch.features_BTF, embeddings_BAKD, batch.anchor_positions_BA)
        for row, column in np.ndindex(3, 4):
            anchor = int(batch.anchor_positions_BA[row, column])
            theirs_1KD = official(
                target_hidden=batch.features_BTF[row : row + 1, :anchor],
                noise_embedding=embeddings_BAKD[row, column][None],
                position_ids=torch.arange(anchor + config.block_size)[None],
            )
            torch.testing.assert_close(ours_BAKD[row, column], theirs_1KD[0], rtol=1e-5, atol=1e-5)


def read_data(inputs: Inputs, group: str = "trained on") -> Any:
    config = read_draft_config(inputs.folder / "draft_config.json")
    return read_training_data(
        inputs.folder / "transcripts.jsonl",
        inputs.folder / "hidden",
        inputs.folder / "embedding.safetensors",
        group=group,
        config=config,
    )


def test_references_are_the_tokens_at_the_slots_own_positions(inputs: Inputs) -> None:
    config = read_draft_config(inputs.folder / "draft_config.json")
    data = read_data(inputs)
    assert len(data.transcripts) == 4
    batch = draw_batch(data.transcripts, num_transcripts=4, num_anchors=30, config=config)
    rows = [json.loads(line) for line in (inputs.folder / "transcripts.jsonl").read_text().splitlines()]
    texts = {tuple(row["prompt_ids"] + row["response_ids"]): len(row["prompt_ids"]) for row in rows}
    found = []
    for row in range(4):
        features_TF = batch.features_BTF[row]
        (tokens,) = (
            text
            for text, transcript in ((tuple(t.tokens_T.tolist()), t) for t in data.transcripts)
            if torch.equal(transcript.features_TF, features_TF[: len(text)])
        )
        found.append(tokens)
        anchors = batch.anchor_positions_BA[row].tolist()
        assert set(anchors) == set(range(texts[tokens], len(tokens) - 1))
        for column, anchor in enumerate(anchors):
            ahead = list(tokens[anchor + 1 : anchor + config.block_size])
            assert batch.block_ids_BAK[row, column].tolist() == [tokens[anchor]] + [MASK] * 4
            assert batch.exists_BAP[row, column].tolist() == [True] * len(ahead) + [False] * (4 - len(ahead))
            assert batch.reference_ids_BAP[row, column].tolist()[: len(ahead)] == ahead
    assert len(set(found)) == 4


def test_the_sampled_loss_tends_to_the_full_one_as_the_sample_grows() -> None:
    torch.manual_seed(5)
    embedding_VD, hidden_RD = torch.randn(VOCAB, 16) * 0.3, torch.randn(9, 16)
    known_U = torch.tensor([3, 40, 41, 299])
    references_R = known_U[torch.randint(4, (9,))]
    weights_R = torch.rand(9)

    def loss(num_random: int) -> float:
        more: dict[str, Any] = {"embedding_VD": embedding_VD, "known_tokens_U": known_U}
        return float(draft_loss(hidden_RD, references_R, weights_R, num_random=num_random, **more))

    def by_hand() -> float:
        log_shares_RV = (hidden_RD @ embedding_VD.T).log_softmax(dim=-1)
        terms = [
            float(weight) * -float(log_shares_RV[row, token])
            for row, (weight, token) in enumerate(zip(weights_R, references_R, strict=True))
        ]
        return sum(terms) / float(weights_R.sum())

    assert loss(0) == pytest.approx(by_hand(), rel=1e-5)
    assert loss(200_000) == pytest.approx(by_hand(), rel=0.01)
    few = [loss(100) for _ in range(200)]
    assert sum(few) / len(few) == pytest.approx(by_hand(), rel=0.02)
    assert max(few) > min(few)


def test_slots_that_do_not_exist_do_not_count() -> None:
    torch.manual_seed(5)
    hidden_RD, embedding_VD = torch.randn(3, 8), torch.randn(VOCAB, 8)
    more: dict[str, Any] = {"embedding_VD": embedding_VD, "known_tokens_U": torch.tensor([4, 9]), "num_random": 0}
    both = draft_loss(hidden_RD[:2], torch.tensor([4, 9]), torch.ones(2), **more)
    padded = draft_loss(hidden_RD, torch.tensor([4, 9, 0]), torch.tensor([1.0, 1.0, 0.0]), **more)
    assert both.item() == pytest.approx(padded.item())


def test_weights_and_learning_rate_follow_their_formulas() -> None:
    assert position_weights(8, decay=4.0).tolist() == pytest.approx([math.exp(-p / 4) for p in range(7)])
    factors = [lr_factor(step, warmup_steps=10, steps=100) for step in range(1, 101)]
    assert factors[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert factors[9:] == sorted(factors[9:], reverse=True)
    assert factors[-1] == pytest.approx(0.1)


def broken(inputs: Inputs, tmp_path: Path, fault: str) -> list[str]:
    config = tmp_path / "config.json"
    changes: dict[str, dict[str, Any]] = {
        "another width": {"hidden_size": 128},
        "a layer that was not extracted": {"dflash_config": {"mask_token_id": MASK, "target_layer_ids": [2]}},
        "a mask outside the vocabulary": {"dflash_config": {"mask_token_id": 300, "target_layer_ids": LAYERS}},
    }
    data = draft_config(**changes.get(fault, {}))
    if fault == "no block size":
        del data["block_size"]
    config.write_text(json.dumps(data))
    arguments = [*inputs.arguments("--steps", "1"), "--config", str(config), "--out", str(tmp_path / "run")]
    more = {"a group nobody has": ["--group", "unknown"], "no transcripts": ["--transcripts", str(tmp_path / "none")]}
    return [*arguments, *more.get(fault, []), *(["--anchors", "0"] if fault == "no anchors" else [])]


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("another width", r"\[189, 128\]"),
        ("a layer that was not extracted", "layer_0002.safetensors"),
        ("a mask outside the vocabulary", "300"),
        ("no block size", "lacks block_size"),
        ("a group nobody has", "'never seen', 'trained on'"),
        ("no transcripts", "check --transcripts"),
        ("no anchors", "--anchors is 0"),
    ],
)
def test_wrong_input_is_named_in_one_line_and_nothing_is_saved(
    inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str, named: str
) -> None:
    assert main(broken(inputs, tmp_path, fault)) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert re.search(named, lines[0])
    assert not (tmp_path / "run").exists()


def test_the_shipped_config_is_of_the_demos_size() -> None:
    config = read_draft_config(PROJECT / "examples/stand_in_run/draft_config.json")
    num_weights = sum(parameter.numel() for parameter in Drafter(config).parameters())
    assert 4_000_000 < num_weights < 6_000_000
    assert (config.block_size, config.target_layer_ids) == (8, (1, 14, 27))
    official = official_drafter(PROJECT / "examples/stand_in_run/draft_config.json")
    assert (official.block_size, official.mask_token_id, official.target_layer_ids) == (8, 16, [1, 14, 27])
    ours: dict[str, Tensor] = Drafter(config).state_dict()
    assert {name: t.shape for name, t in ours.items()} == {name: t.shape for name, t in official.state_dict().items()}
