"""Traffic that goes on while something breaks, and the accounts that must add up behind it."""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path

from support.proxy_kit import Target

CHAT = b'{"model":"smollm2-135m","messages":[{"role":"user","content":"Hi %d"}]}'
KEPT, LOST, SKIPPED = (
    "sidecar_captures_kept_total",
    "sidecar_captures_lost_total{",
    "_skipped_total{",
)


@dataclass
class Traffic:
    """What was sent, and what came of it."""

    port: int
    statuses: Counter[str] = field(default_factory=Counter)
    """Reply statuses; "broken" where no whole reply came."""
    sent: int = 0
    pause_s: float = 0.0
    """Between two requests of a worker."""
    _stop: bool = False

    async def one(self) -> str:
        """One request on a connection of its own."""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            return self._count("refused")
        status = await self._ask(reader, writer)
        writer.close()
        return status

    async def worker(self) -> None:
        """Requests one after the other on a kept connection, until told to stop."""
        while not self._stop:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            while not self._stop and await self._ask(reader, writer) == "200":
                await asyncio.sleep(self.pause_s)
            writer.close()

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        self.sent += 1
        body = CHAT % self.sent
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
        writer.write(head % len(body) + body)
        try:
            async with asyncio.timeout(60):
                reply = await reader.readuntil(b"\r\n\r\n")
                length = int(reply.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                await reader.readexactly(length)
        except (OSError, EOFError, ValueError, TimeoutError):
            return self._count("broken")
        return self._count(reply[9:12].decode())

    def _count(self, status: str) -> str:
        self.statuses[status] += 1
        return status

    async def more(self, count: int) -> None:
        """Let `count` more requests be answered."""
        aim = sum(self.statuses.values()) + count
        async with asyncio.timeout(60):
            while sum(self.statuses.values()) < aim:
                await asyncio.sleep(0.005)


@asynccontextmanager
async def traffic(target: Target, workers: int = 4, pause_s: float = 0.0) -> AsyncIterator[Traffic]:
    """Requests all the time, over `workers` connections."""
    going = Traffic(target.port, pause_s=pause_s)
    tasks = [asyncio.create_task(going.worker()) for _ in range(workers)]
    try:
        yield going
    finally:
        going._stop = True
        await asyncio.gather(*tasks)


async def scrape(target: Target) -> dict[str, float]:
    """`name{labels}` -> value, as Prometheus would scrape them."""
    sent = b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    head, _, text = (await target.send(sent)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    assert b"chunked" not in head
    lines = [line for line in text.decode().splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


@dataclass(frozen=True, slots=True)
class Accounts:
    """Where the captures of all requests went."""

    kept: int
    lost: dict[str, int]
    skipped: dict[str, int]

    @property
    def all_lost(self) -> int:
        return sum(self.lost.values())

    @property
    def total(self) -> int:
        return self.kept + self.all_lost + sum(self.skipped.values())


async def accounts(target: Target, sent: int) -> Accounts:
    """Wait until every request that was sent is kept, lost or skipped; none may be missing, and
    none may be there twice."""
    async with asyncio.timeout(60):
        while True:
            values = await scrape(target)
            found = Accounts(
                kept=int(values.get(KEPT, 0)),
                lost=_by_reason(values, LOST),
                skipped=_by_reason(values, SKIPPED),
            )
            if found.total >= sent:
                break
            await asyncio.sleep(0.05)
    assert found.total == sent, found
    assert sum(v for k, v in values.items() if k.startswith("sidecar_exchanges_total{")) == sent
    assert values["sidecar_requests_in_flight"] <= 1  # the scrape itself
    assert values.get("sidecar_streams_open", 0) == 0
    return found


def _by_reason(values: dict[str, float], part: str) -> dict[str, int]:
    return {
        name.partition('reason="')[2].partition('"')[0]: int(value)
        for name, value in values.items()
        if part in name and value
    }


def rows(path: Path | str) -> list[str]:
    """The exchange ids that an outbox holds."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=60)) as connection:
        return [name for (name,) in connection.execute("SELECT exchange_id FROM outbox")]


@dataclass
class Faults:
    """The functions above, as one fixture."""

    Traffic = Traffic
    traffic = staticmethod(traffic)
    scrape = staticmethod(scrape)
    accounts = staticmethod(accounts)
    rows = staticmethod(rows)
