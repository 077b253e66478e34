"""The gate and a judge that fails: over one prompt, or over all."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

import pytest
from sqlalchemy import delete, select

from deploy.canary.controller import Controller
from deploy.errors import LostLeaseError
from deploy.registry.canary_rule import judge_name
from deploy.registry.lineage import render_lineage, trace_lineage
from ingest.errors import (
    JudgeBusyError,
    JudgeGarbledError,
    JudgeRefusalError,
    JudgeRejectedError,
    JudgeSpentError,
    JudgeTooLongError,
    JudgeUnavailableError,
)
from ingest.judges.replies import CachedJudge, KeptReplies, ReplyStore
from ingest.retention.deletion import blank_comparisons
from ingest.ruler.judge import JudgeReply
from ingest.ruler.prompt import rubric_hash
from sidecar.backoff import Backoff
from sidecar.settings import Judge as JudgeSettings, Privacy, ProjectRubric
from sidecar.store.database import Database
from sidecar.store.models import CounterRow, ExchangeRow, JudgeCallRow, JudgeReplyRow
from support.fake_judge import FakeJudge, Shown, scores_reply
from tests.deploy.conftest import Api, World

KEY = "sk-ant-" + "zebra0marker0" * 4
OWN_FAULTS = [
    (JudgeRejectedError("403: content filter"), "judge_rejected"),
    (JudgeGarbledError("a message of null"), "judge_garbled"),
    (JudgeUnavailableError("500: worker crashed"), "judge_unavailable"),
    (JudgeRefusalError("filtered"), "judge_refused"),
    (JudgeTooLongError("too long", asked=True), "judge_too_long"),
]


class PickyJudge(FakeJudge):
    """A judge that raises an error over each prompt that holds one of some texts."""

    def __init__(self, error: Exception, *texts: str) -> None:
        super().__init__()
        self.error, self.texts, self.asked = error, texts, 0

    async def complete(
        self, messages: Sequence[Mapping[str, str]], schema: Mapping[str, Any]
    ) -> JudgeReply:
        self.asked += 1
        if any(text in messages[1]["content"] for text in self.texts):
            raise self.error
        return await super().complete(messages, schema)


async def play(world: World, controller: Controller, ticks: int, *, every_s: float = 1.0) -> None:
    for _ in range(ticks):
        await controller.tick()
        world.clock.now += every_s


async def test_a_prompt_that_the_judge_refuses_does_not_hold_the_gate(world: World) -> None:
    name = world.register(1)
    world.hold_out(6)
    error, reason = OWN_FAULTS[0]
    world.judge = PickyJudge(error, "ask x6", "ask x5")  # the newest two: asked first

    await play(world, world.controller(), 12)

    assert world.canary(name).phase == "ramping"
    assert world.evidence(name)["gate"]["scored"] == 4
    counts = {row.reason: row.count for row in world.rows(CounterRow) if row.stage == "gate"}
    assert counts in ({"scored": 4}, {"scored": 4, reason: 2})


@pytest.mark.parametrize(("error", "reason"), OWN_FAULTS)
async def test_prompts_that_the_judge_refuses_are_set_aside_and_counted(
    world: World, error: Exception, reason: str
) -> None:
    world.register(1)
    world.hold_out(4)
    judge = PickyJudge(error, "ask x4", "ask x3")
    world.judge = judge
    controller = world.controller()

    await play(world, controller, 12)
    asked = judge.asked
    await play(world, controller, 20)

    counts = {row.reason: row.count for row in world.rows(CounterRow) if row.stage == "gate"}
    assert counts == {"scored": 2, reason: 2}
    assert judge.asked == asked, "what is set aside is paid for no more"


class ShortJudge(FakeJudge):
    """A judge whose known context holds nothing."""

    async def context_tokens(self) -> int:
        return 64


async def test_what_is_too_long_for_a_known_context_is_set_aside_without_a_call(
    world: World,
) -> None:
    world.register(1)
    world.hold_out(4)
    world.judge = judge = ShortJudge()

    await play(world, world.controller(), 12)

    counts = {row.reason: row.count for row in world.rows(CounterRow) if row.stage == "gate"}
    assert counts == {"judge_too_long": 4}
    assert judge.conversations == []


@pytest.mark.parametrize(
    "error",
    [
        OWN_FAULTS[0][0],
        JudgeBusyError("slow"),
        JudgeSpentError("judge.budget is spent: $5.00 of $5.00", until=1e9),
    ],
)
async def test_a_judge_that_refuses_everything_makes_the_gate_wait_and_burns_no_prompt(
    world: World, error: Exception
) -> None:
    name = world.register(1)
    world.hold_out(4)
    judge = PickyJudge(error, "")
    world.judge = judge
    controller = world.controller()

    await play(world, controller, 34, every_s=3.0)

    assert world.canary(name).reason == f"gate waits: {error}"
    assert world.comparisons() == []
    assert judge.asked <= 2 * 8, "after longer and longer waits"

    judge.texts = ()
    await play(world, controller, 24, every_s=3.0)
    assert world.canary(name).phase == "ramping"


def quote(shown: Shown) -> str:
    """A judge that repeats what it is shown."""
    entries = [
        {"id": name, "explanation": f"It says: {answer['content']}", "score": 0.5}
        for name, answer in shown.items()
    ]
    return json.dumps({"scores": entries})


@pytest.mark.parametrize(
    ("privacy", "kept"),
    [
        ({}, True),
        ({"flagged": "drop"}, False),
        ({"before_storage": True}, False),
        ({"projects": {"default": {"flagged": "drop"}}}, False),
    ],
)
async def test_a_comparison_keeps_no_answer_that_may_not_be_stored(
    world: World, privacy: dict[str, Any], kept: bool
) -> None:
    world.register(1)
    world.hold_out(2)
    world.sampler.script = (f"the key is {KEY}", "none")
    world.privacy = Privacy.model_validate(privacy)

    await play(world, world.controller(), 12)

    comparisons = world.comparisons()
    assert [one.status for one in comparisons] == ["scored", "scored"]
    answers = [answer for one in comparisons for answer in one.answers]
    assert (KEY in str(answers)) is kept
    assert all(answer["score"] is not None for answer in answers)
    said = [(answer["content"], answer.get("left_out")) for answer in answers]
    assert (None, "private") in said or kept
    assert ("none", None) in said


@pytest.mark.parametrize(
    ("privacy", "key_kept"),
    [
        ({}, True),
        ({"flagged": "drop"}, False),
        ({"projects": {"default": {"flagged": "drop"}}}, False),
    ],
)
async def test_the_judges_words_are_not_kept_when_they_quote_what_may_not_be_stored(
    world: World, privacy: dict[str, Any], key_kept: bool
) -> None:
    world.register(1)
    world.hold_out(2)
    world.sampler.script = (f"the key is {KEY}", "none")
    world.judge.script = [f"no JSON, but {KEY}", quote]
    world.privacy = Privacy.model_validate({"hide": [], **privacy})

    await play(world, world.controller(), 12)

    explanations = [one["explanation"] for row in world.comparisons() for one in row.answers]
    with world.database.read() as session:
        calls = [(one.ok, one.reply, one.error) for one in session.scalars(select(JudgeCallRow))]
    assert (KEY in str(explanations)) is key_kept
    assert (KEY in str(calls)) is key_kept
    assert "It says: none\nIt says: none" in explanations  # one line a pass
    assert {ok for ok, _, _ in calls} == {True, False}
    if not key_kept:
        assert "" in explanations
        assert (True, "", None) in calls
        assert (False, "", "left out: private") in calls


# A control that loses its lease in the middle of a gate leaves the rest to the next one.


DUE = 8
"""Judge calls of a gate of four prompts with two passes."""


async def gating(world: World) -> str:
    """A candidate that is loaded, and whose gate has not begun."""
    name = world.register(1)
    world.hold_out(4)
    await world.controller().tick()
    assert world.canary(name).phase == "gating"
    return name


async def test_a_control_that_lost_its_lease_asks_the_judge_no_more(world: World) -> None:
    """It was stopped for longer than its lease while the first calls were under way."""
    name = await gating(world)
    before = world.canary(name)
    controller = world.controller()
    world.acts = lambda: not world.judge.conversations

    with pytest.raises(LostLeaseError):
        await controller.tick()

    under_way = len(world.judge.conversations)
    assert under_way in (1, 2), "two comparisons at once, one call of each"
    assert world.canary(name) == before, "it decides nothing either"

    world.acts = lambda: True
    world.clock.now += 60.0
    for _ in range(4):
        await controller.tick()
    assert world.canary(name).phase == "ramping"
    assert len(world.judge.conversations) == under_way + DUE
    assert len(world.rows(JudgeCallRow)) == under_way + DUE, "what was paid for is kept"


async def test_without_the_lease_nothing_is_sampled(world: World) -> None:
    await gating(world)
    world.acts = lambda: False

    with pytest.raises(LostLeaseError):
        await world.controller().tick()

    assert world.sampler.requests == []
    assert world.judge.conversations == []


async def test_a_comparison_whose_last_answer_came_is_stored_without_the_lease(
    world: World,
) -> None:
    """It is paid for, and the next control need not make it again."""
    await gating(world)
    world.acts = lambda: len(world.judge.conversations) < 4

    with pytest.raises(LostLeaseError):
        await world.controller().tick()

    assert len(world.rows(JudgeCallRow)) == 4


# Who judged a gate is kept, how far the passes differ too, and what was paid for is not lost.


RUBRIC = "the better one"


def by_place(shown: Shown) -> str:
    """0.75 for what is shown first, 0.25 for what is shown last, whatever it says."""
    return scores_reply(dict(zip(shown, (0.75, 0.25), strict=True)))


async def ticks_of(world: World, ticks: int) -> None:
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

    await ticks_of(world, 4)

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
    await ticks_of(world, 4)
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


@pytest.mark.parametrize(
    ("kept", "calls"), [(False, {"good": 6}), (True, {"good": 4, "cached": 2})]
)
async def test_calls_before_an_outage_are_recorded_and_not_bought_again_where_replies_are_kept(
    world: World, kept: bool, calls: dict[str, int]
) -> None:
    """The first passes twice, the second ones once."""
    world.register(1)
    world.hold_out(2)
    judge = OnePass(model="fake-judge")
    world.judge, world.judging = judge, JudgeSettings(model="fake-judge", rubric=RUBRIC, passes=2)
    if kept:
        store = ReplyStore(world.database, max_bytes=10**6, max_age_s=1e6, clock=world.clock)
        world.judge = CachedJudge(judge, world.judging, KeptReplies(store))  # type: ignore[assignment]
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
    assert judge_calls(world) == calls
    assert len(world.rows(JudgeCallRow)) == 6
    assert len(judge.prompts) == calls["good"]
    owners = {row.exchange_id for row in world.rows(JudgeReplyRow)}
    assert owners == ({"x1", "x2"} if kept else set())


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

    await ticks_of(world, 4)

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
