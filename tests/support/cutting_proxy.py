"""A TCP proxy on loopback whose connections break: now, after some bytes, or all of them for a while.

    with CuttingProxy(server.port) as proxy:
        connect("127.0.0.1", proxy.port)
        proxy.cut_after(100_000)

Whoever is connected sees a reset, as from a link that is gone, and not an end of the stream.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from contextlib import suppress

CHUNK_BYTES = 64 << 10
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class CuttingProxy:
    """Forwards connections to a port of 127.0.0.1 while the `with` block lasts."""

    def __init__(self, to_port: int) -> None:
        self.port = 0
        self.num_cut = 0
        """Connections that were broken."""
        self._to_port = to_port
        self._away_until = 0.0
        self._bytes_left: int | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="cutting-proxy", daemon=True)

    def __enter__(self) -> CuttingProxy:
        self._thread.start()
        starting = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._forward, "127.0.0.1", 0), self._loop)
        self._server = starting.result(timeout=10)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *_exc: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(timeout=10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        assert not self._thread.is_alive(), "the proxy's thread did not end"
        self._loop.close()

    def cut_after(self, num_bytes: int) -> None:
        """Break all connections once so many more bytes came from the server."""
        self._bytes_left = num_bytes

    @property
    def is_cut_due(self) -> bool:
        """Tell whether a cut is still to come."""
        return self._bytes_left is not None

    def go_away(self, seconds: float) -> None:
        """Break all connections, and refuse new ones for a while."""
        self._away_until = time.monotonic() + seconds
        self._loop.call_soon_threadsafe(self._cut)

    def _cut(self) -> None:
        self._bytes_left = None
        for writer in list(self._writers):
            connection = writer.get_extra_info("socket")
            with suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            writer.transport.abort()
        self.num_cut += len(self._writers) // 2
        self._writers.clear()

    async def _end(self) -> None:
        self._server.close()
        self._cut()
        pending = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if time.monotonic() < self._away_until:
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._to_port)
        except OSError:
            writer.transport.abort()
            return
        both = {writer, far_writer}
        self._writers |= both
        await asyncio.gather(self._pass_on(reader, far_writer), self._pass_on(far_reader, writer, is_counted=True))
        self._writers -= both

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_counted: bool = False
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                if is_counted and self._bytes_left is not None:
                    self._bytes_left -= len(data)
                    if self._bytes_left <= 0:
                        self._cut()
                        return
                writer.write(data)
                await writer.drain()
        with suppress(OSError):
            writer.close()
