"""A replay: which prompts are asked, what is proven, what stands in the report, who waits."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any

import pytest
from sqlalchemy import update

from deploy.canary.replay import GIVE_UP_AFTER, Load, Prompt, Replay, Report, draw, lines_of
from deploy.errors import EngineError, InvalidAdapterError
from deploy.records import trial_of
from ingest.errors import (
    EngineDownError,
    JudgeRefusalError,
    JudgeRejectedError,
    JudgeSpentError,
    JudgeUnavailableError,
    SamplingError,
)
from ingest.privacy.texts import JudgeView
from sidecar.store.models import ExchangeRow, GateComparisonRow, JudgeCallRow
from support.fake_judge import scores_reply
from tests.deploy.conftest import World

NEW, OLD = "m--v2-000000000002", "m--v1-000000000001"
DAY_S = 86_400.0


def prompts_of(world: World, *, since: float = 0.0, limit: int = 200) -> list[Prompt]:
    with world.database.read() as session:
        return draw(
            session,
            world.line,
            trial=trial_of(world.line.name, NEW, OLD, "salt"),
            since=since,
            now=world.clock.now,
            limit=limit,
        )


def replay_of(world: World, load: Load, sleep: Callable[[float], Awaitable[object]]) -> Replay:
    return Replay(
        trial_of(world.line.name, NEW, OLD, "salt"),
        sampler=world.sampler,
        room=world.room,
        judge=world.judge,
        rules=world.rules,
        judging=world.judging,
        view=JudgeView(world.privacy),
        parallel=2,
        load=load,
        sleep=sleep,
    )


async def played(
    world: World,
    prompts: list[Prompt],
    *,
    loads: list[str] | None = None,
    load_error: Exception | None = None,
    after_wait: Callable[[], None] = lambda: None,
) -> Report:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        after_wait()

    async def load() -> None:
        if loads is not None:
            loads.append("load")
        raise load_error or EngineError("still away")

    replay = replay_of(world, load, sleep)
    await replay.run(prompts, lambda done: None)
    return replay.report(since=0.0)


async def no_load() -> None:
    raise EngineError("still away")


def scores(world: World, *, new: float, old: float) -> None:
    world.judge.scores = {f"says {NEW}": new, f"says {OLD}": old}


async def test_a_better_candidate_is_proven_better_and_nothing_is_stored(world: World) -> None:
    world.hold_out(40)
    scores(world, new=0.9, old=0.4)

    report = await played(world, prompts_of(world))

    assert (report.verdict, report.prompts, report.stopped) == ("better", 40, "")
    assert report.difference is not None
    assert report.difference.mean == pytest.approx(0.5)
    assert report.difference.low > 0.2
    assert report.judge_calls == 40 * world.judging.passes
    with world.database.read() as session:
        assert session.query(GateComparisonRow).count() == 0
        assert session.query(JudgeCallRow).count() == 0


async def test_a_worse_one_is_proven_worse_before_all_prompts_are_paid_for(world: World) -> None:
    world.hold_out(60)
    scores(world, new=0.2, old=0.8)

    report = await played(world, prompts_of(world))

    assert report.verdict == "worse"
    assert report.prompts < 30
    assert report.stopped == f"it is proven worse: {60 - report.prompts} prompts not asked"
    assert report.why.startswith("worse than the champion in")


async def test_an_equal_one_is_undecided_by_few_prompts(world: World) -> None:
    world.hold_out(6)
    report = await played(world, prompts_of(world))
    assert report.verdict == "undecided"
    assert "no worse than the champion" in report.why


async def test_the_report_shows_kinds_and_hours(world: World) -> None:
    start = world.clock.now - world.clock.now % DAY_S + DAY_S
    with world.together():
        for number in range(12):
            world.clock.now = start + number * 7_200.0
            world.serve(f"s{number}", held_out=True, project="shop" if number % 2 else "default")
    world.clock.now += DAY_S
    scores(world, new=0.6, old=0.5)

    report = await played(world, prompts_of(world))

    assert [kind.name for kind in report.kinds] == ["project default", "project shop"]
    assert [(one.name, one.difference.groups) for one in report.hours] == [
        (f"{first:02d}-{first + 4:02d} h", 2) for first in range(0, 24, 4)
    ]
    text = "\n".join(lines_of(report))
    for words in ("v2 against v1: 12 held-out prompts", "by hour (UTC)", "project shop"):
        assert words in text
    assert json.loads(json.dumps(asdict(report)))["verdict"] == report.verdict


def test_prompts_are_of_the_span_of_time_and_have_no_words_of_the_candidate(world: World) -> None:
    """Of its own sessions the first turn is taken, after all others."""
    old = world.serve("old", held_out=True)
    world.clock.now += 1_000.0
    since = world.clock.now
    wanted = {world.serve(f"new-{number}", held_out=True) for number in range(5)}
    its = world.serve("its", held_out=True, adapter=NEW)
    later = world.serve("its", held_out=True, adapter=NEW)
    with world.database.write() as session:
        of_later = ExchangeRow.exchange_id == later
        session.execute(update(ExchangeRow).where(of_later).values(turn=1, parent_id=its))
    world.serve("learned-from")
    world.clock.now += 1_000.0

    imported = world.serve("imported", held_out=True)
    with world.database.write() as session:
        of_it = ExchangeRow.exchange_id == imported
        session.execute(update(ExchangeRow).where(of_it).values(started_at=since - 1.0))

    found = prompts_of(world, since=since, limit=5)
    assert {one.held_out.exchange_id for one in found} == wanted
    found = prompts_of(world, since=since)
    assert {one.held_out.exchange_id for one in found} == wanted | {its}
    every = {one.held_out.exchange_id for one in prompts_of(world)}
    assert every == wanted | {its, old, imported}
    assert len(prompts_of(world, limit=2)) == 2


async def test_what_the_judge_cannot_score_is_counted_and_ends_it(world: World) -> None:
    world.hold_out(40)
    world.judge.script = [JudgeRefusalError("no")]

    report = await played(world, prompts_of(world))

    assert report.prompts == GIVE_UP_AFTER
    assert report.stopped == "none of 10 prompts in a row could be scored (judge_refused)"
    assert sum(report.set_aside.values()) == GIVE_UP_AFTER
    assert report.difference is None
    assert lines_of(report)


async def test_answers_that_one_arm_fails_to_give_count_against_it(world: World) -> None:
    world.hold_out(30)
    world.sampler.errors[NEW] = SamplingError("500 in its kernel")

    report = await played(world, prompts_of(world))

    assert report.verdict == "worse"
    assert set(report.set_aside) == {"sampling_failed_candidate"}


async def test_it_waits_for_users_and_for_vllm_and_gives_up_in_the_end(world: World) -> None:
    world.hold_out(4)
    world.room.open = False
    report = await played(world, prompts_of(world))
    assert (report.prompts, report.difference) == (0, None)
    assert "users need the capacity" in report.stopped

    for error in (EngineDownError("vLLM is down"), SamplingError("/metrics: status 404")):
        world.room.open, world.room.error = True, error
        loads: list[str] = []
        report = await played(world, prompts_of(world), loads=loads)
        assert str(error) in report.stopped
        assert loads


async def test_it_waits_for_the_judge_and_keeps_the_answers(world: World) -> None:
    world.hold_out(6)
    world.judge.away = True

    def back() -> None:
        world.judge.away = False

    report = await played(world, prompts_of(world), after_wait=back)

    assert (report.prompts, report.set_aside, report.stopped) == (6, {}, "")
    assert len(world.sampler.requests) == 6 * 2 * world.rules.gate_answers


async def test_a_judge_that_refuses_every_question_ends_it_at_once(world: World) -> None:
    world.hold_out(6)
    world.judge.script = [JudgeRejectedError("401: no such key")]

    report = await played(world, prompts_of(world))

    assert report.prompts == 0
    assert report.stopped == "the judge refuses every question: 401: no such key"


async def test_a_budget_that_is_spent_for_long_ends_it_at_once(world: World) -> None:
    world.hold_out(6)
    world.judge.script = [JudgeSpentError("judge.budget_usd is spent", until=math.inf)]
    waits: list[str] = []

    report = await played(world, prompts_of(world), after_wait=lambda: waits.append("waits"))

    assert (report.prompts, waits) == (0, [])
    assert report.stopped == "judge.budget_usd is spent"


async def test_answers_that_the_champion_fails_to_give_are_shown_as_no_scores(world: World) -> None:
    world.hold_out(12)
    prompts = prompts_of(world)
    scores(world, new=0.5, old=0.5)
    world.sampler.errors[OLD] = SamplingError("400")

    report = await played(world, prompts)

    assert report.difference is not None
    assert (report.verdict, report.difference.mean) == ("undecided", 1.0)
    assert (report.lost, report.champion_lost) == (0, report.difference.groups)
    said = f"of these {report.champion_lost} count as +1: answers of v1 could not be scored"
    assert said in lines_of(report)


async def test_an_interrupted_one_says_so_and_keeps_what_was_answered(world: World) -> None:
    world.hold_out(6)
    world.judge.away = True
    waits = asyncio.Event()

    async def sleep(_: float) -> None:
        waits.set()
        await asyncio.Event().wait()

    replay = replay_of(world, no_load, sleep)
    waiting = asyncio.ensure_future(replay.run(prompts_of(world), lambda done: None))
    await waits.wait()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)

    assert waiting.cancelled()
    assert replay.report(since=0.0).stopped == "it was interrupted"


async def test_an_error_that_no_check_foresaw_keeps_what_was_found(world: World) -> None:
    world.hold_out(6)
    prompts = prompts_of(world)
    scores(world, new=0.6, old=0.5)
    bad = str(prompts[2].held_out.request["messages"][-1]["content"])

    def reply(answers: Mapping[str, dict[str, Any]]) -> str:
        if bad in world.judge.prompts[-1]:
            raise RuntimeError("strange")
        return scores_reply(dict.fromkeys(answers, 0.5))

    world.judge.script = [reply]
    report = await played(world, prompts)

    assert report.stopped == "RuntimeError: strange"
    assert report.prompts in (2, 3)


async def test_a_judge_that_fails_on_one_prompt_alone_sets_it_aside(world: World) -> None:
    world.hold_out(6)
    prompts = prompts_of(world)
    fails = str(prompts[0].held_out.request["messages"][-1]["content"])

    def reply(answers: Mapping[str, dict[str, Any]]) -> str:
        if fails in world.judge.prompts[-1]:
            raise JudgeUnavailableError("timeout")
        return scores_reply(dict.fromkeys(answers, 0.5))

    world.judge.script = [reply]
    report = await played(world, prompts)

    assert (report.prompts, report.set_aside) == (6, {"judge_unavailable": 1})


async def test_what_was_found_stays_when_the_folder_is_changed(world: World) -> None:
    world.hold_out(4)
    world.room.error = EngineDownError("vLLM is down")

    report = await played(
        world, prompts_of(world), load_error=InvalidAdapterError("the folder was changed")
    )

    assert report.stopped == "the candidate cannot be loaded any more: the folder was changed"


async def test_answers_that_the_judge_cannot_score_count_against_their_arm(world: World) -> None:
    """As at the gate: the judge refuses a third of the prompts where it sees the candidate's."""
    world.hold_out(60)
    prompts = prompts_of(world)
    refused = {str(one.held_out.request["messages"][-1]["content"]) for one in prompts[::3]}

    def reply(answers: Mapping[str, dict[str, Any]]) -> str:
        ours = {name: one["content"] == f"says {NEW}" for name, one in answers.items()}
        if any(ours.values()) and any(one in world.judge.prompts[-1] for one in refused):
            raise JudgeRefusalError("no")
        return scores_reply({name: 0.6 if own else 0.5 for name, own in ours.items()})

    world.judge.script = [reply]
    report = await played(world, prompts)

    assert report.verdict == "worse"
    assert set(report.set_aside) == {"judge_refused"}
    assert report.difference is not None
    assert report.difference.groups == report.prompts
