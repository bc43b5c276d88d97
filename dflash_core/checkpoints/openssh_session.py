"""A read-only SFTP session over the pipes of the user's own OpenSSH client.

No thread and no event loop: whoever waits for an answer reads the pipe. The requests that exist are
those of `sftp_packets`, none of which writes; no command is run on the host.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from dflash_core.checkpoints import sftp_packets as packets
from dflash_core.checkpoints.host_errors import HostMessages, Patience, ReceiverError
from dflash_core.checkpoints.openssh_pipe import LinkLost, SshPipe, main_line
from dflash_core.checkpoints.sftp_packets import Answer, MalformedPacket, Request, Status
from dflash_core.config import HostSettings
from dflash_core.errors import CheckpointError, HostError, HostUnreachable, one_line
from dflash_core.ssh import SshAddress, openssh_command

Value = TypeVar("Value")

LOGIN_ANSWERS = 3
"""TCP, log-in and the SFTP server each may take as long as one answer."""
FALLBACK_READ_BYTES = 32 << 10
"""What every server answers in one read; those that say nothing may not do more."""
ROUND_TRIPS = 3
MAX_PIPELINED = 64
LOST = (packets.STATUS_NO_CONNECTION, packets.STATUS_CONNECTION_LOST)


class SshUnusable(HostUnreachable):
    """Raised when the ssh program cannot work on this machine at all, whatever the host."""


class Refused(Exception):
    """Carries a host's refusal of one request to where its path is known."""

    def __init__(self, status: Status) -> None:
        super().__init__(status.message)
        self.status = status


class OpenSshSession:
    """An SFTP session that comes back after a dropped connection; one user at a time."""

    def __init__(self, address: SshAddress, settings: HostSettings) -> None:
        """Connect.

        Raises:
            SshUnusable: there is no ssh program that runs here.
            HostKeyUnknown: the host's key is not in the known_hosts file.
            HostUnreachable: it does not answer, or refuses the login.
        """
        self.address = address
        self.timeout_s = settings.timeout_s
        self.generation = 0
        """Counts connections; a handle of an earlier one is dead."""
        self.max_read_bytes = 0
        """The most that the host answers in one read."""
        self.round_trip_s = math.inf
        """The least time that an answer has taken so far."""
        self._settings = settings
        self._messages = HostMessages(address, settings)
        self._pipe: SshPipe | None = None
        self._is_closed = False
        self._last_number = 0
        self._num_unanswered = 0
        self._num_round_trips = 0
        self._lock = threading.RLock()
        self.connect()

    @property
    def pid(self) -> int | None:
        """Number of the ssh process, if one runs."""
        return None if self._pipe is None else self._pipe.pid

    def measure_round_trip(self, path: str) -> float:
        """Return the least time of at least three answers, in seconds."""
        while self._num_round_trips < ROUND_TRIPS:
            self.request(packets.real_path(b"."), path)
        return self.round_trip_s

    def request(self, request: Request, path: str) -> Answer:
        """Send one request, again after a dropped connection, and return its answer.

        Args:
            request: what to ask.
            path: what it is about, for messages.
        """
        return self.persist(lambda: self.ask(request), path)

    def persist(self, attempt: Callable[[], Value], path: str, *, progress: Callable[[], int] = lambda: 0) -> Value:
        """Repeat `attempt` after dropped connections: a few times, each after a longer wait.

        Whatever ends it while answers are under way ends the connection too: the next request makes a new one.

        Args:
            attempt: what to do; called anew each time.
            path: what it is about, for messages.
            progress: says how many bytes have been received so far.

        Raises:
            HostUnreachable: the connection kept dropping, or could not be made again.
            CheckpointNotFound, CheckpointError: the host refused the request.
        """
        with self._lock:
            patience = Patience(progress)
            while True:
                try:
                    return attempt()
                except ReceiverError as error:
                    self._drop_if_busy()
                    raise error.cause from None
                except (LinkLost, MalformedPacket, TimeoutError, HostUnreachable) as error:
                    self._drop()
                    wait_s = patience.next_wait_s()
                    if wait_s is None or isinstance(error, SshUnusable):
                        raise self._gave_up(error, path) from error
                    time.sleep(wait_s)
                except Refused as error:
                    self._drop_if_busy()
                    raise self._refusal(error.status, path) from error
                except Exception:
                    self._drop_if_busy()
                    raise
                except BaseException:
                    self._drop()  # interrupted: nobody knows what is under way
                    raise

    # One connection; these are called inside `persist`.

    def ask(self, request: Request) -> Answer:
        """Send one request and return its answer.

        Raises:
            Refused: the host said no.
            LinkLost, TimeoutError, MalformedPacket: the connection cannot be used any more.
        """
        sent_at = time.monotonic()
        answer = self.ask_all([request])[0]
        self._note_round_trip(sent_at)
        if isinstance(answer, Status):
            raise Refused(answer)
        return answer

    def ask_all(self, requests: Sequence[Request]) -> list[Answer | Status]:
        """Send several requests at once and return their answers in the same order."""
        self.connect()
        answers: list[Answer | Status] = []
        for begin in range(0, len(requests), MAX_PIPELINED):
            numbers = [self.send(request) for request in requests[begin : begin + MAX_PIPELINED]]
            received: dict[int, Answer | Status] = {}
            while len(received) < len(numbers):
                kind, number, size = self.receive_header()
                if number not in numbers or number in received:
                    raise MalformedPacket("an answer that nobody asked for")
                received[number] = self.receive_answer(kind, size)
            answers += [received[number] for number in numbers]
        return answers

    def connect(self) -> None:
        """Start ssh and agree on the protocol, unless that is done.

        Raises:
            HostKeyUnknown: the host's key is not in the known_hosts file.
            HostUnreachable: it does not answer, or refuses the login.
        """
        if self._pipe is not None:
            return
        if self._is_closed:
            raise self._messages.cannot_connect("this session is over")
        known_hosts = self._settings.known_hosts
        command = openssh_command(self.address, self._settings)
        if any("UserKnownHostsFile" in word for word in command) and not Path(known_hosts or "/").exists():
            raise self._messages.no_known_hosts_file()
        try:
            self._pipe = SshPipe(command)
        except OSError as error:
            raise SshUnusable(f"ssh cannot be started: {one_line(error)}; install OpenSSH's client") from error
        try:
            self._shake_hands()
        except BaseException as error:
            pipe, self._pipe = self._pipe, None
            words = pipe.last_words() if isinstance(error, LinkLost) else ""
            pipe.close(is_idle=False)
            if isinstance(error, LinkLost | MalformedPacket | TimeoutError):
                raise self._connect_error(error, words) from error
            raise
        self.generation += 1

    def send(self, request: Request) -> int:
        """Send a request and return its number."""
        assert self._pipe is not None
        self._last_number = (self._last_number + 1) & 0xFFFFFFFF
        self._num_unanswered += 1
        self._pipe.send(packets.packet(request.kind, self._last_number, request.payload))
        return self._last_number

    def wait(self, timeout_s: float) -> bool:
        """Wait for an answer to begin, and tell whether one does."""
        assert self._pipe is not None
        return self._pipe.wait(timeout_s)

    def receive_header(self, timeout_s: float | None = None) -> tuple[int, int, int]:
        """Return kind and number of the next answer, and how many bytes of it follow."""
        size, kind, number = packets.HEADER.unpack(self.receive(packets.HEADER.size, timeout_s))
        if not packets.HEADER.size - 4 <= size <= packets.MAX_PACKET_BYTES:
            raise MalformedPacket("something that is not SFTP; does a login script print?")
        return kind, number, size - (packets.HEADER.size - 4)

    def receive(self, size: int, timeout_s: float | None = None) -> bytes:
        """Return exactly `size` bytes of the answer under way."""
        data = self.receive_some(size, timeout_s) if size else b""
        while len(data) < size:
            data += self.receive_some(size - len(data), timeout_s)
        return data

    def receive_some(self, max_bytes: int, timeout_s: float | None = None) -> bytes:
        """Return what has come of the answer under way, at least one byte."""
        assert self._pipe is not None
        return self._pipe.read(max_bytes, self.timeout_s if timeout_s is None else timeout_s)

    def receive_answer(self, kind: int, size: int) -> Answer | Status:
        """Return the whole answer whose header has been received."""
        answer = Answer(kind, self.receive(size))
        self.note_answered()
        if kind != packets.STATUS:
            return answer
        status = answer.status()
        if status.code in LOST:
            raise LinkLost(status.message or "the host lost the connection")
        return status

    def note_answered(self) -> None:
        """Take note that an answer has been received to its end."""
        self._num_unanswered -= 1

    # The end.

    def close_handles(self, handles: Sequence[bytes], generation: int) -> None:
        """Close files and folders, unless their connection is gone."""
        with self._lock:
            if not handles or self._pipe is None or self.generation != generation or self._num_unanswered:
                return
            try:
                self.ask_all([packets.close(handle) for handle in handles])
            except (LinkLost, MalformedPacket, TimeoutError):
                self._drop()
            except BaseException:
                self._drop()
                raise

    def disconnect(self) -> None:
        """End the process; the next request starts another."""
        with self._lock:
            self._drop()

    def close(self) -> None:
        """End the session and its process; harmless when done twice."""
        with self._lock:
            self._is_closed = True
            self._drop()

    def _drop_if_busy(self) -> None:
        if self._num_unanswered:
            self._drop()

    def _drop(self) -> None:
        pipe, self._pipe = self._pipe, None
        is_idle, self._num_unanswered = not self._num_unanswered, 0
        if pipe is not None:
            pipe.close(is_idle=is_idle)

    def _shake_hands(self) -> None:
        assert self._pipe is not None
        self._num_unanswered = 0
        self._pipe.send(packets.packet(packets.INIT, packets.VERSION))
        kind, version, size = self.receive_header(LOGIN_ANSWERS * self.timeout_s)
        extensions = Answer(kind, self.receive(size))
        if kind != packets.VERSION_ANSWER or version < packets.VERSION:
            raise MalformedPacket(f"an SFTP server of version {version}, but {packets.VERSION} is needed")
        offered = set()
        while not extensions.is_empty:
            offered.add(extensions.string())
            extensions.string()
        self.max_read_bytes = FALLBACK_READ_BYTES
        if packets.LIMITS_EXTENSION in offered:
            number, sent_at = self.send(packets.limits()), time.monotonic()
            kind, answered, size = self.receive_header()
            self._note_round_trip(sent_at)
            answer = self.receive_answer(kind, size)
            if isinstance(answer, Answer) and answered == number:
                answer.large_number()  # the longest packet
                self.max_read_bytes = answer.large_number() or FALLBACK_READ_BYTES

    def _note_round_trip(self, sent_at: float) -> None:
        self._num_round_trips += 1
        self.round_trip_s = min(self.round_trip_s, time.monotonic() - sent_at)

    def _connect_error(self, error: Exception, words: str) -> HostError:
        """Return what went wrong on the way in, read from what ssh said about it."""
        line = main_line(words)
        if isinstance(error, TimeoutError) or "timed out" in line:
            return self._messages.no_answer()
        if isinstance(error, MalformedPacket):
            return self._messages.cannot_connect(f"it sent {error}")
        if "Host key verification failed" in words:
            return self._messages.unknown_key()
        if "No user exists for uid" in words:
            return SshUnusable(f"ssh does not run here: {line}; run as a user that this machine knows")
        if "Permission denied" in line or "authentication failures" in line:
            return self._messages.refused_login(line[max(0, line.find("Permission denied")) :])
        if f"Could not resolve hostname {self.address.host.lower()}" in words:
            return self._messages.no_such_host()
        if line.startswith("ssh: connect to host"):
            line = line.rpartition(": ")[2]  # the endpoint is named anyway
        return self._messages.cannot_connect(line or "ssh ended without a word")

    def _gave_up(self, error: Exception, path: str) -> HostError:
        if isinstance(error, LinkLost):
            error = LinkLost(main_line(str(error)))
        return self._messages.gave_up(error, path)

    def _refusal(self, status: Status, path: str) -> CheckpointError:
        if status.code == packets.STATUS_NO_SUCH_FILE:
            return self._messages.not_found(path)
        if status.code == packets.STATUS_PERMISSION_DENIED:
            return self._messages.not_permitted(path)
        return self._messages.failed(path, main_line(status.message) or f"status {status.code}")
