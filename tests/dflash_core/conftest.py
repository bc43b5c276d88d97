"""A store in every place where one may lie, and two machines that share it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_core.store import Store
from dflash_core.store_opening import close_connections
from tests.support.store_places import REMOTE, StorePlace, StoreServers


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServers]:
    with StoreServers(tmp_path_factory.mktemp("servers")) as running:
        yield running


@pytest.fixture(params=("local", *REMOTE))
def place(
    request: pytest.FixtureRequest, servers: StoreServers, monkeypatch: pytest.MonkeyPatch
) -> Iterator[StorePlace]:
    yield servers.place(request.param, monkeypatch)
    close_connections()


@pytest.fixture
def box_a(place: StorePlace, tmp_path: Path) -> Store:
    return place.open(tmp_path / "mirror_a")


@pytest.fixture
def box_b(place: StorePlace, tmp_path: Path) -> Store:
    return place.open(tmp_path / "mirror_b")
