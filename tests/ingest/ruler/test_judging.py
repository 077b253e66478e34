"""The judging worker over a real store: what it writes of good and of bad replies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import structlog
from sqlalchemy import select

from ingest.errors import (
    JudgeRefusalError,
    JudgeRejectedError,
    JudgeTooLongError,
    JudgeUnavailableError,
)
from ingest.judges.replies import CachedJudge, ContentSeeds, KeptReplies, ReplyStore
from ingest.ruler.group import SUBJECT
from ingest.ruler.judge import Judge, JudgeReply
from ingest.ruler.judging import JudgingWorker
from ingest.ruler.prompt import rubric_hash
from ingest.store.groups import claim_groups, load_scored_group
from sidecar.errors import StoreError
from sidecar.settings import Judge as JudgeSettings, ProjectRubric
from sidecar.store.database import Database
from sidecar.store.models import AnswerRow
from support.fake_judge import FakeJudge, score_by_content, shown_answers
from tests.ingest.conftest import Bench, until

WORTH = {"good": 0.9, "fair": 0.5, "bad": 0.1}


async def test_a_sampled_group_is_scored_in_the_answers_order(bench: Bench) -> None:
    bench.put("g1", "fair", "bad", "good", "bad")
    judge = FakeJudge(score_by_content(WORTH))

    assert await bench.worker(judge).step() == 1

    scored = bench.scored()
    assert scored.scores == scored.rewards == (0.5, 0.1, 0.9, 0.1)
    assert scored.rewarded is None
    assert scored.explanations[1] == scored.explanations[3] != scored.explanations[0]
    assert (scored.judge_model, scored.rubric_hash) == ("scripted", rubric_hash("Be good."))
    assert bench.row("g1").scored_at == 1_000.0
    assert bench.counts("judging") == {"scored": 1}
    assert bench.counts("judge_calls") == {"good": 1}
    row = bench.calls()[0]
    assert (row.group_id, row.at, row.order_seed, row.ok) == ("g1", 1_000, 200, True)
    assert row.error is None
    assert (row.prompt_tokens, row.completion_tokens, row.seconds) == (100, 10, 0.5)
    assert json.loads(row.reply)["scores"]
    assert row.rubric_hash == rubric_hash("Be good.")


async def test_how_far_two_passes_differ_is_stored(bench: Bench) -> None:
    bench.put("g1", "good", "fair", "bad")
    judge = FakeJudge(
        score_by_content({"good": 0.75, "fair": 0.5, "bad": 0.0}),
        score_by_content({"good": 0.25, "fair": 0.5, "bad": 0.25}),
    )

    await bench.worker(judge, passes=2).step()

    first, second = (list(shown_answers(talk)) for talk in judge.conversations)
    assert second == first[::-1]
    with bench.database.read() as session:
        rows = session.scalars(select(AnswerRow).order_by(AnswerRow.index)).all()
    assert [(row.score, row.disagreement) for row in rows] == [(0.5, 0.5), (0.5, 0), (0.125, 0.25)]
    group = bench.row("g1")
    assert (group.disagreement, group.flipped_pairs) == (0.25, 1 / 3)  # good and fair


async def test_rubbish_twice_is_counted_and_tried_again_in_another_order(bench: Bench) -> None:
    bench.put("g1", "good", "bad")
    judge = FakeJudge("{")

    worker = bench.worker(judge)
    with structlog.testing.capture_logs() as events:
        await worker.step()

    assert bench.status("g1") == ("sampled", None)
    assert bench.counts("judging") == {}
    assert bench.counts("judge_calls") == {"bad": 2}
    assert bench.row("g1").attempts == 2
    rows = bench.calls()
    assert [row.ok for row in rows] == [False, False]
    errors = [row.error for row in rows if row.error]
    assert len(errors) == 2
    assert errors[0] in judge.conversations[1][-1]["content"]  # the retry showed the error
    with bench.database.read() as session:
        assert load_scored_group(session, "g1") is None
    assert [one["reason"] for one in events if one["event"] == "group_not_judged"] == [
        "judge_rubbish"
    ]

    judge.script = [score_by_content(WORTH)]
    bench.clock.now += 5.0
    await worker.step()
    assert bench.status("g1") == ("scored", None)
    assert bench.calls()[-1].order_seed != rows[0].order_seed


async def test_rubbish_at_five_attempts_sets_the_group_aside(bench: Bench) -> None:
    judge = FakeJudge(
        lambda shown: "hm" if "bad" in str(shown) else score_by_content({}, otherwise=0.5)(shown)
    )
    worker = bench.worker(judge)
    bench.put("g1", "bad one", "bad two")
    for number in range(20):
        bench.put(f"other{number}", "good", "fair")
        await worker.step()
        bench.clock.now += 10.0
    assert bench.status("g1") == ("set_aside", "judge_rubbish")
    assert bench.counts("judge_calls") == {"bad": 10, "good": 20}


async def test_a_group_that_the_judge_refuses_or_has_no_room_for_is_set_aside(bench: Bench) -> None:
    class ShortJudge(FakeJudge):
        async def context_tokens(self) -> int:
            return 1_000

    bench.put("long", "good " * 1_000, "bad")
    await bench.worker(ShortJudge()).step()

    assert bench.status("long") == ("set_aside", "judge_too_long")
    assert "judge.context_tokens" in (bench.row("long").detail or "")

    for error in (JudgeTooLongError("no", asked=True), JudgeRefusalError("no")):
        bench.put(type(error).__name__, "good", "bad")
        await bench.worker(FakeJudge(error)).step()
    assert bench.counts("judging") == {"judge_too_long": 2, "judge_refused": 1}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"messages": [b'{"content": "same"}', b'{"content":  "same"}']}, "identical_answers"),
        ({"messages": [b'{"content": "alone"}']}, "identical_answers"),
        ({"messages": [b'{"content": "a"}', b"not json"]}, "unreadable"),
        ({"messages": [b'{"content": "a"}', b'{"content": "b"}'], "request": b"{}"}, "unreadable"),
    ],
)
async def test_what_cannot_be_compared_costs_nothing(
    bench: Bench, fields: Any, reason: str
) -> None:
    bench.put("g1", **fields)
    judge = FakeJudge("never asked")
    await bench.worker(judge).step()
    assert bench.status("g1") == ("set_aside", reason)
    assert judge.conversations == []


# The judging worker on bad days: outages, leases, stopping, a store that fails.

DOWN = JudgeUnavailableError("judge scripted: connection refused")


async def test_an_outage_gives_the_group_back_and_waits_longer_each_time(bench: Bench) -> None:
    for name in ("g1", "g2", "g3"):
        bench.put(name, "good", "bad")
    judge = FakeJudge(DOWN)
    judging = bench.worker(judge, concurrency=2)

    with structlog.testing.capture_logs() as events:
        assert await judging.step() == 2
        assert bench.status("g1") == ("sampled", None)
        assert await judging.step() == 0  # waits
        told = bench.state
        assert (told.state, told.since, told.until) == ("away", 1_000.0, 1_001.0)
        assert "connection refused" in told.error
        bench.clock.now += 1.0
        assert await judging.step() == 1  # tries another one, in vain, and waits 2 s now
        assert bench.status("g3") == ("sampled", None)
        bench.clock.now += 1.9
        assert judging._room() == 0
        bench.clock.now += 0.1
        assert judging._room() == 1
        assert await judging.step() == 0  # each group waits 5 s longer than the worker
        judge.script = [score_by_content(WORTH)]
        bench.clock.now += 3.0
        assert await judging.step() == 1  # g1 may be tried from 1006 on: up again
        assert await judging.step() == 1  # g2 too
        bench.clock.now += 2.0
        assert await judging.step() == 1  # and g3 from 1008 on

    told = bench.state
    assert (told.state, told.error_at, told.good_at) == ("works", 1_001.0, 1_006.0)
    assert [bench.status(name)[0] for name in ("g1", "g2", "g3")] == ["scored"] * 3
    assert bench.counts("judge_calls") == {"good": 3, "unanswered": 3}
    assert bench.row("g1").attempts == 0
    said = [event for event in events if event["event"] in ("judge_down", "judge_up")]
    assert [event["event"] for event in said] == ["judge_down", "judge_up"]
    assert said[0]["error"] == "judge scripted: connection refused"
    assert said[1]["lasted_s"] == 6.0


async def test_a_claimed_group_is_left_alone_until_its_lease_ends(bench: Bench) -> None:
    bench.put("g1", "good", "bad")
    judge = FakeJudge(score_by_content(WORTH))
    with bench.database.write() as session:
        assert claim_groups(session, "sampled", limit=1, now=bench.clock.now, lease_s=30) == ["g1"]
    assert await bench.worker(judge).step() == 0
    bench.clock.now += 30
    assert await bench.worker(judge).step() == 1


async def test_the_slower_of_two_judgements_changes_nothing(bench: Bench) -> None:
    bench.put("g1", "good", "bad")
    fast = bench.worker(FakeJudge(score_by_content(WORTH)))

    class Slow(FakeJudge):
        async def complete(
            self, messages: Sequence[Mapping[str, str]], schema: Mapping[str, Any]
        ) -> JudgeReply:
            bench.clock.now += 10_000  # the lease runs out
            assert await fast.step() == 1
            return await super().complete(messages, schema)

    table = score_by_content({"good": 0.2, "bad": 0.3})
    with structlog.testing.capture_logs() as events:
        await bench.worker(Slow(table)).step()

    scored = bench.scored()
    assert scored.scores == (0.9, 0.1)
    assert bench.counts("judging") == {"scored": 1}
    assert "judgement_came_second" in [event["event"] for event in events]


class GatedJudge:
    """Answers only when told to; knows how many calls are under way."""

    model = "gated"

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self.gate = asyncio.Event()
        self.under_way = 0
        self.most = 0

    async def complete(
        self, messages: Sequence[Mapping[str, str]], schema: Mapping[str, Any]
    ) -> JudgeReply:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            await self.gate.wait()
            return await self._judge.complete(messages, schema)
        finally:
            self.under_way -= 1


async def test_run_keeps_to_the_concurrency(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(7):
        bench.put(f"g{number}", "good", "bad")
    judge = GatedJudge(FakeJudge(score_by_content(WORTH)))
    judging = bench.worker(judge, concurrency=3)
    claim, limits = judging._claim, []

    async def counted(limit: int) -> list[str]:
        limits.append(limit)
        return await claim(limit)

    monkeypatch.setattr(judging, "_claim", counted)
    monkeypatch.setattr("ingest.ruler.judging.POLL_S", 0.01)
    stop = asyncio.Event()
    running = asyncio.create_task(judging.run(stop))

    await until(lambda: len(limits) == 5)
    assert limits == [3, 0, 0, 0, 0]
    await until(lambda: judge.under_way == 3)
    judge.gate.set()
    await until(lambda: bench.counts("judging") == {"scored": 7})
    stop.set()
    await running

    assert judge.most == 3


async def test_stopping_gives_back_what_is_in_flight_at_once(bench: Bench) -> None:
    bench.put("g1", "good", "bad")
    judge = GatedJudge(FakeJudge("never"))
    stop = asyncio.Event()
    running = asyncio.create_task(bench.worker(judge).run(stop))
    await until(lambda: judge.under_way == 1)

    stop.set()
    await running

    assert judge.under_way == 0
    row = bench.row("g1")
    assert (row.status, row.lease_until) == ("sampled", 0.0)


async def test_run_outlives_a_store_outage(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.put("g1", "good", "bad")
    judging = bench.worker(FakeJudge(score_by_content(WORTH)))
    whole = judging._claim_now
    failures = iter([StoreError("locked"), StoreError("locked")])

    def flaky(limit: int) -> list[str]:
        for failure in failures:
            raise failure
        return whole(limit)

    monkeypatch.setattr(judging, "_claim_now", flaky)
    monkeypatch.setattr("ingest.ruler.judging.POLL_S", 0.01)
    stop = asyncio.Event()
    with structlog.testing.capture_logs() as events:
        running = asyncio.create_task(judging.run(stop))
        await until(lambda: bench.status("g1")[0] == "scored")
        stop.set()
        await running
    assert [e["event"] for e in events].count("judging_waits_for_store") == 2


# Two judging workers on one store: each group is scored once.

GROUPS = 24


@pytest.mark.both_stores
async def test_two_workers_score_each_group_once(bench: Bench) -> None:
    names = [f"g{number}" for number in range(GROUPS)]
    for name in names:
        bench.put(name, "good", "bad")
    scores = {"good": 0.9, "bad": 0.1}
    with closing(Database(bench.database.url)) as other:
        judges = [FakeJudge(score_by_content(scores)) for _ in range(2)]
        workers = [
            replace(bench, database=store).worker(judge)
            for store, judge in zip((bench.database, other), judges, strict=True)
        ]
        for _ in range(GROUPS):
            await asyncio.gather(*(worker.step() for worker in workers))
            if bench.counts("judging").get("scored") == GROUPS:
                break

    assert bench.counts("judging") == {"scored": GROUPS}
    assert {bench.status(name)[0] for name in names} == {"scored"}
    calls = bench.calls()
    assert sorted(call.group_id for call in calls) == sorted(names)


@pytest.mark.parametrize("store_kind", ["postgres"], indirect=True)
def test_a_worker_passes_over_what_another_is_claiming(bench: Bench) -> None:
    for name in ("a", "b"):
        bench.put(name, "good", "bad")

    with bench.database.write(alone=False) as one, bench.database.write(alone=False) as two:
        first = claim_groups(one, "sampled", limit=1, now=1.0, lease_s=60.0)
        second = claim_groups(two, "sampled", limit=5, now=1.0, lease_s=60.0)

    assert (first, second) == (["a"], ["b"])
    with bench.database.write(alone=False) as session:
        assert claim_groups(session, "sampled", limit=5, now=60.0, lease_s=60.0) == []
        assert claim_groups(session, "sampled", limit=5, now=61.0, lease_s=60.0) == ["a", "b"]


# Each group is judged by the rubric of its project, and its scores say by which.

RUBRICS = {"shop": "Sell politely.", "desk": "Close tickets.", "default": "Be good."}
"""Project -> its rubric; `default` has none of its own."""
SETTINGS = JudgeSettings(
    model="scripted",
    rubric="Be good.",
    passes=2,
    projects={name: ProjectRubric(rubric=RUBRICS[name]) for name in ("shop", "desk")},
)


def asked_by(conversations: list[list[dict[str, str]]]) -> list[str]:
    """The project whose rubric stands in each conversation, and no other rubric does."""
    texts = ["".join(message["content"] for message in talk) for talk in conversations]
    found = [[name for name, rubric in RUBRICS.items() if rubric in text] for text in texts]
    assert all(len(names) == 1 for names in found), found
    return [names[0] for names in found]


@pytest.mark.both_stores
async def test_the_judge_is_given_the_rubric_of_each_groups_project(bench: Bench) -> None:
    judge = FakeJudge()
    for project in RUBRICS:
        bench.put(f"g-{project}", "a", "b", project=project)
    worker = JudgingWorker(bench.database, judge, SETTINGS, clock=bench.clock)

    assert await worker.step() == 3

    assert sorted(asked_by(judge.conversations)) == sorted([*RUBRICS, *RUBRICS])
    for project, rubric in RUBRICS.items():
        row = bench.row(f"g-{project}")
        assert (row.status, row.rubric_hash) == ("scored", rubric_hash(rubric))
        calls = [one for one in bench.calls() if one.group_id == f"g-{project}"]
        assert [one.rubric_hash for one in calls] == [rubric_hash(rubric)] * 2


async def test_the_probe_at_the_start_has_the_default_rubric(bench: Bench) -> None:
    bench.put("g1", "a", "b", project="shop")
    judge = FakeJudge()
    worker = JudgingWorker(bench.database, judge, SETTINGS, clock=bench.clock)
    await worker.begin()

    await worker.step()
    await worker.step()

    assert asked_by(judge.conversations) == ["default", "shop", "shop"]
    by_subject = {one.group_id: one.rubric_hash for one in bench.calls()}
    assert by_subject == {
        SUBJECT: rubric_hash(RUBRICS["default"]), "g1": rubric_hash(RUBRICS["shop"]),
    }  # fmt: skip


async def test_a_probe_with_an_earlier_group_has_the_rubric_of_its_project(bench: Bench) -> None:
    good = FakeJudge()
    bench.put("g1", "a", "b", project="shop")
    await JudgingWorker(bench.database, good, SETTINGS, clock=bench.clock).step()
    bench.put("g2", "c", "d", project="desk")
    judge = FakeJudge(JudgeRejectedError("400"), score_by_content({}, 0.5))

    await JudgingWorker(bench.database, judge, SETTINGS, clock=bench.clock).step()

    assert asked_by(judge.conversations) == ["desk", "shop"]
    stored = [one.rubric_hash for one in bench.calls() if one.group_id == SUBJECT]
    assert stored == [rubric_hash(RUBRICS["shop"])]


async def test_a_kept_reply_to_one_rubric_answers_no_other(bench: Bench) -> None:
    """Two groups of the same words, of two projects; then the first one's again."""
    real = FakeJudge()
    kept = KeptReplies(ReplyStore(bench.database, max_bytes=2**20, max_age_s=1e9))
    seeds = ContentSeeds(kept.store)
    cached = CachedJudge(real, SETTINGS, kept)

    async def judge(*groups: tuple[str, str]) -> int:
        """Judge groups one after the other. Returns: how many calls were made."""
        before = len(real.conversations)
        for name, project in groups:
            bench.put(name, "a", "b", project=project)
            worker = JudgingWorker(
                bench.database, cached, SETTINGS, clock=bench.clock, draw_seed=seeds
            )
            assert await worker.step() == 1
        return len(real.conversations) - before

    assert await judge(("g1", "shop"), ("g2", "desk")) == 4
    assert await judge(("g3", "shop"), ("g4", "desk"), ("g5", "default")) == 2
    assert asked_by(real.conversations) == ["shop"] * 2 + ["desk"] * 2 + ["default"] * 2
    await kept.aclose()
