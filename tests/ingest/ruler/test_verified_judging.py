"""Verifiers and the judge make the reward of a group, in the store and for the learner."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import select

from ingest.errors import JudgeUnavailableError
from ingest.ruler.judging import JudgingWorker
from ingest.store.rotation import rotate
from ingest.verifiers.records import Failure, Finding, Result
from ingest.verifiers.rewarding import Rewarding, open_rewarding
from learner.runs.selection import select_groups
from sidecar.settings import Judge as JudgeSettings, Reward, Settings
from sidecar.settings.judge import LengthVerifier
from sidecar.store.database import Database
from sidecar.store.keyring import Keyring
from sidecar.store.models import AnswerRow
from support.fake_checker import FakeChecker, Find
from support.fake_judge import FakeJudge, score_by_content
from tests.ingest.conftest import Bench

WORTH = {"good": 0.9, "fair": 0.5, "bad": 0.1}


def worker(bench: Bench, judge: Any, checker: FakeChecker, **changes: Any) -> JudgingWorker:
    own = {name: changes.pop(name) for name in [*changes] if name in LengthVerifier.model_fields}
    one = LengthVerifier(kind="length", **{"max_tokens": 9, **own})
    reward = Reward(verifiers={"v": one}, **changes)
    return JudgingWorker(
        bench.database,
        judge,
        JudgeSettings(model="scripted", rubric="Be good.", passes=1),
        clock=bench.clock,
        draw_seed=lambda _: 1,
        rewarding=Rewarding(bench.database, reward, {"v": checker}),
    )


def finds(**scores: float) -> Find:
    def find(content: str) -> Result:
        return Finding(score=scores[content], why=f"saw {content}")

    return find


@pytest.mark.both_stores
async def test_score_independent_reward_and_reward_are_kept_apart(bench: Bench) -> None:
    bench.put("g1", "good", "bad")
    judge = FakeJudge(score_by_content(WORTH))

    await worker(bench, judge, FakeChecker(finds(good=0.5, bad=1.0)), weight=3.0).step()

    found = bench.scored()
    assert found.scores == (0.9, 0.1)
    assert found.rewarded is not None
    assert found.rewarded.independent == (0.5, 1.0)
    assert found.rewards == pytest.approx(((0.9 + 3 * 0.5) / 4, (0.1 + 3 * 1.0) / 4))
    assert found.rewarded.checks[1] == [
        {"name": "v", "version": "1", "score": 1.0, "why": "saw bad", "error": None}
    ]
    assert found.rewarded.rule["combine"] == "weights"
    assert found.rewarded.rule["verifiers"][0]["weight"] == 3.0


async def test_the_learner_trains_on_the_reward(bench: Bench) -> None:
    bench.put("g1", "good", "bad")
    judge = FakeJudge(score_by_content({"good": 0.9, "bad": 0.7}))
    checker = FakeChecker(finds(good=0.0, bad=1.0))
    await worker(bench, judge, checker, gate=True).step()

    selection = select_groups([bench.scored()], pack_tokens=100)

    # 0.4 * 0.9 = 0.36 and 0.6 + 0.4 * 0.7 = 0.88: the mean is 0.62
    (group,) = selection.groups
    assert [row.advantage for row in group.rows] == pytest.approx([-0.26, 0.26])


LOOK_ALIKE = [
    json.dumps({"role": "assistant", "content": "same", "reasoning": thought}).encode()
    for thought in ("short", "much longer")
]


class ByReasoning(FakeChecker):
    async def check(self, request: bytes, answers: Any, project: str) -> list[Result]:
        thoughts = [json.loads(one.message).get("reasoning") for one in answers]
        return [Finding(score=float(one == "short")) for one in thoughts]


async def test_verifiers_tell_apart_what_looks_alike_to_the_judge(bench: Bench) -> None:
    bench.put("g1", messages=LOOK_ALIKE)
    judge = FakeJudge("never asked")

    await worker(bench, judge, ByReasoning(finds())).step()

    found = bench.scored()
    assert judge.conversations == []
    assert found.scores == (0.5, 0.5)
    assert found.rewards == (0.75, 0.25)
    assert "was not asked" in found.explanations[0]


async def test_answers_that_are_alike_to_all_are_set_aside(bench: Bench) -> None:
    bench.put("g1", "good", "good")
    judge = FakeJudge("never asked")

    await worker(bench, judge, FakeChecker(finds(good=1.0))).step()

    assert bench.status("g1") == ("set_aside", "identical_answers")


async def test_a_score_without_the_judge_does_not_end_its_outage(bench: Bench) -> None:
    bench.put("g0", "good", "bad")
    judge = FakeJudge(JudgeUnavailableError("away"))
    made = worker(bench, judge, ByReasoning(finds()))
    await made.step()
    assert made._blame.waiting.lasts
    bench.put("g1", messages=LOOK_ALIKE)
    bench.clock.now += 3_000.0

    await made.step()

    assert bench.status("g1") == ("scored", None)
    assert made._blame.waiting.lasts


async def test_a_malformed_answer_stays_in_its_group_as_the_lowest_negative(bench: Bench) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    request = json.dumps({"messages": [{"role": "user", "content": "x"}], "tools": [tool]}).encode()

    def calling(arguments: str) -> bytes:
        call = {"id": "c", "type": "function"} | {
            "function": {"name": "look", "arguments": arguments}
        }
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        return json.dumps(message).encode()

    empty = json.dumps({"role": "assistant", "content": ""}).encode()
    bodies = [calling("{}"), calling('{"a": '), empty]
    bench.put("g1", request=request, messages=bodies)
    judge = FakeJudge(score_by_content({}, otherwise=0.8))
    settings = Settings(
        reward=Reward(
            verifiers={
                "calls": {"kind": "tool_calls", "gate": True, "required": True, "timeout_s": 60.0}
            },
        )
    )
    rewarding = open_rewarding(settings, bench.database)
    assert rewarding is not None
    made = JudgingWorker(
        bench.database,
        judge,
        JudgeSettings(model="scripted", rubric="Be good.", passes=1),
        clock=bench.clock,
        rewarding=rewarding,
    )

    await made.step()
    await rewarding.aclose()

    found = bench.scored()
    selection = select_groups([found], pack_tokens=100)
    rows = selection.groups[0].rows
    assert found.rewards == pytest.approx((0.92, 0.32, 0.32))
    assert [row.trainable for row in rows] == [True, True, True]
    assert [row.advantage > 0 for row in rows] == [True, False, False]
    assert found.rewarded is not None
    assert "no JSON" in found.rewarded.checks[1][0]["why"]


async def test_a_held_group_waits_unpaid_and_is_set_aside_in_the_end(bench: Bench) -> None:
    bench.put("g1", "good", "bad")
    judge = FakeJudge(score_by_content(WORTH))
    away = FakeChecker(lambda _: Failure(reason="unreachable", why="ConnectError"))
    made = worker(bench, judge, away, on_error="hold")

    await made.step()

    row = bench.row("g1")
    assert (row.status, row.detail) == ("sampled", "v: unreachable")
    assert row.lease_until == bench.clock.now + 5.0
    assert await made.step() == 0
    for _ in range(29):
        bench.clock.now += 3_600.0
        await made.step()
    assert bench.status("g1") == ("set_aside", "verifier_failed")
    assert judge.conversations == []


async def test_a_verifier_that_fails_costs_its_group_nothing(bench: Bench) -> None:
    bench.put("g1", "good", "bad")
    judge = FakeJudge(score_by_content(WORTH))
    checker = FakeChecker(lambda _: Failure(reason="crashed", why="gone"))

    await worker(bench, judge, checker).step()

    found = bench.scored()
    assert found.rewards == found.scores
    assert found.rewarded is not None
    assert found.rewarded.independent == ()
    assert found.rewarded.checks[0][0]["error"] == "crashed"


async def test_the_words_of_verifiers_are_encrypted_and_get_the_new_key(bench: Bench) -> None:
    first, second = {"one": b"1" * 32}, {"two": b"2" * 32}
    with closing(Database(bench.database.url, Keyring(first))) as keyed:
        on_keyed = replace(bench, database=keyed)
        on_keyed.put("g1", "good", "bad")
        judge = FakeJudge(score_by_content(WORTH))
        await worker(on_keyed, judge, FakeChecker(finds(good=1.0, bad=0.0))).step()
        with keyed.read() as session:
            stored = session.scalars(select(AnswerRow.checks)).all()
    with closing(Database(bench.database.url, Keyring({**second, **first}))) as keyed:
        rotate(keyed)
    with closing(Database(bench.database.url, Keyring(second))) as keyed:
        found = replace(bench, database=keyed).scored()

    assert all(one is not None and one.startswith("sealed:") for one in stored)
    assert found.rewarded is not None
    assert found.rewarded.checks[0][0]["why"] == "saw good"
