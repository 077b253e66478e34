"""Who judged a gate is kept, how far the passes differ too, and what was paid for is not lost."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import delete, select

from deploy.canary.controller import Controller
from deploy.registry.canary_rule import judge_name
from deploy.registry.lineage import render_lineage, trace_lineage
from ingest.errors import JudgeUnavailableError
from ingest.judges.replies import CachedJudge, KeptReplies, ReplyStore
from ingest.retention.deletion import blank_comparisons
from ingest.ruler.judge import JudgeReply
from ingest.ruler.prompt import rubric_hash
from sidecar.backoff import Backoff
from sidecar.settings import Judge as JudgeSettings, ProjectRubric
from sidecar.store.database import Database
from sidecar.store.models import CounterRow, ExchangeRow, JudgeCallRow, JudgeReplyRow
from support.fake_judge import FakeJudge, Shown, scores_reply

if TYPE_CHECKING:
    from tests.deploy.conftest import Api, World

RUBRIC = "the better one"


def by_place(shown: Shown) -> str:
    """0.75 for what is shown first, 0.25 for what is shown last, whatever it says."""
    return scores_reply(dict(zip(shown, (0.75, 0.25), strict=True)))


async def play(world: World, ticks: int) -> None:
    controller = world.controller()
    for _ in range(ticks):
        await controller.tick()


def judge_calls(world: World) -> dict[str, int]:
    return {row.reason: row.count for row in world.rows(CounterRow) if row.stage == "judge_calls"}


@pytest.mark.both_stores
async def test_a_comparison_keeps_its_judge_and_how_far_the_passes_differ(
    world: World, api: Api
) -> None:
    name = world.register(1)
    world.hold_out(2)
    world.judge = FakeJudge(by_place, model="exam/judge")
    world.judging = JudgeSettings(rubric=RUBRIC, passes=2)

    await play(world, 4)

    for one in world.comparisons():
        assert (one.judge_model, one.rubric_hash) == ("exam/judge", rubric_hash(RUBRIC))
        # 0.75 in one pass and 0.25 in the reverse order: 0.5 apart, and the pair turns round.
        assert (one.disagreement, one.flipped_pairs) == (0.5, 1.0)
        assert [answer["disagreement"] for answer in one.answers] == [0.5, 0.5]
    gate = world.evidence(name)["gate"]
    exam = judge_name("exam/judge", rubric_hash(RUBRIC))
    assert gate["judges"] == [exam]
    assert (gate["disagreement"], gate["flipped_pairs"]) == (0.5, 1.0)
    assert gate["judge_gives_reward"] is False
    shown = (await api.get(f"/canaries/{world.canary(name).canary_id}")).json()
    assert (shown["gate_judges"], shown["judge_gives_reward"]) == ([exam], False)
    evidence = (await api.get(f"/canaries/{world.canary(name).canary_id}/evidence")).json()
    first = evidence["comparisons"][0]
    assert (first["judge_model"], first["disagreement"]) == ("exam/judge", 0.5)


async def test_the_lineage_names_the_judge_when_its_calls_are_deleted_and_contents_forgotten(
    world: World,
) -> None:
    name = world.register(1)
    world.hold_out(2)
    world.judge_gives_reward = True
    world.judging = JudgeSettings(rubric=RUBRIC, passes=2)
    await play(world, 4)
    with world.database.write() as session:
        session.execute(delete(JudgeCallRow))
        blank_comparisons(session, ["x1", "x2"])

    with world.database.read() as session:
        lineage = trace_lineage(session, "m", name)

    canary = lineage.steps[0].canary
    assert canary is not None
    assert canary.gate_judges == (judge_name("fake-judge", rubric_hash(RUBRIC)),)
    assert canary.gate_disagreements == (0.0, 0.0)
    assert "that judge also gave the reward that it was trained on" in render_lineage(lineage)
    kept = world.comparisons()[0].answers[0]
    assert (kept["content"], kept["explanation"], kept["disagreement"]) == ("", "", 0.0)


class OnePass(FakeJudge):
    """Is away for every second question about a prompt, until it is mended."""

    mended = False

    async def complete(
        self, messages: Sequence[Mapping[str, str]], schema: Mapping[str, Any]
    ) -> JudgeReply:
        prompt = messages[1]["content"]
        asked = next(name for name in ("ask x1", "ask x2") if name in prompt)
        before = sum(asked in one for one in self.prompts)
        if before % 2 == 1 and not self.mended:
            raise JudgeUnavailableError("the second pass failed")
        return await super().complete(messages, schema)


async def test_calls_that_were_answered_before_an_outage_are_recorded_too(world: World) -> None:
    world.register(1)
    world.hold_out(2)
    judge = OnePass(model="fake-judge")
    world.judge, world.judging = judge, JudgeSettings(rubric=RUBRIC, passes=2)
    controller = world.controller()
    for _ in range(2):
        await controller.tick()
    before = len(judge.prompts)
    judge.mended = True
    for _ in range(3):
        world.clock.now += 100.0
        await controller.tick()

    assert before == 2, "the first pass of both comparisons"
    assert [one.status for one in world.comparisons()] == ["scored", "scored"]
    assert judge_calls(world) == {"good": 2 + 4}
    assert len(world.rows(JudgeCallRow)) == 6


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
        super().__init__(model="fake-judge")
        self.gate = asyncio.Event()

    async def complete(
        self, messages: Sequence[Mapping[str, str]], schema: Mapping[str, Any]
    ) -> JudgeReply:
        reply = await super().complete(messages, schema)
        await self.gate.wait()
        return reply


@pytest.fixture
def hasty(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A store that gives up on a lock after 50 ms in place of 15 s, as are all waits here."""
    if not world.database.url.startswith("sqlite"):
        pytest.skip("the lock is SQLite's")
    monkeypatch.setattr("sidecar.store.engines.BUSY_TIMEOUT_S", 0.05)
    monkeypatch.setattr("ingest.store.listing.PAUSES", Backoff(first_s=0.05, last_s=0.05))
    with closing(Database(world.database.url)) as database:
        world.database = database
        yield world


async def asked_twice(world: World, judge: Locking) -> tuple[Controller, asyncio.Task[None]]:
    """Begin a gate of two prompts. Returns: the tick in which the judge was asked about both."""
    world.register(1)
    world.hold_out(2)
    world.judge, world.judging = judge, JudgeSettings(rubric=RUBRIC, passes=1)
    controller = world.controller()
    await controller.tick()
    ticking = asyncio.create_task(controller.tick())
    while len(judge.conversations) < 2:
        await asyncio.sleep(0.01)
    return controller, ticking


async def test_a_locked_store_costs_no_comparison(hasty: World) -> None:
    judge = Locking()
    _, ticking = await asked_twice(hasty, judge)
    with locked(hasty.database):
        judge.gate.set()
        await asyncio.sleep(0.4)  # the store has refused several times
        assert not ticking.done()
        assert hasty.comparisons() == []

    await ticking

    assert [one.status for one in hasty.comparisons()] == ["scored", "scored"]
    assert len(judge.conversations) == 2, "nothing was asked about twice"
    assert judge_calls(hasty) == {"good": 2}


async def test_a_stop_of_control_waits_until_comparisons_are_stored(hasty: World) -> None:
    judge = Locking()
    controller, ticking = await asked_twice(hasty, judge)
    with locked(hasty.database):
        judge.gate.set()
        await asyncio.sleep(0.2)
        ticking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ticking
        settling = asyncio.create_task(controller.settle())
        await asyncio.sleep(0.2)
        assert not settling.done()

    await settling

    assert [one.status for one in hasty.comparisons()] == ["scored", "scored"]


async def test_a_stop_does_not_wait_for_ever(hasty: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.canary.gate.STOP_GRACE_S", 0.1)
    judge = Locking()
    controller, ticking = await asked_twice(hasty, judge)
    with locked(hasty.database):
        judge.gate.set()
        await asyncio.sleep(0.2)
        ticking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ticking
        await asyncio.wait_for(controller.settle(), 5.0)
        assert hasty.comparisons() == []


async def test_a_pass_that_was_paid_for_before_an_outage_is_not_bought_again(world: World) -> None:
    world.register(1)
    world.hold_out(2)
    judge = OnePass(model="fake-judge")
    world.judging = JudgeSettings(model="fake-judge", rubric=RUBRIC, passes=2)
    kept = KeptReplies(
        ReplyStore(world.database, max_bytes=10**6, max_age_s=1e6, clock=world.clock)
    )
    world.judge = CachedJudge(judge, world.judging, kept)  # type: ignore[assignment]
    controller = world.controller()
    for _ in range(2):
        await controller.tick()
    judge.mended = True
    for _ in range(3):
        world.clock.now += 100.0
        await controller.tick()

    assert [one.status for one in world.comparisons()] == ["scored", "scored"]
    # The first passes twice: paid for, then replayed; the second ones once.
    assert judge_calls(world) == {"good": 4, "cached": 2}
    assert len(judge.prompts) == 4
    with world.database.read() as session:
        owners = set(session.scalars(select(JudgeReplyRow.exchange_id)))
    assert owners == {"x1", "x2"}


async def test_each_held_out_session_is_judged_by_the_rubric_of_its_project(world: World) -> None:
    name = world.register(1)
    world.hold_out(2)
    with world.database.write() as session:
        first = session.scalars(select(ExchangeRow).order_by(ExchangeRow.seq)).all()[0]
        first.project, of_shop = "shop", first.exchange_id
    world.judge = judge = FakeJudge(by_place)
    world.judging = JudgeSettings(
        rubric=RUBRIC, passes=1, projects={"shop": ProjectRubric(rubric="Sell politely.")}
    )

    await play(world, 4)

    shop = rubric_hash("Sell politely.")
    assert {one.exchange_id == of_shop: one.rubric_hash for one in world.comparisons()} == {
        True: shop, False: rubric_hash(RUBRIC),
    }  # fmt: skip
    asked = ["".join(message["content"] for message in talk) for talk in judge.conversations]
    assert sorted(("Sell politely." in one, RUBRIC in one) for one in asked) == [
        (False, True), (True, False),
    ]  # fmt: skip
    assert {row.rubric_hash for row in world.rows(JudgeCallRow)} == {shop, rubric_hash(RUBRIC)}
    judges = [judge_name("scripted", digest) for digest in sorted((shop, rubric_hash(RUBRIC)))]
    assert world.evidence(name)["gate"]["judges"] == judges
