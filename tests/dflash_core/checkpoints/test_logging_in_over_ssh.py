from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import asyncssh
import pytest

from dflash_core.checkpoints import open_source
from dflash_core.config import HostSettings
from dflash_core.errors import HostKeyUnknown, HostUnreachable, InputError
from dflash_core.ssh import openssh_command, parse_ssh_url
from tests.support.sftp_server import RecordingSFTPServer

ChangeSettings = Callable[..., dict[str, HostSettings]]
UseSshConfig = Callable[[str], None]

needs_ssh = pytest.mark.skipif(shutil.which("ssh") is None, reason="OpenSSH's client is not installed")


@pytest.fixture
def use_ssh_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> UseSshConfig:
    """Return a function that puts a text in the place of ~/.ssh/config, for both clients.

    ssh goes by the password file and not by HOME, so it is handed the file by a script of its name.
    """

    def use(text: str) -> None:
        config = tmp_path / "home" / ".ssh" / "config"
        config.parent.mkdir(parents=True)
        config.write_text(text)
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        put_ssh(tmp_path / "bin", f'exec {shutil.which("ssh")} -F "{config}" "$@"', monkeypatch)

    return use


def put_ssh(folder: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a script called ssh, and let it be found first."""
    folder.mkdir()
    (folder / "ssh").write_text(f"#!/bin/sh\n{body}\n")
    (folder / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


# Host keys.


def test_an_unknown_or_changed_host_key_is_refused_and_says_what_to_do(
    server: RecordingSFTPServer, changed: ChangeSettings, tmp_path: Path
) -> None:
    other_key = asyncssh.generate_private_key("ssh-ed25519").export_public_key().decode()
    texts = {"changed": f"[127.0.0.1]:{server.port} {other_key}", "unknown": f"elsewhere {other_key}"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    for name in ("missing", *texts):
        with pytest.raises(HostKeyUnknown, match=f"ssh-keyscan -p {server.port}") as refused:
            open_source(server.url(), changed(known_hosts=str(tmp_path / name)))
        assert str(tmp_path / name) in str(refused.value)
        assert "\n" not in str(refused.value)
    assert server.ops == []
    assert (tmp_path / "unknown").read_text() == texts["unknown"]


def test_the_check_of_host_keys_can_be_turned_off(server: RecordingSFTPServer, changed: ChangeSettings) -> None:
    with open_source(server.url(), changed(known_hosts=None)) as source:
        assert source.list_dir("/") == []


def test_a_file_of_known_hosts_may_have_any_name(
    server: RecordingSFTPServer, changed: ChangeSettings, tmp_path: Path
) -> None:
    odd = tmp_path / 'known "100%" hosts\\'
    odd.write_text(server.known_hosts.read_text())
    with open_source(server.url(), changed(known_hosts=str(odd))) as source:
        assert source.list_dir("/") == []


# Logins.


def test_hosts_that_cannot_be_used_are_named(
    server: RecordingSFTPServer, changed: ChangeSettings, hosts: dict[str, HostSettings]
) -> None:
    server.faults.refuse_login = True
    with pytest.raises(HostUnreachable, match="refused the login: Permission denied.*; check the user"):
        open_source(server.url(), hosts)
    with pytest.raises(HostUnreachable, match=r"no host is called 'no-such-host\.invalid'"):
        open_source("ssh://no-such-host.invalid/x", changed(url="ssh://no-such-host.invalid"))
    url = server.url()
    server.stop()
    with pytest.raises(
        HostUnreachable, match=r"cannot connect to reader@127\.0\.0\.1:\d+: Connection refused; check that it is up"
    ):
        open_source(url, hosts)
    server.start()


def test_a_host_that_says_nothing_is_given_up_in_time(
    server: RecordingSFTPServer, changed: ChangeSettings, tmp_path: Path
) -> None:
    """The port is open, but whoever listens there is stuck."""
    with socket.create_server(("127.0.0.1", 0)) as stuck:
        url = f"ssh://127.0.0.1:{stuck.getsockname()[1]}/x"
        begin = time.monotonic()
        with pytest.raises(HostUnreachable, match=r"gave no answer within 0\.5 s"):
            open_source(url, changed(url=url, timeout_s=0.5))
        assert time.monotonic() - begin < 4


@pytest.mark.parametrize("host", ["training-box", "TrainingBox"])
def test_an_alias_of_the_ssh_config_is_followed(
    server: RecordingSFTPServer, changed: ChangeSettings, use_ssh_config: UseSshConfig, tmp_path: Path, host: str
) -> None:
    """Its host name, port, user and key: the server lets in one key only."""
    (server.root / "run").mkdir()
    key = asyncssh.generate_private_key("ssh-ed25519")
    key.write_private_key(tmp_path / "key")
    (tmp_path / "key").chmod(0o600)
    server.faults.refuse_login, server.accept_key = True, key.export_public_key().decode()
    use_ssh_config(
        f"Host {host}\n  HostName 127.0.0.1\n  Port {server.port}\n  User reader\n  IdentityFile {tmp_path}/key\n"
    )
    with open_source(f"ssh://{host}/run", changed(url=f"ssh://{host}/data")) as source:
        assert source.url_of("/run/step_1") == f"ssh://{host}/run/step_1"
        assert [entry.name for entry in source.list_dir("/")] == ["run"]


def test_a_jump_host_of_the_ssh_config_is_jumped_over(
    server: RecordingSFTPServer, changed: ChangeSettings, use_ssh_config: UseSshConfig, tmp_path: Path
) -> None:
    data = os.urandom(2_000_000)
    (server.root / "file").write_bytes(data)
    (tmp_path / "jump").mkdir()
    with RecordingSFTPServer(tmp_path / "jump", is_jump_host=True) as jump:
        known_hosts = tmp_path / "known_hosts"
        known_hosts.write_text(server.known_hosts.read_text() + jump.known_hosts.read_text())
        use_ssh_config(
            f"Host jump\n  HostName 127.0.0.1\n  Port {jump.port}\n  User reader\n"
            f"Host box\n  HostName 127.0.0.1\n  Port {server.port}\n  User reader\n  ProxyJump jump\n"
            f"Host *\n  UserKnownHostsFile {known_hosts}\n"
        )
        with open_source("ssh://box/file", changed(url="ssh://box", known_hosts=str(known_hosts))) as source:
            assert source.read_at("/file", 0, len(data)) == data
        assert (jump.num_connections, server.num_connections) == (1, 1)
        assert (jump.ops, jump.execs, server.execs) == ([], [], [])


def test_a_key_can_be_given(
    server: RecordingSFTPServer, changed: ChangeSettings, use_ssh_config: UseSshConfig, tmp_path: Path
) -> None:
    use_ssh_config("")
    key = asyncssh.generate_private_key("ssh-ed25519")
    odd = tmp_path / 'my "50%" key'
    key.write_private_key(odd)
    odd.chmod(0o600)
    server.faults.refuse_login, server.accept_key = True, key.export_public_key().decode()
    with open_source(server.url(), changed(identity_file=str(odd))) as source:
        assert source.list_dir("/") == []
    server.accept_key = asyncssh.generate_private_key("ssh-ed25519").export_public_key().decode()
    with pytest.raises(HostUnreachable, match="refused the login"):
        open_source(server.url(), changed(identity_file=str(odd)))


# What must not happen.


def test_a_password_in_a_url_is_refused_and_never_repeated(
    server: RecordingSFTPServer, hosts: dict[str, HostSettings]
) -> None:
    with pytest.raises(InputError, match="a password in the URL") as refused:
        open_source(f"ssh://reader:s3cret@127.0.0.1:{server.port}/x", hosts)
    assert "s3cret" not in str(refused.value) + repr(refused.value)
    assert server.num_connections == 0


@pytest.mark.parametrize(
    "url",
    ["ssh://-oProxyCommand=touch%20x/y", "ssh://a;b/x", "ssh://$(touch x)/x", "ssh://-l@box/x", "ssh://`a`@box/x"],
)
def test_an_address_is_never_taken_for_an_option_or_a_command(url: str) -> None:
    with pytest.raises(InputError, match="is not the name of a"):
        openssh_command(parse_ssh_url(url), HostSettings(url=url))


def test_the_users_ssh_is_asked_for_sftp_and_nothing_else() -> None:
    settings = HostSettings(url="ssh://me@box:23", known_hosts="/k", identity_file="/i", timeout_s=2.5)
    command = openssh_command(parse_ssh_url("ssh://me@box:23/x"), settings)
    assert command[-4:] == ["-s", "--", "box", "sftp"]
    options = dict(word.split("=", 1) for word in command if "=" in word)
    assert options["StrictHostKeyChecking"] == options["BatchMode"] == options["ClearAllForwardings"] == "yes"
    assert options["ForwardAgent"] == options["ForwardX11"] == options["RequestTTY"] == "no"
    assert options["PermitLocalCommand"] == options["Compression"] == options["ControlMaster"] == "no"
    assert options["UserKnownHostsFile"] == '"/k"'
    assert (options["IdentityFile"], options["IdentitiesOnly"]) == ('"/i"', "yes")
    assert (options["Port"], options["User"], options["ConnectTimeout"]) == ("23", "me", "3")
    assert options["Ciphers"].startswith("^aes128-gcm")


def test_the_default_settings_leave_the_users_configuration_in_charge() -> None:
    words = " ".join(openssh_command(parse_ssh_url("ssh://box/x"), HostSettings(url="ssh://box")))
    assert "StrictHostKeyChecking=yes" in words
    for name in ("UserKnownHostsFile", "GlobalKnownHostsFile", "IdentityFile", "Port=", "User="):
        assert name not in words


# What ssh itself may do.


def read_with(hosts: dict[str, HostSettings]) -> None:
    (settings,) = hosts.values()
    with open_source(settings.url, hosts) as source:
        source.list_dir("/")


@needs_ssh
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("echo Welcome to the box; exec cat", "it sent something that is not SFTP; does a login script print"),
        ("printf 'one\\n\\033[31mtwo\\n' >&2; exit 255", r"cannot connect to .*: +\[31mtwo; check that it is up"),
        ("exit 3", "cannot connect to .*: ssh ended without a word; check"),
    ],
    ids=["chatter", "colours", "silence"],
)
def test_a_strange_ssh_is_reported_in_one_line(
    server: RecordingSFTPServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, message: str
) -> None:
    put_ssh(tmp_path / "bin", body, monkeypatch)
    with pytest.raises(HostUnreachable, match=message) as raised:
        read_with({"box": server.host_settings.model_copy(update={"transport": "openssh"})})
    assert str(raised.value).isprintable()


@needs_ssh
def test_a_long_complaint_of_ssh_stops_nothing(
    server: RecordingSFTPServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than its pipe holds, before and while it works."""
    put_ssh(tmp_path / "bin", f'yes complaint | head -c 300000 >&2; exec {shutil.which("ssh")} -v "$@"', monkeypatch)
    read_with({"box": server.host_settings.model_copy(update={"transport": "openssh"})})
    assert server.num_connections == 1


LEAVE_IT_OPEN = """
import os, sys
from dflash_core.checkpoints.openssh_session import OpenSshSession
from dflash_core.checkpoints.openssh_source import OpenSshSource
from dflash_core.config import HostSettings
from dflash_core.ssh import parse_ssh_url
url, known_hosts, end = sys.argv[1:]
source = OpenSshSource(OpenSshSession(parse_ssh_url(url), HostSettings(url=url, known_hosts=known_hosts)))
file = source.open("/file")
print(source.session.pid, flush=True)
if end == "raise":
    raise RuntimeError
if end == "wait":
    file.read_at(0, 1000)
if end == "kill":
    os.kill(os.getpid(), 9)
"""


@needs_ssh
@pytest.mark.parametrize("end", ["return", "raise", "wait", "kill"])
def test_ssh_ends_with_the_interpreter_however_that_ends(server: RecordingSFTPServer, end: str) -> None:
    (server.root / "file").write_bytes(os.urandom(1000))
    server.faults.hang_reads = end == "wait"
    root = Path(__file__).parents[3]
    python = subprocess.Popen(
        [sys.executable, "-c", LEAVE_IT_OPEN, server.url(), str(server.known_hosts), end],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert python.stdout is not None
    ssh = int(python.stdout.readline())
    if end == "wait":
        while not any(operation.name == "read" for operation in server.ops):
            time.sleep(0.01)
        python.send_signal(signal.SIGINT)
    begin = time.monotonic()
    python.wait(10)
    python.stdout.close()
    while Path(f"/proc/{ssh}").exists() and Path(f"/proc/{ssh}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() - begin < 5
        time.sleep(0.01)


@needs_ssh
def test_several_threads_may_share_one_source(server: RecordingSFTPServer) -> None:
    data = os.urandom(500_000)
    (server.root / "file").write_bytes(data)
    got: list[bool] = []
    with open_source(server.url(), {"box": server.host_settings.model_copy(update={"transport": "openssh"})}) as source:
        threads = [
            threading.Thread(target=lambda: got.append(source.read_at("/file", 0, len(data)) == data)) for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert got == [True] * 6
    assert server.num_connections == 1
