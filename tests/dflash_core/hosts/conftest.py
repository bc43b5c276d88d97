"""Real SSH servers on loopback: OpenSSH's sshd as a child, and asyncssh's for faults and for counting."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import asyncssh
import pytest

from dflash_core.config import HostSettings

SSHD = "/usr/sbin/sshd"


@dataclass(frozen=True, kw_only=True)
class Login:
    """A server's address and what a client needs for it."""

    port: int
    user: str
    key: Path
    known_hosts: Path

    def settings(self, path: str = "", **changes: object) -> HostSettings:
        values: dict[str, object] = {
            "url": f"ssh://{self.user}@127.0.0.1:{self.port}{path}",
            "identity_file": str(self.key),
            "known_hosts": str(self.known_hosts),
            "timeout_s": 20.0,
        }
        return HostSettings.model_validate(values | changes)


@dataclass(frozen=True, kw_only=True)
class Keys:
    """One key pair for the host, one for the user, and one that no server knows."""

    host: Path
    user: Path
    stranger: Path

    def known_hosts(self, port: int) -> Path:
        file = self.host.parent / f"known_hosts_{port}"
        public = self.host.with_suffix(".pub").read_text()
        file.write_text(f"[127.0.0.1]:{port} {public}")
        return file


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    folder = tmp_path_factory.mktemp("ssh_keys")
    for name in ("host", "user", "stranger"):
        key = asyncssh.generate_private_key("ssh-ed25519")
        key.write_private_key(str(folder / name))
        key.write_public_key(str(folder / f"{name}.pub"))
        (folder / name).chmod(0o600)
    return Keys(host=folder / "host", user=folder / "user", stranger=folder / "stranger")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture(scope="session")
def sshd(keys: Keys, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Login]:
    """OpenSSH's server, logging in the user who runs the tests."""
    if shutil.which(SSHD) is None:
        reason = f"{SSHD} is not installed"
        if os.environ.get("CI") == "true":
            pytest.fail(f"{reason}, and in CI it must be")
        pytest.skip(reason)
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    folder = tmp_path_factory.mktemp("sshd")
    port = free_port()
    (folder / "authorized_keys").write_bytes(keys.user.with_suffix(".pub").read_bytes())
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {keys.host}\nPidFile none\nStrictModes no\nUsePAM no\n"
        f"AuthorizedKeysFile {folder / 'authorized_keys'}\nPasswordAuthentication no\n"
        "KbdInteractiveAuthentication no\nPermitRootLogin yes\nUseDNS no\nSubsystem sftp internal-sftp\n"
    )
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([SSHD, "-D", "-e", "-f", str(folder / "sshd_config")], stderr=log)
    try:
        _wait_for(port, process, folder / "log")
        user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
        yield Login(port=port, user=user, key=keys.user, known_hosts=keys.known_hosts(port))
    finally:
        process.terminate()
        process.wait(timeout=10)


def _wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(200):
        if process.poll() is not None:
            break
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    pytest.fail(f"sshd did not start: {log.read_text()}")


@dataclass(kw_only=True)
class OddServer:
    """An asyncssh server in a thread of its own that notes every command and opens no file for writing."""

    host_key: Path
    user_key: Path
    folder: Path
    answer: Callable[[asyncssh.SSHServerProcess[bytes]], Awaitable[None]] | None
    commands: list[str] = field(default_factory=list)
    write_opens: list[bytes] = field(default_factory=list)
    port: int = 0

    def __post_init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._acceptor = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)
        self.port = self._acceptor.get_port()

    def stop(self) -> None:
        async def close() -> None:
            self._acceptor.close()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            await asyncio.sleep(0.05)

        asyncio.run_coroutine_threadsafe(close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _listen(self) -> asyncssh.SSHAcceptor:
        return await asyncssh.listen(
            "127.0.0.1",
            0,
            server_host_keys=[str(self.host_key)],
            authorized_client_keys=str(self.user_key.with_suffix(".pub")),
            sftp_factory=self._make_sftp,
            process_factory=self._run,
            encoding=None,
        )

    async def _run(self, process: asyncssh.SSHServerProcess[bytes]) -> None:
        self.commands.append(str(process.command))
        if self.answer is not None:
            await self.answer(process)
        process.exit(0)

    def _make_sftp(self, channel: asyncssh.SSHServerChannel[bytes]) -> asyncssh.SFTPServer:
        server = self

        class Watched(asyncssh.SFTPServer):
            def open(self, path: bytes, pflags: int, attrs: asyncssh.SFTPAttrs) -> object:
                if pflags & ~asyncssh.FXF_READ:
                    server.write_opens.append(path)
                    raise asyncssh.SFTPPermissionDenied("read only")
                return super().open(path, pflags, attrs)

        return Watched(channel, chroot=os.fsencode(self.folder))


@pytest.fixture
def odd_server(keys: Keys, tmp_path: Path) -> Iterator[Callable[..., tuple[OddServer, Login]]]:
    """Return a function that starts a server which treats commands as it is told."""
    started: list[OddServer] = []

    def start(
        answer: Callable[[asyncssh.SSHServerProcess[bytes]], Awaitable[None]] | None = None, folder: Path = tmp_path
    ) -> tuple[OddServer, Login]:
        server = OddServer(host_key=keys.host, user_key=keys.user, folder=folder, answer=answer)
        server.start()
        started.append(server)
        known_hosts = keys.known_hosts(server.port)
        return server, Login(port=server.port, user="me", key=keys.user, known_hosts=known_hosts)

    yield start
    for server in started:
        server.stop()
