"""Artifacts are whole or absent, whatever happens to their makers and to their files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_core import store as store_module
from dflash_core.errors import ConfigError
from dflash_core.store import MANIFEST_NAME, Store, digest, file_sha256

ROOT = Path(__file__).parents[2]
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


def write_two(folder: Path) -> dict[str, Any]:
    (folder / "a.bin").write_bytes(b"a" * 100)
    (folder / "sub").mkdir()
    (folder / "sub" / "b.txt").write_text("b")
    return {"count": 2, "names": ["a", "b"]}


def must_not_run(folder: Path) -> dict[str, Any]:
    raise AssertionError(f"built again in {folder}")


def left_in(store: Store) -> list[str]:
    """Return every name in the store, the locks aside."""
    return sorted(
        path.relative_to(store.root).as_posix() for path in store.root.rglob("*") if "locks" not in path.parts
    )


def run_python(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


class TestBuilding:
    def test_what_was_built_is_found_and_not_built_again(self, store: Store) -> None:
        assert store.find("kind", "k1") is None
        built = store.build("kind", "k1", write_two)
        found = store.build("kind", "k1", must_not_run)
        assert (built.was_built, found.was_built) == (True, False)
        assert built.meta == found.meta == {"count": 2, "names": ["a", "b"]}
        assert found.path == built.path == store.folder("kind", "k1")
        assert found.file("sub/b.txt").read_text() == "b"
        assert store.find("kind", "k2") is None
        assert store.find("other", "k1") is None

    def test_the_manifest_states_size_and_digest_of_every_file(self, store: Store) -> None:
        artifact = store.build("kind", "k1", write_two)
        manifest = json.loads(artifact.file(MANIFEST_NAME).read_text())
        assert {entry["name"]: (entry["size_bytes"], entry["sha256"]) for entry in manifest["files"]} == {
            "a.bin": (100, hashlib.sha256(b"a" * 100).hexdigest()),
            "sub/b.txt": (1, hashlib.sha256(b"b").hexdigest()),
        }

    @pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()], ids=["error", "interrupt"])
    def test_a_writer_that_raises_leaves_nothing(self, store: Store, error: BaseException) -> None:
        def write(folder: Path) -> dict[str, Any]:
            write_two(folder)
            raise error

        with pytest.raises(type(error)):
            store.build("kind", "k1", write)
        assert store.find("kind", "k1") is None
        assert left_in(store) == ["kind"]
        assert store.build("kind", "k1", write_two).was_built, "the lock is free again"

    @pytest.mark.parametrize(
        "meta", [{"a": object()}, {"a": float("nan")}, {"a": {1, 2}}], ids=["object", "nan", "set"]
    )
    def test_meta_that_is_not_plain_publishes_nothing(self, store: Store, meta: dict[str, Any]) -> None:
        with pytest.raises((TypeError, ValueError)):
            store.build("kind", "k1", lambda folder: meta)
        assert left_in(store) == ["kind"]


def _flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _change_manifest(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        manifest = json.loads((folder / MANIFEST_NAME).read_text())
        for key, value in changes.items():
            manifest.pop(key)
            if value is not None:
                manifest[key] = value
        (folder / MANIFEST_NAME).write_text(json.dumps(manifest))

    return change


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "file removed": lambda folder: (folder / "a.bin").unlink(),
    "file in a subfolder removed": lambda folder: (folder / "sub" / "b.txt").unlink(),
    "file cut off": lambda folder: os.truncate(folder / "a.bin", 99),
    "file longer": lambda folder: os.truncate(folder / "a.bin", 101),
    "one bit flipped": lambda folder: _flip_last_byte(folder / "a.bin"),
    "no manifest": lambda folder: (folder / MANIFEST_NAME).unlink(),
    "manifest cut off": lambda folder: os.truncate(folder / MANIFEST_NAME, 40),
    "manifest empty": lambda folder: os.truncate(folder / MANIFEST_NAME, 0),
    "manifest of bytes": lambda folder: (folder / MANIFEST_NAME).write_bytes(b"\xff\xfe\x00"),
    "manifest is a list": lambda folder: (folder / MANIFEST_NAME).write_text("[]"),
    "manifest is null": lambda folder: (folder / MANIFEST_NAME).write_text("null"),
    "manifest without files": _change_manifest(files=None),
    "manifest without meta": _change_manifest(meta=None),
    "manifest of another key": _change_manifest(key="other"),
    "manifest with odd files": _change_manifest(files=["a.bin"]),
}


class TestDamage:
    @pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
    def test_a_damaged_artifact_is_not_found_and_is_built_again(
        self, store: Store, damage: Callable[[Path], Any]
    ) -> None:
        folder = store.build("kind", "k1", write_two).path
        damage(folder)
        assert store.find("kind", "k1") is None
        again = store.build("kind", "k1", write_two)
        assert again.was_built
        assert again.file("a.bin").read_bytes() == b"a" * 100
        assert store.find("kind", "k1") is not None

    def test_a_touched_file_with_equal_bytes_is_still_whole(self, store: Store) -> None:
        artifact = store.build("kind", "k1", write_two)
        os.utime(artifact.file("a.bin"), (1, 1))
        assert store.find("kind", "k1") is not None

    def test_a_rebuilt_artifact_holds_nothing_of_the_old_one(self, store: Store) -> None:
        artifact = store.build("kind", "k1", write_two)
        artifact.file("stray.bin").write_bytes(b"old")
        artifact.file("a.bin").unlink()
        assert not store.build("kind", "k1", write_two).file("stray.bin").exists()


_KILLED_BUILDER = """
import os, signal, sys
from pathlib import Path
from dflash_core.store import Store
root, moment = sys.argv[1:]
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
def write(folder):
    (folder / "a.bin").write_bytes(b"half")
    if moment == "while writing":
        die()
    return {}
if moment == "before the rename":
    Path.rename = die
Store(root).build("kind", "k1", write)
"""

_SLOW_BUILDER = """
import sys, time
from pathlib import Path
from dflash_core.store import Store
root, log = sys.argv[1:]
print("ready", flush=True)
sys.stdin.readline()
def write(folder):
    with open(log, "a") as file:
        file.write("built\\n")
    time.sleep(0.5)
    (folder / "a.bin").write_bytes(b"whole")
    return {}
artifact = Store(root).build("kind", "k1", write)
assert artifact.file("a.bin").read_bytes() == b"whole"
print(artifact.was_built)
"""


class TestProcesses:
    @pytest.mark.parametrize("moment", ["while writing", "before the rename"])
    def test_a_killed_builder_leaves_nothing_that_is_found_and_is_cleaned_up_after(
        self, store: Store, moment: str
    ) -> None:
        process = run_python(_KILLED_BUILDER, str(store.root), moment)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL, stderr
        assert any(name.endswith(".tmp") for name in left_in(store)), "it was killed in the middle"
        assert store.find("kind", "k1") is None
        assert store.build("kind", "k1", write_two).was_built
        assert left_in(store) == [
            "kind",
            "kind/k1",
            "kind/k1/a.bin",
            f"kind/k1/{MANIFEST_NAME}",
            "kind/k1/sub",
            "kind/k1/sub/b.txt",
        ]

    def test_of_two_processes_that_want_one_artifact_one_builds(self, store: Store, tmp_path: Path) -> None:
        log = tmp_path / "log"
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", _SLOW_BUILDER, str(store.root), str(log)],
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(2)
        ]
        try:
            for process in processes:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
            answers = []
            for process in processes:
                assert process.stdin is not None
                process.stdin.write("go\n")
                process.stdin.flush()
            for process in processes:
                answers.append(process.communicate(timeout=60)[0].strip())
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                process.wait()
        assert sorted(answers) == ["False", "True"]
        assert log.read_text() == "built\n"


class TestPlace:
    @pytest.mark.parametrize("url", ["s3://bucket/store", "ssh://me@box/store", "memory://x"])
    def test_a_remote_store_is_refused_in_one_line(self, url: str) -> None:
        with pytest.raises(ConfigError, match="only a local folder") as refused:
            Store(url)
        assert url in str(refused.value)
        assert "\n" not in str(refused.value)

    def test_a_file_url_a_home_folder_and_a_relative_path_are_local(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.chdir(tmp_path)
        assert Store(f"file://{tmp_path}/s").root == tmp_path / "s"
        assert Store("~/s").root == tmp_path / "s"
        assert Store("s").root == tmp_path / "s"

    def test_making_a_store_writes_nothing(self, store: Store) -> None:
        store.find("kind", "k1")
        assert not store.root.exists()


def canonical(value: Any) -> Any:
    """Tell values apart as a digest must: true is not 1, 1 is not 1.0; the order of keys does not matter."""
    if isinstance(value, dict):
        return ("dict", frozenset((key, canonical(item)) for key, item in value.items()))
    if isinstance(value, list | tuple):
        return ("list", tuple(canonical(item) for item in value))
    return (type(value).__name__, repr(value))


class TestDigest:
    @given(st.lists(st.tuples(st.text(max_size=3), PLAIN), max_size=5), st.randoms(use_true_random=False))
    def test_the_order_of_keys_does_not_matter(self, pairs: list[tuple[str, Any]], random: Any) -> None:
        data = dict(pairs)
        shuffled = list(data.items())
        random.shuffle(shuffled)
        assert digest("x", {"inner": data}) == digest("x", {"inner": dict(shuffled)})

    @given(PLAIN, PLAIN)
    def test_equal_digests_are_equal_data(self, one: Any, other: Any) -> None:
        assert (digest(one) == digest(other)) == (canonical(one) == canonical(other))

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            (("ab",), ("a", "b")),
            (("a", "b"), (["a", "b"],)),
            ((1,), ("1",)),
            ((1,), (1.0,)),
            ((1,), (True,)),
            ((None,), ("null",)),
            ((0,), (None,)),
            (([1, 2],), ([2, 1],)),
            (("",), ()),
        ],
        ids=repr,
    )
    def test_near_twins_differ(self, one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
        assert digest(*one) != digest(*other)

    @pytest.mark.parametrize(
        "value", [object(), {1, 2}, Path("/x"), b"x", {1: "a"}, [{"x": {None: 1}}]], ids=lambda value: repr(value)[:12]
    )
    def test_data_that_is_not_plain_is_refused(self, value: Any) -> None:
        with pytest.raises(TypeError):
            digest("x", value)

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_numbers_that_are_not_finite_are_refused(self, value: float) -> None:
        with pytest.raises(ValueError, match="not JSON compliant"):
            digest(value)

    def test_a_name_with_bytes_that_are_no_text_has_a_digest(self) -> None:
        name = os.fsdecode(b"run-\xff")
        assert digest(name) != digest("run-")

    def test_it_is_stable_from_one_version_to_the_next(self) -> None:
        """A change here makes every store of every user useless: raise it only on purpose."""
        assert digest("kind", 1, {"b": [1.5, None], "a": "é"}) == STABLE


STABLE = "3143ccc555698f795ef98b11dd4aaf25"


def test_a_file_larger_than_one_chunk_has_the_plain_sha256(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_HASH_CHUNK_BYTES", 7)
    data = bytes(range(250))
    (tmp_path / "f").write_bytes(data)
    assert file_sha256(tmp_path / "f") == hashlib.sha256(data).hexdigest()


def test_what_a_failed_builder_had_is_there_for_the_next_one(tmp_path: Path) -> None:
    store = Store(tmp_path)

    def fail(folder: Path) -> dict[str, Any]:
        with store.unfinished("drafter", "k") as unfinished:
            (unfinished / "half").write_text("half")
            raise RuntimeError("the link broke")

    def finish(folder: Path) -> dict[str, Any]:
        with store.unfinished("drafter", "k") as unfinished:
            assert (unfinished / "half").read_text() == "half"
            (unfinished / "half").rename(folder / "whole")
        return {}

    with pytest.raises(RuntimeError):
        store.build("drafter", "k", fail)
    assert store.find("drafter", "k") is None
    assert store.build("drafter", "k", finish).file("whole").read_text() == "half"
    assert list((tmp_path / "unfinished").iterdir()) == []


def test_what_no_builder_came_back_to_goes_after_some_days(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for name, age_days in (("drafter-old", 4), ("drafter-young", 1)):
        folder = tmp_path / "unfinished" / name
        folder.mkdir(parents=True)
        (folder / "part").write_bytes(b"x")
        then = time.time() - age_days * 86400
        os.utime(folder, (then, then))
    with store.unfinished("drafter", "k"):
        pass
    assert [path.name for path in (tmp_path / "unfinished").iterdir()] == ["drafter-young"]
