"""A drafter's own embedding and head decide its drafts; copies of the target's change nothing and are not fetched."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_core import evaluation
from dflash_core.config import Config
from dflash_core.errors import UnsupportedCheckpoint
from tests.golden import tiny_qwen3 as golden
from tests.support.direct import Evaluated, evaluate_directly


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("own_tables")


@pytest.fixture(scope="module")
def config(folder: Path) -> Config:
    return golden.make_config(folder)


@pytest.fixture(scope="module")
def plain(folder: Path, config: Config) -> Evaluated:
    """Return the drafter that repeats its anchor, without tables."""
    return evaluate_directly(config, folder / "runs" / "step_2")


@pytest.fixture(scope="module")
def table(folder: Path, config: Config) -> torch.Tensor:
    """Return the target's embedding, which is its head too."""
    (path,) = (folder / "target").glob("*.safetensors")
    return load_file(path)["model.embed_tokens.weight"]


def evaluate_with(folder: Path, config: Config, step: int, **tables: torch.Tensor) -> Evaluated:
    into = folder / "runs" / f"step_{step}"
    shutil.copytree(folder / "runs" / "step_2", into)
    tensors = load_file(into / "model.safetensors")
    save_file(tensors | {name.replace("__", "."): table for name, table in tables.items()}, into / "model.safetensors")
    return evaluate_directly(config, into)


def meta(evaluated: Evaluated) -> dict[str, object]:
    return evaluated.manifests["drafter"]["meta"]


def test_the_plain_drafter_is_right_now_and_then(plain: Evaluated) -> None:
    assert max(max(walk) for walk in plain.walks().values()) > 3
    assert meta(plain)["own_tables"] == meta(plain)["warnings"] == []


def test_copies_change_nothing_and_are_not_fetched(
    folder: Path, config: Config, plain: Evaluated, table: torch.Tensor
) -> None:
    copied = evaluate_with(folder, config, 3, embed_tokens__weight=table.clone(), lm_head__weight=table.bfloat16())
    assert copied.walks() == plain.walks()
    assert meta(copied)["own_tables"] == meta(copied)["warnings"] == []
    assert meta(copied)["weights_sha256"] == meta(plain)["weights_sha256"]
    assert meta(copied)["bytes_wanted"] == meta(plain)["bytes_wanted"]


def test_an_own_head_is_drafted_with(folder: Path, config: Config, plain: Evaluated, table: torch.Tensor) -> None:
    scaled = evaluate_with(folder, config, 4, lm_head__weight=table * 2)
    assert scaled.walks() == plain.walks(), "a positive factor leaves the largest logit where it was"
    assert meta(scaled)["own_tables"] == ["lm_head.weight"]
    assert "lm_head.weight differs from the target's" in str(meta(scaled)["warnings"])
    shifted = evaluate_with(folder, config, 5, lm_head__weight=table.roll(1, dims=0))
    assert max(max(walk) for walk in shifted.walks().values()) <= 2, "every draft is the token beside the right one"


def test_an_own_embedding_is_drafted_with(folder: Path, config: Config, plain: Evaluated, table: torch.Tensor) -> None:
    shifted = evaluate_with(folder, config, 6, embed_tokens__weight=table.roll(1, dims=0))
    assert meta(shifted)["own_tables"] == ["embed_tokens.weight"]
    assert sum(map(len, shifted.walks().values())) > sum(map(len, plain.walks().values()))


def test_a_reduced_vocabulary_is_drafted_from(
    folder: Path, config: Config, plain: Evaluated, table: torch.Tensor
) -> None:
    """Without tokens that no text holds it changes nothing; without one that they repeat it misses there."""
    tokens = torch.arange(len(table))
    responses = [prompt.response_text.split() for prompt in plain.record.prompts]
    used = {int(word.removeprefix("w")) for response in responses for word in response if word[1:].isdigit()}
    kept = torch.tensor([token for token in tokens.tolist() if token in used or token % 2])
    assert 20 < len(kept) < len(table) - 20
    reduced = evaluate_with(folder, config, 7, lm_head__weight=table[kept], d2t=kept - tokens[: len(kept)])
    assert reduced.walks() == plain.walks()
    assert reduced.spec["drafter"]["draft_vocab_size"] == len(kept)
    accepted = [word for response in responses for word, after in zip(response, response[1:], strict=False)
                if word == after]  # fmt: skip
    missing = int(max(accepted, key=accepted.count).removeprefix("w"))
    rest = tokens[tokens != missing]
    without = evaluate_with(folder, config, 9, lm_head__weight=table[rest], d2t=rest - tokens[: len(rest)])
    assert sum(map(len, without.walks().values())) > sum(map(len, plain.walks().values()))
    assert without.record.blocks is not None
    assert (without.record.blocks["miss_rank"] == len(rest) + 1).any(), "a token that cannot be proposed ranks last"


def test_a_head_over_fewer_tokens_without_a_map_is_refused_by_name(
    folder: Path, config: Config, table: torch.Tensor
) -> None:
    with pytest.raises(UnsupportedCheckpoint, match="lm_head.weight"):
        evaluate_with(folder, config, 8, lm_head__weight=table[:20].clone())


def test_warnings_travel_with_the_record(folder: Path, config: Config, plain: Evaluated) -> None:
    inspection = evaluation.inspect(str(folder / "runs" / "step_2"), config)
    record = evaluation.done_record(
        config,
        evaluation.checkpoint_record(inspection, "x"),
        plain.spec,
        plain.manifests["blocks"],
        started_at=evaluation.now(),
        seconds={},
        cached={},
        bytes_read=0,
        warnings=["lm_head.weight differs"],
    )
    assert record.spec["warnings"] == ["lm_head.weight differs"]
