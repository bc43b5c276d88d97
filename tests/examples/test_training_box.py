"""The training box: a real SSH server that only reads, and that never outlives its user."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import asyncssh
import pytest

from dflash_core.errors import HostUnreachable, InputError
from dflash_core.ssh import parse_ssh_url
from examples.training_box import Kind, TrainingBox, find_sshd

CONTENT = bytes(range(256)) * 2048
PROJECT = Path(__file__).parents[2]
Value = TypeVar("Value")


@pytest.fixture(params=["sshd", "asyncssh"])
def kind(request: pytest.FixtureRequest) -> Kind:
    if request.param == "sshd" and find_sshd() is None:
        pytest.skip("no usable sshd on this machine; the asyncssh kind is what it will use")
    return request.param


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "runs of today 100%"
    (root / "step_1").mkdir(parents=True)
    (root / "step_1" / "checkpoint.pt").write_bytes(CONTENT)
    return root


def group_members(process_group: int) -> list[int]:
    """Process ids of a group that are not yet reaped zombies."""
    members = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _parent, group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(group) == process_group and state != "Z":
            members.append(int(folder.name))
    return members


def is_gone_within(seconds: float, is_gone: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if is_gone():
            return True
        time.sleep(0.05)
    return is_gone()


def connected(
    box: TrainingBox, use: Callable[[asyncssh.SSHClientConnection], Awaitable[Value]], **options: Any
) -> Value:
    """Log in as a careful client does, host key checked, and run `use` on the connection."""
    address = parse_ssh_url(box.url())

    async def session() -> Value:
        async with asyncssh.connect(
            address.host,
            address.port or 0,
            username=address.user,
            config=None,
            agent_path=None,
            **{"known_hosts": str(box.known_hosts), "client_keys": [box.identity_file], **options},
        ) as connection:
            return await use(connection)

    return asyncio.run(session())


def server_group(box: TrainingBox) -> int:
    assert box._server is not None
    return box._server.pid


def test_files_are_served_and_nothing_remains_after_the_block(kind: Kind, root: Path, tmp_path: Path) -> None:
    with TrainingBox(root, tmp_path / "state", kind=kind) as box:
        group, port = server_group(box), box.port
        assert box.kind == kind
        assert len(group_members(group)) == (2 if kind == "sshd" else 1)
        path = parse_ssh_url(box.url("step_1/checkpoint.pt")).path
        folder = parse_ssh_url(box.url()).path

        async def read(connection: asyncssh.SSHClientConnection) -> tuple[bytes, list[str]]:
            async with connection.start_sftp_client() as sftp:
                async with sftp.open(path, "rb") as file:
                    await file.seek(256)
                    content: Any = await file.read(-1)
                return content, [str(name) for name in await sftp.listdir(folder)]

        content, names = connected(box, read)
        assert content == CONTENT[256:]
        assert set(names) - {".", ".."} == {"step_1"}
    assert group_members(group) == []
    with pytest.raises(ConnectionRefusedError):
        asyncio.run(asyncssh.get_server_host_key("127.0.0.1", port))


def test_every_way_to_change_a_file_is_refused(kind: Kind, root: Path, tmp_path: Path) -> None:
    before = sorted(root.rglob("*"))
    with TrainingBox(root, tmp_path / "state", kind=kind) as box:
        path = parse_ssh_url(box.url("step_1/checkpoint.pt")).path

        async def attempt(connection: asyncssh.SSHClientConnection) -> dict[str, bool]:
            refused: dict[str, bool] = {}
            async with connection.start_sftp_client() as sftp:
                attempts: dict[str, Callable[[], Awaitable[Any]]] = {
                    "overwrite": lambda: sftp.open(path, "wb"),
                    "append": lambda: sftp.open(path, "ab"),
                    "update": lambda: sftp.open(path, "r+b"),
                    "create": lambda: sftp.open(path + ".lock", "xb"),
                    "remove": lambda: sftp.remove(path),
                    "rename": lambda: sftp.rename(path, path + ".old"),
                    "posix_rename": lambda: sftp.posix_rename(path, path + ".old"),
                    "mkdir": lambda: sftp.mkdir(path + ".d"),
                    "rmdir": lambda: sftp.rmdir(path.rpartition("/")[0]),
                    "chmod": lambda: sftp.chmod(path, 0o777),
                    "truncate": lambda: sftp.truncate(path, 0),
                    "symlink": lambda: sftp.symlink(path, path + ".ln"),
                    "hard link": lambda: sftp.link(path, path + ".ln"),
                }
                for name, call in attempts.items():
                    try:
                        await call()
                    except asyncssh.SFTPError:
                        refused[name] = True
                    else:
                        refused[name] = False
            return refused

        refused = connected(box, attempt)
    assert refused == dict.fromkeys(refused, True)
    assert len(refused) == 13
    assert sorted(root.rglob("*")) == before
    assert (root / "step_1" / "checkpoint.pt").read_bytes() == CONTENT


def test_commands_and_tunnels_are_refused(kind: Kind, root: Path, tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    with TrainingBox(root, tmp_path / "state", kind=kind) as box:

        async def attempt(connection: asyncssh.SSHClientConnection) -> None:
            try:
                await asyncio.wait_for(connection.run(f"touch {proof}", input="", check=True), timeout=10)
            except (asyncssh.Error, TimeoutError):
                return
            raise AssertionError("the command was accepted")

        async def tunnel(connection: asyncssh.SSHClientConnection) -> None:
            await connection.open_connection("127.0.0.1", box.port)

        connected(box, attempt)
        with pytest.raises(asyncssh.ChannelOpenError):
            connected(box, tunnel)
    assert not proof.exists()


def test_another_host_key_and_another_client_key_are_refused(kind: Kind, root: Path, tmp_path: Path) -> None:
    async def nothing(_connection: asyncssh.SSHClientConnection) -> None:
        return None

    stranger = asyncssh.generate_private_key("ssh-ed25519")
    with TrainingBox(root, tmp_path / "state", kind=kind) as box:
        other_hosts = tmp_path / "other_hosts"
        other_hosts.write_text(f"[127.0.0.1]:{box.port} {stranger.export_public_key().decode()}")
        with pytest.raises(asyncssh.HostKeyNotVerifiable):
            connected(box, nothing, known_hosts=str(other_hosts))
        with pytest.raises(asyncssh.PermissionDenied):
            connected(box, nothing, client_keys=[stranger])
        assert box.identity_file.stat().st_mode & 0o077 == 0


def test_the_server_ends_when_its_parent_is_killed(kind: Kind, root: Path, tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from examples.training_box import TrainingBox\n"
        "with TrainingBox(Path(sys.argv[1]), Path(sys.argv[2]), kind=sys.argv[3]) as box:\n"
        "    print(box._server.pid, flush=True); time.sleep(60)\n"
    )
    command = [sys.executable, "-c", program, str(root), str(tmp_path / "state"), kind]
    with subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        group = int(parent.stdout.readline())
        assert group_members(group)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    assert is_gone_within(10, lambda: group_members(group) == [])


def test_sshd_ends_when_its_guardian_is_killed(root: Path, tmp_path: Path) -> None:
    if find_sshd() is None:
        pytest.skip("no usable sshd on this machine")
    with TrainingBox(root, tmp_path / "state", kind="sshd") as box:
        group = server_group(box)
        os.kill(group, signal.SIGKILL)
        assert is_gone_within(10, lambda: group_members(group) == [])


def test_the_command_line_serves_until_it_is_told_to_stop(kind: Kind, root: Path) -> None:
    command = [sys.executable, "-m", "examples.training_box", str(root), "--kind", kind]
    with subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = dict(process.stdout.readline().strip().split(": ", 1) for _ in range(3))
        assert parse_ssh_url(lines["url"]).host == "127.0.0.1"
        assert Path(lines["known_hosts"]).exists()
        process.terminate()
        assert process.wait(15) == 0
    assert not Path(lines["identity_file"]).exists()


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere"), TrainingBox(tmp_path / "nowhere", tmp_path / "state"):
        pass


def test_a_server_that_cannot_start_says_why(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("examples.training_box.find_sshd", lambda: None)
    with (
        pytest.raises(HostUnreachable, match="install openssh-server"),
        TrainingBox(root, tmp_path / "state", kind="sshd"),
    ):
        pass
    with TrainingBox(root, tmp_path / "state") as box:
        assert box.kind == "asyncssh"
