"""A store on another machine: the network, its disk, its permissions and its identity may all fail, in one line."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_core import progress
from dflash_core.config import HostSettings, parse_config
from dflash_core.errors import ConfigError, DFlashEvalError, DoesNotFit, HostError, HostKeyUnknown, HostUnreachable
from dflash_core.errors import InputError as BadInput
from dflash_core.store import MANIFEST_NAME, Store
from dflash_core.store_opening import close_connections, open_store, store_of
from dflash_core.store_remote import DOWNLOADING, UPLOADING, RemoteStore
from tests.support.sftp_server import RecordingSFTPServer
from tests.support.store_places import FolderStore
from tests.support.store_server import StoreServer

SIZE = 3_000_000


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StoreServer]:
    with StoreServer(tmp_path / "served") as running:
        yield running
        close_connections()


@pytest.fixture
def place(server: StoreServer) -> FolderStore:
    return FolderStore(server.root / "store", server.url("store"), server.hosts)


@pytest.fixture
def box_a(place: FolderStore, tmp_path: Path) -> RemoteStore:
    store = place.open(tmp_path / "mirror_a")
    assert isinstance(store, RemoteStore)
    return store


@pytest.fixture
def box_b(place: FolderStore, tmp_path: Path) -> Store:
    return place.open(tmp_path / "mirror_b")


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_core.checkpoints.host_errors.RECONNECT_WAITS_S", (0.01, 0.02, 0.03))


def write(folder: Path) -> dict[str, Any]:
    (folder / "a.bin").write_bytes(os.urandom(SIZE))
    return {"size": SIZE}


def must_not_run(folder: Path) -> dict[str, Any]:
    raise AssertionError(f"built again in {folder}")


def in_one_line(error: BaseException) -> str:
    text = str(error)
    assert "\n" not in text
    assert text[0].islower() or not text[0].isalpha()
    assert isinstance(error, DFlashEvalError)
    assert error.exit_status == 2
    return text


class TestNetwork:
    def test_an_upload_goes_on_after_a_cut_connection(
        self, server: StoreServer, box_a: RemoteStore, box_b: Store
    ) -> None:
        server.faults.cut_after_bytes = SIZE // 2
        built = box_a.build("kind", "k1", write)
        assert server.faults.cut_after_bytes is None, "it was cut"
        assert server.num_connections == 2
        found = box_b.build("kind", "k1", must_not_run)
        assert found.file("a.bin").read_bytes() == built.file("a.bin").read_bytes()

    def test_a_rename_whose_answer_is_lost_was_done(self, server: StoreServer, box_a: RemoteStore) -> None:
        server.faults.lose_rename_answers = 1
        assert box_a.build("kind", "k1", write).was_built
        assert not box_a.is_due("kind", "k1")
        assert sorted(path.name for path in (server.root / "store" / "kind").iterdir()) == ["k1"]

    def test_a_store_that_goes_away_is_one_line_and_what_was_made_goes_up_later(
        self, server: StoreServer, box_a: RemoteStore, box_b: Store
    ) -> None:
        def write_and_stop(folder: Path) -> dict[str, Any]:
            server.stop()
            return write(folder)

        with pytest.raises(HostUnreachable, match="cannot connect") as away:
            box_a.build("kind", "k1", write_and_stop)
        text = in_one_line(away.value)
        assert str(box_a.root) in text
        assert "next try" in text
        with pytest.raises(HostUnreachable):
            box_a.find("kind", "k1")
        server.start()
        assert box_b.find("kind", "k1") is None
        mine = box_a.build("kind", "k1", must_not_run)
        theirs = box_b.build("kind", "k1", must_not_run)
        assert theirs.file("a.bin").read_bytes() == mine.file("a.bin").read_bytes()

    def test_what_is_mirrored_is_used_without_the_store(self, server: StoreServer, box_a: RemoteStore) -> None:
        box_a.build("kind", "k1", write)
        server.stop()
        box_a.files.looked_at.clear()
        assert box_a.build("kind", "k1", must_not_run).meta == {"size": SIZE}
        began = time.monotonic()
        for _ in range(100):
            assert box_a.find("kind", "k1") is not None
        assert time.monotonic() - began < 2, "a store that is away is not asked every time"
        server.start()

    def test_it_comes_back_after_the_server_was_started_anew(
        self, server: StoreServer, box_a: RemoteStore, box_b: Store
    ) -> None:
        box_a.build("kind", "k1", write)
        server.stop()
        server.start()
        box_a.build("kind", "k2", write)
        assert box_b.find("kind", "k1") is not None
        assert box_b.find("kind", "k2") is not None

    def test_nothing_answers_at_all(self, place: FolderStore, server: StoreServer, box_a: RemoteStore) -> None:
        server.stop()
        with pytest.raises(HostUnreachable) as away:
            box_a.find("kind", "k1")
        assert f"127.0.0.1:{server.port}" in in_one_line(away.value)
        server.start()

    def test_an_idle_connection_is_closed_and_made_again(
        self, server: StoreServer, box_a: RemoteStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        box_a.build("kind", "k1", write)
        assert server.num_connections == 1
        monkeypatch.setattr("dflash_core.store_sftp.IDLE_S", 0.05)
        assert box_a.find("kind", "k2") is None
        end = time.monotonic() + 10
        while getattr(box_a.files, "_session", None) is not None and time.monotonic() < end:
            time.sleep(0.02)
        assert getattr(box_a.files, "_session", None) is None
        made = server.num_connections
        assert box_a.find("kind", "k2") is None
        assert server.num_connections > made


class TestRefusals:
    def test_a_full_disk_over_there(self, server: StoreServer, box_a: RemoteStore, box_b: Store) -> None:
        server.faults.full_after_bytes = SIZE // 2
        with pytest.raises(HostError, match="disk full") as full:
            box_a.build("kind", "k1", write)
        in_one_line(full.value)
        assert box_b.find("kind", "k1") is None
        server.faults.full_after_bytes = None
        assert not box_a.build("kind", "k1", must_not_run).was_built
        assert box_b.find("kind", "k1") is not None

    def test_a_folder_that_may_only_be_read(self, server: StoreServer, box_a: RemoteStore) -> None:
        server.faults.refuse = True
        with pytest.raises(HostError, match="permissions") as refused:
            box_a.build("kind", "k1", write)
        assert "kind/" in in_one_line(refused.value)
        assert box_a.mirror.find("kind", "k1") is not None

    def test_a_mirror_whose_disk_is_too_small(
        self, box_a: RemoteStore, box_b: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        box_a.build("kind", "k1", write)
        usage = shutil.disk_usage("/")._replace(free=SIZE - 1)
        monkeypatch.setattr("dflash_core.store_remote.shutil.disk_usage", lambda _path: usage)
        with pytest.raises(DoesNotFit, match="store_mirror") as small:
            box_b.find("kind", "k1")
        in_one_line(small.value)

    def test_a_host_key_that_is_not_known(self, server: StoreServer, tmp_path: Path) -> None:
        (tmp_path / "none").write_text("")
        hosts = {"box": server.hosts["box"].model_copy(update={"known_hosts": str(tmp_path / "none")})}
        store = open_store(server.url("store"), hosts, mirror=str(tmp_path / "m"))
        with pytest.raises(HostKeyUnknown) as unknown:
            store.build("kind", "k1", write)
        in_one_line(unknown.value)
        assert list(server.root.iterdir()) == []

    def test_without_a_configured_host_the_users_own_known_hosts_are_asked(
        self, server: StoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        (tmp_path / ".ssh").mkdir()
        (tmp_path / ".ssh" / "known_hosts").write_text("")
        with pytest.raises(HostKeyUnknown):
            open_store(server.url("store"), {}, mirror=str(tmp_path / "m")).find("kind", "k1")

    @pytest.mark.parametrize("user", ["tester@", "other@", ""])
    def test_a_host_that_is_only_read_gets_no_store_whoever_logs_in(self, tmp_path: Path, user: str) -> None:
        with RecordingSFTPServer(tmp_path / "runs") as training:
            hosts = {"training": training.host_settings.model_copy(update={"read_only": True})}
            address = f"ssh://{user}127.0.0.1:{training.port}/store"
            config = parse_config({"store": address, "hosts": {"training": hosts["training"].model_dump()}}, where="f")
            with pytest.raises(ConfigError, match="read_only") as refused:
                store_of(config)
            assert address in in_one_line(refused.value)
            assert training.num_connections == 0

    def test_a_store_on_another_port_of_that_machine_is_another_host(self, tmp_path: Path) -> None:
        hosts = {"training": HostSettings(url="ssh://me@box:22/runs", read_only=True)}
        assert isinstance(open_store("ssh://me@box:2222/store", hosts, mirror=str(tmp_path)), RemoteStore)

    @pytest.mark.parametrize(
        ("url", "reason"),
        [
            ("ssh://me@box", "names no folder"),
            ("ssh://me@box/", "names no folder"),
            ("ssh://me:secret@box/x", "log in with a key"),
            ("http://host/x", "nothing can be written"),
            ("https://host/x", "nothing can be written"),
        ],
    )
    def test_an_address_that_cannot_be_one_is_refused_at_once(self, tmp_path: Path, url: str, reason: str) -> None:
        with pytest.raises(BadInput, match=reason) as refused:
            open_store(url, {}, mirror=str(tmp_path))
        assert "secret" not in in_one_line(refused.value)

    @pytest.mark.parametrize(
        ("url", "reason"), [("nosuch://x/y", "no store is known"), ("s3://key:secret@bucket/x", "end up in logs")]
    )
    def test_a_scheme_that_is_not_known_or_a_secret_in_it(self, tmp_path: Path, url: str, reason: str) -> None:
        with pytest.raises(BadInput, match=reason) as refused:
            open_store(url, {}, mirror=str(tmp_path)).find("kind", "k1")
        assert "secret" not in in_one_line(refused.value)


class TestMirror:
    def test_each_url_has_its_own_and_a_slash_at_the_end_is_the_same(self, tmp_path: Path) -> None:
        roots = [
            open_store(url, {}, mirror=str(tmp_path)).root
            for url in ("memory://a/b", "memory://a/b/", "memory://a/c", "ssh://me@box/b")
        ]
        assert roots[0] == roots[1]
        assert len(set(roots)) == 3
        assert all(root.parent == tmp_path for root in roots)
        assert list(tmp_path.iterdir()) == [], "to open a store writes nothing"

    def test_a_local_store_needs_none(self, tmp_path: Path) -> None:
        config = parse_config({"store": str(tmp_path / "s"), "store_mirror": str(tmp_path / "m")}, where="f")
        assert type(store_of(config)) is Store
        assert store_of(config).root == tmp_path / "s"

    def test_it_tells_whose_mirror_it_is(self, box_a: RemoteStore, place: FolderStore) -> None:
        box_a.build("kind", "k1", write)
        assert place.url in (box_a.root / "mirror.json").read_text()

    def test_both_ways_tell_how_far_they_are(self, box_a: RemoteStore, box_b: Store) -> None:
        heard: list[tuple[str, float, float]] = []
        with progress.listening(lambda *said: heard.append(said)):
            box_a.build("kind", "k1", write)
            box_b.find("kind", "k1")
        for stage in (UPLOADING, DOWNLOADING):
            done = [amount for name, amount, total in heard if name == stage and total == SIZE]
            assert done == sorted(done)
            assert (len(done) > 3, done[-1]) == (True, SIZE)

    def test_only_what_is_asked_for_is_downloaded(self, server: StoreServer, box_a: RemoteStore, box_b: Any) -> None:
        for key in ("layer-1", "layer-2", "layer-3"):
            box_a.build("kind", key, write)
        box_b.find("kind", "layer-2")
        assert [path.parent.name for path in box_b.root.rglob(MANIFEST_NAME)] == ["layer-2"]

    def test_memory_does_not_grow_with_the_file(self, box_a: RemoteStore, box_b: Store, tmp_path: Path) -> None:
        """The server lives in this process too, so that what both hold at once is counted."""
        import tracemalloc

        size = 64 << 20

        def write_large(folder: Path) -> dict[str, Any]:
            with (folder / "a.bin").open("wb") as file:
                for _ in range(64):
                    file.write(os.urandom(1 << 20))
            return {}

        tracemalloc.start()
        try:
            box_a.build("kind", "k1", write_large)
            sent = tracemalloc.get_traced_memory()[1]
            tracemalloc.reset_peak()
            found = box_b.find("kind", "k1")
            received = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert found is not None
        assert found.file("a.bin").stat().st_size == size
        assert sent < size, f"{sent / 1e6:.0f} MB"
        assert received < size, f"{received / 1e6:.0f} MB"
