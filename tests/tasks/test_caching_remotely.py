"""A task's record counts only while its artifact is whole in the store, which may lie on another machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.filesystems import LocalFileSystem
from prefect.results import ResultStore

from dflash_core.config import Config, parse_config
from dflash_core.store import Store
from dflash_core.store_opening import close_connections, store_of
from tasks.caching import ArtifactPolicy
from tests.support.store_server import StoreServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StoreServer]:
    with StoreServer(tmp_path / "served") as running:
        yield running
        close_connections()


def config_of(server: StoreServer, mirror: Path) -> Config:
    hosts = {name: host.model_dump() for name, host in server.hosts.items()}
    return parse_config({"store": server.url("store"), "store_mirror": str(mirror), "hosts": hosts}, where="test")


def write(folder: Path) -> dict[str, Any]:
    return {"size": (folder / "a").write_bytes(b"abc")}


def key_of(records: ResultStore, config: Config) -> str | None:
    context: Any = SimpleNamespace(result_store=records)
    inputs = {"config": config, "store": config.store, "key": "k1"}
    return ArtifactPolicy(kind="kind").compute_key(context, inputs, {})


def test_a_record_counts_where_another_box_has_the_artifact_and_not_where_it_is_damaged(
    server: StoreServer, tmp_path: Path
) -> None:
    records = ResultStore(result_storage=LocalFileSystem(basepath=str(tmp_path / "records")))
    builder, reader, late = (config_of(server, tmp_path / name) for name in ("builder", "reader", "late"))
    records.write({"was_built": True, "meta": {"size": 3}}, key="kind-k1")
    assert key_of(records, reader) is None, "a record of nothing: run"
    store_of(builder).build("kind", "k1", write)
    assert key_of(records, reader) == "kind-k1"
    assert Store(store_of(reader).root).find("kind", "k1") is not None, "it was brought here for the next stage"
    (server.root / "store" / "kind" / "k1" / "a").write_bytes(b"abd")
    assert key_of(records, late) is None, "altered: run"
