"""A TCP proxy on loopback that delays what passes through: a long link without leaving the machine.

    with DelayProxy(server.port, round_trip_s=0.08) as proxy:
        connect("127.0.0.1", proxy.port)

It runs in a process of its own, so that its work is not done by the interpreter of the one who
measures, and adds half a round trip each way. The rate is not limited. Its process ends with the `with`
block, and also when whoever started it is gone.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

CHUNK_BYTES = 1 << 20
BUFFER_BYTES = 64 << 20
"""What may be on its way at once, each way: far more than any window of SSH."""


class DelayProxy:
    """Forwards connections to a port of 127.0.0.1 while the `with` block lasts."""

    def __init__(self, to_port: int, *, round_trip_s: float) -> None:
        self.port = 0
        self._command = [sys.executable, str(Path(__file__).resolve()), str(to_port), str(round_trip_s / 2)]
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> DelayProxy:
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        return self

    def __exit__(self, *_exc: object) -> None:
        assert self._process is not None
        self._process.communicate(timeout=10)  # closes its standard input, which ends it


async def _serve(to_port: int, delay_s: float) -> None:
    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(delay_s)
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", to_port, limit=CHUNK_BYTES)
        except OSError:
            writer.close()
            return
        await asyncio.gather(_pass_on(reader, far_writer, delay_s), _pass_on(far_reader, writer, delay_s))

    server = await asyncio.start_server(forward, "127.0.0.1", 0, limit=CHUNK_BYTES)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    """Write everything that is read, each part as much later as it takes to travel."""
    under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(BUFFER_BYTES // CHUNK_BYTES)

    async def take() -> None:
        data = b"-"
        while data:
            try:
                data = await reader.read(CHUNK_BYTES)
            except OSError:
                data = b""
            await under_way.put((time.monotonic() + delay_s, data))

    taking = asyncio.create_task(take())
    try:
        while True:
            due_at, data = await under_way.get()
            await asyncio.sleep(max(0.0, due_at - time.monotonic()))
            if not data:
                break
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        taking.cancel()
        with suppress(OSError):
            writer.close()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), float(sys.argv[2])))
