"""A running `ssh -s HOST sftp`: bytes go in, bytes come out, and it always ends.

All pipes are non-blocking and waited for together, so that neither a request that does not fit into
its pipe nor a long complaint of ssh can stop the answers from being read. The process is a session of
its own: Ctrl-C at a terminal does not reach it, and what it starts (a jump host's ssh) ends with it.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress

from dflash_core.checkpoints.host_errors import CLOSE_TIMEOUT_S

PIPE_BYTES = 1 << 20
"""Room between ssh and us; as much as Linux lets any user have."""
MAX_WORDS_BYTES = 16 << 10
GRACE_S = 0.5
"""How long ssh may take to end by itself once its input is closed."""
# Said by the outer ssh when its way through a jump host or a ProxyCommand broke; the reason is another line.
_ECHOES = ("UNKNOWN port", "kex_exchange_identification", "Pseudo-terminal will not")


class LinkLost(Exception):
    """Raised when the connection is gone; a new one may do better."""


class SshPipe:
    """One ssh process and its three pipes."""

    def __init__(self, command: Sequence[str]) -> None:
        """Start it.

        Raises:
            OSError: there is no such program, or it cannot be run.
        """
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env=os.environ | {"SSH_ASKPASS_REQUIRE": "never"},  # nobody may be there to answer
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        # Also when the owner forgets to close it, and at the end of the interpreter.
        self._end = weakref.finalize(self, _end_process, self._process, os.getpid())
        self._in = self._process.stdin.fileno()
        self._out = self._process.stdout.fileno()
        self._err = self._process.stderr.fileno()
        self._unsent = bytearray()
        self._words = b""
        for file in (self._in, self._out, self._err):
            os.set_blocking(file, False)
        with suppress(OSError, AttributeError):  # other systems have no such call, users a limit
            fcntl.fcntl(self._out, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._poll = select.poll()
        self._poll.register(self._out, select.POLLIN)
        self._poll.register(self._err, select.POLLIN)

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid

    def send(self, data: bytes) -> None:
        """Write, now or as soon as there is room; never waits."""
        if self._unsent:
            self._unsent += data
            return
        self._unsent += data[self._write(data) :]
        if self._unsent:
            self._poll.register(self._in, select.POLLOUT)

    def wait(self, timeout_s: float) -> bool:
        """Wait until there is something to read, or the end, and tell whether there is."""
        until = time.monotonic() + timeout_s
        while True:
            ready = dict(self._poll.poll(max(0.0, until - time.monotonic()) * 1000))
            if self._in in ready:
                self._send_rest()
            if self._err in ready:
                self._hear()
            if self._out in ready:
                return True
            if not ready and time.monotonic() >= until:
                return False

    def read(self, max_bytes: int, timeout_s: float) -> bytes:
        """Return at least one byte, and no more than asked for.

        Raises:
            TimeoutError: none came in that time.
            LinkLost: ssh has ended.
        """
        while True:
            try:
                data = os.read(self._out, max_bytes)
            except BlockingIOError:
                if not self.wait(timeout_s):
                    raise TimeoutError from None
                continue
            if not data:
                raise LinkLost(self.last_words() or "ssh ended without a word")
            return data

    def last_words(self) -> str:
        """Return everything that ssh has said, having waited a little for its end."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_S)
        self._hear()
        return self._words.decode(errors="replace")

    def close(self, *, is_idle: bool) -> None:
        """End the process and wait for it; harmless when done twice.

        Args:
            is_idle: no answer is under way, so that ssh may take its leave by itself.
        """
        assert self._process.stdin is not None
        self._process.stdin.close()
        if is_idle:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_S)
        self._end()

    def _write(self, data: bytes | bytearray) -> int:
        try:
            return os.write(self._in, data)
        except BlockingIOError:
            return 0
        except BrokenPipeError:
            return len(data)  # ssh has ended; reading will tell

    def _send_rest(self) -> None:
        del self._unsent[: self._write(self._unsent)]
        if not self._unsent:
            self._poll.unregister(self._in)

    def _hear(self) -> None:
        """Take in what ssh says; the last of it is enough."""
        while True:
            try:
                said = os.read(self._err, MAX_WORDS_BYTES)
            except BlockingIOError:
                return
            if not said:
                with suppress(KeyError):
                    self._poll.unregister(self._err)
                return
            self._words = (self._words + said)[-MAX_WORDS_BYTES:]


def main_line(words: str) -> str:
    """Return the one line of what ssh said that tells why it ended, fit to be shown."""
    lines = ["".join(char if char.isprintable() else " " for char in line).strip() for line in words.splitlines()]
    lines = [line for line in lines if line]
    telling = [line for line in lines if not any(echo in line for echo in _ECHOES)] or lines
    return telling[-1][:300] if telling else ""


def _end_process(process: subprocess.Popen[bytes], owner_pid: int) -> None:
    """Ask the process to end, make it end, and take note of its end."""
    if os.getpid() != owner_pid:  # a fork of the owner has no say in it
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)  # its own session, started above
            with suppress(subprocess.TimeoutExpired):
                process.wait(CLOSE_TIMEOUT_S)
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
