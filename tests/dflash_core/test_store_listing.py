"""A listing says what is there, whose it is and when it was used, and changes nothing."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_core.store import MANIFEST_NAME, Store
from dflash_core.store_listing import CheckpointName, StoredArtifact, list_store

KEY = "0123456789abcdef0123456789abcdef"


def writer(size_bytes: int = 100, **meta: Any) -> Callable[[Path], dict[str, Any]]:
    def write(folder: Path) -> dict[str, Any]:
        (folder / "a.bin").write_bytes(b"a" * size_bytes)
        return meta

    return write


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def only(store: Store, **names: CheckpointName) -> StoredArtifact:
    (one,) = list_store(store, names).artifacts
    return one


def test_a_store_that_does_not_exist_is_empty_and_is_not_made(store: Store) -> None:
    listing = list_store(store)
    assert (listing.artifacts, listing.left_overs, listing.size_bytes) == ((), (), 0)
    assert not store.root.exists()


def test_size_last_use_and_cost_are_told(store: Store) -> None:
    def write(folder: Path) -> dict[str, Any]:
        time.sleep(0.06)
        return writer(1000)(folder)

    before = time.time()
    artifact = store.build("blocks", KEY, write)
    one = only(store)
    assert (one.kind, one.key, one.path, one.is_damaged) == ("blocks", KEY, artifact.path, False)
    assert one.size_bytes == sum(path.stat().st_size for path in artifact.path.iterdir()) > 1000
    assert before - 1 < one.last_used < time.time() + 1
    assert one.seconds is not None
    assert 0.06 <= one.seconds < 5
    assert one.bytes_read is None


def test_to_find_is_to_use_and_to_list_is_not(store: Store) -> None:
    artifact = store.build("blocks", KEY, writer())
    os.utime(artifact.file(MANIFEST_NAME), (1000, 1000))
    assert only(store).last_used == only(store).last_used == 1000
    assert store.find("blocks", KEY) is not None
    assert only(store).last_used > time.time() - 60


def test_in_a_store_that_may_only_be_read_artifacts_are_still_found(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.build("blocks", KEY, writer())

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(30, "Read-only file system")

    monkeypatch.setattr(os, "utime", refuse)
    assert store.find("blocks", KEY) is not None


def test_what_a_stage_says_of_its_cost_goes_before_what_was_measured(store: Store) -> None:
    store.build("hidden_states", KEY, writer(seconds=41.5, part=3))
    assert only(store).seconds == 41.5


def test_artifacts_of_an_older_version_have_no_known_cost(store: Store) -> None:
    path = store.build("blocks", KEY, writer()).file(MANIFEST_NAME)
    manifest = json.loads(path.read_text())
    del manifest["seconds"]
    path.write_text(json.dumps(manifest))
    assert store.find("blocks", KEY) is not None
    assert only(store).seconds is None


def test_whose_it_is_comes_from_its_own_meta_from_its_transcripts_and_from_the_results(store: Store) -> None:
    store.build("transcripts", "t", writer(digest="d1", target="smol", num_transcripts=24))
    store.build("hidden_states", "h", writer(part=14, transcripts="d1"))
    store.build("hidden_states", "f", writer(part="final"))
    store.build("drafter", "r", writer(identity="i1", weights_sha256="w1", bytes_read=500, checkpoint="/runs/a/step_1"))
    store.build("drafter", "s", writer(identity="i2", checkpoint="/runs/a/step_2"))
    store.build("blocks", "b", writer(num_blocks=9, weights_sha256="w1", transcripts="d1", target="smol"))
    store.build("target", "g", writer(source="smol.gguf"))
    name = CheckpointName("a", 1, "ssh://box/runs/a/step_1")
    found = {one.key: one for one in list_store(store, {"w1": name}).artifacts}
    assert [(key, found[key].target, found[key].detail) for key in "thfrsbg"] == [
        ("t", "smol", "24 transcripts"),
        ("h", "smol", "layer 14"),
        ("f", None, "final"),
        ("r", None, None),
        ("s", None, None),
        ("b", "smol", "9 blocks"),
        ("g", None, "smol.gguf"),
    ]
    assert (found["t"].transcripts, found["h"].transcripts) == ("d1", "d1")
    assert (found["r"].checkpoint, found["b"].checkpoint) == (name, name)
    assert found["s"].checkpoint == CheckpointName(None, None, "/runs/a/step_2")
    assert found["r"].bytes_read == 500


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "file gone": lambda folder: (folder / "a.bin").unlink(),
    "cut off": lambda folder: os.truncate(folder / "a.bin", 1),
    "no manifest": lambda folder: (folder / MANIFEST_NAME).unlink(),
    "manifest cut off": lambda folder: os.truncate(folder / MANIFEST_NAME, 10),
    "manifest is a list": lambda folder: (folder / MANIFEST_NAME).write_text("[1]"),
    "odd meta": lambda folder: (folder / MANIFEST_NAME).write_text('{"meta": 3, "files": []}'),
    "odd files": lambda folder: (folder / MANIFEST_NAME).write_text('{"meta": {}, "files": [3]}'),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_what_is_damaged_is_listed_as_such(store: Store, damage: Callable[[Path], Any]) -> None:
    damage(store.build("blocks", KEY, writer()).path)
    assert only(store).is_damaged


def test_what_other_programs_keep_beside_is_not_listed(store: Store) -> None:
    (store.root / "prefect" / "records").mkdir(parents=True)
    (store.root / "prefect" / "records" / "x").write_bytes(b"x")
    (store.root / "prefect" / "prefect.db").write_bytes(b"x")
    (store.root / "notes.txt").write_text("mine")
    store.build("blocks", KEY, writer())
    (one,) = list_store(store).artifacts
    assert one.kind == "blocks"


def test_what_builders_left_is_told_apart(store: Store) -> None:
    store.build("drafter", "k", writer())
    unfinished = store.root / "unfinished" / f"drafter-{KEY}"
    unfinished.mkdir(parents=True)
    (unfinished / "part").write_bytes(b"x" * 70)
    temporary = store.root / "drafter" / f".{KEY}.0123abcd.tmp"
    temporary.mkdir()
    (temporary / "a.bin").write_bytes(b"x" * 30)
    listing = list_store(store)
    assert [(one.what, one.kind, one.key, one.size_bytes) for one in listing.left_overs] == [
        ("unfinished", "drafter", KEY, 70),
        ("temporary", "drafter", KEY, 30),
    ]
    assert listing.size_bytes == 100 + listing.artifacts[0].size_bytes


def test_the_least_recently_used_of_a_kind_comes_first(store: Store) -> None:
    for key, age in (("a", 10), ("b", 30), ("c", 20)):
        then = time.time() - age
        os.utime(store.build("blocks", key, writer()).file(MANIFEST_NAME), (then, then))
    assert [one.key for one in list_store(store).artifacts] == ["b", "c", "a"]
