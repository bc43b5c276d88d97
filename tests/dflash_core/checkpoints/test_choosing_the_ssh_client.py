from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_core.checkpoints import open_source
from dflash_core.checkpoints.source_base import Source
from dflash_core.checkpoints.ssh_source import LARGE_READ_BYTES, SshSource
from dflash_core.config import HostSettings
from dflash_core.errors import CheckpointChanged, CheckpointVanished, HostKeyUnknown, HostUnreachable
from tests.support.delay_proxy import DelayProxy
from tests.support.sftp_server import RecordingSFTPServer

SIZE = LARGE_READ_BYTES + 1_000_000
pytestmark = pytest.mark.skipif(shutil.which("ssh") is None, reason="OpenSSH's client is not installed")


@pytest.fixture
def data(server: RecordingSFTPServer) -> bytes:
    data = os.urandom(SIZE)
    (server.root / "file").write_bytes(data)
    return data


@pytest.fixture
def far(server: RecordingSFTPServer, tmp_path: Path) -> Iterator[HostSettings]:
    """The server's host behind a long link."""
    with DelayProxy(server.port, round_trip_s=0.03) as proxy:
        known_hosts = tmp_path / "known_hosts_of_the_proxy"
        known_hosts.write_text(server.known_hosts.read_text().replace(str(server.port), str(proxy.port), 1))
        url = server.url().replace(str(server.port), str(proxy.port))
        yield server.host_settings.model_copy(update={"url": url, "known_hosts": str(known_hosts)})


def opened(settings: HostSettings) -> SshSource:
    source = open_source(settings.url, {"box": settings})
    assert isinstance(source, SshSource)
    return source


def test_a_short_link_is_read_through_ssh(server: RecordingSFTPServer, data: bytes) -> None:
    with opened(server.host_settings) as source:
        assert source.read_at("/file", 0, SIZE) == data
        assert source.transport == "openssh"
    assert server.num_connections == 1


def test_a_long_link_is_read_through_asyncssh_once_there_is_much_to_read(
    server: RecordingSFTPServer, far: HostSettings, data: bytes
) -> None:
    with opened(far) as source, source.open("/file") as file:
        assert [entry.name for entry in source.list_dir("/")] == ["file"]
        assert file.read_at(5, 1_000_000) == data[5:1_000_005]
        assert (source.transport, server.num_connections) == ("openssh", 1)
        assert file.read_at(0, SIZE) == data
        assert (source.transport, server.num_connections) == ("asyncssh", 2)
        file.check_unchanged()
        assert source.list_dir("/")[0].stat == file.stat
        assert source.read_at("/file", 0, SIZE) == data
        assert source.bytes_read == server.bytes_sent == 1_000_000 + 2 * SIZE
    assert (server.num_connections, server.most_open_at_once) == (2, 1)
    assert (server.write_attempts, server.execs) == ([], [])


def test_a_host_that_only_ssh_can_reach_is_read_through_ssh_on_any_link(
    server: RecordingSFTPServer, far: HostSettings, data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An alias that only ssh knows stands for a hardware key, or whatever else asyncssh cannot do."""
    port = far.url.rpartition(":")[2].strip("/")
    (tmp_path / "config").write_text(
        f"Host alias.invalid\n  HostName 127.0.0.1\n  Port {port}\n  User reader\n  HostKeyAlias [127.0.0.1]:{port}\n"
    )
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "ssh"
    script.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {tmp_path}/config "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    with opened(far.model_copy(update={"url": "ssh://alias.invalid"})) as source, source.open("/file") as file:
        for _ in range(2):
            assert file.read_at(0, SIZE) == data
            assert source.transport == "openssh"
    assert server.num_connections == 2


@pytest.mark.parametrize("change", ["replaced", "rotated"])
def test_a_file_that_changes_with_the_client_is_noticed(
    server: RecordingSFTPServer, far: HostSettings, data: bytes, change: str
) -> None:
    with opened(far) as source, source.open("/file") as file:
        (server.root / "file").rename(server.root / "old")
        if change == "replaced":
            (server.root / "file").write_bytes(data)
            os.utime(server.root / "file", (1, 1))
        with pytest.raises(CheckpointChanged if change == "replaced" else CheckpointVanished):
            file.read_at(0, SIZE)


@pytest.mark.parametrize("transport", ["openssh", "asyncssh"])
def test_a_chosen_client_stays(server: RecordingSFTPServer, far: HostSettings, data: bytes, transport: str) -> None:
    with opened(far.model_copy(update={"transport": transport})) as source:
        assert source.read_at("/file", 0, SIZE) == data
        assert source.transport == transport
    assert server.num_connections == 1


def test_the_rate_limit_holds_across_clients(server: RecordingSFTPServer, far: HostSettings, data: bytes) -> None:
    with opened(far.model_copy(update={"max_read_mb_s": 9.0})) as source, source.open("/file") as file:
        begin = time.monotonic()
        file.read_at(0, LARGE_READ_BYTES - 1)
        file.read_at(0, SIZE)
        seconds = time.monotonic() - begin
        assert source.transport == "asyncssh"
    assert seconds > 0.9 * (LARGE_READ_BYTES - 1 + SIZE) / 9e6


def test_many_small_reads_are_a_large_one(server: RecordingSFTPServer, far: HostSettings, data: bytes) -> None:
    with opened(far) as source, source.open("/file") as file:
        pieces = [file.read_at(offset, min(1_000_000, SIZE - offset)) for offset in range(0, SIZE, 1_000_000)]
        assert (b"".join(pieces), source.transport) == (data, "asyncssh")
    assert server.num_connections == 2


def no_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nothing").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))


def test_without_ssh_asyncssh_reads(
    server: RecordingSFTPServer, data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_ssh(tmp_path, monkeypatch)
    with opened(server.host_settings) as source:
        assert (source.transport, source.read_at("/file", 0, SIZE) == data) == ("asyncssh", True)
    with pytest.raises(HostUnreachable, match="ssh cannot be started"):
        opened(server.host_settings.model_copy(update={"transport": "openssh"}))


@pytest.mark.parametrize(
    "words", ["No user exists for uid 1234", "something else"], ids=["ssh_cannot_work_here", "ssh_fails"]
)
def test_only_an_ssh_that_cannot_work_here_is_gone_around(
    server: RecordingSFTPServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    (tmp_path / "ssh").write_text(f"#!/bin/sh\necho {words} >&2\nexit 255\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    if words == "something else":
        with pytest.raises(HostUnreachable, match="something else"):
            opened(server.host_settings)
        assert server.num_connections == 0
        return
    with opened(server.host_settings) as source:
        assert source.transport == "asyncssh"


def test_a_host_key_that_ssh_does_not_know_is_not_asked_for_again(server: RecordingSFTPServer, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    with pytest.raises(HostKeyUnknown):
        opened(server.host_settings.model_copy(update={"known_hosts": str(tmp_path / "empty")}))
    server.faults.refuse_login = True
    with pytest.raises(HostUnreachable, match="refused the login"):
        opened(server.host_settings)
    assert server.num_connections == 2


def test_asyncssh_is_not_imported_before_it_is_needed() -> None:
    code = "import sys, dflash_core.checkpoints.ssh_source; print('asyncssh' in sys.modules)"
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": "."}
    )
    assert done.stdout.strip() == "False", done.stderr


def test_a_source_says_who_reads(server: RecordingSFTPServer) -> None:
    source: Source = opened(server.host_settings)
    with source:
        assert isinstance(source, SshSource)
        assert source.transport == "openssh"
