from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.utils.serialization import config as serialization_config

from dflash_core.checkpoints import stream_checkpoint
from dflash_core.checkpoints.container import Container
from dflash_core.checkpoints.dcp import DcpCheckpoint
from dflash_core.checkpoints.dcp_safetensors import DcpSafetensors
from dflash_core.errors import (
    CheckpointChanged,
    CheckpointVanished,
)
from tests.dflash_core.checkpoints.checkpoint_files import adamw_state, drafter_tensors, training_args
from tests.dflash_core.checkpoints.dcp_files import AppState, save_alone, save_small
from tests.dflash_core.checkpoints.dcp_reading import (
    assert_same,
    edit_metadata,
    fetch,
    opened,
    raw,
)
from tests.support.object_store import ObjectStore
from tests.support.places import Place, empty_place


def test_tensors_that_two_ranks_sharded_are_joined_byte_for_byte(two_ranks: Path) -> None:
    with opened(two_ranks / "train") as held:
        found = fetch(held.container)
    assert_same(found.tensors, load_file(two_ranks / "train.safetensors"))
    assert found.unverified == []


def test_fsdp_checkpoints_give_the_weights_and_leave_the_optimizer_out(two_ranks: Path) -> None:
    with opened(two_ranks / "fsdp") as held:
        found = fetch(held.container)
        assert held.container.facts == {"step": 1200}
        assert any("exp_avg" in name for name in held.container.training_state)
    assert_same(found.tensors, load_file(two_ranks / "fsdp.safetensors"))


def test_plain_values_beside_the_tensors_are_facts_and_training_state_is_none(two_ranks: Path) -> None:
    with opened(two_ranks / "train") as held:
        facts, left_out = held.container.facts, held.container.training_state
    assert facts["global_step"] == 1200
    assert facts["extra.epoch"] == 2
    assert facts["args.target_layer_ids"] == [1, 14, 27]
    assert not any("param_groups" in name or "rng" in name for name in facts)
    assert "rng_state" in left_out
    assert "optimizer.param_groups.0.lr" in left_out


def test_the_sum_of_all_reads_is_the_wanted_bytes_and_two_kb_a_chunk(two_ranks: Path) -> None:
    folder = two_ranks / "train"
    with opened(folder) as held:
        container, source = held.container, held.source
        index_bytes, index_calls = source.bytes_read, source.num_calls
        fetch(container)
        wanted = sum(info.size_bytes for info in container.tensors.values())
        num_chunks = sum(len(tensor.chunks) for tensor in container._index.tensors.values())
    # The index itself, and the first KB of every object beside the tensors.
    assert index_bytes <= (folder / ".metadata").stat().st_size + 16_000
    assert index_calls <= 3
    assert source.bytes_read - index_bytes <= wanted + 2100 * num_chunks
    # One pipelined call per file for the chunks' indices, one for their data.
    assert source.num_calls - index_calls == 4
    assert sorted(source.opened) == sorted(str(folder / name) for name in (".metadata", "__0_0.distcp", "__1_0.distcp"))


def test_of_a_large_mixed_checkpoint_only_the_wanted_bytes_are_read(tmp_path: Path) -> None:
    weights = {"fc.weight": torch.randn(1024, 1024), "norm.weight": torch.randn(1024)}
    moments = {name: {"exp_avg": torch.zeros(1024, 1024), "exp_avg_sq": torch.zeros(1024, 1024)} for name in weights}
    save_alone(
        tmp_path / "mixed", {"model": weights, "optimizer": {"state": moments}, "frozen": torch.zeros(1024, 1024)}
    )
    with opened(tmp_path / "mixed") as held:
        found = fetch(held.container, ["model.fc.weight", "model.norm.weight"])
        read = held.source.bytes_read
    wanted = sum(tensor.numel() * 4 for tensor in weights.values())
    assert wanted <= read <= wanted + 20_000
    assert_same(found.tensors, {f"model.{name}": tensor for name, tensor in weights.items()})


def test_the_folder_of_the_optimizer_is_never_opened(tmp_path: Path) -> None:
    save_alone(tmp_path / "iter_0000010" / "model", {"model_state": {"fc.weight": torch.randn(4, 4)}})
    save_alone(tmp_path / "iter_0000010" / "optimizer", {"optim": {"exp_avg": torch.randn(4, 4)}})
    with opened(tmp_path / "iter_0000010" / "model") as held:
        fetch(held.container)
        held.container.check_unchanged()
        assert held.source.opened
        assert all("optimizer" not in path for path in held.source.opened)


def test_a_file_is_opened_only_for_what_is_wanted_of_it(two_ranks: Path) -> None:
    with opened(two_ranks / "train") as held:
        before = set(held.source.opened)
        name = next(
            name
            for name, tensor in held.container._index.tensors.items()
            if {chunk.item.file for chunk in tensor.chunks} == {"__0_0.distcp"}
        )
        fetch(held.container, [name])
        assert {Path(path).name for path in set(held.source.opened) - before} <= {"__0_0.distcp"}
        assert {Path(file.path).name for file in held.container.files} == {".metadata", "__0_0.distcp", "__1_0.distcp"}


@pytest.fixture(scope="module")
def object_store() -> Iterator[ObjectStore]:
    with ObjectStore() as running:
        yield running


@pytest.fixture(params=["ssh", "memory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    store = request.getfixturevalue("object_store") if request.param == "s3" else None
    (tmp_path / "there").mkdir()
    with empty_place(request.param, tmp_path / "there", store, monkeypatch) as ready:
        yield ready


def test_both_kinds_are_read_in_every_place_and_their_changes_are_seen(place: Place, two_ranks: Path) -> None:
    place.put_tree(two_ranks / "train", "run/train")
    place.put_tree(two_ranks / "hf", "run/hf")
    changed = {"train": "__1_0.distcp", "hf": "shard-00002-model-00001-of-00002.safetensors"}
    kinds: dict[str, Callable[..., Container]] = {"train": DcpCheckpoint, "hf": DcpSafetensors}
    for name, kind in kinds.items():
        data = (two_ranks / name / changed[name]).read_bytes()
        with place.open() as source, ExitStack() as stack:
            container = kind(source, source.path_of(place.url(f"run/{name}")), stack)
            assert_same(fetch(container).tensors, load_file(two_ranks / f"{name}.safetensors"))
            container.check_unchanged()
            place.put(f"run/{name}/{changed[name]}", data[:-100] + bytes(100))
            with pytest.raises(CheckpointChanged):
                container.check_unchanged()
            place.delete(f"run/{name}/{changed[name]}")
            with pytest.raises(CheckpointVanished):
                container.check_unchanged()


def test_a_torchspec_folder_is_streamed_as_safetensors_would_write_it(tmp_path: Path) -> None:
    tensors = drafter_tensors()
    step = tmp_path / "run" / "iter_0000010"
    held = {f"draft_model.{name}": tensor for name, tensor in tensors.items()}
    save_alone(step / "model", {"model_state": AppState({"model": held})})
    save_alone(step / "optimizer", {"optim": adamw_state(tensors)})
    (step / "meta.json").write_text('{"step": 10}')
    result = stream_checkpoint(str(step), tmp_path / "out.safetensors")
    assert result.path.read_bytes() == save(tensors)
    assert (result.ref.layout, result.ref.step, result.unverified_tensors) == ("dcp", 10, ())
    assert result.bytes_read <= result.bytes_wanted + 1_000_000


# Kinds of tensors.


def test_all_types_views_scalars_and_empty_tensors_of_one_process_are_read(tmp_path: Path) -> None:
    tensors = {
        "bf16": torch.randn(3, 4).bfloat16(),
        "fp16": torch.randn(3, 4).half(),
        "fp64": torch.randn(3, 4).double(),
        "fp8": torch.randn(3, 4).to(torch.float8_e4m3fn),
        "int8": torch.arange(12, dtype=torch.int8),
        "bool": torch.tensor([True, False, True]),
        "transposed": torch.randn(5, 3).t(),
        "part of a larger": torch.randn(10, 10)[2:5, 3:7],
        "expanded": torch.randn(1, 4).expand(3, 4),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "parameter": torch.nn.Parameter(torch.randn(2, 3)),
        "three dimensions": torch.randn(2, 3, 4).permute(2, 0, 1),
    }
    save_alone(tmp_path / "one", {"model": tensors})
    with opened(tmp_path / "one") as held:
        found = fetch(held.container)
    assert_same(found.tensors, {f"model.{name}": tensor for name, tensor in tensors.items()})
    assert found.unverified == []


def test_one_file_per_tensor_is_read(tmp_path: Path) -> None:
    tensors = drafter_tensors(num_layers=1)
    save_alone(tmp_path / "many", tensors, single_file_per_rank=False)
    with opened(tmp_path / "many") as held:
        assert len(held.container.files) == len(tensors) + 1
        assert_same(fetch(held.container).tensors, tensors)


def test_chunks_in_safetensors_format_are_read_and_reported_as_unverified(tmp_path: Path) -> None:
    # q_norm and k_norm have one shape and type: in the index they look the same but for their names.
    tensors = drafter_tensors(num_layers=1) | {"scalar": torch.tensor(1, dtype=torch.int8)}
    save_alone(tmp_path / "st", {**tensors, "step": 5}, serialization_format=SerializationFormat.SAFETENSORS)
    with opened(tmp_path / "st") as held:
        found = fetch(held.container)
        assert held.container.facts == {"step": 5}
    assert_same(found.tensors, tensors)
    assert sorted(found.unverified) == sorted(tensors)


def test_a_checkpoint_saved_without_checksums_is_read_and_reported_as_unverified(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(4, 4), "b": torch.randn(4, 4).t()}
    torch.serialization.set_crc32_options(False)
    try:
        save_alone(tmp_path / "nocrc", tensors)
    finally:
        torch.serialization.set_crc32_options(True)
    with opened(tmp_path / "nocrc") as held:
        found = fetch(held.container)
    assert_same(found.tensors, tensors)
    assert sorted(found.unverified) == ["a", "b"]


def test_large_alignment_of_records_is_read(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(100, 100), "b": torch.randn(3)}
    with serialization_config.patch({"save.storage_alignment": 4096}):  # type: ignore[attr-defined]
        save_alone(tmp_path / "aligned", tensors)
    with opened(tmp_path / "aligned") as held:
        assert_same(fetch(held.container).tensors, tensors)


def test_the_names_are_the_paths_in_the_state_dict(tmp_path: Path) -> None:
    state = {
        "model_state": AppState({"model": {"draft_model.fc.weight": torch.randn(2, 2)}}),
        "buffers": [torch.ones(2)],
    }
    save_alone(tmp_path / "names", state)
    with opened(tmp_path / "names") as held:
        assert set(held.container.tensors) == {"model_state.model.draft_model.fc.weight", "buffers.0"}


def test_a_module_with_a_name_like_a_scheduler_stays_a_tensor_of_the_model(tmp_path: Path) -> None:
    state = {"model": {"random_head.weight": torch.randn(2, 2)}, "scheduler": {"t": torch.ones(2)}}
    save_alone(tmp_path / "names", state)
    with opened(tmp_path / "names") as held:
        assert set(held.container.tensors) == {"model.random_head.weight"}
        assert held.container.training_state == ("scheduler.t",)


@pytest.mark.parametrize("is_old", [False, True], ids=["as written", "of old classes without the later fields"])
def test_the_indices_of_older_versions_are_read(tmp_path: Path, is_old: bool) -> None:
    alone = tmp_path / "alone"
    save_small(alone)

    def strip(metadata: Any) -> None:
        for name in ("storage_meta", "version"):
            del metadata.__dict__[name]
        metadata.planner_data = None

    with opened(alone) as held:
        expected = fetch(held.container).tensors
    edit_metadata(alone, strip)
    data = pickle.dumps(pickle.loads((alone / ".metadata").read_bytes()), protocol=2)
    if is_old:
        data = data.replace(b"torch.distributed.checkpoint.", b"torch.distributed._shard.checkpoint.")
    (alone / ".metadata").write_bytes(data)
    with opened(alone) as held:
        assert_same(fetch(held.container).tensors, expected)
        assert held.container.facts == {"global_step": 7}
        assert held.container.odd_globals == ()


def test_the_facts_of_trainers_arguments_are_read_from_an_object(tmp_path: Path) -> None:
    state = {
        "w": torch.ones(2),
        "args": training_args(),
        "note": "x",
        "steps": (1, 2),
        "rng": {"python": random.getstate()},
    }
    save_alone(tmp_path / "facts", state)
    with opened(tmp_path / "facts") as held:
        facts = held.container.facts
    assert (facts["args.block_size"], facts["args.seed"], facts["note"]) == (8, 7, "x")
    assert not any(name.startswith("rng") for name in facts)


# Where bytes lie.


def test_extents_of_row_shards_are_runs_of_the_tensor_and_columns_have_none(two_ranks: Path) -> None:
    expected = load_file(two_ranks / "train.safetensors")
    with opened(two_ranks / "train") as held:
        container, prefix = held.container, "model_state.model.draft_model."
        calls = held.source.num_calls
        for name in ("fc.weight", "uneven_rows.weight", "one_row.weight", "norm.weight", "d2t", "t2d"):
            extents = container.extents(prefix + name)
            assert len(extents) == (2 if name in ("fc.weight", "uneven_rows.weight", "norm.weight") else 1)
            assert [extent.start for extent in extents] == sorted(extent.start for extent in extents)
            data = b"".join(extent.file.read_at(extent.data.offset, extent.data.size) for extent in extents)
            assert data == raw(expected[prefix + name])
        for name in ("layers.0.self_attn.o_proj.weight", "grid.weight"):
            assert container.extents(prefix + name) == ()
        # The indices of all chunks came in one call per file; each extent above was one more.
        assert held.source.num_calls == calls + 2 + 9
