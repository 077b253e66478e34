"""The judging worker on bad days: outages, leases, stopping, a store that fails."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pytest
import structlog

from ingest.errors import JudgeUnavailableError
from ingest.judge_watch import read_judge_state
from ingest.ruler.judge import Judge, JudgeReply
from ingest.store.groups import claim_groups, load_scored_group
from sidecar.errors import StoreError
from sidecar.store.database import Database
from support.clock import Clock
from support.fake_judge import FakeJudge, Shown

if TYPE_CHECKING:
    from tests.ingest.conftest import JudgeKit


WORTH = {"good": 0.9, "fair": 0.5, "bad": 0.1}
DOWN = JudgeUnavailableError("judge scripted: connection refused")


async def test_an_outage_gives_the_group_back_and_waits_longer_each_time(
    database: Database, clock: Clock, judge_kit: JudgeKit
) -> None:
    for name in ("g1", "g2", "g3"):
        judge_kit.put_group(database, name, "good", "bad")
    judge = judge_kit.FakeJudge(DOWN)
    judging = judge_kit.worker(database, judge, clock, concurrency=2)

    with structlog.testing.capture_logs() as events:
        assert await judging.step() == 2
        assert judge_kit.status(database, "g1") == ("sampled", None)
        assert await judging.step() == 0  # waits
        with database.read() as session:
            told = read_judge_state(session)
        assert told is not None
        assert (told.state, told.since, told.until) == ("away", 1_000.0, 1_001.0)
        assert "connection refused" in told.error
        clock.now += 1.0
        assert await judging.step() == 1  # tries another one, in vain, and waits 2 s now
        assert judge_kit.status(database, "g3") == ("sampled", None)
        clock.now += 1.9
        assert judging._room() == 0
        clock.now += 0.1
        assert judging._room() == 1
        assert await judging.step() == 0  # each group waits 5 s longer than the worker
        judge.script = [judge_kit.score_by_content(WORTH)]
        clock.now += 3.0
        assert await judging.step() == 1  # g1 may be tried from 1006 on: up again
        assert await judging.step() == 1  # g2 too
        clock.now += 2.0
        assert await judging.step() == 1  # and g3 from 1008 on

    with database.read() as session:
        told = read_judge_state(session)
    assert told is not None
    assert (told.state, told.error_at, told.good_at) == ("works", 1_001.0, 1_006.0)
    assert [judge_kit.status(database, name)[0] for name in ("g1", "g2", "g3")] == ["scored"] * 3
    assert judge_kit.counts(database, "judge_calls") == {"good": 3, "unanswered": 3}
    assert judge_kit.group_row(database, "g1").attempts == 0
    said = [event for event in events if event["event"] in ("judge_down", "judge_up")]
    assert [event["event"] for event in said] == ["judge_down", "judge_up"]
    assert said[0]["error"] == "judge scripted: connection refused"
    assert said[1]["lasted_s"] == 6.0


async def test_a_claimed_group_is_left_alone_until_its_lease_ends(
    database: Database, clock: Clock, judge_kit: JudgeKit
) -> None:
    judge_kit.put_group(database, "g1", "good", "bad")
    judge = judge_kit.FakeJudge(judge_kit.score_by_content(WORTH))
    with database.write() as session:
        assert claim_groups(session, "sampled", limit=1, now=clock.now, lease_s=30) == ["g1"]
    assert await judge_kit.worker(database, judge, clock).step() == 0
    clock.now += 30
    assert await judge_kit.worker(database, judge, clock).step() == 1


async def test_the_lease_outlasts_the_slowest_judgement(
    database: Database, clock: Clock, judge_kit: JudgeKit
) -> None:
    judge_kit.put_group(database, "g1", "good", "bad")
    leases: list[float] = []

    def look(shown: Shown) -> str:
        leases.append(judge_kit.group_row(database, "g1").lease_until)
        return judge_kit.score_by_content(WORTH)(shown)

    judging = judge_kit.worker(database, judge_kit.FakeJudge(look), clock, passes=3, timeout_s=50)
    await judging.step()
    # Three passes of two attempts, each of 30 s until the judge is free and 50 s, and a minute.
    assert leases[0] == 1_000 + 3 * 2 * (30 + 50) + 60


async def test_the_slower_of_two_judgements_changes_nothing(
    database: Database, clock: Clock, judge_kit: JudgeKit
) -> None:
    judge_kit.put_group(database, "g1", "good", "bad")
    fast = judge_kit.worker(database, judge_kit.FakeJudge(judge_kit.score_by_content(WORTH)), clock)

    class Slow(FakeJudge):
        async def complete(
            self, messages: Sequence[Mapping[str, str]], schema: Mapping[str, Any]
        ) -> JudgeReply:
            clock.now += 10_000  # the lease runs out
            assert await fast.step() == 1
            return await super().complete(messages, schema)

    table = judge_kit.score_by_content({"good": 0.2, "bad": 0.3})
    with structlog.testing.capture_logs() as events:
        await judge_kit.worker(database, Slow(table), clock).step()

    with database.read() as session:
        scored = load_scored_group(session, "g1")
    assert scored is not None
    assert scored.scores == (0.9, 0.1)
    assert judge_kit.counts(database, "judging") == {"scored": 1}
    assert "judgement_came_second" in [event["event"] for event in events]


class GatedJudge:
    """Answers only when told to; knows how many calls are under way."""

    model = "gated"

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self.gate = asyncio.Event()
        self.under_way = 0
        self.most = 0

    async def complete(
        self, messages: Sequence[Mapping[str, str]], schema: Mapping[str, Any]
    ) -> JudgeReply:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            await self.gate.wait()
            return await self._judge.complete(messages, schema)
        finally:
            self.under_way -= 1


async def test_run_keeps_to_the_concurrency_and_judges_everything(
    database: Database, clock: Clock, judge_kit: JudgeKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(7):
        judge_kit.put_group(database, f"g{number}", "good", "bad")
    judge = GatedJudge(judge_kit.FakeJudge(judge_kit.score_by_content(WORTH)))
    judging = judge_kit.worker(database, judge, clock, concurrency=3)
    claim, limits = judging._claim, []

    async def counted(limit: int) -> list[str]:
        limits.append(limit)
        return await claim(limit)

    monkeypatch.setattr(judging, "_claim", counted)
    monkeypatch.setattr("ingest.ruler.judging.POLL_S", 0.01)
    stop = asyncio.Event()
    running = asyncio.create_task(judging.run(stop))

    await judge_kit.until(lambda: len(limits) == 5)
    assert limits == [3, 0, 0, 0, 0]
    await judge_kit.until(lambda: judge.under_way == 3)
    judge.gate.set()
    await judge_kit.until(lambda: judge_kit.counts(database, "judging") == {"scored": 7})
    stop.set()
    await running

    assert judge.most == 3


async def test_stopping_gives_back_what_is_in_flight_at_once(
    database: Database, clock: Clock, judge_kit: JudgeKit
) -> None:
    judge_kit.put_group(database, "g1", "good", "bad")
    judge = GatedJudge(judge_kit.FakeJudge("never"))
    stop = asyncio.Event()
    running = asyncio.create_task(judge_kit.worker(database, judge, clock).run(stop))
    await judge_kit.until(lambda: judge.under_way == 1)

    stop.set()
    await running

    assert judge.under_way == 0
    row = judge_kit.group_row(database, "g1")
    assert (row.status, row.lease_until) == ("sampled", 0.0)


async def test_run_outlives_an_outage_of_judge_and_store(
    database: Database, clock: Clock, judge_kit: JudgeKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge_kit.put_group(database, "g1", "good", "bad")
    judging = judge_kit.worker(
        database, judge_kit.FakeJudge(judge_kit.score_by_content(WORTH)), clock
    )
    whole = judging._claim_now
    failures = iter([StoreError("locked"), StoreError("locked")])

    def flaky(limit: int) -> list[str]:
        for failure in failures:
            raise failure
        return whole(limit)

    monkeypatch.setattr(judging, "_claim_now", flaky)
    monkeypatch.setattr("ingest.ruler.judging.POLL_S", 0.01)
    stop = asyncio.Event()
    with structlog.testing.capture_logs() as events:
        running = asyncio.create_task(judging.run(stop))
        await judge_kit.until(lambda: judge_kit.status(database, "g1")[0] == "scored")
        stop.set()
        await running
    assert [e["event"] for e in events].count("judging_waits_for_store") == 2
