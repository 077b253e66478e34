"""The bus locked, taken away, read-only, full: no request fails for it, and every capture is
accounted for. Each with a real proxy process, a real outbox and traffic that never stops."""

from __future__ import annotations

import asyncio
import resource
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from support.fake_vllm import FakeVllm
from support.proxy_kit import StartProcess
from support.traffic import Faults


async def test_a_full_disk_costs_captures_only(
    start_process: StartProcess,
    answering: FakeVllm,
    faults: Faults,
    small_disk: Path | None,
    state_dir: Path,
) -> None:
    folder = small_disk or state_dir
    child = await start_process(bus={"url": f"sqlite:///{folder}/outbox.db"})
    if small_disk is None:  # the same for one process: no file of its may grow further
        resource.prlimit(child.worker, resource.RLIMIT_FSIZE, (200_000, 200_000))
    async with faults.traffic(child) as traffic:
        await traffic.more(200)  # about 2 kB each
        await lost_some(faults, child)
        await traffic.more(50)

    accounts = await faults.accounts(child, traffic.sent)
    assert set(traffic.statuses) == {"200"}
    assert set(accounts.lost) <= {"disk_full", "failed"}
    found = faults.rows(folder / "outbox.db")
    assert len(found) == len(set(found)) == accounts.kept


async def test_a_store_that_goes_away_leaves_the_last_routing(
    start_process: StartProcess,
    answering: FakeVllm,
    faults: Faults,
    state_dir: Path,
    routing_store: Any,
) -> None:
    """Locked, then deleted, then rubbish, then back with a newer table."""
    path = routing_store(champion="smollm2-135m--v1", generation=1)
    child = await start_process()
    async with faults.traffic(child) as traffic:
        await adapter_is(child, b"smollm2-135m--v1")
        with closing(sqlite3.connect(path, isolation_level=None)) as locker:
            locker.execute("BEGIN EXCLUSIVE")
            await traffic.more(50)
            await adapter_is(child, b"smollm2-135m--v1")
            locker.execute("ROLLBACK")
        path.unlink()
        await traffic.more(50)
        path.write_bytes(b"this is no database, whatever its name says" * 100)
        await traffic.more(50)
        await adapter_is(child, b"smollm2-135m--v1")
        path.unlink()
        routing_store(champion="smollm2-135m--v2", generation=2)
        async with asyncio.timeout(60):
            while await adapter_of(child) != b"smollm2-135m--v2":
                await asyncio.sleep(0.02)

    assert set(traffic.statuses) == {"200"}


async def adapter_of(child: Any) -> bytes:
    body = b'{"model":"smollm2-135m","messages":[]}'
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nx-sidecar-capture: off\r\n"
    sent = head + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    reply: bytes = await child.send(sent)
    return reply.partition(b"x-sidecar-adapter: ")[2].partition(b"\r\n")[0]


async def adapter_is(child: Any, name: bytes) -> None:
    async with asyncio.timeout(60):
        while await adapter_of(child) != name:
            await asyncio.sleep(0.02)


async def lost_some(faults: Faults, child: Any) -> None:
    async with asyncio.timeout(60):
        while not any("captures_lost_total{" in name for name in await faults.scrape(child)):
            await asyncio.sleep(0.02)
