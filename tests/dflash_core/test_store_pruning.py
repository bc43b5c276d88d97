"""Pruning removes what was chosen and nothing else, never what is in use, and never half."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_core.errors import ArtifactDamaged
from dflash_core.store import MANIFEST_NAME, Store
from dflash_core.store_listing import CheckpointName, Listing, StoredArtifact, list_store
from dflash_core.store_pruning import Selection, plan_pruning, prune

ROOT = Path(__file__).parents[2]
NOW = 1_000_000.0
NAME = CheckpointName("a", 1, "ssh://box/runs/a/step_1")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def writer(size_bytes: int = 100, **meta: Any) -> Callable[[Path], dict[str, Any]]:
    def write(folder: Path) -> dict[str, Any]:
        (folder / "a.bin").write_bytes(b"a" * size_bytes)
        return meta

    return write


def listed(key: str, *, kind: str = "blocks", age: float = 0, size: int = 10, **changes: Any) -> StoredArtifact:
    facts: dict[str, Any] = {"seconds": 1.0, "bytes_read": None, "is_damaged": False, "target": None}
    facts |= {"transcripts": None, "detail": None} | changes
    return StoredArtifact(kind=kind, key=key, path=Path(key), size_bytes=size, last_used=NOW - age, **facts)


def chosen(listing: list[StoredArtifact], **conditions: Any) -> list[str]:
    plan = plan_pruning(Listing(root=Path(), artifacts=tuple(listing)), Selection(**conditions), now=NOW)
    return [one.key for one in plan.artifacts]


class TestChoosing:
    ALL = [
        listed("b", age=100, target="smol", checkpoint=NAME),
        listed("h", kind="hidden_states", age=50, target="smol"),
        listed("d", kind="drafter", age=200, checkpoint=NAME),
        listed("o", age=10, target="other", checkpoint=CheckpointName("b", 1, "/runs/b/step_1")),
    ]

    @pytest.mark.parametrize(
        ("conditions", "keys"),
        [
            ({}, []),
            ({"kinds": ("blocks",)}, ["b", "o"]),
            ({"kinds": ("blocks", "drafter")}, ["d", "b", "o"]),
            ({"older_than_s": 100}, ["d", "b"]),
            ({"target": "smol"}, ["b", "h"]),
            ({"run": "a"}, ["d", "b"]),
            ({"checkpoint": "ssh://box/runs/a/step_1"}, ["d", "b"]),
            ({"checkpoint": "step_1"}, ["d", "b", "o"]),
            ({"checkpoint": "a/step_1/"}, ["d", "b"]),
            ({"checkpoint": "tep_1"}, []),
            ({"target": "smol", "kinds": ("blocks",), "older_than_s": 101}, []),
            ({"kinds": ("no such",)}, []),
        ],
        ids=str,
    )
    def test_what_meets_every_condition_goes_least_recently_used_first(
        self, conditions: dict[str, Any], keys: list[str]
    ) -> None:
        assert chosen(self.ALL, **conditions) == keys

    @given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9), st.booleans()), max_size=8), st.integers(0, 250))
    def test_keeping_so_many_bytes_removes_no_more_than_it_must(
        self, sizes: list[tuple[int, int, bool]], keep: int
    ) -> None:
        artifacts = [
            listed(str(number), size=size, age=age, is_damaged=is_damaged)
            for number, (size, age, is_damaged) in enumerate(sizes)
        ]
        going = chosen(artifacts, keep_bytes=keep)
        left = sum(one.size_bytes for one in artifacts if one.key not in going)
        assert left <= keep
        if going:
            last = artifacts[int(going[-1])]
            assert left + last.size_bytes > keep, "without the last one it would not have been enough"
            kept = [one for one in artifacts if one.key not in going]
            assert all((last.is_damaged, last.last_used) >= (one.is_damaged, 0) for one in kept)
            assert all(one.last_used >= last.last_used for one in kept if one.is_damaged == last.is_damaged)

    def test_the_cost_is_the_sum_of_what_is_known(self) -> None:
        artifacts = (
            listed("a", seconds=2.5, bytes_read=100),
            listed("b", seconds=None),
            listed("c", seconds=4.0, bytes_read=11),
        )
        plan = plan_pruning(Listing(root=Path(), artifacts=artifacts), Selection(kinds=("blocks",)), now=NOW)
        assert (plan.seconds, plan.num_without_seconds, plan.bytes_to_read_again) == (6.5, 1, 111)
        assert plan.size_bytes == 30


def leave(store: Store, kind: str, key: str, age_s: float) -> list[Path]:
    """Leave what a killed builder leaves: half a product of it, and a temporary folder."""
    folders = [store.root / "unfinished" / f"{kind}-{key}", store.root / kind / f".{key}.0123abcd.tmp"]
    then = time.time() - age_s
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "part").write_bytes(b"x" * 10)
        for path in (folder / "part", folder):
            os.utime(path, (then, then))
    return folders


def run(store: Store, **conditions: Any) -> Any:
    return prune(store, plan_pruning(list_store(store), Selection(**conditions)))


class TestRemoving:
    def test_it_is_gone_with_its_lock_and_is_built_again(self, store: Store) -> None:
        store.build("blocks", "a", writer())
        store.build("drafter", "b", writer())
        pruned = run(store, kinds=("blocks",))
        assert [one.key for one in pruned.removed] == ["a"]
        assert (pruned.in_use, pruned.failed, pruned.num_locks) == ((), (), 1)
        assert not store.folder("blocks", "a").exists()
        assert sorted(path.name for path in (store.root / "locks").iterdir()) == ["drafter-b.lock"]
        assert store.find("drafter", "b") is not None
        assert store.build("blocks", "a", writer()).was_built

    def test_with_no_condition_only_what_killed_builders_left_goes(self, store: Store) -> None:
        store.build("drafter", "a", writer())
        folders = leave(store, "drafter", "k", age_s=5)
        pruned = run(store)
        assert len(pruned.removed) == 2
        assert not any(folder.exists() for folder in folders)
        assert store.find("drafter", "a") is not None

    @pytest.mark.parametrize(
        ("conditions", "goes"),
        [
            ({"kinds": ("drafter",)}, True),
            ({"kinds": ("blocks",)}, False),
            ({"older_than_s": 50.0}, True),
            ({"older_than_s": 500.0}, False),
            ({"target": "smol"}, False),
            ({"keep_bytes": 10**9}, True),
        ],
        ids=str,
    )
    def test_left_overs_follow_kind_and_age(self, store: Store, conditions: dict[str, Any], goes: bool) -> None:
        folders = leave(store, "drafter", "k", age_s=100)
        run(store, **conditions)
        assert [folder.exists() for folder in folders] == [not goes] * 2

    def test_what_a_reader_holds_stays(self, store: Store) -> None:
        artifact = store.build("blocks", "a", writer())
        with store.reading(artifact), store.reading(artifact):
            pruned = run(store, kinds=("blocks",))
            assert [one.key for one in pruned.in_use] == ["a"]
            assert artifact.file("a.bin").exists()
        assert [one.key for one in run(store, kinds=("blocks",)).removed] == ["a"]

    def test_what_was_used_since_it_was_listed_stays(self, store: Store) -> None:
        artifact = store.build("blocks", "a", writer())
        os.utime(artifact.file(MANIFEST_NAME), (1000, 1000))
        plan = plan_pruning(list_store(store), Selection(older_than_s=60))
        assert store.find("blocks", "a") is not None
        pruned = prune(store, plan)
        assert [one.key for one in pruned.in_use] == ["a"]
        assert artifact.path.exists()

    def test_what_was_built_again_since_it_was_listed_as_damaged_stays(self, store: Store) -> None:
        artifact = store.build("blocks", "a", writer())
        artifact.file(MANIFEST_NAME).unlink()
        then = time.time() - 60
        os.utime(artifact.path, (then, then))
        damaged = replace(listed("a", is_damaged=True), path=artifact.path, last_used=then)
        listing = Listing(root=store.root, artifacts=(damaged,))
        assert store.build("blocks", "a", writer()).was_built
        prune(store, plan_pruning(listing, Selection(kinds=("blocks",))))
        assert store.find("blocks", "a") is not None

    def test_what_another_pruner_removed_is_no_error(self, store: Store) -> None:
        store.build("blocks", "a", writer())
        leave(store, "drafter", "k", age_s=5)
        plan = plan_pruning(list_store(store), Selection(keep_bytes=0))
        first, second = prune(store, plan), prune(store, plan)
        assert (len(first.removed), len(second.removed)) == (3, 0)
        assert not first.failed
        assert not second.failed

    def test_a_reader_whose_artifact_was_removed_is_told(self, store: Store) -> None:
        artifact = store.build("blocks", "a", writer())
        run(store, kinds=("blocks",))
        with pytest.raises(ArtifactDamaged, match="was removed from the store"), store.reading(artifact):
            raise AssertionError("nothing to read")

    def test_what_a_killed_pruner_had_renamed_is_removed_by_the_next(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store.build("blocks", "a", writer())

        def die(path: Path) -> None:
            raise KeyboardInterrupt

        unfinished, temporary = leave(store, "drafter", "k", age_s=5)
        shutil.rmtree(temporary)
        for _ in range(2):
            with monkeypatch.context() as patched, contextlib.suppress(KeyboardInterrupt):
                patched.setattr("shutil.rmtree", die)
                plan = plan_pruning(list_store(store), Selection(keep_bytes=0))
                prune(store, replace(plan, left_overs=tuple(one for one in plan.left_overs if one.path == unfinished)))
        assert store.find("blocks", "a") is None
        assert not unfinished.exists()
        assert [(one.what, one.kind, one.key) for one in list_store(store).left_overs] == [
            ("temporary", "blocks", "a"),
            ("temporary", "drafter", "k"),
        ]
        run(store)
        assert list_store(store).left_overs == ()
        assert [path for path in store.root.rglob("*") if path.is_file()] == []

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may remove anything")
    def test_what_may_not_be_removed_is_told_and_the_rest_goes(self, store: Store) -> None:
        store.build("blocks", "a", writer())
        store.build("drafter", "b", writer())
        (store.root / "blocks").chmod(0o500)
        try:
            pruned = run(store, keep_bytes=0)
        finally:
            (store.root / "blocks").chmod(0o700)
        assert [(item.key, reason) for item, reason in pruned.failed] == [("a", "Permission denied")]
        assert [one.key for one in pruned.removed] == ["b"]

    def test_an_error_of_the_disk_is_told_and_the_rest_goes(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for key in ("a", "b"):
            store.build("blocks", key, writer())
        rename = Path.rename

        def fail(path: Path, to: Path) -> Path:
            if path.name == "a":
                raise PermissionError(13, "Permission denied")
            return rename(path, to)

        monkeypatch.setattr(Path, "rename", fail)
        pruned = run(store, kinds=("blocks",))
        assert [(item.key, reason) for item, reason in pruned.failed] == [("a", "Permission denied")]
        assert [one.key for one in pruned.removed] == ["b"]


_BUILDER = """
import sys
from pathlib import Path
from dflash_core.store import Store
store = Store(sys.argv[1])
def write(folder):
    with store.unfinished("drafter", "k") as unfinished:
        (unfinished / "part").write_bytes(b"half")
        (folder / "a.bin").write_bytes(b"half")
        print("half", flush=True)
        sys.stdin.readline()
        (folder / "a.bin").write_bytes(b"whole")
    return {}
artifact = store.build("drafter", "k", write)
assert artifact.file("a.bin").read_bytes() == b"whole"
print("done", flush=True)
"""

_RACER = """
import sys, time
from pathlib import Path
from dflash_core.errors import ArtifactDamaged
from dflash_core.store import Store
store, end = Store(sys.argv[1]), time.monotonic() + 1.5
num_built = num_read = num_vanished = 0
def write(folder):
    for number in range(20):
        (folder / f"{number}.bin").write_bytes(b"x" * 1000)
    return {}
while time.monotonic() < end:
    artifact = store.build("blocks", "k", write)
    num_built += artifact.was_built
    try:
        with store.reading(artifact):
            for number in range(20):
                assert artifact.file(f"{number}.bin").read_bytes() == b"x" * 1000
            num_read += 1
    except ArtifactDamaged:
        num_vanished += 1
print(num_built, num_read, num_vanished)
"""


@contextlib.contextmanager
def process(code: str, store: Store) -> Iterator[subprocess.Popen[str]]:
    """Run Python code with the store's root as argument; it has ended when the block has."""
    running = subprocess.Popen(
        [sys.executable, "-c", code, str(store.root)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield running
    finally:
        running.kill()
        running.communicate()


class TestRacing:
    def test_what_a_builder_is_at_work_on_stays(self, store: Store) -> None:
        with process(_BUILDER, store) as builder:
            assert builder.stdout is not None
            assert builder.stdin is not None
            assert builder.stdout.readline() == "half\n"
            pruned = run(store)
            assert [one.what for one in pruned.in_use] == ["unfinished", "temporary"]
            assert (pruned.removed, pruned.num_locks) == ((), 0)
            builder.stdin.write("go\n")
            builder.stdin.flush()
            assert builder.stdout.readline() == "done\n"
        assert store.find("drafter", "k") is not None

    def test_builders_and_readers_never_see_half_of_what_is_pruned(self, store: Store) -> None:
        num_removed = 0
        with process(_RACER, store) as one, process(_RACER, store) as other:
            while one.poll() is None or other.poll() is None:
                num_removed += len(run(store, kinds=("blocks",)).removed)
                time.sleep(0.002)
            for racer in (one, other):
                assert racer.stdout is not None
                assert racer.stderr is not None
                assert racer.returncode == 0, racer.stderr.read()
            counts = [[int(count) for count in racer.stdout.read().split()] for racer in (one, other) if racer.stdout]
        num_built, num_read = counts[0][0] + counts[1][0], counts[0][1] + counts[1][1]
        assert num_removed > 3, "it did race"
        assert num_read > 10
        assert num_built in (num_removed, num_removed + 1), "what was removed was built again once"
        assert all(".tmp" not in path.name for path in (store.root / "blocks").iterdir())

    def test_who_waited_for_a_lock_that_was_removed_holds_the_one_that_others_see(self, store: Store) -> None:
        is_held, may_end = threading.Event(), threading.Event()

        def wait_for_it() -> None:
            with store.lock("blocks", "k"):
                is_held.set()
                may_end.wait(10)

        waiting = threading.Thread(target=wait_for_it)
        with store.lock("blocks", "k"):
            waiting.start()
            time.sleep(0.1)
            store.lock_path("blocks", "k").unlink()
        assert is_held.wait(10)
        with pytest.raises(BlockingIOError), store.lock("blocks", "k", wait=False):
            raise AssertionError("two hold one lock")
        may_end.set()
        waiting.join(10)
        with store.lock("blocks", "k", wait=False):
            pass

    def test_a_build_that_takes_days_is_not_cleaned_up_by_others(self, store: Store) -> None:
        folder = store.root / "unfinished" / "drafter-slow"
        folder.mkdir(parents=True)
        then = time.time() - 10 * 86400
        os.utime(folder, (then, then))
        with store.lock("drafter", "slow"), store.unfinished("drafter", "k"):
            assert folder.exists()
        with store.unfinished("drafter", "k"):
            assert not folder.exists()
