"""A training box to try things on: a real SSH server on loopback that only lets files be read.

    with TrainingBox(Path("runs"), Path("box")) as box:
        watch(box.url("stand_in"))

    python -m examples.training_box runs        serves until Ctrl-C, and says how to log in

OpenSSH's `sshd` is used where it is installed, and an SFTP server of asyncssh in a process of its own
elsewhere. It listens on a free port of 127.0.0.1, has a host key of its own (in a `known_hosts` file
made for it), and lets in one key made for it. Writing is refused, and so is every command.
Under sshd a client may read whatever this user may read; under asyncssh, only the folder.
"""

from __future__ import annotations

import argparse
import asyncio
import getpass
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal
from urllib.parse import quote

import asyncssh

from dflash_core.errors import DFlashEvalError, HostUnreachable, InputError, one_line

Kind = Literal["sshd", "asyncssh"]
HOST = "127.0.0.1"
START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 5.0
PORT_ATTEMPTS = 5
SSHD_PRIVILEGE_SEPARATION_FOLDER = Path("/run/sshd")
"""sshd refuses to start as root without it; only the distribution's service makes it."""

SSHD_CONFIG = """\
ListenAddress 127.0.0.1
Port {port}
HostKey "{state}/host_key"
AuthorizedKeysFile "{state}/authorized_keys"
PidFile "{state}/sshd.pid"
AllowUsers {user}
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
StrictModes no
UsePAM no
UseDNS no
AllowTcpForwarding no
AllowAgentForwarding no
X11Forwarding no
PermitTTY no
PermitTunnel no
PermitUserRC no
Subsystem sftp internal-sftp -R
ForceCommand internal-sftp -R
"""


class TrainingBox:
    """A folder served read-only over SSH while the `with` block runs.

    Attributes:
        kind: `sshd` or `asyncssh`, once started.
        port: port on 127.0.0.1, once started.
        user: the one user that may log in.
        known_hosts: file with the server's host key.
        identity_file: private key to log in with.
    """

    def __init__(self, root: Path, state: Path, *, kind: Kind | None = None) -> None:
        """Remember what to serve; nothing is started before the `with` block.

        Args:
            root: folder to serve.
            state: folder for keys, configuration and log; made if missing, for its owner's eyes only.
            kind: insist on one kind of server; None takes sshd where it works.
        """
        self.root = root.resolve()
        self.state = state.resolve()
        self.user = _login_name()
        self.known_hosts = self.state / "known_hosts"
        self.identity_file = self.state / "client_key"
        self._wanted = kind
        self.kind: Kind
        self.port: int
        self._server: subprocess.Popen[bytes] | None = None

    def url(self, path: str = "") -> str:
        """Return the `ssh://` address of a file or folder, given relative to the root."""
        base = self.root if self.kind == "sshd" else Path("/")
        return f"ssh://{quote(self.user)}@{HOST}:{self.port}{quote(str(base / path))}"

    def __enter__(self) -> TrainingBox:
        if not self.root.is_dir():
            raise InputError(f"no folder to serve at {str(self.root)!r}; make it first")
        self.state.mkdir(parents=True, exist_ok=True, mode=0o700)
        host_key = _make_key(self.state / "host_key")
        client_key = _make_key(self.identity_file)
        (self.state / "authorized_keys").write_bytes(client_key.export_public_key())
        kinds: list[Kind] = [self._wanted] if self._wanted else ["sshd", "asyncssh"]
        reasons = []
        for kind in kinds:
            try:
                self._start(kind, host_key)
            except HostUnreachable as error:
                reasons.append(f"{kind}: {error}")
                self._stop()
            except BaseException:
                self._stop()
                raise
            else:
                return self
        raise HostUnreachable(f"no SSH server could be started on {HOST}; {'; '.join(reasons)}")

    def __exit__(self, *_exc: object) -> None:
        self._stop()

    def _start(self, kind: Kind, host_key: asyncssh.SSHKey) -> None:
        """Start one kind of server, on another port if the first was taken meanwhile, and log in once."""
        sshd = find_sshd() if kind == "sshd" else None
        if kind == "sshd" and sshd is None:
            raise HostUnreachable("sshd is not installed (or lacks /run/sshd); install openssh-server")
        self.kind = kind
        for attempt in range(1, PORT_ATTEMPTS + 1):
            self.port = _free_port()
            public_key = host_key.export_public_key().decode().strip()
            self.known_hosts.write_text(f"[{HOST}]:{self.port} {public_key}\n", encoding="utf-8")
            self._launch(kind, sshd)
            try:
                self._wait_until_it_answers()
            except HostUnreachable:
                if attempt == PORT_ATTEMPTS or self._is_running():
                    raise
            else:
                break
        with ThreadPoolExecutor(max_workers=1) as thread:  # the caller may have an event loop running
            thread.submit(lambda: asyncio.run(self._log_in())).result()

    def _launch(self, kind: Kind, sshd: str | None) -> None:
        if kind == "sshd":
            escaped_state = str(self.state).replace("%", "%%")
            text = SSHD_CONFIG.format(port=self.port, state=escaped_state, user=self.user)
            (self.state / "sshd_config").write_text(text, encoding="utf-8")
        command = [sys.executable, "-m", "examples.training_box_server", "--kind", kind, "--port", str(self.port)]
        command += ["--root", str(self.root), "--state", str(self.state), "--parent", str(os.getpid())]
        command += ["--sshd", sshd] if sshd else []
        with (self.state / "server.log").open("wb") as log:
            self._server = subprocess.Popen(
                command,
                cwd=Path(__file__).resolve().parents[1],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a process group of its own, and no Ctrl-C of ours
            )

    def _wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while self._is_running() and time.monotonic() < deadline:
            if _greets(self.port):
                return
            time.sleep(0.05)
        raise HostUnreachable(f"it did not answer on port {self.port}; {self._last_words()}")

    async def _log_in(self) -> None:
        """Open one SFTP session: a locked account or a forbidden shell shows only here."""
        try:
            async with (
                asyncssh.connect(
                    HOST,
                    self.port,
                    username=self.user,
                    client_keys=[self.identity_file],
                    known_hosts=str(self.known_hosts),
                    config=None,
                    agent_path=None,
                    login_timeout=START_TIMEOUT_S,
                ) as connection,
                connection.start_sftp_client() as sftp,
            ):
                await sftp.stat(str(self.root) if self.kind == "sshd" else "/")
        except (OSError, asyncssh.Error) as error:
            raise HostUnreachable(
                f"user {self.user!r} cannot log in: {one_line(error)}; {self._last_words()}"
            ) from error

    def _is_running(self) -> bool:
        return self._server is not None and self._server.poll() is None

    def _last_words(self) -> str:
        log = self.state / "server.log"
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
        return f"its log {str(log)!r} ends with {lines[-1] if lines else 'nothing'!r}"

    def _stop(self) -> None:
        """End the server and whatever it started."""
        server, self._server = self._server, None
        if server is None:
            return
        if server.poll() is None:
            server.terminate()
            try:
                server.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)  # its own session, started above
                server.wait()


def find_sshd() -> str | None:
    """Return the path of a usable sshd, or None; as root, make the folder that it insists on."""
    path = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin")
    if path is not None and os.geteuid() == 0:
        try:
            SSHD_PRIVILEGE_SEPARATION_FOLDER.mkdir(mode=0o755, exist_ok=True)
        except OSError:
            return None
    return path


def _login_name() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container's user without an entry in the password file
        return getpass.getuser()


def _make_key(file: Path) -> asyncssh.SSHKey:
    key = asyncssh.generate_private_key("ssh-ed25519")
    file.unlink(missing_ok=True)
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
        stream.write(key.export_private_key())
    return key


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _greets(port: int) -> bool:
    try:
        with socket.create_connection((HOST, port), timeout=START_TIMEOUT_S) as connection:
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False


def main(arguments: list[str] | None = None) -> int:
    """Serve a folder until Ctrl-C or SIGTERM; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.training_box", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("root", type=Path, metavar="ROOT", help="folder to serve")
    parser.add_argument("--state", type=Path, help="folder for keys and log; default: a temporary one")
    parser.add_argument("--kind", choices=("sshd", "asyncssh"), help="insist on one kind of server")
    args = parser.parse_args(arguments)
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda _number, _frame: over.set())
    with tempfile.TemporaryDirectory(prefix="training-box-") as temporary:
        try:
            with TrainingBox(args.root, args.state or Path(temporary), kind=args.kind) as box:
                print(
                    f"url: {box.url()}\nknown_hosts: {box.known_hosts}\nidentity_file: {box.identity_file}", flush=True
                )
                over.wait()
        except DFlashEvalError as error:
            print(f"error: {one_line(error)}", file=sys.stderr)
            return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
