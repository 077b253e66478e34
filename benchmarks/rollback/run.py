"""`make bench BENCH=rollback`: a rollback under load, with what may be away being away.

Three proxies and three replicas (stand-ins) on one machine; clients ask every proxy all the time.
Measured from just before the call until the first reply by the old adapter, on each proxy; and how
many requests failed from a second before to three after it. `--offline` is a command, which starts
a Python: its rows have both the time from its start and, as `after_call_ms`, the time from its end,
which is what the target holds to; a start depends on what else the machine does.
No judge, no learner and no ingest runs: a rollback needs none of them.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import httpx

from benchmarks.results import at_most, exit_code, machine, table, targets_table, write
from benchmarks.rollback.load import Load, Reply
from benchmarks.rollback.stack import PROXIES, PYTHON, Stack

BEFORE_S = 1.0
AFTER_S = 3.0
LEAST_S = 1.5
"""Clients go on for so long after the end of the call: on a busy machine a command takes longer
than AFTER_S, and what follows is measured from its end."""
COLUMNS = (
    "scenario", "ms_to_first_old_reply", "by_proxy_ms", "call_ms", "after_call_ms", "requests",
    "failed",
)  # fmt: skip
OFFLINE = "--offline"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks rollback")
    parser.add_argument("--clients", type=int, default=6, help="for each proxy")
    parser.add_argument("--repeat", type=int, default=3, help="times that each scenario is played")
    asked = parser.parse_args(argv)
    ran_on = machine()
    with tempfile.TemporaryDirectory() as folder:
        rows = asyncio.run(_play(Path(folder), asked.clients, asked.repeat))
    print(table(rows, COLUMNS))
    targets = []
    for row in rows:
        offline = OFFLINE in str(row["scenario"])
        since = "the end of the command" if offline else "the call"
        value = row["after_call_ms" if offline else "ms_to_first_old_reply"]
        what = f"ms from {since} to the first reply by the old adapter on the slowest proxy"
        targets.append(at_most(f"{what}: {row['scenario']}", _number(value), 1_000.0))
    failed = [_number(row["failed"]) or 0.0 for row in rows]
    targets.append(at_most("failed requests in all scenarios", sum(failed), 0.0))
    print(targets_table(targets))
    print(write("rollback", rows, targets, machine=ran_on))
    return exit_code(targets)


async def _play(folder: Path, clients: int, repeat: int) -> list[dict[str, object]]:
    stack = Stack(folder)
    rows: list[dict[str, object]] = []
    try:
        names = await stack.start()
        serves = 1

        async def play(
            scenario: str, call: Callable[[str], Awaitable[None]], prepare: Callable[[], None]
        ) -> None:
            nonlocal serves
            kept: list[dict[str, object]] = []
            for number in range(repeat):
                to = names[1 - serves]
                before = _nothing if number else prepare
                kept.append(await _measure(stack, scenario, call, to, clients, before))
                serves = 1 - serves
            rows.append(max(kept, key=_badness))
            rows[-1]["failed"] = sum(int(str(one["failed"])) for one in kept)
            rows[-1]["requests"] = sum(int(str(one["requests"])) for one in kept)
            rows[-1]["rollbacks"] = repeat

        await play("all up", lambda to: _by_api(stack, to), _nothing)
        await play("all up, --offline", lambda to: _offline(stack, to), _nothing)
        await play(
            "one replica killed", lambda to: _by_api(stack, to), lambda: stack.kill("replica-2")
        )
        await play(
            "control killed too, --offline",
            lambda to: _offline(stack, to),
            lambda: stack.kill("control"),
        )
    finally:
        stack.stop()
    return rows


async def _measure(
    stack: Stack,
    scenario: str,
    call: Callable[[str], Awaitable[None]],
    to: str,
    clients: int,
    prepare: Callable[[], None],
) -> dict[str, object]:
    prepare()
    await asyncio.sleep(3.0 if prepare is not _nothing else 0.0)  # what was killed is noticed
    load = Load(stack.proxy_ports, clients)
    await asyncio.sleep(BEFORE_S)
    called_at = time.monotonic()
    await call(to)
    call_s = time.monotonic() - called_at
    await asyncio.sleep(max(LEAST_S, AFTER_S - call_s))
    await load.stop()
    first = first_replies(load.replies, to, called_at)
    known = [one for one in first if one is not None]
    slowest = round(max(known) * 1e3, 1) if len(known) == PROXIES else None
    return {
        "scenario": scenario,
        "to": to,
        "ms_to_first_old_reply": slowest,
        "by_proxy_ms": ", ".join("-" if one is None else f"{one * 1e3:.0f}" for one in first),
        "call_ms": round(call_s * 1e3, 1),
        "after_call_ms": None if slowest is None else round(slowest - call_s * 1e3, 1),
        "requests": len(load.replies),
        "failed": sum(1 for one in load.replies if one.error),
        "errors": sorted({one.error for one in load.replies if one.error}),
    }


def first_replies(replies: Sequence[Reply], to: str, called_at: float) -> list[float | None]:
    """Return for each proxy the seconds from the call to its first reply by an adapter. Pure."""
    found: list[float | None] = [None] * PROXIES
    for one in sorted(replies, key=lambda reply: reply.done_at):
        if one.adapter == to and one.done_at >= called_at and found[one.proxy] is None:
            found[one.proxy] = one.done_at - called_at
    return found


async def _by_api(stack: Stack, to: str) -> None:
    url = f"http://127.0.0.1:{stack.admin_port}/admin/v1/rollback"
    async with httpx.AsyncClient(trust_env=False, timeout=30.0) as client:
        reply = await client.post(url, json={"to": to, "reason": "bench"})
    reply.raise_for_status()


async def _offline(stack: Stack, to: str) -> None:
    arguments = ("rollback", "--offline", "--to", to, "--reason", "bench")
    process = await asyncio.create_subprocess_exec(
        PYTHON, "-m", "deploy.cli.main", "--config", str(stack.config()), *arguments,
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    _, said = await process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"rollback --offline: {said.decode().strip()}")


def _nothing() -> None:
    """Nothing is away in this scenario."""


def _badness(row: dict[str, object]) -> tuple[float, float]:
    """The most failed requests, then the slowest; a proxy that never changed is the slowest."""
    slowest = _number(row["ms_to_first_old_reply"])
    return _number(row["failed"]) or 0.0, math.inf if slowest is None else slowest


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
