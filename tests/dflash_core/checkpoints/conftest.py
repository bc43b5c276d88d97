"""A recording server, and the ways to read from it: every test that asks for `hosts` runs over both clients."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest

from dflash_core.config import HostSettings
from tests.support.sftp_server import RecordingSFTPServer

Transport = Literal["openssh", "asyncssh"]
ChangeSettings = Callable[..., dict[str, HostSettings]]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RecordingSFTPServer]:
    root = tmp_path / "box"
    root.mkdir()
    with RecordingSFTPServer(root) as running:
        yield running


@pytest.fixture(params=["openssh", "asyncssh"])
def transport(request: pytest.FixtureRequest) -> Transport:
    if request.param == "openssh" and shutil.which("ssh") is None:
        pytest.skip("OpenSSH's client is not installed")
    return request.param


@pytest.fixture
def changed(server: RecordingSFTPServer, transport: Transport) -> ChangeSettings:
    """Return a function that gives the settings of the server's host, some of them changed."""

    def change(**settings: object) -> dict[str, HostSettings]:
        return {"box": server.host_settings.model_copy(update={"transport": transport, **settings})}

    return change


@pytest.fixture
def hosts(changed: ChangeSettings) -> dict[str, HostSettings]:
    return changed()


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.safetensors"


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The distributed checkpoints that two ranks wrote, and what they hold; nobody may change them."""
    from tests.dflash_core.checkpoints.dcp_files import save_two_ranks

    folder = tmp_path_factory.mktemp("two ranks")
    save_two_ranks(folder)
    return folder
