from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from dflash_core.checkpoints import inspect_checkpoint, stream_checkpoint
from dflash_core.checkpoints.dtypes import ELEMENT_TYPES
from dflash_core.checkpoints.safetensors_file import build_header
from dflash_core.errors import CheckpointCorrupt, CheckpointNotFound, CheckpointNotReady
from tests.dflash_core.checkpoints.checkpoint_files import drafter_tensors


def save_folder(folder: Path, **files: object) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return str(folder)


def save_shards(folder: Path, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Write tensors as two shards and their index, as transformers does."""
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(tensors)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for shard, held in halves.items():
        save_file({name: tensors[name] for name in held}, folder / shard)
    weight_map = {name: shard for shard, held in halves.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def with_header(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def test_a_folder_with_one_file_gives_the_drafter_its_config_and_its_facts(tmp_path: Path) -> None:
    tensors = drafter_tensors(dtype=torch.bfloat16)
    url = save_folder(
        tmp_path / "run" / "7",
        config={"block_size": 16, "architectures": ["DFlashDraftModel"]},
        training_state={"epoch": 1, "local_step": 5, "global_step": 16626},
    )
    frozen = {"embed_tokens.weight": torch.randn(90_000, 32), "lm_head.weight": torch.randn(9000, 32)}
    save_file({**tensors, **frozen}, f"{url}/model.safetensors")
    torch.save({"state": {}}, f"{url}/optimizer_state_dict.pt")
    os.utime(f"{url}/training_state.json")  # written last
    result = stream_checkpoint(url, tmp_path / "out.safetensors")
    assert result.path.read_bytes() == save(tensors)
    assert result.config == {"block_size": 16, "architectures": ["DFlashDraftModel"]}
    assert result.facts == {"epoch": 1, "local_step": 5, "global_step": 16626}
    assert (result.ref.run, result.ref.step, result.ref.layout) == ("run", 16626, "safetensors")
    assert result.bytes_total == sum(path.stat().st_size for path in Path(url).iterdir())
    assert result.bytes_read < result.bytes_wanted + 100_000 < result.bytes_total


def test_shards_are_put_together(tmp_path: Path) -> None:
    tensors = drafter_tensors()
    save_shards(tmp_path / "step_3", tensors)
    result = stream_checkpoint(str(tmp_path / "step_3"), tmp_path / "out.safetensors")
    assert result.path.read_bytes() == save(tensors)
    assert (result.ref.layout, result.ref.step) == ("safetensors_sharded", 3)
    by_index = inspect_checkpoint(str(tmp_path / "step_3" / "model.safetensors.index.json"))
    assert by_index.ref.identity == result.ref.identity


def test_a_missing_shard_is_named_and_nothing_is_loaded_from_the_others(tmp_path: Path) -> None:
    save_shards(tmp_path / "step_3", drafter_tensors())
    (tmp_path / "step_3" / "model-00002-of-00002.safetensors").unlink()
    found = inspect_checkpoint(str(tmp_path / "step_3"))
    assert not found.ready
    assert "'model-00002-of-00002.safetensors'" in str(found.not_ready_reason)
    with pytest.raises(CheckpointNotReady, match="model-00002-of-00002"):
        stream_checkpoint(str(tmp_path / "step_3"), tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


def test_a_shard_of_another_save_that_lacks_what_the_index_says_is_corrupt(tmp_path: Path) -> None:
    save_shards(tmp_path / "step_3", drafter_tensors())
    save_file({"other": torch.ones(1)}, tmp_path / "step_3" / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointCorrupt, match="lacks what the index says"):
        inspect_checkpoint(str(tmp_path / "step_3"))


def test_an_index_that_points_outside_its_folder_is_refused(tmp_path: Path) -> None:
    save_shards(tmp_path / "step_3", drafter_tensors())
    (tmp_path / "step_3" / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "../../secret.safetensors"}}'
    )
    with pytest.raises(CheckpointCorrupt, match="do not lie beside it"):
        inspect_checkpoint(str(tmp_path / "step_3"))


@pytest.mark.parametrize("missing", [1, 60, 2000])
def test_a_file_that_is_cut_off_is_not_ready_and_gives_nothing(tmp_path: Path, missing: int) -> None:
    data = save(drafter_tensors())
    path = tmp_path / "model.safetensors"
    path.write_bytes(data[:-missing])
    found = inspect_checkpoint(str(path))
    assert (found.ready, found.tensors) == (False, ())
    assert "cut off" in str(found.not_ready_reason)
    with pytest.raises(CheckpointCorrupt, match="cut off"):
        stream_checkpoint(str(path), tmp_path / "out.safetensors")


def test_a_header_of_two_to_the_sixty_bytes_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 60) + b"{}" * 100)
    with pytest.raises(CheckpointCorrupt, match=r"claims 1152921504606846976 bytes"):
        inspect_checkpoint(str(path))


FC = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"fc.weight": {**FC, "data_offsets": [0, 12]}}, "cannot have 12 bytes"),
        ({"fc.weight": {**FC, "shape": [-2, -2]}}, "shape"),
        ({"fc.weight": {**FC, "shape": [1 << 62, 1 << 62]}}, "cannot have 16 bytes"),
        ({"fc.weight": FC, "b": FC}, "expected"),
        ({"fc.weight": {**FC, "data_offsets": [8, 24]}}, "expected"),
        ({"fc.weight": {"dtype": "F32"}}, "not that of a safetensors file"),
        ([1, 2], "not that of a safetensors file"),
        ({}, "more than its header says"),
    ],
    ids=["too_few_bytes", "negative", "overflowing", "overlapping", "gap", "no_shape", "a_list", "trailing_bytes"],
)
def test_a_header_that_contradicts_itself_is_corrupt(tmp_path: Path, header: object, message: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(with_header(header, b"\0" * 16))
    with pytest.raises(CheckpointCorrupt, match=message):
        inspect_checkpoint(str(path))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_quantised_drafter_is_fetched_as_it_is(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {**drafter_tensors(), "fc.weight": torch.randn(32, 96).mul(20).to(dtype)}
    save_file(tensors, tmp_path / "model.safetensors")
    result = stream_checkpoint(str(tmp_path / "model.safetensors"), tmp_path / "out.safetensors")
    assert result.path.read_bytes() == save(tensors)


@pytest.mark.parametrize("num_shards", [1, 2])
def test_two_steps_of_one_size_and_one_time_are_two_checkpoints(tmp_path: Path, num_shards: int) -> None:
    """Copied within a second: SFTP tells times in whole seconds, and the format has no checksums."""
    identities = []
    for seed in (1, 2):
        folder = tmp_path / "run" / f"step_{seed}"
        folder.mkdir(parents=True)
        names = sorted(drafter_tensors())
        shards = [names[number::num_shards] for number in range(num_shards)]
        files = [f"model-{number + 1:05}-of-{num_shards:05}.safetensors" for number in range(num_shards)]
        if num_shards == 1:
            files = ["model.safetensors"]
        else:
            weight_map = {name: file for file, held in zip(files, shards, strict=True) for name in held}
            (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        for file, held in zip(files, shards, strict=True):
            save_file({name: drafter_tensors(seed=seed)[name] for name in held}, folder / file)
        for path in folder.iterdir():
            os.utime(path, (1_000_000_000, 1_000_000_000))
        identities.append(inspect_checkpoint(str(folder)).ref.identity)
    assert identities[0] != identities[1]


def test_identity_notices_a_rewrite_of_the_same_size(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(drafter_tensors(), path)
    before = inspect_checkpoint(str(path)).ref.identity
    assert inspect_checkpoint(str(path)).ref.identity == before
    save_file(drafter_tensors(seed=1), path)
    assert inspect_checkpoint(str(path)).ref.identity != before


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [(".incomplete", "", "marked"), ("metadata.json", '{"step": 3, "complete": false}', "complete: false")],
)
def test_a_marker_of_the_trainer_says_not_ready(tmp_path: Path, name: str, content: str, reason: str) -> None:
    folder = tmp_path / "draft_step_3"
    save_folder(folder)
    save_file(drafter_tensors(), folder / "model.safetensors")
    (folder / name).write_text(content)
    found = inspect_checkpoint(str(folder))
    assert not found.ready
    assert reason in str(found.not_ready_reason)
    with pytest.raises(CheckpointNotReady):
        stream_checkpoint(str(folder), tmp_path / "out.safetensors")


def test_weights_win_over_a_training_state_that_lies_beside_them(tmp_path: Path) -> None:
    tensors = drafter_tensors()
    save_file(tensors, tmp_path / "model.safetensors")
    torch.save({"epoch": 1, "optimizer": {}}, tmp_path / "training_state.pt")
    assert load_file(stream_checkpoint(str(tmp_path), tmp_path / "out.st").path).keys() == tensors.keys()


def test_a_missing_path_and_an_empty_folder_say_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="nothing lies at"):
        inspect_checkpoint(str(tmp_path / "nowhere"))
    with pytest.raises(CheckpointNotFound, match="it holds nothing"):
        inspect_checkpoint(str(tmp_path))
    for name in ("notes.txt", "log.csv", "optimizer.pt", "rng_state.pth"):
        (tmp_path / name).write_text("x")
    with pytest.raises(CheckpointNotFound, match=r"'log\.csv', 'notes\.txt', 'optimizer\.pt' and 1 more"):
        inspect_checkpoint(str(tmp_path))


def test_a_file_url_and_an_fsspec_url_are_read_like_a_path(tmp_path: Path) -> None:
    import fsspec

    tensors = drafter_tensors()
    (tmp_path / "step_2").mkdir()
    save_file(tensors, tmp_path / "step_2" / "model.safetensors")
    assert inspect_checkpoint((tmp_path / "step_2").as_uri()).ref.step == 2
    memory = fsspec.filesystem("memory")
    memory.pipe("/runs/step_2/model.safetensors", save(tensors))
    try:
        result = stream_checkpoint("memory://runs/step_2", tmp_path / "out.safetensors")
        assert result.path.read_bytes() == save(tensors)
        assert result.bytes_read < result.bytes_wanted + 50_000
    finally:
        memory.rm("/runs", recursive=True)


def test_the_header_is_the_one_that_the_library_writes_for_all_its_types() -> None:
    tensors, described = {}, {}
    for element in ELEMENT_TYPES:
        for which, shape in {"a": (3,), "b": (2, 2), "é": ()}.items():
            tensors[f"{which}.{element.name}"] = torch.zeros(shape).to(getattr(torch, element.name))
            described[f"{which}.{element.name}"] = (element, shape)
    assert save(tensors).startswith(build_header(described).raw)


def test_drafters_without_a_step_are_told_by_their_folder_and_a_moved_run_is_the_same(tmp_path: Path) -> None:
    found = {}
    for place in ("here/a", "here/b", "there/a"):
        folder = tmp_path / place / "x" / place[-1]
        folder.mkdir(parents=True)
        save_file(drafter_tensors(seed=ord(place[-1])), folder / "model.safetensors")
        os.utime(folder / "model.safetensors", (1_000_000_000, 1_000_000_000))
        found[place] = inspect_checkpoint(str(folder)).ref.identity
        assert inspect_checkpoint(str(folder / "model.safetensors")).ref.identity == found[place], "by file or folder"
    assert found["here/a"] != found["here/b"]
    assert found["here/a"] == found["there/a"], "run, folder, files, size and time are the same: it was moved"
