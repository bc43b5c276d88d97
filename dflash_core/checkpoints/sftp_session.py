"""One SFTP session with an SSH host, kept by an event loop in a thread of its own.

asyncssh is used directly and not through sshfs: sshfs ignores the range of `cat_file`, cannot
reconnect, checks no host key unless told to, and a file of it that is left open hangs the
interpreter at exit. Only the SFTP subsystem is ever asked for; no command is run.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import asyncssh

from dflash_core.checkpoints.host_errors import (
    CLOSE_TIMEOUT_S,
    KEEPALIVE_S,
    HostMessages,
    Patience,
    ReceiverError,
)
from dflash_core.config import HostSettings
from dflash_core.errors import CheckpointError, DFlashEvalError, HostError, HostKeyUnknown, one_line
from dflash_core.ssh import SshAddress, connect_options

# Room for all blocks that may be under way; the default of 2 MiB caps a link of 80 ms at 25 MB/s.
WINDOW_BYTES = 32 << 20

Value = TypeVar("Value")

TRANSIENT_ERRORS = (
    asyncssh.SFTPConnectionLost,
    asyncssh.SFTPNoConnection,
    asyncssh.DisconnectError,
    asyncssh.ChannelOpenError,
    TimeoutError,
    ConnectionError,
)
"""What a dropped or silent connection looks like; a new one may do better."""


class SftpSession:
    """An SFTP session that comes back after a dropped connection."""

    def __init__(self, address: SshAddress, settings: HostSettings) -> None:
        self.address = address
        self.timeout_s = settings.timeout_s
        self.generation = 0
        """Counts connections; a handle of an earlier one is dead."""
        self._settings = settings
        self._messages = HostMessages(address, settings)
        self._connection: asyncssh.SSHClientConnection | None = None
        self._client: asyncssh.SFTPClient | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"sftp {address.host}", daemon=True)
        self._thread.start()
        try:
            self.run(self.client())
        except BaseException:
            self.close()
            raise

    def run(self, coroutine: Coroutine[Any, Any, Value]) -> Value:
        """Run a coroutine in the session's thread and return its result.

        Interrupted, it waits for the coroutine to end, so that nothing writes on behind its caller.
        """
        ended = threading.Event()

        async def tracked() -> Value:
            try:
                return await coroutine
            finally:
                ended.set()

        future = asyncio.run_coroutine_threadsafe(tracked(), self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            ended.wait(CLOSE_TIMEOUT_S)
            raise

    def request(self, ask: Callable[[asyncssh.SFTPClient], Awaitable[Value]], path: str) -> Value:
        """Send one request, again after a dropped connection, and return its answer.

        Args:
            ask: sends it.
            path: what it is about, for messages.
        """

        async def attempt() -> Value:
            return await asyncio.wait_for(_awaited(ask(await self.client())), self.timeout_s)

        return self.run(self.persist(attempt, path))

    async def persist(
        self, attempt: Callable[[], Awaitable[Value]], path: str, *, progress: Callable[[], int] = lambda: 0
    ) -> Value:
        """Repeat `attempt` after dropped connections: a few times, each after a longer wait.

        Args:
            attempt: what to do; called anew each time.
            path: what it is about, for messages.
            progress: says how many bytes have been received so far.

        Raises:
            HostUnreachable: the connection kept dropping, or could not be made again.
            CheckpointNotFound, CheckpointError: the host refused the request.
        """
        patience = Patience(progress)
        while True:
            try:
                return await attempt()
            except ReceiverError as error:
                raise error.cause from None
            except TRANSIENT_ERRORS as error:
                if isinstance(error, HostKeyUnknown):
                    raise
                await self._drop()
                wait_s = patience.next_wait_s()
                if wait_s is None:
                    raise self._messages.gave_up(error, path) from error
                await asyncio.sleep(wait_s)
            except DFlashEvalError:
                raise
            except (asyncssh.Error, OSError) as error:
                raise self._refusal(error, path) from error

    async def client(self) -> asyncssh.SFTPClient:
        """Return the SFTP client, connecting first where there is none.

        Raises:
            HostKeyUnknown: the host's key is not in the known_hosts file.
            HostUnreachable: it does not answer, or refuses the login.
        """
        if self._client is None:
            options = connect_options(self.address, self._settings)
            known_hosts = options["known_hosts"]
            if known_hosts is not None and not Path(known_hosts).exists():
                raise self._messages.no_known_hosts_file()
            try:
                self._connection = await asyncssh.connect(
                    self.address.host, **options, window=WINDOW_BYTES, keepalive_interval=KEEPALIVE_S
                )
                self._client = await asyncio.wait_for(self._connection.start_sftp_client(), self.timeout_s)
            except (OSError, asyncssh.Error, ValueError) as error:
                await self._drop()
                raise self._connect_error(error) from error
            self.generation += 1
        return self._client

    @property
    def max_read_bytes(self) -> int:
        """Return the most that the host answers in one read, as far as it says so."""
        return self._client.limits.max_read_len if self._client is not None else 0

    def require_link(self) -> None:
        """Check that the link is not known to be broken: writing into it would log a warning each time.

        Raises:
            asyncssh.SFTPConnectionLost: it is.
        """
        transport = getattr(self._connection, "_transport", None)
        if transport is None or transport.is_closing():
            raise asyncssh.SFTPConnectionLost("the connection broke")

    def close(self) -> None:
        """End the session and its thread; harmless when done twice."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _drop(self) -> None:
        connection, self._connection, self._client = self._connection, None, None
        if connection is not None:
            connection.abort()
            await quietly(connection.wait_closed())

    async def _shut_down(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        connection, client = self._connection, self._client
        if client is not None:
            client.exit()
            await quietly(client.wait_closed())
        if connection is not None:
            connection.close()
            await quietly(connection.wait_closed())
        await self._drop()
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        # The thread that looks up host names.
        await quietly(self._loop.shutdown_default_executor())

    def _connect_error(self, error: Exception) -> HostError:
        if isinstance(error, asyncssh.HostKeyNotVerifiable):
            return self._messages.unknown_key()
        if isinstance(error, asyncssh.PermissionDenied):
            return self._messages.refused_login(error.reason)
        if isinstance(error, socket.gaierror):
            return self._messages.no_such_host()
        if isinstance(error, TimeoutError):
            return self._messages.no_answer()
        if isinstance(error, OSError) and error.errno:
            return self._messages.cannot_connect(os.strerror(error.errno))
        return self._messages.cannot_connect(one_line(error))

    def _refusal(self, error: Exception, path: str) -> CheckpointError:
        if isinstance(error, asyncssh.SFTPNoSuchFile | asyncssh.SFTPNoSuchPath | asyncssh.SFTPNotADirectory):
            return self._messages.not_found(path)
        if isinstance(error, asyncssh.SFTPPermissionDenied):
            return self._messages.not_permitted(path)
        return self._messages.failed(path, one_line(error))


async def quietly(closing: Awaitable[Any]) -> None:
    """Wait a little for a closing step without minding how it ends."""
    with suppress(TimeoutError, OSError, asyncssh.Error, ValueError):
        await asyncio.wait_for(_awaited(closing), CLOSE_TIMEOUT_S)


async def _awaited(result: Awaitable[Value]) -> Value:
    return await result
