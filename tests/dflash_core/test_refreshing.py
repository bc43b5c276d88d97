"""What is to be made again is not found before it was, and what it replaces stays valid until then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_core import store_remote
from dflash_core.errors import HostUnreachable, InputError
from dflash_core.refreshing import Refresh, refreshing
from dflash_core.store import Store
from dflash_core.store_opening import close_connections, open_store
from dflash_core.store_remote import RemoteStore
from tests.support.store_server import StoreServer


def writer(data: bytes) -> Callable[[Path], dict[str, Any]]:
    return lambda folder: {"size": (folder / "a").write_bytes(data)}


def content(store: Store, kind: str = "blocks") -> bytes | None:
    found = store.find(kind, "k")
    return None if found is None else found.file("a").read_bytes()


class TestNames:
    @pytest.mark.parametrize(
        ("names", "stages"),
        [
            ([], set()),
            (["results"], {"results"}),
            (["blocks"], {"blocks", "results"}),
            (["drafter"], {"drafter", "blocks", "results"}),
            (["hidden_states"], {"hidden_states", "blocks", "results"}),
            (["transcripts"], {"transcripts", "hidden_states", "blocks", "results"}),
            (["all"], {"transcripts", "hidden_states", "drafter", "blocks", "results"}),
            (["drafter", "transcripts"], {"transcripts", "hidden_states", "drafter", "blocks", "results"}),
        ],
        ids=str,
    )
    def test_a_stage_takes_along_what_is_made_from_it(self, names: list[str], stages: set[str]) -> None:
        assert Refresh(names).stages == stages

    def test_an_unknown_one_is_refused_with_those_that_exist(self) -> None:
        with pytest.raises(InputError, match=r"'block' is no stage; expected all, or some of transcripts, hidden_st"):
            Refresh(["block"])


class TestLocalStore:
    def test_each_artifact_is_made_again_once(self, tmp_path: Path) -> None:
        store = Store(tmp_path)
        store.build("blocks", "k", writer(b"old"))
        store.build("drafter", "k", writer(b"old"))
        with refreshing(["blocks"]):
            assert store.find("blocks", "k") is None
            assert store.build("blocks", "k", writer(b"new")).was_built
            assert not store.build("blocks", "k", writer(b"newer")).was_built
            assert not store.build("drafter", "k", writer(b"new")).was_built
            assert content(store) == b"new"
        assert [content(store), content(store, "drafter")] == [b"new", b"old"]
        assert not store.build("blocks", "k", writer(b"newer")).was_built, "it is over"

    def test_the_old_one_is_there_until_the_new_one_is_whole(self, tmp_path: Path) -> None:
        store = Store(tmp_path)
        store.build("blocks", "k", writer(b"old"))

        def fail(folder: Path) -> dict[str, Any]:
            assert (tmp_path / "blocks" / "k" / "a").read_bytes() == b"old"
            (folder / "a").write_bytes(b"ne")
            raise RuntimeError("no power")

        with refreshing(["blocks"]), pytest.raises(RuntimeError, match="no power"):
            store.build("blocks", "k", fail)
        assert content(store) == b"old"
        assert [path.name for path in (tmp_path / "blocks").iterdir()] == ["k"]

    def test_it_is_told_where_the_new_one_differs(self, tmp_path: Path) -> None:
        store = Store(tmp_path)
        store.build("blocks", "k", writer(b"old"))
        store.build("transcripts", "k", writer(b"same"))
        with refreshing(["all"]) as refresh:
            store.build("blocks", "k", writer(b"new"))
            store.build("transcripts", "k", writer(b"same"))
            store.build("drafter", "k", writer(b"first"))
        (told,) = refresh.take_differing()
        assert told.startswith("blocks k was made again and came out otherwise (a)")

    def test_of_several_checkpoints_each_is_told_its_own_and_what_all_rest_on(self, tmp_path: Path) -> None:
        store = Store(tmp_path)
        for kind in ("transcripts", "blocks"):
            store.build(kind, "k", writer(b"old"))
        with refreshing(["all"]) as refresh:
            for kind in ("transcripts", "blocks"):
                store.build(kind, "k", writer(b"new"))
            told = [[line.split()[0] for line in refresh.take_differing()] for _checkpoint in range(2)]
        assert told == [["transcripts", "blocks"], ["transcripts"]]

    def test_of_several_in_a_row_the_outer_one_counts(self, tmp_path: Path) -> None:
        store = Store(tmp_path)
        store.build("blocks", "k", writer(b"old"))
        built = []
        with refreshing(["blocks"]):
            for data in (b"1", b"2"):
                with refreshing(["blocks"]):
                    built.append(store.build("blocks", "k", writer(data)).was_built)
        assert built == [True, False]

    def test_what_another_box_made_is_found(self, tmp_path: Path) -> None:
        store = Store(tmp_path)
        store.build("transcripts", "k", writer(b"theirs"))
        with refreshing(["transcripts"]) as refresh:
            assert content(store, "transcripts") is None
            refresh.made_elsewhere("transcripts", "hidden_states")
            assert content(store, "transcripts") == b"theirs"
            assert refresh.stages == {"blocks", "results"}


class TestSharedStore:
    @pytest.fixture
    def server(self, tmp_path: Path) -> Iterator[StoreServer]:
        with StoreServer(tmp_path / "served") as running:
            yield running
            close_connections()

    def store(self, server: StoreServer, mirror: Path) -> RemoteStore:
        opened = open_store(server.url("store"), server.hosts, mirror=str(mirror))
        assert isinstance(opened, RemoteStore)
        return opened

    def test_it_is_replaced_for_everybody(self, server: StoreServer, tmp_path: Path) -> None:
        first, second = self.store(server, tmp_path / "1"), self.store(server, tmp_path / "2")
        first.build("blocks", "k", writer(b"old"))
        assert content(second) == b"old"
        with refreshing(["blocks"]) as refresh:
            assert first.find("blocks", "k") is None
            assert first.build("blocks", "k", writer(b"new")).was_built
        assert len(refresh.take_differing()) == 1
        assert (server.root / "store" / "blocks" / "k" / "a").read_bytes() == b"new"
        assert content(self.store(server, tmp_path / "3")) == b"new"
        # A box that has a copy looks again after a while, or when it is told to.
        second.look_again()
        assert content(second) == b"new"
        assert content(first) == b"new"
        left = [path.name for path in (server.root / "store" / "blocks").iterdir()]
        assert left == ["k"]

    def test_what_could_not_be_sent_replaces_the_old_one_at_the_next_try(
        self, server: StoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It must not give way to the very one that was to be replaced."""
        store = self.store(server, tmp_path / "1")
        store.build("blocks", "k", writer(b"old"))

        def cut(*_arguments: Any, **_options: Any) -> None:
            raise HostUnreachable("the connection broke")

        monkeypatch.setattr(store_remote, "publish", cut)
        with refreshing(["blocks"]), pytest.raises(HostUnreachable, match="next try"):
            store.build("blocks", "k", writer(b"new"))
        monkeypatch.undo()
        assert (server.root / "store" / "blocks" / "k" / "a").read_bytes() == b"old"
        assert content(self.store(server, tmp_path / "1")) == b"new"
        assert (server.root / "store" / "blocks" / "k" / "a").read_bytes() == b"new"
        assert not store.is_due("blocks", "k")

    def test_what_is_damaged_there_is_replaced_though_it_comes_out_as_it_was(
        self, server: StoreServer, tmp_path: Path
    ) -> None:
        store = self.store(server, tmp_path / "1")
        store.build("blocks", "k", writer(b"old"))
        (server.root / "store" / "blocks" / "k" / "a").write_bytes(b"odd")
        with refreshing(["blocks"]) as refresh:
            store.build("blocks", "k", writer(b"old"))
        assert refresh.take_differing() == []
        assert content(self.store(server, tmp_path / "2")) == b"old"
