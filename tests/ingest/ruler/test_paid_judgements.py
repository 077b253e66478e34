"""Judgements are paid for: a store that is locked for a while costs none of them."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

import pytest
import structlog

from ingest.ruler.judge import JudgeReply
from ingest.ruler.judging import JudgingWorker
from sidecar.backoff import Backoff
from sidecar.store.database import Database
from support.fake_judge import FakeJudge, score_by_content
from tests.ingest.conftest import Bench, until

NAMES = [f"g{number}" for number in range(8)]


@pytest.fixture
def database(database: Database, monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    """A store that gives up on a lock after 50 ms in place of 15 s, as are all waits here."""
    if not database.url.startswith("sqlite"):
        pytest.skip("the lock is SQLite's")
    monkeypatch.setattr("sidecar.store.engines.BUSY_TIMEOUT_S", 0.05)
    monkeypatch.setattr("ingest.store.listing.PAUSES", Backoff(first_s=0.05, last_s=0.05))
    monkeypatch.setattr("ingest.ruler.judging.POLL_S", 0.02)
    with closing(Database(database.url)) as hasty:
        yield hasty


@contextmanager
def locked(database: Database) -> Iterator[None]:
    """Hold the store's write lock, as a copy tool or an open `sqlite3` session does."""
    path = database.url.removeprefix("sqlite:///")
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


class Locking(FakeJudge):
    """Answers once the test lets it: then the store is locked."""

    def __init__(self) -> None:
        super().__init__(score_by_content({"good": 0.9, "bad": 0.1}))
        self.gate = asyncio.Event()

    async def complete(
        self, messages: Sequence[Mapping[str, str]], schema: Mapping[str, Any]
    ) -> JudgeReply:
        reply = await super().complete(messages, schema)
        await self.gate.wait()
        return reply


async def asked_about_all(
    bench: Bench,
) -> tuple[Locking, JudgingWorker, asyncio.Event, asyncio.Task[None]]:
    """A worker at work, whose eight groups the judge is asked about."""
    for name in NAMES:
        bench.put(name, "good", "bad")
    judge = Locking()
    worker = bench.worker(judge)
    stop = asyncio.Event()
    running = asyncio.create_task(worker.run(stop))
    await until(lambda: len(judge.prompts) == 8)
    return judge, worker, stop, running


def scored(bench: Bench) -> int:
    return bench.counts("judging").get("scored", 0)


async def test_a_locked_store_costs_no_judgement_though_leases_end(bench: Bench) -> None:
    judge, worker, stop, running = await asked_about_all(bench)
    with locked(bench.database):
        judge.gate.set()
        await until(lambda: len(worker._storing) == 8)
        await asyncio.sleep(0.5)  # each has failed to be stored several times
        assert scored(bench) == 0
        bench.clock.now += 100_000.0

    await until(lambda: scored(bench) == 8)

    stop.set()
    await running
    assert len(judge.prompts) == 8, "no group was asked about twice"
    assert bench.counts("judge_calls") == {"good": 8}


async def test_a_stop_waits_until_the_judgements_are_stored(bench: Bench) -> None:
    judge, worker, stop, running = await asked_about_all(bench)
    with locked(bench.database):
        judge.gate.set()
        await until(lambda: len(worker._storing) == 8)
        stop.set()
        await asyncio.sleep(0.3)
        assert not running.done()

    await running

    assert scored(bench) == 8


async def test_a_stop_does_not_wait_for_ever(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingest.ruler.judging.STOP_GRACE_S", 0.2)
    judge, worker, stop, running = await asked_about_all(bench)
    with structlog.testing.capture_logs() as events, locked(bench.database):
        judge.gate.set()
        await until(lambda: len(worker._storing) == 8)
        stop.set()
        async with asyncio.timeout(20):
            await running
            # An attempt that has begun goes on in its thread, and would find the store free.
            await asyncio.get_running_loop().shutdown_default_executor()

    lost = [event for event in events if event["event"] == "judgement_lost"]
    assert sorted(event["group_id"] for event in lost) == NAMES
    assert {bench.status(name) for name in NAMES} == {("sampled", None)}


async def test_a_judgement_that_is_kept_in_vain_is_counted_and_made_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ingest.ruler.judging.LONGEST_KEPT_S", 0.3)
    judge, worker, stop, running = await asked_about_all(bench)
    with locked(bench.database):
        judge.gate.set()
        await until(lambda: len(worker._storing) == 8)
        await until(lambda: not worker._storing)

    bench.clock.now += 1_000.0  # the leases
    await until(lambda: bool(scored(bench)))
    bench.clock.now += 1_000.0  # those that a process seems to have died over come one by one
    await until(lambda: scored(bench) == 8)

    stop.set()
    await running
    assert bench.counts("judge_calls") == {"good": 8, "lost": 8}
