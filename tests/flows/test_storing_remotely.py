"""`dflash-eval store` on a store that is not local."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import yaml

from dflash_core.store_opening import close_connections, open_store
from dflash_core.store_remote import RemoteStore
from tests.support import scene
from tests.support.store_server import StoreServer

URL = "memory://store-commands/a"


def write(folder: Path) -> dict[str, Any]:
    (folder / "a.bin").write_bytes(b"a" * 1000)
    return {"target": "smol"}


@pytest.fixture
def box(tmp_path: Path) -> Iterator[scene.Setup]:
    config = tmp_path / "dflash.yaml"
    data = {"store": URL, "store_mirror": str(tmp_path / "mirror"), "results": str(tmp_path / "r.duckdb")}
    config.write_text(yaml.safe_dump(data))
    yield scene.Setup(tmp_path, config, tmp_path / "runs")
    close_connections()
    memory = fsspec.filesystem("memory")
    if memory.exists("/store-commands"):
        memory.rm("/store-commands", recursive=True)


@pytest.fixture
def store(box: scene.Setup) -> RemoteStore:
    made = open_store(URL, {}, mirror=str(box.folder / "mirror"))
    assert isinstance(made, RemoteStore)
    made.build("blocks", "b1", write)
    open_store(URL, {}, mirror=str(box.folder / "other")).build("drafter", "d1", write)
    return made


def test_the_list_tells_the_url_and_what_is_here(box: scene.Setup, store: RemoteStore) -> None:
    listed = box.json("store", "list")
    assert listed["store"] == URL
    assert {(one["kind"], one["is_mirrored"]) for one in listed["artifacts"]} == {("blocks", True), ("drafter", False)}
    shown = box.cli("store", "list").stdout
    assert URL in shown
    assert "here" in shown


def test_what_is_pruned_goes_from_the_store_and_from_here(box: scene.Setup, store: RemoteStore) -> None:
    pruned = box.json("store", "prune", "--kind", "blocks", "--yes")
    assert [one["key"] for one in pruned["removed"]] == ["b1"]
    assert [one["key"] for one in box.json("store", "list")["artifacts"]] == ["d1"]
    assert store.mirror.find("blocks", "b1") is None


def test_the_mirror_alone_is_emptied(box: scene.Setup, store: RemoteStore) -> None:
    shown = box.cli("store", "prune", "--mirror", "--yes")
    assert (shown.returncode, "the store keeps all of it" in shown.stdout) == (0, True), shown.stderr
    assert store.mirror.find("blocks", "b1") is None
    assert len(box.json("store", "list")["artifacts"]) == 2
    assert store.find("blocks", "b1") is not None


def test_a_local_store_has_no_mirror_to_empty(box: scene.Setup, tmp_path: Path) -> None:
    box.change_config(store=str(tmp_path / "local"))
    done = box.cli("store", "prune", "--mirror", "--yes")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "not local" in done.stderr


def test_a_store_that_does_not_answer_is_one_line_and_2(box: scene.Setup, tmp_path: Path) -> None:
    with StoreServer(tmp_path / "served") as server:
        hosts = {name: host.model_dump() for name, host in server.hosts.items()}
        box.change_config(store=server.url("store"), hosts=hosts)
        server.stop()
        done = box.cli("store", "list")
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
        assert f"127.0.0.1:{server.port}" in done.stderr
        server.start()
