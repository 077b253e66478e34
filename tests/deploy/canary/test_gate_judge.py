"""The gate and a judge that fails: over one prompt, or over all."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import select

from deploy.canary.controller import Controller
from ingest.errors import (
    JudgeBusyError,
    JudgeGarbledError,
    JudgeRefusalError,
    JudgeRejectedError,
    JudgeSpentError,
    JudgeTooLongError,
    JudgeUnavailableError,
)
from ingest.ruler.judge import JudgeReply
from sidecar.settings import Privacy
from sidecar.store.models import CounterRow, JudgeCallRow
from support.fake_judge import FakeJudge, Shown

if TYPE_CHECKING:
    from tests.deploy.conftest import World

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


@pytest.mark.parametrize(("error", "reason"), OWN_FAULTS)
async def test_a_prompt_that_the_judge_refuses_does_not_hold_the_gate(
    world: World, error: Exception, reason: str
) -> None:
    name = world.register(1)
    world.hold_out(6)
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
