"""A relay between the sidecar and vLLM that can let an adapter's chats hang, as an engine may.

It passes everything on as it came. While an adapter is `stalled`, its chat requests are never sent
on: they wait until the client leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator

PATH = "/v1/chat/completions"


class Stalling:
    """Listens on a port, and speaks to vLLM on another; both on loopback."""

    def __init__(self, engine_port: int) -> None:
        self._engine_port = engine_port
        self._tasks: set[asyncio.Task[None]] = set()
        self.stalled: str | None = None
        self.held = 0
        """Chats that were left to hang."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection: of each request the head is read, and the reply passed on."""
        engine: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        try:
            while True:
                head, body = await _request(reader)
                if self._is_stalled(head, body):
                    self.held += 1
                    await reader.read(1)  # the client sends no more: this is its end
                    return
                if engine is None:
                    engine = await asyncio.open_connection("127.0.0.1", self._engine_port)
                    task = asyncio.create_task(_pump(engine[0], writer))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                engine[1].write(head + body)
                await engine[1].drain()
        except (OSError, asyncio.IncompleteReadError):
            return  # either side left
        finally:
            writer.close()
            if engine is not None:
                engine[1].close()

    def _is_stalled(self, head: bytes, body: bytes) -> bool:
        if self.stalled is None or PATH.encode() not in head.split(b"\r\n", 1)[0]:
            return False
        return bool(json.loads(body).get("model") == self.stalled)


async def _request(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return head, await reader.readexactly(int(value))
    return head, b""


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):  # the client left
        while piece := await reader.read(65_536):
            writer.write(piece)
            await writer.drain()
    writer.close()


@contextlib.contextmanager
def stalling(port: int, engine_port: int) -> Iterator[Stalling]:
    """Run it in a thread of its own."""
    made, loop = Stalling(engine_port), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    opened = asyncio.start_server(made.serve, "127.0.0.1", port, limit=2**24)
    server = asyncio.run_coroutine_threadsafe(opened, loop).result(10)
    try:
        yield made
    finally:
        asyncio.run_coroutine_threadsafe(_end(server), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _end(server: asyncio.Server) -> None:
    """Close the port and all connections; what still hangs is cancelled."""
    server.close()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
