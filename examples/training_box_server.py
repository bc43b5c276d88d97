"""The server process of a training box; it ends with the process that started it.

`examples.training_box` starts it as a child. It is an SFTP server of its own (kind `asyncssh`), or
it starts OpenSSH's `sshd` and looks after it (kind `sshd`), since sshd would outlive its parent. Both
notice within half a second that the parent is gone, however it went, and take their whole process
group with them.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

POLL_S = 0.3
PR_SET_PDEATHSIG = 1
"""`prctl` option of Linux: the signal that a process gets when its parent dies."""


def main() -> None:
    """Serve until the parent is gone or a SIGTERM comes, then end the process group."""
    parser = argparse.ArgumentParser(prog="python -m examples.training_box_server")
    parser.add_argument("--kind", choices=("sshd", "asyncssh"), required=True)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True, help="process that this one must not outlive")
    parser.add_argument("--sshd", help="path of sshd, for kind sshd")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, _leave)
    try:
        if args.kind == "sshd":
            look_after_sshd([args.sshd, "-D", "-e", "-f", str(args.state / "sshd_config")], parent=args.parent)
        else:
            asyncio.run(serve_files(args.root, args.state, port=args.port, parent=args.parent))
    finally:
        # Sessions of sshd are processes of their own; the group was made for this server alone.
        if os.getpgid(0) == os.getpid():
            os.killpg(0, signal.SIGKILL)


def look_after_sshd(command: list[str], *, parent: int) -> None:
    """Run sshd until it ends or the parent does."""
    sshd = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=end_with_parent_call())
    try:
        while sshd.poll() is None and os.getppid() == parent:
            time.sleep(POLL_S)
    finally:
        sshd.terminate()
        sshd.wait()


def end_with_parent_call() -> Callable[[], None] | None:
    """Return what a child must run before it starts sshd, so that it dies if this process is killed."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up here: after a fork there must be no imports

    def ask_for_signal() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    return ask_for_signal


async def serve_files(root: Path, state: Path, *, port: int, parent: int) -> None:
    """Serve a folder over SFTP, reading only, until the parent ends."""
    import asyncssh

    class ReadOnlyFiles(asyncssh.SFTPServer):
        """The files under the root; every request that would change something is refused."""

        def __init__(self, channel: asyncssh.SSHServerChannel[bytes]) -> None:
            super().__init__(channel, chroot=os.fsencode(root))

        def open(self, path: bytes, pflags: int, attrs: asyncssh.SFTPAttrs) -> Any:
            """Open for reading; refuse any other flag."""
            if pflags != asyncssh.FXF_READ:
                self._refuse()
            return super().open(path, pflags, attrs)

        def _refuse(self, *_request: object) -> NoReturn:
            raise asyncssh.SFTPPermissionDenied("this server only reads")

        open56 = write = setstat = lsetstat = fsetstat = _refuse  # type: ignore[assignment]
        remove = mkdir = rmdir = rename = posix_rename = symlink = link = lock = fsync = _refuse  # type: ignore[assignment]

    server = await asyncssh.listen(
        "127.0.0.1",
        port,
        server_host_keys=[state / "host_key"],
        authorized_client_keys=str(state / "authorized_keys"),
        sftp_factory=ReadOnlyFiles,
        password_auth=False,
        kbdint_auth=False,
    )
    async with server:
        while os.getppid() == parent:
            await asyncio.sleep(POLL_S)


def _leave(_signal: int, _frame: object) -> None:
    raise SystemExit(0)


if __name__ == "__main__":
    main()
