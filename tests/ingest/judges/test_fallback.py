"""Judges behind the first one: one judge for all of a group, and no group waits or is blamed."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import structlog

from ingest.errors import JudgeBusyError, JudgeRejectedError, JudgeSpentError, JudgeUnavailableError
from ingest.judge_watch import read_judge_state
from ingest.judges.provider import Panel, Patience
from ingest.judges.spending import ASKED
from ingest.ruler.judge import JudgeReply
from ingest.store.groups import load_scored_group
from support.fake_judge import score_by_content
from tests.ingest.conftest import answer_with, until
from tests.ingest.judges.conftest import PRICE, Bench

MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
SCHEMA = {"properties": {"scores": {"items": {"properties": {"id": {"enum": ["a", "b"]}}}}}}
FIRST, SECOND = "openai/first", "openai/second"


class JudgeOf:
    """Gives one reply to all questions."""

    model = "one"

    async def complete(self, messages: Any, schema: Any) -> Any:
        return JudgeReply(text="{}")


Step = Callable[[dict[str, Any]], tuple[Any, ...]]


def fallback(url: str, **changes: Any) -> dict[str, Any]:
    return {"model": SECOND, "api_base": url, "api_key": "sk-test-key-2", **changes}


def scoring(good: float) -> Step:
    return answer_with(score_by_content({"good": good, "bad": 0.1}, otherwise=0.5))


async def test_a_judge_that_is_away_is_logged_once_until_it_is_back(bench: Bench) -> None:
    class Fickle(JudgeOf):
        fails = True

        async def complete(self, messages: Any, schema: Any) -> Any:
            if self.fails:
                raise JudgeUnavailableError("503")
            return await super().complete(messages, schema)

    first, second = Fickle(), JudgeOf()
    second.model = SECOND
    first.model = FIRST
    panel = Panel(
        [bench.provider(first), bench.provider(second)], Patience(first_s=0.0, begun_s=0.0)
    )

    with structlog.testing.capture_logs() as logs:
        for _ in range(30):
            bench.clock.now += 400.0  # long enough for the breaker to try the first one again
            await panel.complete(MESSAGES, SCHEMA)
        first.fails = False
        bench.clock.now += 1_000.0
        await panel.complete(MESSAGES, SCHEMA)
        first.fails = True
        await panel.complete(MESSAGES, SCHEMA)

    said = [one["event"] for one in logs if one["event"].startswith("judge_fallback")]
    assert said == ["judge_fallback", "judge_fallback_over", "judge_fallback"]


async def test_a_wrong_key_of_the_first_judge_stops_nothing(bench: Bench) -> None:
    refused = bench.kit.serve((401, {"error": {"message": "Incorrect API key"}}))
    second = bench.kit.serve(scoring(0.8))
    settings = bench.settings(refused.url, fallbacks=[fallback(second.url)], concurrency=1)
    worker = bench.scoring(bench.open(settings), settings)
    await worker.begin()
    await worker.step()  # asks whether the judge works
    for name in ("g1", "g2", "g3", "g4"):
        bench.put(name, "good", "bad")
        await worker.step()

    assert [bench.status(name)[0] for name in ("g1", "g4")] == ["scored"] * 2
    assert {bench.row("g1").judge_model} == {SECOND}
    assert len(refused.requests) == 3, "then it is left alone"
    assert bench.counts("judge_failures") == {}
    with bench.database.read() as session:
        state = read_judge_state(session)
    assert state is not None
    assert state.state == "works"
    first, other = state.judges
    assert (first.model, first.breaker, other.model, other.breaker) == (
        FIRST, "open", SECOND, "closed",
    )  # fmt: skip
    assert first.error == "judge_rejected"


async def test_each_judge_gets_its_own_key_and_parameters(bench: Bench) -> None:
    away = bench.kit.serve((500, {}))
    second = bench.kit.serve((200, bench.kit.completion("ok")))
    settings = bench.settings(
        away.url,
        params={"temperature": 0.25},
        fallbacks=[fallback(second.url, params={"seed": 7})],
    )
    await bench.open(settings).patient.complete(MESSAGES, SCHEMA)

    assert away.headers[0]["authorization"] == "Bearer sk-test-key-1"
    assert second.headers[0]["authorization"] == "Bearer sk-test-key-2"
    assert "temperature" not in second.requests[0]
    assert second.requests[0]["seed"] == 7
    assert second.requests[0]["model"] == "second"


@pytest.mark.parametrize(
    ("statuses", "error"),
    [
        ((401, 403), JudgeRejectedError),  # an operator has to act
        ((401, 500), JudgeUnavailableError),  # the second may come back
    ],
)
async def test_when_no_judge_answers_all_are_named(
    bench: Bench, statuses: tuple[int, int], error: type[Exception]
) -> None:
    first, second = (
        bench.kit.serve((one, {"error": {"message": f"no {one}"}})) for one in statuses
    )
    judges = bench.open(bench.settings(first.url, fallbacks=[fallback(second.url)]))

    with pytest.raises(JudgeUnavailableError) as raised:
        await judges.patient.complete(MESSAGES, SCHEMA)

    assert type(raised.value) is error
    assert all(f"no {one}" in str(raised.value) for one in statuses)


async def test_a_short_rate_limit_is_waited_for_and_a_long_one_is_not(bench: Bench) -> None:
    first = bench.kit.serve((429, {"error": {"message": "slow"}}, ("retry-after", "5")))
    second = bench.kit.serve((200, bench.kit.completion("ok")))
    judges = bench.open(bench.settings(first.url, fallbacks=[fallback(second.url)]))
    with pytest.raises(JudgeBusyError):
        await judges.hurried.complete(MESSAGES, SCHEMA)
    assert second.requests == []

    bench.clock.now += 40.0  # and its pause still lasts
    assert (await judges.hurried.complete(MESSAGES, SCHEMA)).text == "ok"
    assert len(second.requests) == 1


async def test_what_a_judge_writes_wrong_is_no_reason_for_another(bench: Bench) -> None:
    """Its reply is there. To ask until one judge agrees would choose the judge by the scores."""
    first = bench.kit.serve((200, bench.kit.completion("I like them all")))
    second = bench.kit.serve(scoring(0.8))
    settings = bench.settings(first.url, fallbacks=[fallback(second.url)])
    bench.put("g1", "good", "bad")
    await bench.scoring(bench.open(settings), settings).step()

    assert bench.row("g1").judge_failures == '{"judge_rubbish":1}'
    assert second.requests == []


async def test_the_budget_holds_for_all_judges_together(bench: Bench) -> None:
    first = bench.kit.serve((500, {}))
    second = bench.kit.serve((200, bench.kit.completion("ok")))
    price = {"input": 2_000.0, "output": 4_000.0}  # $0.036 a call
    settings = bench.settings(
        first.url, price=PRICE, budget=0.03, fallbacks=[fallback(second.url, price=price)]
    )
    judges = bench.open(settings)
    await judges.patient.complete(MESSAGES, SCHEMA)
    await judges.aclose()

    with pytest.raises(JudgeSpentError, match=r"\$0\.04 of \$0\.03"):
        await judges.patient.complete(MESSAGES, SCHEMA)
    assert len(second.requests) == 1


class Dying:
    """A judge that answers, then breaks each connection, then answers again."""

    def __init__(self, answer: Step, *, dies_after: int) -> None:
        self.answer = answer
        self.left = dies_after
        self.asked_dead = 0

    def __call__(self, request: dict[str, Any]) -> tuple[Any, ...]:
        if self.left <= 0:
            self.asked_dead += 1
            raise ConnectionAbortedError("dead")
        self.left -= 1
        return self.answer(request)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_the_first_judge_dies_the_second_takes_over_and_back(bench: Bench) -> None:
    """No group is lost, judged twice, or has scores of both. 41 calls: dies between two passes."""
    groups = [f"g{number:02}" for number in range(60)]
    for name in groups:
        bench.put(name, "good", "bad")
    dying = Dying(scoring(0.9), dies_after=41)
    first, second = bench.kit.serve(dying), bench.kit.serve(scoring(0.8))
    settings = bench.settings(first.url, fallbacks=[fallback(second.url)], passes=2, concurrency=4)
    judges = bench.open(settings)
    worker = bench.scoring(judges, settings)
    for round_ in range(40):
        if await worker.step() == 0:
            break
        if round_ == 10:
            dying.left = 10**9  # it is back, and nobody knows
        bench.clock.now += 2.0
    await judges.aclose()

    calls = Counter((call.group_id, call.judge_model) for call in bench.calls() if call.ok)
    for name in groups:
        row = bench.row(name)
        assert (row.status, row.judge_attempts, row.judge_failures) == ("scored", 0, None)
        assert row.judge_model in (FIRST, SECOND)
        assert calls[name, row.judge_model] == 2, "one judge, both passes, once"
        with bench.database.read() as session:
            scored = load_scored_group(session, name)
        assert scored is not None
        good = {FIRST: 0.9, SECOND: 0.8}[row.judge_model]
        assert scored.scores == pytest.approx((good, 0.1))
    by_judge = Counter(bench.row(name).judge_model for name in groups)
    assert by_judge[FIRST] > 20, "before and after"
    assert by_judge[SECOND] > 10
    assert bench.counts("judge_failures") == {}
    # Calls that were paid for and not used: first passes of groups over which the first one died.
    assert sum(calls.values()) - 2 * len(groups) <= 4
    asked = bench.counts(ASKED)
    assert asked[f"judge_unavailable {FIRST}"] == dying.asked_dead <= 4 + 3


async def test_while_an_open_breaker_is_tried_other_groups_do_not_wait_for_it(bench: Bench) -> None:
    first = bench.kit.serve((500, {}))
    second = bench.kit.serve((200, bench.kit.completion("ok")))
    judges = bench.open(bench.settings(first.url, fallbacks=[fallback(second.url)]))
    for _ in range(3):
        await judges.patient.complete(MESSAGES, SCHEMA)
    bench.clock.now += 1.0
    first.script = [(0, None)]  # it hangs

    slow = asyncio.create_task(judges.patient.complete(MESSAGES, SCHEMA))
    await until(lambda: len(first.requests) == 4)
    for _ in range(3):
        async with asyncio.timeout(10):
            assert (await judges.patient.complete(MESSAGES, SCHEMA)).text == "ok"
    assert len(first.requests) == 4
    slow.cancel()
    with pytest.raises(asyncio.CancelledError):
        await slow


async def test_a_judges_context_is_known_through_what_stands_before(bench: Bench) -> None:
    server = bench.kit.serve(scoring(0.8))
    settings = bench.settings(server.url, context_tokens=64, requests_per_minute=100)
    bench.put("g1", "good", "bad")

    await bench.scoring(bench.open(settings), settings).step()

    assert bench.status("g1") == ("set_aside", "judge_too_long")
    assert server.requests == []
