"""Listen for best-of-N questions on a Unix socket in `state_dir`, open to this user only."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import structlog

from ingest.best_of.questions import SWEEP_S, BestOfJudge
from sidecar.scoring.wire import (
    MAX_QUESTION_BYTES,
    Material,
    NothingSaidError,
    WireError,
    encode_frame,
    read_frame,
    read_material,
)
from sidecar.unix_socket import bind, kernel_path

QUESTION_TIMEOUT_S = 5.0
"""Timeout for receiving a whole question from a process on this machine."""
TAKE_OVER_S = 2.0
"""Interval at which a second scoring process checks whether the first has ended."""

log = structlog.get_logger()


class BestOfServer:
    """Answers questions until stopped. Of several servers on one machine, one listens."""

    def __init__(self, path: Path, judge: BestOfJudge) -> None:
        self._path = path
        self._judge = judge
        self._waited = False

    async def run(self, stop: asyncio.Event) -> None:
        """Listen until `stop` is set, then store the finished judgements."""
        listener = await self._take_path(stop)
        if listener is None:
            return
        server = await asyncio.start_unix_server(self._serve, sock=listener)
        own = self._path.stat().st_ino
        log.info("best_of_listens", path=str(self._path))
        try:
            while not stop.is_set():
                await self._judge.sweep()
                await _wait(stop, SWEEP_S)
        finally:
            server.close()
            if self._path.exists() and self._path.stat().st_ino == own:
                self._path.unlink()
            await self._judge.aclose()

    async def _take_path(self, stop: asyncio.Event) -> socket.socket | None:
        """Return the listening socket; None if stopped while another process holds the path."""
        while not stop.is_set():
            if not await _answers(self._path):
                return bind(self._path)
            if not self._waited:
                self._waited = True
                log.info("best_of_waits", why="another scoring process listens")
            await _wait(stop, TAKE_OVER_S)
        return None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            material = await _question(reader)
            if material is not None:
                writer.write(encode_frame(await self._judge.decide(material)))
                await writer.drain()
        except OSError as error:  # the proxy no longer waits
            log.debug("best_of_asker_left", error=str(error))
        finally:
            writer.close()


async def _question(reader: asyncio.StreamReader) -> Material | None:
    """Read a question; None when there is no valid one. Raises: OSError."""
    try:
        async with asyncio.timeout(QUESTION_TIMEOUT_S):
            frame = await read_frame(reader, limit=MAX_QUESTION_BYTES)
        return read_material(frame)
    except TimeoutError:
        log.warning("best_of_question_refused", why="it did not arrive in time")
    except NothingSaidError:
        log.debug("best_of_looked_at")
    except WireError as error:
        log.warning("best_of_question_refused", why=str(error))
    return None


async def _answers(path: Path) -> bool:
    """Return True when a process listens on this path."""
    try:
        with kernel_path(path) as name:
            _, writer = await asyncio.open_unix_connection(name)
    except OSError:
        return False
    writer.close()
    return True


async def _wait(stop: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(stop.wait(), timeout=seconds)
    except TimeoutError:
        return
