"""A judge that answers short questions only, limits, and a store that refuses, on injected clocks.

The judge is in the process and raises what `ingest.ruler.judge` makes of a provider's reply.
"""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Callable
from typing import Any

import pytest
import structlog
from sqlalchemy import event
from sqlalchemy.exc import OperationalError

from ingest.errors import (
    JudgeBusyError,
    JudgeGarbledError,
    JudgeRejectedError,
    JudgeUnavailableError,
)
from ingest.ruler.blame import ATTEMPTS, UNPROVEN, Failed, charge, claim_for_judge
from support.fake_judge import FakeJudge, scores_reply
from tests.ingest.conftest import Bench

LEASE_S = 180.0
BROWN_OUTS = [
    (JudgeRejectedError("max_tokens is too large"), 60),
    (JudgeGarbledError("a page"), 60),
    (JudgeUnavailableError("overloaded"), 1800),
]


class Play:
    """A worker and its judge; `refuse` says what becomes of a question by its answers' texts."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.database, self.clock = bench, bench.database, bench.clock
        self.began = self.clock.now
        self.asked: list[tuple[float, str]] = []
        self.refuse: Callable[[str], Exception | None] = lambda texts: None
        self.worker = bench.worker(FakeJudge(self._reply))

    def _reply(self, shown: Any) -> str:
        texts = " ".join(sorted(answer["content"] for answer in shown.values()))
        self.asked.append((self.clock.now - self.began, texts))
        error = self.refuse(texts)
        if error is not None:
            raise error
        scores = {name: 0.25 + 0.5 * (place % 2) for place, name in enumerate(shown)}
        return scores_reply(scores)

    def put(self, name: str) -> None:
        self.bench.put(name, f"{name} one", f"{name} two")

    async def run(
        self, seconds: float, tick_s: float, before: Callable[[float], None] = lambda now: None
    ) -> None:
        end = self.clock.now + seconds
        while self.clock.now < end:
            before(self.clock.now - self.began)
            await self.worker.step()
            self.clock.now += tick_s

    def calls(self, name: str) -> list[float]:
        return [at for at, texts in self.asked if name in texts]

    def judged(self) -> dict[str, int]:
        return self.bench.counts("judging")


@pytest.fixture
def play(bench: Bench) -> Play:
    return Play(bench)


@pytest.mark.parametrize(
    ("error", "seconds", "waiting"),
    [(*one, count) for one, count in zip(BROWN_OUTS, (2, 32, 32), strict=True)],
)
async def test_a_judge_that_is_good_for_a_sum_only_costs_no_group(
    play: Play, error: Exception, seconds: int, waiting: int
) -> None:
    play.refuse = lambda texts: None if "2 + 3" in texts else error
    for number in range(waiting):
        play.put(f"good{number:02}")

    with structlog.testing.capture_logs() as events:
        await play.run(seconds, 5 if seconds < 100 else 20)
    assert play.judged() == {}
    asked = len(play.asked)
    play.refuse = lambda texts: None
    await play.run(1800, 30)

    assert play.judged() == {"scored": waiting}
    assert asked <= 2 * 24 + 2 * (8 + seconds / 30), "a few at first, then one for each wait"
    said = [one for one in events if one["event"] == "judge_down"]
    assert [one["log_level"] for one in said] == (["error"] if waiting > 2 else [])
    assert all("answers a simple sum but fails on every group" in one["to_do"] for one in said)


async def test_a_queue_of_bad_groups_is_given_up_after_a_hundred_tries(play: Play) -> None:
    """No group was ever scored, so nothing proves that it is not the judge."""
    play.refuse = lambda texts: None if "2 + 3" in texts else JudgeRejectedError("no")
    play.put("bad0")
    play.put("bad1")

    await play.run(60 * 3600, 1800)
    assert play.judged() == {}
    await play.run(90 * 3600, 1800)

    assert play.judged() == {"judge_rejected": 2}
    assert [len(play.calls(name)) for name in ("bad0", "bad1")] == [ATTEMPTS[UNPROVEN]] * 2
    assert play.bench.row("bad0").detail == "no"
    asked = len(play.asked)
    await play.run(24 * 3600, 1800)
    assert len(play.asked) == asked


@pytest.mark.parametrize("last", ["judge_garbled", "killed"])
async def test_attempts_of_one_reason_do_not_use_up_those_of_another(play: Play, last: str) -> None:
    """Each reason is one short of its limit but the last, which is new."""
    play.put("good")
    for reason, tries in (("judge_busy", 29), ("judge_unavailable", 9), ("judge_rejected", 2)):
        for _ in range(tries):
            with play.database.write() as session:
                failed = Failed(group_id="good", reason=reason, detail="said")
                assert not charge(session, failed, now=play.clock.now)
    play.clock.now += 4000
    with play.database.write() as session:
        if last == "killed":
            claim_for_judge(session, limit=1, now=play.clock.now, lease_s=LEASE_S)
        else:
            charge(session, Failed(group_id="good", reason=last, detail="x"), now=play.clock.now)
    play.clock.now += 4000

    await play.run(60, 5)

    assert play.judged() == {"scored": 1}


async def test_a_group_that_is_told_to_come_back_later_pauses_the_others_once(play: Play) -> None:
    """Two such groups, so that they may meet; a good group comes every five seconds."""

    def limited(texts: str) -> Exception | None:
        return JudgeBusyError("later", retry_after_s=60) if "bad" in texts else None

    play.refuse = limited
    for name in ("bad0", "bad1"):
        play.put(name)
    came = 0

    def arrive(now: float) -> None:
        nonlocal came
        while came < 120 and came * 5 <= now:
            play.put(f"good{came:03}")
            came += 1

    await play.run(700, 5, arrive)

    good = sorted({at for at, texts in play.asked if "good" in texts})
    pauses = [later - at for at, later in itertools.pairwise(good) if later - at > 10]
    assert len(pauses) <= 2, "each pauses the others once at most"
    assert play.judged() == {"scored": 120}
    assert all(len(play.calls(name)) >= 4 for name in ("bad0", "bad1"))
    await play.run(60 * 3600, 1800)
    assert play.judged() == {"scored": 120, "judge_busy": 2}


async def test_a_full_disk_slows_the_worker(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full while a failure is open, for longer than a judgement is kept; each call
    costs money."""
    monkeypatch.setattr("ingest.ruler.judging.LONGEST_KEPT_S", 0.0)
    play.refuse = lambda texts: None if "2 + 3" in texts else JudgeUnavailableError("away")
    for number in range(60):
        play.put(f"good{number:03}")
    await play.worker._work((await play.worker._claim(1))[0])
    full = True

    def refuse(_c: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if full and statement.startswith("INSERT"):
            raise OperationalError(statement, {}, sqlite3.OperationalError("disk is full"))

    event.listen(play.database.engine, "before_cursor_execute", refuse)
    asked = len(play.asked)
    with structlog.testing.capture_logs() as events:
        await play.run(300, 1)
    assert len(play.asked) - asked <= 2 * (24 + 10), "24 failures in a row, then one for each wait"
    assert "judgement_not_stored" in [one["event"] for one in events]

    full = False
    play.refuse = lambda texts: None
    await play.run(1200, 15)
    assert play.judged() == {"scored": 60}
