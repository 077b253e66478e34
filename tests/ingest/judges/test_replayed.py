"""What was paid for is replayed: after a kill, after an outage; and it tells nothing of a judge."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from ingest.errors import JudgeUnavailableError
from ingest.judges.replies import CachedJudge, ContentSeeds, KeptReplies, ReplyStore
from ingest.ruler.judge import JudgeReply
from ingest.ruler.judging import JudgingWorker
from sidecar.settings import Judge as JudgeSettings
from sidecar.store.database import Database
from sidecar.store.models import GroupRow
from support.clock import Clock
from support.fake_judge import FakeJudge, score_by_content
from support.forking import Fork, forking
from tests.ingest.judges.conftest import Bench

WORTH = {"good": 0.9, "bad": 0.1}


def cached_worker(database: Database, judge: FakeJudge, clock: Clock, passes: int) -> JudgingWorker:
    settings = JudgeSettings(model="scripted", rubric="Be good.", passes=passes)
    store = ReplyStore(database, max_bytes=10**6, max_age_s=1e6, clock=clock)
    return JudgingWorker(
        database,
        CachedJudge(judge, settings, KeptReplies(store)),
        settings,
        clock=clock,
        draw_seed=ContentSeeds(store),
    )


class DiesAfter(FakeJudge):
    """Answers some calls; the process ends in the next one, as far as its tasks can tell."""

    def __init__(self, calls: int) -> None:
        super().__init__(score_by_content(WORTH))
        self.left = calls

    async def complete(
        self, messages: Sequence[Mapping[str, str]], schema: Mapping[str, Any]
    ) -> JudgeReply:
        if self.left == 0:
            raise Killed
        self.left -= 1
        return await super().complete(messages, schema)


class Killed(BaseException):
    """The end of a process."""


@pytest.mark.both_stores
async def test_calls_before_a_kill_are_not_bought_again(bench: Bench) -> None:
    bench.put("g1", "good", "bad")
    with pytest.raises(Killed):
        await cached_worker(bench.database, DiesAfter(3), bench.clock, passes=4).step()
    bench.clock.now += 10_000.0
    judge = FakeJudge(score_by_content(WORTH))

    await cached_worker(bench.database, judge, bench.clock, passes=4).step()

    assert bench.status("g1") == ("scored", None)
    assert len(judge.prompts) == 1, "three of four passes were replayed"
    calls = bench.calls()
    assert [one.cached for one in calls] == [True, True, True, False]
    assert [one.cost_usd for one in calls[:3]] == [0.0, 0.0, 0.0]
    assert [one.prompt_tokens for one in calls] == [0, 0, 0, 100]
    assert bench.counts("judge_calls") == {"cached": 3, "good": 1}
    scores = bench.row("g1")
    assert (scores.disagreement, scores.flipped_pairs) == (0.0, 0.0)


class Away(FakeJudge):
    """Is away for every group but `good`, and for the probe."""

    async def complete(
        self, messages: Sequence[Mapping[str, str]], schema: Mapping[str, Any]
    ) -> JudgeReply:
        raise JudgeUnavailableError("down")


async def test_a_replayed_group_is_no_proof_that_the_judge_works(bench: Bench) -> None:
    """Else an outage would end with each replay, and its failures count against groups."""
    first = FakeJudge(score_by_content(WORTH))
    bench.put("g1", "good", "bad")
    await cached_worker(bench.database, first, bench.clock, passes=1).step()
    worker = cached_worker(bench.database, Away(), bench.clock, passes=1)
    bench.put("other", "good", "worse")
    await worker.step()  # it fails, and so does the probe: an outage
    assert worker._blame.waiting.lasts
    bench.put("same", "good", "bad")
    bench.clock.now = worker._blame.waiting.retry_at
    for _ in range(4):
        await worker.step()
        bench.clock.now += 1.0

    assert bench.status("same") == ("scored", None)
    assert worker._blame.waiting.lasts
    row = bench.row("other")
    assert (row.status, row.judge_attempts) == ("sampled", 0)


def config_of(database: Database, folder: Path, url: str) -> Path:
    config = folder / "sidecar.toml"
    config.write_text(
        f"""[serving]
upstreams = ["http://127.0.0.1:9"]
[store]
url = "{database.url}"
[judge]
model = "openai/local-judge"
api_base = "{url}"
api_key = "sk-test"
passes = 2
""",
        encoding="utf-8",
    )
    return config


@pytest.fixture(scope="module")
def fork() -> Iterator[Fork]:
    with forking(
        "ingest.score",
        "ingest.best_of",
        "ingest.judge_noise",
        "ingest.judges.build",
        "ingest.sampling.worker",
        "ingest.verifiers.rewarding",
        "ingest.vllm.sampler",
        "ingest.vllm.watch",
        "litellm",
    ) as found:
        yield found


async def test_a_sigkill_between_two_passes_costs_the_second_alone(
    bench: Bench,
    tmp_path: Path,
    fork: Fork,
) -> None:
    bench.put("g1", "good", "bad")
    answer = bench.kit.answer_with(score_by_content(WORTH, otherwise=0.5))
    dying = bench.kit.serve(answer, answer, (0, None))  # the probe and one pass
    config = config_of(bench.database, tmp_path, dying.url)
    process = fork("ingest.score", "--config", str(config))
    while len(dying.requests) < 3:
        assert process.poll() is None
        await asyncio.sleep(0.05)
    process.kill()
    process.wait()
    with bench.database.write() as session:
        session.execute(update(GroupRow).values(lease_until=0.0))  # it has run out
    dying.script[:] = [answer]

    process = fork("ingest.score", "--config", str(config))
    while bench.status("g1") != ("scored", None):
        assert process.poll() is None
        await asyncio.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 0

    assert len(dying.requests) - 3 - 1 == 1, "besides the probe of its start"
    replies = [json.loads(one.reply) for one in bench.calls() if one.group_id == "g1"]
    assert len(replies) == 2
    assert bench.row("g1").judge_attempts == 1, "the one that the process died over"
