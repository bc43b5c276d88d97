"""Embedding and head in a checkpoint: copies of the target's are left out, the drafter's own are fetched."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_core.checkpoints import stream_checkpoint
from tests.dflash_core.checkpoints.checkpoint_files import drafter_tensors
from tests.support.sftp_server import RecordingSFTPServer

Tensors = dict[str, torch.Tensor]


class Tables:
    """The tables of a target, held in memory."""

    def __init__(self, embedding_VD: torch.Tensor, head_VD: torch.Tensor) -> None:
        self.tables = {"embedding": embedding_VD, "head": head_VD}

    def shape(self, role: str) -> tuple[int, int]:
        rows, columns = self.tables[role].shape
        return rows, columns

    def rows(self, role: str, indices: Sequence[int], num_columns: int) -> numpy.ndarray:
        return self.tables[role][list(indices), :num_columns].float().numpy()


EMBEDDING, HEAD = torch.randn(5000, 256), torch.randn(5000, 256)


@pytest.fixture(params=["torch", "safetensors"])
def write(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Tensors], str]:
    def write_file(tensors: Tensors) -> str:
        if request.param == "torch":
            torch.save({"model": tensors}, tmp_path / "checkpoint.pt")
            return str(tmp_path / "checkpoint.pt")
        save_file(tensors, tmp_path / "model.safetensors")
        return str(tmp_path / "model.safetensors")

    return write_file


def with_tables(embedding: torch.Tensor, head: torch.Tensor) -> Tensors:
    return drafter_tensors() | {"embed_tokens.weight": embedding, "lm_head.weight": head}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target_dtype", [torch.float32, torch.bfloat16])
def test_copies_are_left_out_whatever_they_were_rounded_to(
    write, tmp_path: Path, dtype: torch.dtype, target_dtype: torch.dtype
) -> None:
    target = Tables(EMBEDDING.to(target_dtype), HEAD.to(target_dtype))
    url = write(with_tables(EMBEDDING.to(target_dtype).to(dtype), HEAD.to(target_dtype).to(dtype)))
    result = stream_checkpoint(url, tmp_path / "o.st", target=target)
    assert (result.own_tables, result.warnings) == ((), ())
    assert load_file(result.path).keys() == drafter_tensors().keys()
    assert result.bytes_read < result.bytes_wanted + 200_000


def test_a_table_that_was_trained_along_is_the_drafters_own_and_named_in_a_warning(write, tmp_path: Path) -> None:
    mine = HEAD * 1.001
    url = write(with_tables(EMBEDDING, mine))
    result = stream_checkpoint(url, tmp_path / "o.st", target=Tables(EMBEDDING, HEAD))
    assert result.own_tables == ("lm_head.weight",)
    (warning,) = result.warnings
    assert warning.startswith("lm_head.weight differs from the target's in 64 of 64 sampled rows, by up to 0.00")
    assert torch.equal(load_file(result.path)["lm_head.weight"], mine)


def test_a_single_row_that_changed_is_seen_where_it_is_sampled(write, tmp_path: Path) -> None:
    mine = EMBEDDING.clone()
    mine[4999, 3] += 1e-3
    result = stream_checkpoint(write(with_tables(mine, HEAD)), tmp_path / "o.st", target=Tables(EMBEDDING, HEAD))
    assert result.own_tables == ("embed_tokens.weight",)
    assert "in 1 of 64 sampled rows" in result.warnings[0]


def test_a_table_of_another_shape_is_the_drafters_own(write, tmp_path: Path) -> None:
    result = stream_checkpoint(
        write(with_tables(EMBEDDING, HEAD[:700])), tmp_path / "o.st", target=Tables(EMBEDDING, HEAD)
    )
    assert result.own_tables == ("lm_head.weight",)
    assert "has the shape [700, 256], the target's is [5000, 256]" in result.warnings[0]


def test_a_table_of_nan_is_no_table(write, tmp_path: Path) -> None:
    url = write(with_tables(EMBEDDING, torch.full_like(HEAD, torch.nan)))
    result = stream_checkpoint(url, tmp_path / "o.st", target=Tables(EMBEDDING, HEAD))
    assert result.own_tables == ()
    assert result.warnings == ("lm_head.weight holds NaN; the target's is used",)


def test_a_transposed_table_that_cannot_be_sampled_is_fetched(tmp_path: Path) -> None:
    torch.save({"model": with_tables(EMBEDDING.t().contiguous().t(), HEAD)}, tmp_path / "c.pt")
    result = stream_checkpoint(str(tmp_path / "c.pt"), tmp_path / "o.st", target=Tables(EMBEDDING, HEAD))
    assert result.own_tables == ("embed_tokens.weight",)
    assert torch.equal(load_file(result.path)["embed_tokens.weight"], EMBEDDING)


def test_without_a_target_tables_are_left_out(write, tmp_path: Path) -> None:
    result = stream_checkpoint(write(with_tables(EMBEDDING, HEAD)), tmp_path / "o.st")
    assert result.own_tables == ()
    assert load_file(result.path).keys() == drafter_tensors().keys()


def test_comparing_costs_the_host_little(tmp_path: Path) -> None:
    (tmp_path / "box").mkdir()
    torch.save({"model": with_tables(EMBEDDING, HEAD)}, tmp_path / "box" / "c.pt")
    with RecordingSFTPServer(tmp_path / "box") as server:
        hosts = {"box": server.host_settings}
        target = Tables(EMBEDDING, HEAD)
        result = stream_checkpoint(server.url("c.pt"), tmp_path / "o.st", hosts=hosts, target=target)
        assert server.bytes_sent == result.bytes_read < result.bytes_wanted + 400_000
        assert server.bytes_sent < EMBEDDING.nbytes // 5


MASK = 4003
"""A row that lies between two sampled ones."""


@pytest.mark.parametrize("place", ["config", "nested config", "facts", "args", "the caller", "nowhere"])
def test_a_mask_token_that_was_trained_alone_makes_the_embedding_the_drafters_own(tmp_path: Path, place: str) -> None:
    """Every slot but the anchor's holds that one row: a copy of the target's embedding would draft otherwise."""
    mine = EMBEDDING.clone()
    mine[MASK] = torch.randn(256)
    tensors = with_tables(mine, HEAD)
    configs = {
        "config": {"mask_token_id": MASK},
        "nested config": {"dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1]}, "x": [1]},
    }
    beside = {"facts": {"mask_token_id": MASK}, "args": {"args": argparse.Namespace(mask_token_id=MASK)}}
    if place in configs:
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(configs[place]))
    else:
        torch.save({"model": tensors} | beside.get(place, {}), tmp_path / "checkpoint.pt")
    said = (MASK,) if place == "the caller" else ()
    result = stream_checkpoint(str(tmp_path), tmp_path / "o.st", target=Tables(EMBEDDING, HEAD), mask_ids=said)
    if place == "nowhere":
        assert result.own_tables == (), "or the row was sampled by chance"
        return
    assert result.own_tables == ("embed_tokens.weight",)
    assert "differs from the target's in 1 of 65 sampled rows" in result.warnings[0]
    assert torch.equal(load_file(result.path)["embed_tokens.weight"], mine)


@pytest.mark.parametrize("stated", [-1, 5000, True, "4003", None, [4003]])
def test_what_is_no_row_of_a_table_is_not_looked_for(tmp_path: Path, stated: object) -> None:
    save_file(with_tables(EMBEDDING, HEAD), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"mask_token_id": stated, "dflash_config": None}))
    result = stream_checkpoint(str(tmp_path), tmp_path / "o.st", target=Tables(EMBEDDING, HEAD))
    assert (result.own_tables, result.warnings) == ((), ())
