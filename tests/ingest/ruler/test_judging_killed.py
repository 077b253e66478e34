"""Scoring processes that die in the middle of a judge call, and what the next one makes of it."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ingest.errors import JudgeBusyError, JudgeUnavailableError
from ingest.ruler.blame import ATTEMPTS, INTERRUPTED, claim_for_judge
from ingest.store.groups import SAMPLED
from sidecar.store.database import Database
from support.clock import Clock
from support.fake_judge import Shown

if TYPE_CHECKING:
    from tests.ingest.conftest import JudgeKit


WORTH = {"good": 0.9, "bad": 0.1}
LEASE_S = 420.0


class Killed(BaseException):
    """The end of a process, as far as its tasks can tell."""


def _kill(shown: Shown) -> str:
    if any(answer["content"] == "deadly" for answer in shown.values()):
        raise Killed
    entries = [{"id": name, "explanation": "", "score": 0.5} for name in shown]
    return json.dumps({"scores": entries})


def die_over(database: Database, clock: Clock, limit: int = 8) -> list[str]:
    """Claim as a worker does, and never come back."""
    clock.now += LEASE_S
    with database.write() as session:
        claimed = claim_for_judge(session, limit=limit, now=clock.now, lease_s=LEASE_S)
    return claimed.group_ids


async def test_a_sigkill_in_the_middle_of_a_call_counts_as_one_attempt(
    database: Database, clock: Clock, judge_kit: JudgeKit, tmp_path: Path
) -> None:
    judge_kit.put_group(database, "g1", "good", "bad")
    first = judge_kit.answer_with(judge_kit.score_by_content({}, otherwise=0.5))
    server = judge_kit.serve(first, (0, None))  # answers the question of the start alone
    config = tmp_path / "sidecar.toml"
    config.write_text(
        f"""[serving]
upstreams = ["http://127.0.0.1:9"]
[store]
url = "{database.url}"
[judge]
model = "openai/local-judge"
api_base = "{server.url}"
api_key = "sk-test"
""",
        encoding="utf-8",
    )
    arguments = [sys.executable, "-m", "ingest.score", "--config", str(config)]
    with subprocess.Popen(arguments, stderr=subprocess.DEVNULL) as process:
        while len(server.requests) < 2:
            assert process.poll() is None
            await asyncio.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    row = judge_kit.group_row(database, "g1")
    assert (row.status, row.judge_attempts) == (SAMPLED, 0)
    clock.now = row.lease_until
    judge = judge_kit.FakeJudge(judge_kit.score_by_content(WORTH))

    assert await judge_kit.worker(database, judge, clock).step() == 1

    row = judge_kit.group_row(database, "g1")
    assert (row.status, row.judge_attempts) == ("scored", 1)


async def test_groups_that_a_process_died_over_are_tried_one_at_a_time(
    database: Database, clock: Clock, judge_kit: JudgeKit
) -> None:
    for number in range(8):
        judge_kit.put_group(database, f"g{number}", "good", "bad")
    assert len(die_over(database, clock)) == 8
    assert len(die_over(database, clock)) == 1
    clock.now += LEASE_S
    judge = judge_kit.FakeJudge(judge_kit.score_by_content(WORTH))
    judging = judge_kit.worker(database, judge, clock)

    tried = [await judging.step() for _ in range(9)]

    assert tried == [1] * 8 + [0]
    attempts = [judge_kit.group_row(database, f"g{number}").judge_attempts for number in range(8)]
    assert sorted(attempts) == [1] * 7 + [2]


async def test_a_group_that_brings_each_process_down_is_set_aside_and_costs_no_other(
    database: Database, clock: Clock, judge_kit: JudgeKit
) -> None:
    for number in range(7):
        judge_kit.put_group(database, f"g{number}", "good", "bad")
    judge_kit.put_group(database, "deadly", "deadly", "bad")
    deaths = 0
    for _ in range(40):
        judging = judge_kit.worker(database, judge_kit.FakeJudge(_kill), clock)
        try:
            await judging.step()
        except Killed:
            deaths += 1
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            clock.now += LEASE_S

    assert deaths == ATTEMPTS[INTERRUPTED]
    row = judge_kit.group_row(database, "deadly")
    assert (row.status, row.reason) == ("set_aside", INTERRUPTED)
    assert "scoring process ended" in (row.detail or "")
    assert judge_kit.counts(database, "judging") == {INTERRUPTED: 1, "scored": 7}


@pytest.mark.parametrize("held", [False, True])
async def test_a_worker_that_is_told_to_stop_charges_nobody(
    database: Database, clock: Clock, judge_kit: JudgeKit, held: bool
) -> None:
    """held: its group has failed, and the probe that would tell why is not sent yet."""
    judge_kit.put_group(database, "g1", "good", "bad")
    error = JudgeBusyError("later", retry_after_s=60) if held else JudgeUnavailableError("down")
    judge = judge_kit.FakeJudge(error)
    judging = judge_kit.worker(database, judge, clock)
    await judging.step()

    stop = asyncio.Event()
    stop.set()
    await judging.run(stop)

    row = judge_kit.group_row(database, "g1")
    assert (row.status, row.judge_attempts, row.judging_since) == (SAMPLED, 0, None)
