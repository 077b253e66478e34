"""The judging worker over a real store: what it writes of good and of bad replies."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import structlog
from sqlalchemy import select

from ingest.errors import JudgeRefusalError, JudgeTooLongError
from ingest.ruler.prompt import rubric_hash
from ingest.store.groups import load_scored_group
from sidecar.store.database import Database
from sidecar.store.models import AnswerRow
from support.clock import Clock
from support.fake_judge import Shown

if TYPE_CHECKING:
    from tests.ingest.conftest import JudgeKit


WORTH = {"good": 0.9, "fair": 0.5, "bad": 0.1}


async def test_a_sampled_group_is_scored_in_the_answers_order(
    database: Database, clock: Clock, judge_kit: JudgeKit
) -> None:
    judge_kit.put_group(database, "g1", "fair", "bad", "good", "bad")
    judge = judge_kit.FakeJudge(judge_kit.score_by_content(WORTH))

    assert await judge_kit.worker(database, judge, clock).step() == 1

    with database.read() as session:
        scored = load_scored_group(session, "g1")
    assert scored is not None
    assert scored.scores == (0.5, 0.1, 0.9, 0.1)
    assert scored.explanations[1] == scored.explanations[3] != scored.explanations[0]
    assert (scored.judge_model, scored.rubric_hash) == ("scripted", rubric_hash("Be good."))
    assert judge_kit.group_row(database, "g1").scored_at == 1_000.0
    assert judge_kit.counts(database, "judging") == {"scored": 1}
    assert judge_kit.counts(database, "judge_calls") == {"good": 1}
    row = judge_kit.calls(database)[0]
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
    database: Database, clock: Clock, judge_kit: JudgeKit
) -> None:
    judge = judge_kit.FakeJudge("never asked")
    assert await judge_kit.worker(database, judge, clock).step() == 0
    assert judge.conversations == []


async def test_every_pass_is_written(database: Database, clock: Clock, judge_kit: JudgeKit) -> None:
    judge_kit.put_group(database, "g1", "good", "bad")
    judge = judge_kit.FakeJudge(judge_kit.score_by_content(WORTH))
    await judge_kit.worker(database, judge, clock, passes=3).step()
    assert [row.order_seed for row in judge_kit.calls(database)] == [200, 201, 202]


async def test_how_far_two_passes_differ_is_stored(
    database: Database, clock: Clock, judge_kit: JudgeKit
) -> None:
    judge_kit.put_group(database, "g1", "good", "fair", "bad")
    judge = judge_kit.FakeJudge(
        judge_kit.score_by_content({"good": 0.75, "fair": 0.5, "bad": 0.0}),
        judge_kit.score_by_content({"good": 0.25, "fair": 0.5, "bad": 0.25}),
    )

    await judge_kit.worker(database, judge, clock, passes=2).step()

    first, second = (list(judge_kit.shown_answers(talk)) for talk in judge.conversations)
    assert second == first[::-1]
    with database.read() as session:
        rows = session.scalars(select(AnswerRow).order_by(AnswerRow.index)).all()
    assert [(row.score, row.disagreement) for row in rows] == [(0.5, 0.5), (0.5, 0), (0.125, 0.25)]
    group = judge_kit.group_row(database, "g1")
    assert (group.disagreement, group.flipped_pairs) == (0.25, 1 / 3)  # good and fair


RUBBISH: dict[str, Any] = {
    "bad JSON": lambda ids: "{",
    "a score of 7": lambda ids: {**dict.fromkeys(ids, 0.5), ids[0]: 7},
}


@pytest.mark.parametrize("kind", RUBBISH)
async def test_rubbish_twice_is_counted_and_tried_again_in_another_order(
    database: Database, clock: Clock, judge_kit: JudgeKit, kind: str
) -> None:
    def rubbish(shown: Shown) -> str:
        made = RUBBISH[kind](list(shown))
        return made if isinstance(made, str) else judge_kit.scores_reply(made)

    judge_kit.put_group(database, "g1", "good", "bad")
    judge = judge_kit.FakeJudge(rubbish)

    worker = judge_kit.worker(database, judge, clock)
    with structlog.testing.capture_logs() as events:
        await worker.step()

    assert judge_kit.status(database, "g1") == ("sampled", None)
    assert judge_kit.counts(database, "judging") == {}
    assert judge_kit.counts(database, "judge_calls") == {"bad": 2}
    assert judge_kit.group_row(database, "g1").attempts == 2
    rows = judge_kit.calls(database)
    assert [row.ok for row in rows] == [False, False]
    errors = [row.error for row in rows if row.error]
    assert len(errors) == 2
    assert errors[0] in judge.conversations[1][-1]["content"]  # the retry showed the error
    with database.read() as session:
        assert load_scored_group(session, "g1") is None
    assert [one["reason"] for one in events if one["event"] == "group_not_judged"] == [
        "judge_rubbish"
    ]

    judge.script = [judge_kit.score_by_content(WORTH)]
    clock.now += 5.0
    await worker.step()
    assert judge_kit.status(database, "g1") == ("scored", None)
    assert judge_kit.calls(database)[-1].order_seed != rows[0].order_seed


async def test_rubbish_at_five_attempts_sets_the_group_aside(
    database: Database, clock: Clock, judge_kit: JudgeKit
) -> None:
    judge = judge_kit.FakeJudge(
        lambda shown: (
            "hm" if "bad" in str(shown) else judge_kit.score_by_content({}, otherwise=0.5)(shown)
        )
    )
    worker = judge_kit.worker(database, judge, clock)
    judge_kit.put_group(database, "g1", "bad one", "bad two")
    for number in range(20):
        judge_kit.put_group(database, f"other{number}", "good", "fair")
        await worker.step()
        clock.now += 10.0
    assert judge_kit.status(database, "g1") == ("set_aside", "judge_rubbish")
    assert judge_kit.counts(database, "judge_calls") == {"bad": 10, "good": 20}


async def test_rubbish_once_costs_one_more_call(
    database: Database, clock: Clock, judge_kit: JudgeKit
) -> None:
    judge_kit.put_group(database, "g1", "good", "bad")
    judge = judge_kit.FakeJudge("hm", judge_kit.score_by_content(WORTH))
    await judge_kit.worker(database, judge, clock).step()
    assert judge_kit.status(database, "g1") == ("scored", None)
    assert [(row.ok, row.reply == "hm") for row in judge_kit.calls(database)] == [
        (False, True),
        (True, False),
    ]
    assert judge_kit.group_row(database, "g1").attempts == 1


async def test_a_group_the_judge_refuses_is_set_aside(
    database: Database, clock: Clock, judge_kit: JudgeKit
) -> None:
    judge_kit.put_group(database, "g1", "good", "bad")
    await judge_kit.worker(
        database, judge_kit.FakeJudge(JudgeRefusalError("too long")), clock
    ).step()
    assert judge_kit.status(database, "g1") == ("set_aside", "judge_refused")


async def test_a_group_longer_than_the_judges_context_is_set_aside(
    database: Database, clock: Clock, judge_kit: JudgeKit
) -> None:
    class ShortJudge(judge_kit.FakeJudge):  # type: ignore[name-defined,misc]
        async def context_tokens(self) -> int:
            return 1_000

    judge_kit.put_group(database, "long", "good " * 1_000, "bad")
    judge_kit.put_group(database, "says so", "good", "bad")
    short, says_so = ShortJudge(), judge_kit.FakeJudge(JudgeTooLongError("no", asked=True))

    await judge_kit.worker(database, short, clock).step()

    assert judge_kit.status(database, "long") == ("set_aside", "judge_too_long")
    assert "judge.context_tokens" in (judge_kit.group_row(database, "long").detail or "")

    await judge_kit.worker(database, says_so, clock).step()
    assert judge_kit.status(database, "says so") == ("set_aside", "judge_too_long")
    assert judge_kit.counts(database, "judging") == {"judge_too_long": 2}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"messages": [b'{"content": "same"}', b'{"content":  "same"}']}, "identical_answers"),
        ({"messages": [b'{"content": "alone"}']}, "identical_answers"),
        ({"messages": [b'{"content": "a"}', b"not json"]}, "unreadable"),
        ({"messages": [b'{"content": "a"}', b'{"content": "b"}'], "request": b"{}"}, "unreadable"),
    ],
)
async def test_what_cannot_be_compared_is_set_aside_without_a_call(
    database: Database, clock: Clock, judge_kit: JudgeKit, fields: Any, reason: str
) -> None:
    judge_kit.put_group(database, "g1", **fields)
    judge = judge_kit.FakeJudge("never asked")
    await judge_kit.worker(database, judge, clock).step()
    assert judge_kit.status(database, "g1") == ("set_aside", reason)
    assert judge.conversations == []
