"""A budget of the judges: kept over restarts and over processes, and nobody is blamed for it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import pytest
import structlog

from ingest.errors import JudgeRejectedError, JudgeSpentError, JudgeUnavailableError
from ingest.judge_watch import read_judge_state, why_sampling_holds
from ingest.judges.spending import Ledger, Meter, litellm_price, read_spending
from ingest.ruler.judge import Judge, JudgeReply, Usage
from sidecar.store.database import Database
from support.fake_judge import score_by_content
from tests.ingest.conftest import until
from tests.ingest.judges.conftest import MIDNIGHT, NOON, PRICE, Bench

WORTH = {"good": 0.9, "fair": 0.5, "bad": 0.1}
MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
SCHEMA = {"properties": {"scores": {"items": {"properties": {"id": {"enum": ["a", "b"]}}}}}}
CALL = 18_000_000
"""Nano-dollars of one scripted call at `PRICE`."""


async def ask(judge: Judge) -> str:
    return (await judge.complete(MESSAGES, SCHEMA)).text


def spent_today(database: Database) -> int:
    with database.read() as session:
        return read_spending(session, now=NOON).nano_usd_today


async def test_a_spent_budget_refuses_calls_unasked_until_midnight(bench: Bench) -> None:
    server = bench.kit.serve((200, bench.kit.completion("ok")))
    settings = bench.settings(server.url, price=PRICE, budget=0.03)
    judges = bench.open(settings)
    await ask(judges.patient)
    await ask(judges.patient)

    with pytest.raises(JudgeSpentError) as raised:
        await ask(judges.patient)

    assert len(server.requests) == 2
    assert raised.value.until == MIDNIGHT
    assert str(raised.value) == (
        "judge.budget is spent: $0.04 of $0.03 today, until 2026-11-22 00:00 UTC"
    )
    bench.clock.now = MIDNIGHT - 0.001
    with pytest.raises(JudgeSpentError):
        await ask(judges.patient)
    bench.clock.now = MIDNIGHT
    assert await ask(judges.patient) == "ok"


@pytest.mark.both_stores
async def test_what_is_spent_holds_over_restarts_processes_and_uses(bench: Bench) -> None:
    server = bench.kit.serve((200, bench.kit.completion("ok")))
    settings = bench.settings(server.url, price=PRICE, budget=0.03)
    before = bench.open(settings)
    await ask(before.patient)
    await before.aclose()
    control, score = bench.open(settings), bench.open(settings)
    await ask(control.hurried)
    await control.aclose()

    for judge in (score.patient, score.hurried, bench.open(settings).patient):
        with pytest.raises(JudgeSpentError):
            await ask(judge)

    assert len(server.requests) == 2
    assert spent_today(bench.database) == 2 * CALL


async def test_a_budget_of_tokens(bench: Bench) -> None:
    server = bench.kit.serve((200, bench.kit.completion("ok")))
    judges = bench.open(bench.settings(server.url, budget_tokens=15))
    await ask(judges.patient)
    await judges.aclose()

    with pytest.raises(JudgeSpentError) as raised:
        await ask(judges.patient)
    assert str(raised.value).startswith("judge.budget_tokens is spent: 15 of 15 tokens today")
    assert raised.value.until == MIDNIGHT


@pytest.mark.both_stores
async def test_calls_at_once_exceed_it_by_those_in_flight_at_most(bench: Bench) -> None:
    server = bench.kit.serve((200, bench.kit.completion("ok")))
    settings = bench.settings(server.url, price=PRICE, budget=0.018)
    judges = [bench.open(settings) for _ in range(2)]
    asked = [ask(judges[number % 2].patient) for number in range(40)]

    ended = await asyncio.gather(*asked, return_exceptions=True)

    answered = [one for one in ended if one == "ok"]
    assert all(one == "ok" or isinstance(one, JudgeSpentError) for one in ended)
    # A reservation is more than the budget, so once one is stored no other call begins.
    assert 1 <= len(answered) <= 2
    for one in judges:
        await one.aclose()
    assert spent_today(bench.database) == len(answered) * CALL


async def test_a_dollar_budget_without_a_known_price_asks_nobody(bench: Bench) -> None:
    server = bench.kit.serve((200, bench.kit.completion("ok")))
    judges = bench.open(bench.settings(server.url, model="hosted_vllm/own", budget=1.0))

    with pytest.raises(JudgeRejectedError, match="nobody knows the price of hosted_vllm/own"):
        await ask(judges.patient)

    assert server.requests == []


async def test_litellms_price_is_taken_where_none_is_given(bench: Bench) -> None:
    server = bench.kit.serve((200, {**bench.kit.completion("ok"), "model": "gpt-4o-mini"}))
    judges = bench.open(bench.settings(server.url, model="openai/gpt-4o-mini", budget=1.0))
    await ask(judges.patient)
    await judges.aclose()
    # 12 prompt tokens at $0.15 and 3 completion tokens at $0.60 per million.
    assert spent_today(bench.database) == 3_600


@pytest.mark.parametrize(
    ("model", "prompt", "reply", "dollars"),
    [
        # USD for a million tokens: 1.25 and 10; for prompts over 200,000 tokens 2.50 and 15
        ("gemini/gemini-2.5-pro", 20_000, 1_000, 0.025 + 0.01),
        ("gemini/gemini-2.5-pro", 200_000, 1_000, 0.25 + 0.01),
        ("gemini/gemini-2.5-pro", 400_000, 1_000, 1.0 + 0.015),
        ("gemini/gemini-2.5-pro", 0, 0, 0.0),
        ("openai/gpt-4o-mini", 1_000_000, 1_000_000, 0.15 + 0.6),
    ],
)
def test_litellms_price_is_that_of_a_prompt_of_this_length(
    model: str, prompt: int, reply: int, dollars: float
) -> None:
    cost = litellm_price(model)

    assert cost is not None
    assert cost(prompt, reply) == pytest.approx(dollars)


@pytest.mark.parametrize(
    ("step", "estimated"),
    [
        ((0, None), True),  # silence until the time limit
        ((429, {"error": {"message": "slow down"}}), False),
        ((401, {"error": {"message": "no key"}}), False),
        ((200, {"id": "c", "object": "chat.completion", "created": 1, "model": "m",
                "choices": [{"index": 0, "finish_reason": "stop",
                             "message": {"role": "assistant", "content": "ok"}}]}), True),
    ],
)  # fmt: skip
async def test_a_call_that_may_have_been_paid_for_counts_by_an_estimate(
    bench: Bench, step: tuple[Any, ...], estimated: bool
) -> None:
    warm = bench.kit.serve((200, bench.kit.completion("ok")))
    await bench.kit.litellm_judge(warm.url).complete(MESSAGES, SCHEMA)  # LiteLLM's import is slow
    server = bench.kit.serve(step)
    judges = bench.open(bench.settings(server.url, price=PRICE, budget=9.0, timeout_s=1.0))
    with suppress(JudgeUnavailableError):
        await ask(judges.hurried)
    await judges.aclose()

    # 1 token of prompt (2 bytes), and a whole reply: 256 tokens and 128 for each of 2 answers.
    expected = round((1 * 1_000.0 + 512 * 2_000.0) / 1e6 * 1e9) if estimated else 0
    assert spent_today(bench.database) == expected
    told = bench.counts("judge_estimated")
    assert told == ({"openai/first": 1} if estimated else {})


async def test_a_cancelled_call_and_a_killed_process_leave_what_they_reserved(bench: Bench) -> None:
    server = bench.kit.serve((0, None))
    settings = bench.settings(server.url, price=PRICE, budget=9.0)
    judges = bench.open(settings)
    asking = asyncio.create_task(ask(judges.patient))
    await until(lambda: len(server.requests) == 1)

    killed = spent_today(bench.database)  # as the store is when the process dies here
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await judges.aclose()

    assert killed == spent_today(bench.database) == 1_025_000_000


async def test_both_requests_of_one_call_are_paid_for(bench: Bench) -> None:
    """A judge that thinks is cut at the token limit, and asked again at once."""
    cut = bench.kit.completion("<think>The first")
    cut["choices"][0]["finish_reason"] = "length"
    server = bench.kit.serve((200, cut), (200, bench.kit.completion("ok")))
    judges = bench.open(bench.settings(server.url, price=PRICE))

    reply = await judges.patient.complete(MESSAGES, SCHEMA)
    await judges.aclose()

    assert (reply.prompt_tokens, reply.completion_tokens) == (24, 6)
    assert reply.cost_usd == pytest.approx(0.036)
    assert spent_today(bench.database) == 2 * CALL


class _Tells:
    """A judge whose provider reports these, one for each request of a call."""

    model = "openai/first"

    def __init__(self, usages: list[Usage]) -> None:
        self.usages = usages
        self.meter: Meter | None = None

    async def complete(
        self, messages: Sequence[Mapping[str, str]], schema: Mapping[str, Any]
    ) -> JudgeReply:
        assert self.meter is not None
        for one in self.usages:
            self.meter.paid(one)
        whole = all(one.completion_tokens is not None for one in self.usages)
        return JudgeReply(
            text="ok", prompt_tokens=2_001, completion_tokens=768 if whole else None, seconds=0.1
        )


@pytest.mark.parametrize("budget", [9.0, 0.0])
@pytest.mark.parametrize(
    ("usages", "tokens", "nano"),
    [
        # The reservation stands: 1 token of prompt and 512 of a reply.
        ([Usage(prompt_tokens=2_001)], 513, 1_025_000_000),
        # The first request was told of whole: 10 + 5 tokens, 20,000,000; the other is reserved.
        (
            [Usage(prompt_tokens=10, completion_tokens=5), Usage(prompt_tokens=2_001)],
            528,
            1_045_000_000,
        ),
        ([Usage(prompt_tokens=10, completion_tokens=5)], 15, 20_000_000),
    ],
)
async def test_half_a_usage_is_not_counted_beside_the_reservation(
    bench: Bench, usages: list[Usage], tokens: int, nano: int, budget: float
) -> None:
    settings = bench.settings("http://127.0.0.1:1", price=PRICE, budget=budget)
    ledger = Ledger(bench.database, settings, clock=bench.clock)
    judge, meter = _Tells(usages), Meter(settings, ledger)
    judge.meter = meter

    estimate = await meter.estimate(MESSAGES, SCHEMA)
    await meter.metered(lambda: judge.complete(MESSAGES, SCHEMA), estimate, begun=False)
    await ledger.aclose()

    with bench.database.read() as session:
        found = read_spending(session, now=NOON)
    assert (found.tokens_today, found.nano_usd_today) == (tokens, nano)


async def test_the_worker_waits_says_until_when_and_blames_nobody(bench: Bench) -> None:
    score = score_by_content(WORTH, otherwise=0.5)
    server = bench.kit.serve(bench.kit.answer_with(score))
    settings = bench.settings(server.url, price=PRICE, budget=0.018, concurrency=1)
    worker = bench.scoring(bench.open(settings), settings)
    for name in ("g1", "g2"):
        bench.put(name, "good", "bad")

    with structlog.testing.capture_logs() as events:
        await worker.step()
        await worker.step()
        await worker.step()
    with bench.database.read() as session:
        state, holds = read_judge_state(session), why_sampling_holds(session)

    assert bench.status("g1")[0] == "scored"
    assert bench.status("g2") == ("sampled", None)
    row = bench.row("g2")
    assert (row.judge_attempts, row.judge_failures, row.judging_since) == (0, None, None)
    assert state is not None
    assert (state.state, state.until) == ("spent", MIDNIGHT)
    assert holds == ("judge_spent", state.error)
    assert state.error == "judge.budget is spent: $0.02 of $0.02 today, until 2026-11-22 00:00 UTC"
    assert [one["event"] for one in events if one["event"].startswith("judge_")] == ["judge_spent"]
    assert len(server.requests) == 1, "no probe either"

    bench.clock.now = MIDNIGHT
    for _ in range(3):  # the judge is asked whether it works, which spends the new day's budget
        await worker.step()
    with bench.database.read() as session:
        state = read_judge_state(session)
    assert state is not None
    assert state.state in ("works", "spent")
    assert len(server.requests) == 2


async def test_a_group_finished_late_does_not_hide_a_spent_budget(bench: Bench) -> None:
    """One is scored, the other is refused before the first one ends."""
    score = score_by_content(WORTH, otherwise=0.5)
    server = bench.kit.serve(bench.kit.answer_with(score))
    settings = bench.settings(server.url, price=PRICE, budget=0.018, concurrency=2)
    said: list[str] = []
    worker = bench.scoring(bench.open(settings), settings, announce=said.append)
    for name in ("g1", "g2"):
        bench.put(name, "good", "bad")

    await worker.step()
    with bench.database.read() as session:
        state, holds = read_judge_state(session), why_sampling_holds(session)

    ends = {bench.status(name)[0] for name in ("g1", "g2")}
    assert ends == {"scored", "sampled"}
    assert state is not None
    assert (state.state, state.until) == ("spent", MIDNIGHT)
    assert holds == ("judge_spent", state.error)
    assert [line.partition(":")[0] for line in said] == ["judge is not asked"]


async def test_a_judgement_that_has_begun_is_finished(bench: Bench) -> None:
    """Else its first pass would be paid for nothing."""
    server = bench.kit.serve(bench.kit.answer_with(score_by_content(WORTH)))
    settings = bench.settings(server.url, price=PRICE, budget=0.001, passes=3)
    worker = bench.scoring(bench.open(settings), settings)
    bench.put("g1", "good", "bad")

    await worker.step()

    assert bench.status("g1")[0] == "scored"
    assert len(server.requests) == 3


async def test_an_unread_store_stops_spending(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sidecar.errors import StoreError

    server = bench.kit.serve((200, bench.kit.completion("ok")))
    judges = bench.open(bench.settings(server.url, price=PRICE, budget=1.0))

    def locked(*_: Any, **__: Any) -> None:
        raise StoreError("locked")

    with monkeypatch.context() as patched:
        patched.setattr(bench.database, "repeat", locked)
        with pytest.raises(StoreError):
            await ask(judges.patient)
    assert server.requests == []
    assert await ask(judges.patient) == "ok"
