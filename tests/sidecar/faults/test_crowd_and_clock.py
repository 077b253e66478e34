"""Two thousand clients at once, and a clock that steps back."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

CLIENTS = 2000
ROOT = Path(__file__).resolve().parents[3]
STEPPING_CLOCK = """
import os, time
_real, _flag = time.time, {flag!r}
time.time = lambda: _real() - 7200.0 if os.path.exists(_flag) else _real()
"""


async def test_two_thousand_clients_at_once_are_all_served(
    start_process: Any, answering: Any, faults: Any, many_files: int
) -> None:
    """All connect before any sends, so that all are there together."""
    assert many_files >= 2 * CLIENTS + 200, "raise the limit of open files (ulimit -n)"
    child = await start_process()
    traffic = faults.Traffic(child.port)
    dialled = await asyncio.gather(
        *(asyncio.open_connection("127.0.0.1", child.port) for _ in range(CLIENTS))
    )

    async with asyncio.timeout(60):
        await asyncio.gather(*(traffic._ask(*one) for one in dialled))

    for _, writer in dialled:
        writer.close()
    assert traffic.statuses == {"200": CLIENTS}
    accounts = await faults.accounts(child, CLIENTS)
    # The queue holds 2,000; what the capture's thread has in hand comes on top.
    assert set(accounts.lost) <= {"queue_full"}
    values = await faults.scrape(child)
    assert values['sidecar_requests_total{status="200"}'] >= CLIENTS


async def test_clients_that_vanish_at_any_point_leave_the_accounts_right(
    start_proxy: Any, fake_vllm: Any, faults: Any, wire: Any, recorded: Any
) -> None:
    """At every tenth byte of the request, and in the middle of a stream; by close and by reset."""
    events = recorded("whole_stream_asked.sse").split(b"\n\n")[:-1]
    chunks = [wire.chunk(event + b"\n\n") for event in events]
    fake_vllm.script = lambda _: [wire.STREAM_HEAD, *chunks, wire.LAST_CHUNK]
    running = await start_proxy()
    sent = wire.post(b'{"model":"smollm2-135m","stream":true,"messages":[]}', close=False)
    for number in range(300):
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(sent[: 10 * (number % 30)] if number % 2 else sent)
        if number % 4 == 0:
            await reader.readexactly(1 + number)
        if number % 3:
            writer.transport.abort()
        else:
            writer.close()

    async with asyncio.timeout(60):
        while (values := await faults.scrape(running))["sidecar_requests_in_flight"] > 1:
            await asyncio.sleep(0.02)
    begun = sum(v for k, v in values.items() if k.startswith("sidecar_exchanges_total{"))
    assert begun >= 75
    assert (await faults.accounts(running, int(begun))).lost == {}


async def test_a_clock_that_steps_back_two_hours_changes_no_reply_and_no_account(
    start_process: Any, answering: Any, faults: Any, state_dir: Path
) -> None:
    """As when NTP corrects a machine: names stay unique, durations do not go below zero."""
    flag = state_dir / "stepped-back"
    (state_dir / "sitecustomize.py").write_text(STEPPING_CLOCK.format(flag=str(flag)))
    child = await start_process(
        env={"PYTHONPATH": f"{state_dir}:{os.environ.get('PYTHONPATH') or ROOT}"}
    )
    async with faults.traffic(child) as traffic:
        await traffic.more(100)
        flag.touch()
        await traffic.more(100)
        flag.unlink()
        await traffic.more(100)

    accounts = await faults.accounts(child, traffic.sent)
    assert set(traffic.statuses) == {"200"}
    assert (accounts.kept, accounts.lost) == (traffic.sent, {})
    found = faults.rows(state_dir / "outbox.db")
    assert len(set(found)) == traffic.sent
    assert min(found)[3:9] != max(found)[3:9]  # the clock did step: their time is in the names
    values = await faults.scrape(child)
    for name in ("request_duration", "ttft", "proxy_overhead"):
        assert 0 <= values[f"sidecar_{name}_seconds_sum"] < 3600
        assert values[f"sidecar_{name}_seconds_count"] == traffic.sent


async def test_captures_in_memory_at_a_stop_are_written(
    start_process: Any, answering: Any, faults: Any, state_dir: Path
) -> None:
    child = await start_process()
    async with faults.traffic(child) as traffic:
        await traffic.more(200)
    child.process.send_signal(signal.SIGTERM)
    await asyncio.wait_for(child.process.wait(), 60)
    assert len(set(faults.rows(state_dir / "outbox.db"))) == traffic.sent
