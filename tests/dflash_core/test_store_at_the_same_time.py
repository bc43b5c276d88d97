"""Two machines, or two processes, at one store at the same time, and processes that are killed at it."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from dflash_core.store import MANIFEST_NAME, Store, file_sha256
from dflash_core.store_files import RemoteFiles
from dflash_core.store_listing import list_store
from dflash_core.store_pruning import Selection, plan_pruning, prune
from dflash_core.store_remote import RemoteStore
from tests.support.store_contents import (
    BIG,
    OTHER,
    TWO,
    answer,
    between_processes,
    contents,
    left_of_uploads,
    remote_only,
    worker,
    write_other,
    write_two,
)
from tests.support.store_places import StorePlace


class TestAtTheSameTime:
    @between_processes
    def test_two_processes_of_one_machine_build_once(self, place: StorePlace, tmp_path: Path) -> None:
        go = tmp_path / "go"
        arguments = ("build", "k1", "--wait-for", str(go), "--slow", "0.3")
        processes = [worker(place, tmp_path / "one", *arguments) for _ in range(2)]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        go.touch()
        answers = [answer(process) for process in processes]
        assert sorted(one["was_built"] for one in answers) == [False, True]

    @pytest.mark.parametrize("place", ["sshd", "asyncssh", "s3"], indirect=True)
    def test_two_machines_agree_on_one_whole_publication(self, place: StorePlace, tmp_path: Path) -> None:
        """Both build something else under one key; whoever wins, nobody ever has files of both."""
        go = tmp_path / "go"
        processes = [
            worker(place, tmp_path / text, "build", "k1", "--text", text, "--size", str(BIG), "--wait-for", str(go))
            for text in "xy"
        ]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        go.touch()
        answers = [answer(process) for process in processes]
        third = answer(worker(place, tmp_path / "third", "find", "k1"))
        assert all(len(set(one["digests"])) == 1 for one in (*answers, third)), "no mixture"
        assert third["found"]
        if place.url.startswith("ssh"):  # the first wins, and the second takes it
            assert [one["digests"] for one in answers] == [third["digests"]] * 2
            assert [one["meta"] for one in answers] == [third["meta"]] * 2
            assert left_of_uploads(place) == []
        else:
            assert third["digests"] in [one["digests"] for one in answers]

    @remote_only
    def test_the_second_of_two_machines_takes_what_the_first_published(
        self, place: StorePlace, box_a: Store, box_b: Store
    ) -> None:
        def write_slowly(folder: Path) -> dict[str, Any]:
            box_a.build("kind", "k1", write_two)
            return write_other(folder)

        late = box_b.build("kind", "k1", write_slowly)
        assert (late.was_built, late.meta, contents(late)) == (True, {"count": 2}, TWO)
        assert contents(box_b.find("kind", "k1")) == TWO
        assert left_of_uploads(place) == []

    @remote_only
    def test_equal_artifacts_are_not_sent_twice(
        self, box_a: RemoteStore, box_b: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sent: list[str] = []
        whole = type(box_a.files).upload

        def upload(self: RemoteFiles, local: Path, path: str, **options: Any) -> None:
            sent.append(path)
            whole(self, local, path, **options)

        def write_slowly(folder: Path) -> dict[str, Any]:
            box_a.build("kind", "k1", write_two)
            sent.clear()
            return write_two(folder)

        monkeypatch.setattr(type(box_a.files), "upload", upload)
        box_b.build("kind", "k1", write_slowly)
        assert sent == []

    @remote_only
    def test_a_reader_whose_artifact_is_replaced_on_the_way_gets_the_new_one_whole(
        self, place: StorePlace, box_a: RemoteStore, box_b: RemoteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        box_a.build("kind", "k1", write_two)
        third = place.open(tmp_path / "mirror_c")
        whole, downloads = type(box_a.files).download, []

        def download(self: RemoteFiles, path: str, **options: Any) -> None:
            downloads.append(path)
            whole(self, path, **options)
            if len(downloads) == 1:  # after the first file: the artifact goes, and another comes
                prune(box_a, plan_pruning(list_store(box_a), Selection(kinds=("kind",))))
                thread = threading.Thread(target=lambda: third.build("kind", "k1", write_other))
                thread.start()
                thread.join()

        monkeypatch.setattr(type(box_a.files), "download", download)
        found = box_b.find("kind", "k1")
        assert found is not None
        assert (found.meta, contents(found)) == ({"count": 3}, OTHER)


class TestKilled:
    @pytest.mark.parametrize("place", ["sshd", "asyncssh", "s3"], indirect=True)
    def test_in_the_middle_of_an_upload_nothing_is_half_visible_and_the_next_try_succeeds(
        self, place: StorePlace, box_b: RemoteStore, tmp_path: Path
    ) -> None:
        arguments = ("build", "k1", "--size", str(BIG))
        killed = worker(place, tmp_path / "one", *arguments, "--kill-after", str(BIG + 1000))
        killed.communicate(timeout=60)
        assert killed.returncode == -signal.SIGKILL
        assert f"kind/k1/{MANIFEST_NAME}" not in place.files()
        assert place.files(), "it was killed after it had sent something"
        assert box_b.find("kind", "k1") is None
        assert list_store(box_b).artifacts == () or place.url.startswith("s3")
        again = answer(worker(place, tmp_path / "one", "find", "k1"))
        assert not again["was_built"], "it was built before the upload began, and lies in the mirror"
        assert left_of_uploads(place) == []
        found = box_b.find("kind", "k1")
        assert found is not None
        assert {file_sha256(found.file(name)) for name in ("a.bin", "b.bin")} == set(again["digests"])

    @pytest.mark.parametrize("place", ["sshd", "asyncssh", "s3"], indirect=True)
    def test_in_the_middle_of_a_download_the_next_one_goes_on_from_there(
        self, place: StorePlace, box_a: RemoteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        size = 12_000_000

        def write(folder: Path) -> dict[str, Any]:
            for name in ("a.bin", "b.bin"):
                (folder / name).write_bytes(os.urandom(size))
            return {}

        built = box_a.build("kind", "k1", write)
        killed = worker(place, tmp_path / "one", "find", "k1", "--kill-after", str(size + 5_000_000))
        killed.communicate(timeout=60)
        assert killed.returncode == -signal.SIGKILL
        starts: list[int] = []
        whole = type(box_a.files).download

        def download(self: RemoteFiles, path: str, **options: Any) -> None:
            starts.append(options["start"])
            whole(self, path, **options)

        monkeypatch.setattr(type(box_a.files), "download", download)
        again = place.open(tmp_path / "one").find("kind", "k1")
        assert contents(again) == contents(built)
        assert len(starts) == 1, "the first file was there already"
        assert starts[0] >= 1_000_000, "and a part of the second"
