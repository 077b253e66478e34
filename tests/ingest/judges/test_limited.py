"""Limits a minute: waits are bounded, nobody is blamed, and users do not queue."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from ingest.errors import JudgeBusyError, JudgeLimitedError, JudgeUnavailableError
from ingest.judges.limited import LimitedJudge, Limits, free_in_s
from ingest.judges.spending import Ticket
from ingest.ruler.judge import LiteLlmJudge
from ingest.ruler.judging import LONGEST_LIMIT_S, lease_s
from sidecar.settings import Judge as JudgeSettings
from support.clock import Clock
from support.fake_judge import FakeJudge
from tests.ingest.judges.conftest import Bench

if TYPE_CHECKING:
    from tests.ingest.conftest import JudgeKit

MESSAGES = [{"role": "system", "content": ""}, {"role": "user", "content": "x" * 400}]
SCHEMA = {"properties": {"scores": {"items": {"properties": {"id": {"enum": ["a", "b"]}}}}}}
ESTIMATE = 100 + 256 + 2 * 128


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time that passes while calls wait."""
    made = Clock()

    async def sleep(seconds: float) -> None:
        made.now += seconds

    monkeypatch.setattr("ingest.judges.limited.monotonic", made)
    monkeypatch.setattr("ingest.judges.limited.time.time", made)
    monkeypatch.setattr("asyncio.sleep", sleep)
    return made


def seat(judge: FakeJudge, limits: Limits, ticket: Ticket | None = None) -> LimitedJudge:
    return LimitedJudge(judge, limits, ticket or Ticket(), longest_s=30.0, longest_begun_s=120.0)


def limits(**changes: int) -> Limits:
    return Limits(JudgeSettings.model_validate({"model": "m", **changes}))


def begun() -> Ticket:
    ticket = Ticket()
    ticket.begun = True
    return ticket


def tokens_free_in_s(shared: Limits, tokens: int, now: float) -> float:
    assert shared.tokens is not None
    return free_in_s([shared.tokens], [[tokens]], now)


async def test_so_many_calls_go_in_each_minute(clock: Clock) -> None:
    shared, judge, starts = limits(requests_per_minute=2), FakeJudge("{}"), []
    for _ in range(5):
        await seat(judge, shared, begun()).complete(MESSAGES, SCHEMA)
        starts.append(clock.now - 1_000.0)
    assert starts == pytest.approx([0.0, 0.0, 60.0, 60.0, 120.0])


async def test_a_judgement_that_would_wait_long_is_put_off_and_one_that_has_begun_waits(
    clock: Clock,
) -> None:
    shared, judge = limits(requests_per_minute=1), FakeJudge("{}")
    await seat(judge, shared).complete(MESSAGES, SCHEMA)

    with pytest.raises(JudgeLimitedError) as raised:
        await seat(judge, shared).complete(MESSAGES, SCHEMA)
    assert raised.value.until == pytest.approx(1_060.0)
    assert (clock.now, len(judge.conversations)) == (1_000.0, 1)

    await seat(judge, shared, begun()).complete(MESSAGES, SCHEMA)
    assert clock.now == pytest.approx(1_060.0)


async def test_tokens_are_estimated_before_and_corrected_after(clock: Clock) -> None:
    shared, judge = limits(tokens_per_minute=800), FakeJudge("{}")
    await seat(judge, shared).complete(MESSAGES, SCHEMA)  # 110 as it reports
    assert clock.now == 1_000.0
    assert tokens_free_in_s(shared, 690, clock.now) == 0.0
    assert tokens_free_in_s(shared, 691, clock.now) == 60.0


@pytest.mark.parametrize(
    ("error", "left"),
    [
        (JudgeUnavailableError("cut off", maybe_paid=True), 800 - ESTIMATE),
        (JudgeUnavailableError("refused"), 800),
        (JudgeBusyError("429"), 800),
    ],
)
async def test_a_call_that_was_not_served_gives_its_tokens_back(
    clock: Clock, error: Exception, left: int
) -> None:
    shared = limits(tokens_per_minute=800)
    with pytest.raises(JudgeUnavailableError):
        await seat(FakeJudge(error), shared).complete(MESSAGES, SCHEMA)
    assert tokens_free_in_s(shared, left, clock.now) == 0.0
    assert left == 800 or tokens_free_in_s(shared, left + 1, clock.now) == 60.0


async def test_both_requests_of_a_call_that_is_made_twice_count(clock: Clock) -> None:
    shared = limits(requests_per_minute=3)

    class Twice(FakeJudge):
        async def complete(self, *args: Any) -> Any:
            shared.sent()
            shared.sent()
            return await super().complete(*args)

    await seat(Twice("{}"), shared).complete(MESSAGES, SCHEMA)
    await seat(FakeJudge("{}"), shared).complete(MESSAGES, SCHEMA)

    assert shared.calls is not None
    assert free_in_s([shared.calls], [[1]], clock.now) == 60.0


async def test_a_refused_request_counts_as_a_call(clock: Clock) -> None:
    shared = limits(requests_per_minute=1)

    class Refuses(FakeJudge):
        async def complete(self, *_: Any) -> Any:
            shared.sent()
            raise JudgeBusyError("429")

    with pytest.raises(JudgeBusyError):
        await seat(Refuses(), shared).complete(MESSAGES, SCHEMA)

    assert shared.calls is not None
    assert free_in_s([shared.calls], [[1]], clock.now) == 60.0


async def test_the_judge_says_when_each_request_goes_out(bench: Bench, judge_kit: JudgeKit) -> None:
    server = judge_kit.serve((200, judge_kit.completion("ok")))
    sent: list[int] = []
    judge = LiteLlmJudge(bench.settings(server.url), on_send=lambda: sent.append(1))

    await judge.complete(MESSAGES, SCHEMA)

    assert len(sent) == len(server.requests) == 1
    await judge.aclose()


async def test_without_limits_nothing_waits(clock: Clock) -> None:
    shared, judge = limits(), FakeJudge("{}")
    for _ in range(100):
        await seat(judge, shared).complete(MESSAGES, SCHEMA)
    assert clock.now == 1_000.0


async def test_a_group_that_is_put_off_counts_no_attempt_and_is_judged_later(
    bench: Bench, judge_kit: JudgeKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 call a minute, and no time passes: the second group is put off."""
    monkeypatch.setattr("ingest.judges.limited.monotonic", lambda: 1_000.0)
    score = judge_kit.answer_with(judge_kit.score_by_content({"good": 0.9}, otherwise=0.1))
    server = judge_kit.serve(score)
    settings = bench.settings(server.url, requests_per_minute=1, concurrency=1)
    judges = bench.open(settings)
    worker = bench.worker(judges, settings)
    for name in ("g1", "g2"):
        judge_kit.put_group(bench.database, name, "good", "bad")
    for _ in range(4):
        await worker.step()

    assert judge_kit.status(bench.database, "g1")[0] == "scored"
    row = judge_kit.group_row(bench.database, "g2")
    assert (row.status, row.judge_attempts, row.judge_failures) == ("sampled", 0, None)
    assert row.lease_until == 0.0, "free for whoever may ask"
    assert judge_kit.counts(bench.database, "judge_failures") == {"judge_limited": 1}
    assert len(server.requests) == 1


async def test_best_of_n_is_declined_when_its_time_is_too_short(
    bench: Bench, judge_kit: JudgeKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ingest.judges.limited.monotonic", lambda: 1_000.0)
    server = judge_kit.serve((200, judge_kit.completion("ok")))
    judges = bench.open(bench.settings(server.url, requests_per_minute=1), hurry_s=5.0)
    await judges.patient.complete(MESSAGES, SCHEMA)

    async with asyncio.timeout(5):
        with pytest.raises(JudgeLimitedError):
            await judges.hurried.complete(MESSAGES, SCHEMA)


def test_the_lease_covers_every_judge_and_the_longest_wait() -> None:
    plain = JudgeSettings(model="m", passes=2, timeout_s=60.0)
    assert lease_s(plain) == 2 * 2 * 60.0 + 60.0
    other = {"model": "n", "requests_per_minute": 5}
    two = JudgeSettings.model_validate({"model": "m", "passes": 2, "fallbacks": [other]})
    assert lease_s(two) == 2 * 2 * 2 * (60.0 + LONGEST_LIMIT_S) + 60.0
