"""What was paid for is replayed: after a kill, after an outage; and it tells nothing of a judge."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from tests.ingest.conftest import JudgeKit

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
async def test_calls_before_a_kill_are_not_bought_again(
    database: Database, clock: Clock, judge_kit: JudgeKit
) -> None:
    judge_kit.put_group(database, "g1", "good", "bad")
    with pytest.raises(Killed):
        await cached_worker(database, DiesAfter(3), clock, passes=4).step()
    clock.now += 10_000.0
    judge = judge_kit.FakeJudge(judge_kit.score_by_content(WORTH))

    await cached_worker(database, judge, clock, passes=4).step()

    assert judge_kit.status(database, "g1") == ("scored", None)
    assert len(judge.prompts) == 1, "three of four passes were replayed"
    calls = judge_kit.calls(database)
    assert [one.cached for one in calls] == [True, True, True, False]
    assert [one.cost_usd for one in calls[:3]] == [0.0, 0.0, 0.0]
    assert [one.prompt_tokens for one in calls] == [0, 0, 0, 100]
    assert judge_kit.counts(database, "judge_calls") == {"cached": 3, "good": 1}
    scores = judge_kit.group_row(database, "g1")
    assert (scores.disagreement, scores.flipped_pairs) == (0.0, 0.0)


async def test_a_second_group_of_the_same_content_costs_nothing(
    database: Database, clock: Clock, judge_kit: JudgeKit
) -> None:
    judge = judge_kit.FakeJudge(judge_kit.score_by_content(WORTH))
    worker = cached_worker(database, judge, clock, passes=2)
    judge_kit.put_group(database, "g1", "good", "bad")
    await worker.step()
    judge_kit.put_group(database, "g2", "good", "bad")
    await worker.step()

    assert judge_kit.status(database, "g2") == ("scored", None)
    assert len(judge.prompts) == 2
    assert judge_kit.counts(database, "judge_calls") == {"good": 2, "cached": 2}


class Away(FakeJudge):
    """Is away for every group but `good`, and for the probe."""

    async def complete(
        self, messages: Sequence[Mapping[str, str]], schema: Mapping[str, Any]
    ) -> JudgeReply:
        raise JudgeUnavailableError("down")


async def test_a_replayed_group_is_no_proof_that_the_judge_works(
    database: Database, clock: Clock, judge_kit: JudgeKit
) -> None:
    """Else an outage would end with each replay, and its failures count against groups."""
    first = judge_kit.FakeJudge(judge_kit.score_by_content(WORTH))
    judge_kit.put_group(database, "g1", "good", "bad")
    await cached_worker(database, first, clock, passes=1).step()
    worker = cached_worker(database, Away(), clock, passes=1)
    judge_kit.put_group(database, "other", "good", "worse")
    await worker.step()  # it fails, and so does the probe: an outage
    assert worker._blame.waiting.lasts
    judge_kit.put_group(database, "same", "good", "bad")
    clock.now = worker._blame.waiting.retry_at
    for _ in range(4):
        await worker.step()
        clock.now += 1.0

    assert judge_kit.status(database, "same") == ("scored", None)
    assert worker._blame.waiting.lasts
    row = judge_kit.group_row(database, "other")
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
    database: Database,
    clock: Clock,
    judge_kit: JudgeKit,
    tmp_path: Path,
    fork: Fork,
) -> None:
    judge_kit.put_group(database, "g1", "good", "bad")
    answer = judge_kit.answer_with(judge_kit.score_by_content(WORTH, otherwise=0.5))
    dying = judge_kit.serve(answer, answer, (0, None))  # the probe and one pass
    config = config_of(database, tmp_path, dying.url)
    process = fork("ingest.score", "--config", str(config))
    while len(dying.requests) < 3:
        assert process.poll() is None
        await asyncio.sleep(0.05)
    process.kill()
    process.wait()
    with database.write() as session:
        session.execute(update(GroupRow).values(lease_until=0.0))  # it has run out
    dying.script[:] = [answer]

    process = fork("ingest.score", "--config", str(config))
    while judge_kit.status(database, "g1") != ("scored", None):
        assert process.poll() is None
        await asyncio.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 0

    assert len(dying.requests) - 3 - 1 == 1, "besides the probe of its start"
    replies = [json.loads(one.reply) for one in judge_kit.calls(database) if one.group_id == "g1"]
    assert len(replies) == 2
