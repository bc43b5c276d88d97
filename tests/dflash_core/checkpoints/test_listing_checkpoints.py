from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file

from dflash_core.checkpoints import FoundCheckpoint, check_readiness, inspect_checkpoint, list_checkpoints
from dflash_core.checkpoints.paths import natural_key, step_in_name
from dflash_core.config import HostSettings
from dflash_core.errors import CheckpointNotFound
from tests.dflash_core.checkpoints.checkpoint_files import drafter_tensors, save_mixed
from tests.support.sftp_server import RecordingSFTPServer

TENSORS = drafter_tensors()


@pytest.fixture(params=["local", "sftp"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, str, dict[str, HostSettings]]]:
    """A run folder, its URL, and the hosts it needs: on this machine, and behind SFTP."""
    run = tmp_path / "run_a"
    run.mkdir()
    if request.param == "local":
        yield run, str(run), {}
        return
    with RecordingSFTPServer(tmp_path) as server:
        yield run, server.url("run_a"), {"box": server.host_settings}
        assert (server.write_attempts, server.execs) == ([], [])


Place = tuple[Path, str, dict[str, HostSettings]]


def add_step(run: Path, name: str, file: str = "checkpoint.pt") -> Path:
    path = run / name / file
    path.parent.mkdir(parents=True)
    if file.endswith(".safetensors"):
        save_file(TENSORS, path)
    else:
        torch.save({"model": TENSORS}, path)
    return path


def listed(place: Place) -> list[FoundCheckpoint]:
    _, url, hosts = place
    return list_checkpoints(url, hosts=hosts)


def test_steps_come_in_the_order_of_their_numbers(place: Place) -> None:
    run = place[0]
    for name in ("step_10", "step_9", "step_100000", "step_0900"):
        add_step(run, name)
    add_step(run, "checkpoint-20", "model.safetensors")
    torch.save({"model": TENSORS}, run / "checkpoint-9500.pt")
    torch.save({"model": TENSORS}, run / "epoch-0-final.pt")
    found = listed(place)
    assert [(one.name, one.step) for one in found] == [
        ("step_9", 9),
        ("step_10", 10),
        ("checkpoint-20", 20),
        ("step_0900", 900),
        ("checkpoint-9500", 9500),
        ("step_100000", 100000),
        ("epoch-0-final", None),
    ]
    assert {one.run for one in found} == {"run_a"}
    hosts = place[2]
    assert [inspect_checkpoint(one.url, hosts=hosts).ref.step for one in found] == [one.step for one in found]
    assert {inspect_checkpoint(one.url, hosts=hosts).ref.run for one in found} == {"run_a"}


def test_links_count_once_and_unfinished_names_not_at_all(place: Place) -> None:
    run = place[0]
    add_step(run, "step_1")
    add_step(run, "step_2")
    add_step(run, "step_3.tmp")
    add_step(run, ".reserving-77")
    (run / "step_4").mkdir()
    (run / "logs").mkdir()
    (run / "logs" / "train.txt").write_text("x")
    (run / "step_latest").symlink_to("step_2")
    (run / "checkpoint_best").symlink_to("step_1")
    (run / "gone").symlink_to("step_99")
    for name in ("optimizer.pt", "checkpoint-5.pt.tmp", "args.json", ".hidden.pt"):
        (run / name).write_bytes(b"x")
    assert [one.name for one in listed(place)] == ["step_1", "step_2"]


def test_a_link_to_elsewhere_is_a_checkpoint(place: Place) -> None:
    run = place[0]
    add_step(run.parent / "other", "step_7")
    (run / "step_7").symlink_to("../other/step_7")
    (run / "same").symlink_to("step_7")
    assert len(listed(place)) == 1


def test_a_url_of_one_checkpoint_gives_that_one(place: Place) -> None:
    run, url, hosts = place
    add_step(run, "step_5")
    torch.save({"model": TENSORS}, run / "checkpoint-6.pt")
    by_folder = list_checkpoints(f"{url}/step_5", hosts=hosts)
    by_file = list_checkpoints(f"{url}/checkpoint-6.pt", hosts=hosts)
    assert [(one.name, one.step, one.run) for one in by_folder + by_file] == [
        ("step_5", 5, "run_a"),
        ("checkpoint-6", 6, "run_a"),
    ]


def test_a_run_folder_with_one_file_is_still_a_run(place: Place) -> None:
    run = place[0]
    torch.save({"model": TENSORS}, run / "checkpoint-500.pt")
    (found,) = listed(place)
    assert (found.name, found.step) == ("checkpoint-500", 500)
    ref = inspect_checkpoint(place[1], hosts=place[2]).ref
    assert (ref.run, ref.step) == ("run_a", 500)


def test_a_folder_of_shards_is_one_checkpoint(place: Place) -> None:
    folder = place[0] / "step_3"
    folder.mkdir()
    for shard in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        save_file({shard: torch.ones(1)}, folder / shard)
    index = {
        "weight_map": {f"model-0000{i}-of-00002.safetensors": f"model-0000{i}-of-00002.safetensors" for i in (1, 2)}
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (in_run,) = listed(place)
    (itself,) = list_checkpoints(in_run.url, hosts=place[2])
    assert in_run == itself
    assert in_run.name == "step_3"


def test_a_run_folder_with_a_final_model_still_shows_its_steps(place: Place) -> None:
    run = place[0]
    add_step(run, "checkpoint-500", "model.safetensors")
    (run / "checkpoint-500" / "global_step500").mkdir()
    save_file(TENSORS, run / "model.safetensors")
    assert [(one.name, one.step) for one in listed(place)] == [("checkpoint-500", 500), ("model", None)]
    (alone,) = list_checkpoints(f"{place[1]}/checkpoint-500", hosts=place[2])
    assert alone.name == "checkpoint-500"


def test_a_step_folder_whose_file_repeats_the_step_is_one_checkpoint(place: Place) -> None:
    run, url, hosts = place
    add_step(run, "step_5", "drafter_step_5.pt")
    (found,) = listed(place)
    assert (found.name, found.step) == ("step_5", 5)
    for address in (found.url, f"{url}/step_5/drafter_step_5.pt"):
        ref = inspect_checkpoint(address, hosts=hosts).ref
        assert (ref.run, ref.step) == ("run_a", 5)


def test_an_empty_run_folder_says_what_it_holds_or_is_empty_where_that_is_allowed(place: Place) -> None:
    run, url, hosts = place
    (run / "notes.txt").write_text("x")
    with pytest.raises(CheckpointNotFound, match=r"holds no checkpoint but 'notes\.txt'"):
        listed(place)
    assert list_checkpoints(url, hosts=hosts, allow_empty=True) == []
    with pytest.raises(CheckpointNotFound, match="nothing lies at"):
        list_checkpoints(f"{url}_b", hosts=hosts, allow_empty=True)


def test_the_run_can_be_named(place: Place) -> None:
    run, url, hosts = place
    add_step(run, "step_5")
    assert [one.run for one in list_checkpoints(url, hosts=hosts, run="mine")] == ["mine"]


def test_a_growing_file_is_ready_only_once_it_is_whole_and_was_seen_twice(place: Place) -> None:
    run, _, hosts = place
    path = add_step(run, "step_1")
    data = path.read_bytes()
    signature: str | None = None
    seen: list[bool] = []
    for size in (100, len(data) // 2, len(data) // 2, len(data) - 1, len(data) - 1, len(data), len(data)):
        path.write_bytes(data[:size])
        os.utime(path, (size, size))
        (found,) = listed(place)
        readiness = check_readiness(found, signature, hosts=hosts)
        seen.append(readiness.ready)
        assert readiness.ready or readiness.reason
        signature = found.signature
    assert seen == [False] * 6 + [True]


def test_a_rewrite_of_the_same_size_changes_the_signature(place: Place) -> None:
    path = add_step(place[0], "step_1")
    (before,) = listed(place)
    (same,) = listed(place)
    os.utime(path, (5, 5))
    (after,) = listed(place)
    assert before.signature == same.signature != after.signature
    assert not check_readiness(after, before.signature, hosts=place[2]).ready


def readiness_of(place: Place) -> tuple[bool, str]:
    (found,) = listed(place)
    readiness = check_readiness(found, found.signature, hosts=place[2])
    return readiness.ready, readiness.reason


def test_markers_and_missing_shards_hold_a_checkpoint_back(place: Place) -> None:
    folder = place[0] / "step_1"
    folder.mkdir()
    index = folder / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"fc.weight": "a.safetensors", "norm.weight": "b.safetensors"}}')
    (folder / "a.safetensors").write_bytes(save({"fc.weight": torch.ones(1)}))
    is_ready, reason = readiness_of(place)
    assert not is_ready
    assert "1 of 2 shards that its index names are missing: 'b.safetensors'" in reason
    (folder / "b.safetensors").write_bytes(save({"norm.weight": torch.ones(1)})[:-1])
    assert "cut off" in readiness_of(place)[1]
    (folder / "b.safetensors").write_bytes(save({"norm.weight": torch.ones(1)}))
    assert readiness_of(place)[0]
    (folder / "metadata.json").write_text('{"complete": false}')
    assert "complete: false" in readiness_of(place)[1]
    (folder / "metadata.json").write_text('{"complete": true}')
    (folder / ".incomplete").write_text("")
    assert readiness_of(place) == (False, "a file .incomplete lies in it")


def test_a_checkpoint_that_vanishes_between_two_looks_is_not_ready(place: Place) -> None:
    path = add_step(place[0], "step_1")
    (found,) = listed(place)
    path.unlink()
    path.parent.rmdir()
    assert not check_readiness(found, found.signature, hosts=place[2]).ready


def test_a_kind_that_is_refused_counts_as_ready_so_that_the_refusal_is_recorded(place: Place) -> None:
    (place[0] / "step_1").mkdir()
    torch.save(TENSORS | {"prefix_gru.weight_hh_l0": torch.ones(3)}, place[0] / "step_1" / "model.pt")
    is_ready, reason = readiness_of(place)
    assert is_ready
    assert "'prefix_gru.weight_hh_l0'" in reason


def test_a_damaged_index_counts_as_ready_so_that_the_damage_is_recorded(place: Place) -> None:
    path = add_step(place[0], "step_1", "model.safetensors")
    path.write_bytes(path.read_bytes() + b"tail")
    is_ready, reason = readiness_of(place)
    assert is_ready
    assert "4 more than its header says" in reason


def test_no_prefix_of_a_file_passes_for_the_whole(tmp_path: Path) -> None:
    whole = tmp_path / "whole.pt"
    save_mixed(whole, vocab=10)
    for name, data in (("c.pt", whole.read_bytes()), ("m.safetensors", save(TENSORS))):
        path = tmp_path / "cut" / name
        path.parent.mkdir(exist_ok=True)
        sizes = {*range(0, len(data), max(1, len(data) // 60)), *range(len(data) - 100, len(data))}
        for size in sorted(sizes):
            path.write_bytes(data[:size])
            (found,) = list_checkpoints(str(path))
            assert not check_readiness(found, found.signature).ready, size


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step_100", 100),
        ("checkpoint-9500.pt", 9500),
        ("epoch_0_step_5", 5),
        ("iter_0000100", 100),
        ("run7-step300", 300),
        ("global_step12", 12),
        ("12", 12),
        ("step_latest", None),
        ("epoch-0-final.pt", None),
        ("model-00001-of-00002.safetensors", None),
    ],
)
def test_steps_are_read_from_names(name: str, step: int | None) -> None:
    assert step_in_name(name) == step


def test_names_sort_as_people_read_them() -> None:
    names = ["run1-step20", "run1-step3", "step_10", "step_9", "a", "10", "9"]
    assert sorted(names, key=natural_key) == ["9", "10", "a", "run1-step3", "run1-step20", "step_9", "step_10"]
