"""The judging worker over a real store: what it writes, and what it does on bad days."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import structlog
from sqlalchemy import select

from ingest.errors import JudgeRefusalError, JudgeUnavailableError, StoreError
from ingest.judging import JudgingWorker
from ingest.records import Answer, Group
from ingest.ruler_prompt import rubric_hash
from ingest.store.database import Database
from ingest.store.exchanges import save_exchange
from ingest.store.groups import claim_groups, load_scored_group, mark_sampled, save_group
from ingest.store.models import CounterRow, GroupRow, JudgeCallRow
from sidecar.records import Choice, Exchange, Sampling, Timings
from sidecar.settings import Judge as JudgeSettings

WORTH = {"good": 0.9, "fair": 0.5, "bad": 0.1}
DOWN = JudgeUnavailableError("judge scripted: connection refused")
REQUEST = json.dumps({"messages": [{"role": "user", "content": "hello"}]}).encode()


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def database(tmp_path: Path) -> Any:
    opened = Database(f"sqlite:///{tmp_path}/store.db")
    opened.upgrade()
    yield opened
    opened.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def put_group(
    database: Database, name: str, *texts: str, request: bytes = REQUEST, messages: Any = None
) -> None:
    """Store a sampled group `name` with one answer per text."""
    bodies = messages or [
        json.dumps({"role": "assistant", "content": text}).encode() for text in texts
    ]
    exchange = Exchange(
        exchange_id=f"x-{name}",
        surface="chat",
        public_model="m",
        adapter="base",
        arm="champion",
        propensity=1.0,
        replica="http://127.0.0.1:1",
        session_key="m:1",
        request=request,
        choices=(Choice(index=0, message=bodies[0]),),
        prompt_token_ids=(1, 2),
        sampling=Sampling(),
        stream=False,
        status=200,
        outcome="ok",
        timings=Timings(started_at=1.0),
    )
    group = Group(
        group_id=name,
        exchange_id=exchange.exchange_id,
        session_key="m:1",
        adapter="base",
        request=request,
        prompt_token_ids=(1, 2),
        answers=tuple(
            Answer(index=i, origin="sampled", message=body, token_ids=(3,), logprobs=(-0.5,))
            for i, body in enumerate(bodies)
        ),
    )
    with database.write() as session:
        assert save_exchange(session, exchange, held_out=False, now=1.0)
        assert save_group(session, group, now=1.0)
        assert mark_sampled(session, name)


def status(database: Database, name: str) -> tuple[str, str | None]:
    with database.read() as session:
        row = session.scalars(select(GroupRow).where(GroupRow.group_id == name)).one()
        return row.status, row.reason


def group_row(database: Database, name: str) -> GroupRow:
    with database.read() as session:
        return session.scalars(select(GroupRow).where(GroupRow.group_id == name)).one()


def counts(database: Database, stage: str) -> dict[str, int]:
    with database.read() as session:
        rows = session.scalars(select(CounterRow).where(CounterRow.stage == stage))
        return {row.reason: row.count for row in rows}


def calls(database: Database) -> list[JudgeCallRow]:
    with database.read() as session:
        return list(session.scalars(select(JudgeCallRow).order_by(JudgeCallRow.seq)))


def worker(database: Database, judge: Any, clock: Any, **settings: Any) -> JudgingWorker:
    values = {"model": "scripted", "rubric": "Be good.", **settings}
    seeds = iter(range(100, 10_000))
    return JudgingWorker(
        database, judge, JudgeSettings(**values), clock=clock, draw_seed=lambda: next(seeds)
    )


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_sampled_group_is_scored_in_the_answers_order(
    database: Database, clock: Clock, judge_kit: Any
) -> None:
    put_group(database, "g1", "fair", "bad", "good", "bad")
    judge = judge_kit.ScriptedJudge(judge_kit.score_by_content(WORTH))

    assert await worker(database, judge, clock).step() == 1

    with database.read() as session:
        scored = load_scored_group(session, "g1")
    assert scored is not None
    assert scored.scores == (0.5, 0.1, 0.9, 0.1)
    assert scored.explanations[1] == scored.explanations[3] != scored.explanations[0]
    assert (scored.judge_model, scored.rubric_hash) == ("scripted", rubric_hash("Be good."))
    assert group_row(database, "g1").scored_at == 1_000.0
    assert counts(database, "judging") == {"scored": 1}
    assert counts(database, "judge_calls") == {"good": 1}
    row = calls(database)[0]
    assert (row.group_id, row.at, row.order_seed, row.ok, row.error) == (
        "g1",
        1_000,
        200,
        True,
        None,
    )
    assert (row.prompt_tokens, row.completion_tokens, row.seconds) == (100, 10, 0.5)
    assert json.loads(row.reply)["scores"]
    assert row.rubric_hash == rubric_hash("Be good.")


async def test_nothing_waiting_is_nothing_done(
    database: Database, clock: Clock, judge_kit: Any
) -> None:
    judge = judge_kit.ScriptedJudge("never asked")
    assert await worker(database, judge, clock).step() == 0
    assert judge.conversations == []


async def test_every_pass_is_written(database: Database, clock: Clock, judge_kit: Any) -> None:
    put_group(database, "g1", "good", "bad")
    judge = judge_kit.ScriptedJudge(judge_kit.score_by_content(WORTH))
    await worker(database, judge, clock, passes=3).step()
    assert [row.order_seed for row in calls(database)] == [200, 201, 202]


RUBBISH: dict[str, Any] = {
    "bad JSON": lambda ids: "{",
    "prose": lambda ids: "The first.",
    "wrong ids": lambda ids: {str(i): 0.5 for i in range(len(ids))},
    "a missing id": lambda ids: {ids[0]: 0.5},
    "an id too many": lambda ids: {**dict.fromkeys(ids, 0.5), "a9999999": 0.5},
    "a score of 7": lambda ids: {**dict.fromkeys(ids, 0.5), ids[0]: 7},
    "a score of -3": lambda ids: {**dict.fromkeys(ids, 0.5), ids[0]: -3},
    "NaN": lambda ids: {**dict.fromkeys(ids, 0.5), ids[0]: float("nan")},
    "infinity": lambda ids: {**dict.fromkeys(ids, 0.5), ids[0]: float("inf")},
    "a boolean": lambda ids: {**dict.fromkeys(ids, 0.5), ids[0]: True},
    "a text": lambda ids: {**dict.fromkeys(ids, 0.5), ids[0]: "0.5"},
    "nothing": lambda ids: "",
}


@pytest.mark.parametrize("kind", RUBBISH)
async def test_rubbish_twice_sets_the_group_aside_and_is_counted(
    database: Database, clock: Clock, judge_kit: Any, kind: str
) -> None:
    def rubbish(shown: Any) -> str:
        made = RUBBISH[kind](list(shown))
        return made if isinstance(made, str) else judge_kit.scores_reply(made)

    put_group(database, "g1", "good", "bad")
    judge = judge_kit.ScriptedJudge(rubbish)

    with structlog.testing.capture_logs() as events:
        await worker(database, judge, clock).step()

    assert status(database, "g1") == ("set_aside", "judge_rubbish")
    assert counts(database, "judging") == {"judge_rubbish": 1}
    assert counts(database, "judge_calls") == {"bad": 2}
    assert group_row(database, "g1").attempts == 2
    rows = calls(database)
    assert [row.ok for row in rows] == [False, False]
    assert all(row.error for row in rows)
    assert rows[0].error in judge.conversations[1][-1]["content"]  # the retry showed the error
    with database.read() as session:
        assert load_scored_group(session, "g1") is None
    assert [event["reason"] for event in events if event["event"] == "group_set_aside"] == [
        "judge_rubbish"
    ]


async def test_rubbish_once_costs_one_more_call(
    database: Database, clock: Clock, judge_kit: Any
) -> None:
    put_group(database, "g1", "good", "bad")
    judge = judge_kit.ScriptedJudge("hm", judge_kit.score_by_content(WORTH))
    await worker(database, judge, clock).step()
    assert status(database, "g1") == ("scored", None)
    assert [(row.ok, row.reply == "hm") for row in calls(database)] == [
        (False, True),
        (True, False),
    ]
    assert group_row(database, "g1").attempts == 1


async def test_a_group_the_judge_refuses_is_set_aside(
    database: Database, clock: Clock, judge_kit: Any
) -> None:
    put_group(database, "g1", "good", "bad")
    await worker(database, judge_kit.ScriptedJudge(JudgeRefusalError("too long")), clock).step()
    assert status(database, "g1") == ("set_aside", "judge_refused")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"messages": [b'{"content": "same"}', b'{"content":  "same"}']}, "identical_answers"),
        ({"messages": [b'{"content": "alone"}']}, "identical_answers"),
        ({"messages": [b'{"content": "a"}', b"not json"]}, "unreadable"),
        ({"messages": [b'{"content": "a"}', b"[]"]}, "unreadable"),
        ({"messages": [b'{"content": "a"}', b'{"content": "b"}'], "request": b"{}"}, "unreadable"),
        (
            {
                "messages": [b'{"content": "a"}', b'{"content": "b"}'],
                "request": b'{"messages":[1]}',
            },
            "unreadable",
        ),
    ],
)
async def test_what_cannot_be_compared_is_set_aside_without_a_call(
    database: Database, clock: Clock, judge_kit: Any, fields: Any, reason: str
) -> None:
    put_group(database, "g1", **fields)
    judge = judge_kit.ScriptedJudge("never asked")
    await worker(database, judge, clock).step()
    assert status(database, "g1") == ("set_aside", reason)
    assert judge.conversations == []


async def test_an_outage_gives_the_group_back_and_waits_longer_each_time(
    database: Database, clock: Clock, judge_kit: Any
) -> None:
    for name in ("g1", "g2", "g3"):
        put_group(database, name, "good", "bad")
    judge = judge_kit.ScriptedJudge(DOWN)
    judging = worker(database, judge, clock, concurrency=2)

    with structlog.testing.capture_logs() as events:
        assert await judging.step() == 2
        assert status(database, "g1") == ("sampled", None)
        assert await judging.step() == 0  # waits
        clock.now += 1.0
        assert await judging.step() == 1  # tries another one, in vain, and waits 2 s now
        assert status(database, "g3") == ("sampled", None)
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

    assert [status(database, name)[0] for name in ("g1", "g2", "g3")] == ["scored"] * 3
    assert counts(database, "judge_calls") == {"good": 3, "unanswered": 3}
    assert group_row(database, "g1").attempts == 0
    said = [event for event in events if event["event"] in ("judge_down", "judge_up")]
    assert [event["event"] for event in said] == ["judge_down", "judge_up"]
    assert said[0]["error"] == "judge scripted: connection refused"
    assert said[1]["lasted_s"] == 6.0


async def test_a_group_that_only_the_judge_chokes_on_lets_others_by(
    database: Database, clock: Clock, judge_kit: Any
) -> None:
    def choke(shown: Any) -> str:
        if any(answer["content"] == "poison" for answer in shown.values()):
            raise DOWN
        return judge_kit.score_by_content(WORTH)(shown)

    put_group(database, "g1", "poison", "bad")
    put_group(database, "g2", "good", "bad")
    judging = worker(database, judge_kit.ScriptedJudge(choke), clock, concurrency=1)
    await judging.step()
    for _ in range(3):
        clock.now += 1.0
        await judging.step()
    assert status(database, "g2")[0] == "scored"
    assert status(database, "g1")[0] == "sampled"


async def test_a_claimed_group_is_left_alone_until_its_lease_ends(
    database: Database, clock: Clock, judge_kit: Any
) -> None:
    put_group(database, "g1", "good", "bad")
    judge = judge_kit.ScriptedJudge(judge_kit.score_by_content(WORTH))
    with database.write() as session:
        assert claim_groups(session, "sampled", limit=1, now=clock.now, lease_s=30) == ["g1"]
    assert await worker(database, judge, clock).step() == 0
    clock.now += 30
    assert await worker(database, judge, clock).step() == 1


async def test_the_lease_outlasts_the_slowest_judgement(
    database: Database, clock: Clock, judge_kit: Any
) -> None:
    put_group(database, "g1", "good", "bad")
    leases: list[float] = []

    def look(shown: Any) -> str:
        leases.append(group_row(database, "g1").lease_until)
        return judge_kit.score_by_content(WORTH)(shown)

    judging = worker(database, judge_kit.ScriptedJudge(look), clock, passes=3, timeout_s=50)
    await judging.step()
    # Three passes of two attempts of 50 s, and a minute.
    assert leases[0] == 1_000 + 3 * 2 * 50 + 60


async def test_the_slower_of_two_judgements_changes_nothing(
    database: Database, clock: Clock, judge_kit: Any
) -> None:
    put_group(database, "g1", "good", "bad")
    fast = worker(database, judge_kit.ScriptedJudge(judge_kit.score_by_content(WORTH)), clock)

    class Slow(judge_kit.ScriptedJudge):  # type: ignore[misc]
        async def complete(self, messages: Any, schema: Any) -> Any:
            clock.now += 10_000  # the lease runs out
            assert await fast.step() == 1
            return await super().complete(messages, schema)

    table = judge_kit.score_by_content({"good": 0.2, "bad": 0.3})
    with structlog.testing.capture_logs() as events:
        await worker(database, Slow(table), clock).step()

    with database.read() as session:
        scored = load_scored_group(session, "g1")
    assert scored is not None
    assert scored.scores == (0.9, 0.1)
    assert counts(database, "judging") == {"scored": 1}
    assert "judgement_came_second" in [event["event"] for event in events]


class GatedJudge:
    """Answers only when told to; knows how many calls are under way."""

    model = "gated"

    def __init__(self, judge: Any) -> None:
        self._judge = judge
        self.gate = asyncio.Event()
        self.under_way = 0
        self.most = 0

    async def complete(self, messages: Any, schema: Any) -> Any:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            await self.gate.wait()
            return await self._judge.complete(messages, schema)
        finally:
            self.under_way -= 1


async def test_run_keeps_to_the_concurrency_and_judges_everything(
    database: Database, clock: Clock, judge_kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(7):
        put_group(database, f"g{number}", "good", "bad")
    judge = GatedJudge(judge_kit.ScriptedJudge(judge_kit.score_by_content(WORTH)))
    judging = worker(database, judge, clock, concurrency=3)
    claim, limits = judging._claim, []

    async def counted(limit: int) -> list[str]:
        limits.append(limit)
        return await claim(limit)

    monkeypatch.setattr(judging, "_claim", counted)
    monkeypatch.setattr("ingest.judging.POLL_S", 0.01)
    stop = asyncio.Event()
    running = asyncio.create_task(judging.run(stop))

    await until(lambda: len(limits) == 5)
    assert limits == [3, 0, 0, 0, 0]
    await until(lambda: judge.under_way == 3)
    judge.gate.set()
    await until(lambda: counts(database, "judging") == {"scored": 7})
    stop.set()
    await running

    assert judge.most == 3


async def test_stopping_gives_back_what_is_in_flight_at_once(
    database: Database, clock: Clock, judge_kit: Any
) -> None:
    put_group(database, "g1", "good", "bad")
    judge = GatedJudge(judge_kit.ScriptedJudge("never"))
    stop = asyncio.Event()
    running = asyncio.create_task(worker(database, judge, clock).run(stop))
    await until(lambda: judge.under_way == 1)

    stop.set()
    await running

    assert judge.under_way == 0
    row = group_row(database, "g1")
    assert (row.status, row.lease_until) == ("sampled", 0.0)


async def test_run_outlives_an_outage_of_judge_and_store(
    database: Database, clock: Clock, judge_kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_group(database, "g1", "good", "bad")
    judging = worker(database, judge_kit.ScriptedJudge(judge_kit.score_by_content(WORTH)), clock)
    whole = judging._claim_now
    failures = iter([StoreError("locked"), StoreError("locked")])

    def flaky(limit: int) -> list[str]:
        for failure in failures:
            raise failure
        return whole(limit)

    monkeypatch.setattr(judging, "_claim_now", flaky)
    monkeypatch.setattr("ingest.judging.POLL_S", 0.01)
    stop = asyncio.Event()
    with structlog.testing.capture_logs() as events:
        running = asyncio.create_task(judging.run(stop))
        await until(lambda: status(database, "g1")[0] == "scored")
        stop.set()
        await running
    assert [e["event"] for e in events].count("judging_waits_for_store") == 2


async def test_a_judgement_that_cannot_be_stored_is_made_again(
    database: Database, clock: Clock, judge_kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_group(database, "g1", "good", "bad")
    judging = worker(database, judge_kit.ScriptedJudge(judge_kit.score_by_content(WORTH)), clock)

    def full(*_: Any) -> None:
        raise StoreError("disk full")

    with monkeypatch.context() as patched, structlog.testing.capture_logs() as events:
        patched.setattr(judging, "_record", full)
        assert await judging.step() == 1
    assert [e["event"] for e in events] == ["judgement_not_stored"]
    assert status(database, "g1")[0] == "sampled"
    clock.now += 1_000
    assert await judging.step() == 1
    assert status(database, "g1")[0] == "scored"
