"""Groups that the judge cannot judge, outages, and both at once, on an injected clock.

The judge is a real HTTP server behind the real LiteLLM: what an error means is part of what is
tested.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import structlog
from sqlalchemy import select, update

from ingest.ruler.blame import ATTEMPTS, UNUSABLE_IN_A_ROW
from sidecar.store.models import AnswerRow, GroupRow
from support.fake_judge import scores_reply, shown_answers
from tests.ingest.conftest import Bench

TICK_S = 0.5
"""Between two steps of the worker. Tests of long waits pass a longer one to `Stage.play`: each step
reads the store, whether or not a group is due."""


def failure(message: str = "no") -> dict[str, Any]:
    return {"error": {"message": message, "type": "x", "code": "y"}}


POISON: dict[str, tuple[int, Any]] = {
    "400": (400, failure("invalid request")),
    "413": (413, b"<html>Request Entity Too Large</html>"),
    "500": (500, failure("worker crashed")),
}
DEAD_LETTERS = [
    ("413", "judge_rejected", "Request Entity Too Large"),
    ("500", "judge_unavailable", "worker crashed"),
]


class Stage:
    """A judge's HTTP server with its bad days, and the groups that wait for it."""

    def __init__(self, bench: Bench, **settings: Any) -> None:
        self.bench, self.kit, self.clock = bench, bench.kit, bench.clock
        self.began = self.clock.now
        self.outages: list[tuple[float, float, tuple[int, Any]]] = []
        """(from, to, reply), in seconds from the beginning."""
        self.server = self.kit.serve(self._reply)
        self.judge = self.kit.litellm_judge(self.server.url)
        self.judging = bench.worker(self.judge, **settings)

    def _reply(self, request: dict[str, Any]) -> tuple[int, Any]:
        now = self.clock.now - self.began
        for start, end, reply in self.outages:
            if start <= now < end:
                return reply
        text = request["messages"][1]["content"]
        for kind, reply in POISON.items():
            if f"poison-{kind}" in text:
                return reply
        return self.scores(request)

    def scores(self, request: dict[str, Any]) -> tuple[int, Any]:
        shown = shown_answers(request["messages"])
        scores = {name: 0.25 + 0.5 * (place % 2) for place, name in enumerate(shown)}
        return 200, self.kit.completion(scores_reply(scores))

    def put(self, name: str, kind: str | None = None) -> None:
        words = (f"{name} one", f"{name} two")
        texts = words if kind is None else (f"poison-{kind} {name}", words[1])
        self.bench.put(name, *texts)

    async def play(
        self,
        seconds: float,
        before: Callable[[float], None] = lambda now: None,
        *,
        tick_s: float = TICK_S,
    ) -> None:
        end = self.clock.now + seconds
        while self.clock.now < end:
            before(self.clock.now - self.began)
            await self.judging.step()
            self.clock.now += tick_s

    def statuses(self, prefix: str) -> dict[str, int]:
        found: dict[str, int] = {}
        with self.bench.database.read() as session:
            rows = session.scalars(select(GroupRow).where(GroupRow.group_id.startswith(prefix)))
            for row in rows:
                found[row.status] = found.get(row.status, 0) + 1
        return found


@pytest.fixture
def stage(bench: Bench) -> Callable[..., Stage]:
    return lambda **settings: Stage(bench, **settings)


@pytest.mark.parametrize(("kind", "reason", "words"), DEAD_LETTERS)
async def test_a_group_the_judge_cannot_take_is_set_aside_with_reason_and_text(
    stage: Callable[..., Stage], kind: str, reason: str, words: str
) -> None:
    """Nothing else waits: a group that was scored before tells that the judge works."""
    play = stage()
    play.put("good")
    await play.play(1)
    play.put("bad", kind)

    if kind == "500":  # the waits double from 5 s, ten times
        await play.play(4000, tick_s=10)
    else:
        await play.play(60)

    row = play.bench.row("bad")
    assert (row.status, row.reason) == ("set_aside", reason)
    assert row.judge_attempts == ATTEMPTS[reason]
    assert row.detail is not None
    assert words in row.detail
    assert len(row.detail) <= 500
    assert play.bench.counts("judging") == {reason: 1, "scored": 1}
    assert play.bench.counts("judge_failures") == {reason: ATTEMPTS[reason]}
    asked = len(play.server.requests)
    assert asked == 1 + 2 * ATTEMPTS[reason], "each attempt, and a probe for each"
    await play.play(60)
    assert len(play.server.requests) == asked, "no further call is paid for"


async def test_poison_and_an_outage_cost_no_good_group(stage: Callable[..., Stage]) -> None:
    """A group every four seconds for 240 s, every tenth bad, and no judge from 60 s to 180 s."""
    play = stage(passes=1)
    play.outages = [(60, 180, (503, failure("away")))]

    def arrive(now: float) -> None:
        number = int(now / 4)
        if now == 4 * number and number < 60:
            if number % 10 == 0:
                play.put(f"bad{number:03}", ("400", "413")[number // 10 % 2])
            else:
                play.put(f"good{number:03}")

    await play.play(400, arrive, tick_s=2)

    assert play.statuses("good") == {"scored": 54}
    assert play.statuses("bad") == {"set_aside": 6}


@pytest.mark.parametrize(
    "away",
    [
        (401, failure("no such key")),
        (400, failure("This model's maximum context length is 10 tokens.")),
        (200, b"<html>login</html>"),
    ],
    ids=["401", "context", "page"],
)
async def test_a_judge_that_refuses_everything_is_a_fault_of_the_settings_and_burns_no_group(
    stage: Callable[..., Stage], away: tuple[int, Any]
) -> None:
    play = stage()
    play.outages = [(0, 600, away)]
    for number in range(12):
        play.put(f"good{number:02}")

    with structlog.testing.capture_logs() as events:
        await play.play(600, tick_s=4)
    asked = len(play.server.requests)
    waiting = play.statuses("good")["sampled"]
    await play.play(400, tick_s=4)

    assert waiting >= 12 - UNUSABLE_IN_A_ROW
    assert play.statuses("good")["scored"] == waiting
    said = [event for event in events if event["event"] == "judge_down"]
    assert len(said) == 1, "said once"
    assert said[0]["log_level"] == "error"
    assert "correct judge." in said[0]["to_do"]
    assert asked <= 8 * 2 + 2 + 9 * 4, "eight in flight, then a group and a probe for each wait"


async def test_groups_that_failed_come_after_the_others(stage: Callable[..., Stage]) -> None:
    play = stage(concurrency=1)
    play.put("bad", "400")
    await play.judging.step()
    play.clock.now += 60
    play.put("good")

    await play.judging.step()

    assert play.statuses("good") == {"scored": 1}
    assert play.bench.row("bad").judge_attempts == 1


async def test_attempts_survive_a_restart(stage: Callable[..., Stage]) -> None:
    play = stage()
    play.put("good")
    await play.play(1)
    play.put("bad", "400")
    await play.play(1)
    play.judging = play.bench.worker(play.judge)
    await play.play(60)
    assert play.bench.counts("judge_failures") == {"judge_rejected": 3}
    assert play.bench.status("bad") == ("set_aside", "judge_rejected")


async def test_a_group_that_the_code_fails_over_costs_itself(stage: Callable[..., Stage]) -> None:
    play = stage()
    for name in ("broken", "good"):
        play.put(name)
    with play.bench.database.write() as session:
        session.execute(
            update(AnswerRow).where(AnswerRow.group_id == "broken").values(message_body=b"no zlib")
        )

    with structlog.testing.capture_logs() as events:
        await play.play(60)

    assert play.statuses("good") == {"scored": 1}
    assert play.bench.status("broken") == ("set_aside", "judge_defect")
    assert [event["event"] for event in events].count("judging_failed") == 3
