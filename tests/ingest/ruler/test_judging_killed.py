"""Scoring processes that die in the middle of a judge call, and what the next one makes of it."""

from __future__ import annotations

import asyncio
import json

import pytest

from ingest.errors import JudgeBusyError, JudgeUnavailableError
from ingest.ruler.blame import ATTEMPTS, INTERRUPTED, claim_for_judge
from ingest.store.groups import SAMPLED
from support.fake_judge import FakeJudge, Shown, score_by_content
from tests.ingest.conftest import Bench

WORTH = {"good": 0.9, "bad": 0.1}
LEASE_S = 420.0


class Killed(BaseException):
    """The end of a process, as far as its tasks can tell."""


def _kill(shown: Shown) -> str:
    if any(answer["content"] == "deadly" for answer in shown.values()):
        raise Killed
    entries = [{"id": name, "explanation": "", "score": 0.5} for name in shown]
    return json.dumps({"scores": entries})


def die_over(bench: Bench, limit: int = 8) -> list[str]:
    """Claim as a worker does, and never come back."""
    bench.clock.now += LEASE_S
    with bench.database.write() as session:
        claimed = claim_for_judge(session, limit=limit, now=bench.clock.now, lease_s=LEASE_S)
    return claimed.group_ids


async def test_groups_that_a_process_died_over_are_tried_one_at_a_time(bench: Bench) -> None:
    for number in range(8):
        bench.put(f"g{number}", "good", "bad")
    assert len(die_over(bench)) == 8
    assert len(die_over(bench)) == 1
    bench.clock.now += LEASE_S
    judge = FakeJudge(score_by_content(WORTH))
    judging = bench.worker(judge)

    tried = [await judging.step() for _ in range(9)]

    assert tried == [1] * 8 + [0]
    attempts = [bench.row(f"g{number}").judge_attempts for number in range(8)]
    assert sorted(attempts) == [1] * 7 + [2]


async def test_a_group_that_ends_each_process_is_set_aside(bench: Bench) -> None:
    for number in range(7):
        bench.put(f"g{number}", "good", "bad")
    bench.put("deadly", "deadly", "bad")
    deaths = 0
    for _ in range(40):
        judging = bench.worker(FakeJudge(_kill))
        try:
            await judging.step()
        except Killed:
            deaths += 1
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            bench.clock.now += LEASE_S

    assert deaths == ATTEMPTS[INTERRUPTED]
    row = bench.row("deadly")
    assert (row.status, row.reason) == ("set_aside", INTERRUPTED)
    assert "scoring process ended" in (row.detail or "")
    assert bench.counts("judging") == {INTERRUPTED: 1, "scored": 7}


@pytest.mark.parametrize("held", [False, True])
async def test_a_worker_that_is_told_to_stop_charges_nobody(bench: Bench, held: bool) -> None:
    """held: its group has failed, and the probe that would tell why is not sent yet."""
    bench.put("g1", "good", "bad")
    error = JudgeBusyError("later", retry_after_s=60) if held else JudgeUnavailableError("down")
    judge = FakeJudge(error)
    judging = bench.worker(judge)
    await judging.step()

    stop = asyncio.Event()
    stop.set()
    await judging.run(stop)

    row = bench.row("g1")
    assert (row.status, row.judge_attempts, row.judging_since) == (SAMPLED, 0, None)
