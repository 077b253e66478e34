"""One judge for a crowd, in virtual time: its limits hold, its pace is met, nobody is blamed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from ingest.errors import JudgeBusyError, JudgeLimitedError, JudgeUnavailableError
from ingest.judges.provider import Patience, Provider
from ingest.judges.spending import Meter
from ingest.ruler.judge import Judge, JudgeReply
from ingest.ruler.judging import LONGEST_LIMIT_S, lease_s
from ingest.ruler.waiting import LONGEST_STAY_S, MINUTE_S
from sidecar.settings import Judge as JudgeSettings
from support.fake_judge import score_by_content
from support.virtual_time import VirtualLoop
from tests.ingest.judges.conftest import Bench

SCHEMA = {"properties": {"scores": {"items": {"properties": {"id": {"enum": ["a", "b"]}}}}}}
PATIENT = Patience(first_s=LONGEST_STAY_S, begun_s=LONGEST_LIMIT_S)
ENDLESS = Patience(first_s=1e9, begun_s=1e9)
Answer = Callable[[float], float | None]
"""(time of a request) -> None: it is answered; or the `Retry-After` of its refusal, 0: none."""


class NoLedger:
    """Books nothing, and needs no thread."""

    in_dollars = False

    async def reserve(self, *_: Any, **__: Any) -> dict[Any, Any]:
        return {}

    def settle(self, *_: Any) -> None: ...

    note = spend = settle

    def write_soon(self) -> None: ...


@dataclass
class Server:
    """A provider that notes when it answered."""

    loop: VirtualLoop
    answer: Answer
    lasts_s: float = 0.4
    model = "openai/m"

    def __post_init__(self) -> None:
        self.answered: list[float] = []
        self.refused = 0

    async def complete(self, messages: Any, schema: Any) -> JudgeReply:
        now = self.loop.time()
        wait_s = self.answer(now)
        if wait_s is not None:
            self.refused += 1
            await asyncio.sleep(0.05)
            raise JudgeBusyError("429", retry_after_s=wait_s)
        self.answered.append(now)
        await asyncio.sleep(self.lasts_s)
        return JudgeReply(text="{}", prompt_tokens=1, completion_tokens=1)


def provider(judge: Judge, loop: VirtualLoop, **changes: Any) -> Provider:
    made = JudgeSettings.model_validate(
        {"model": "openai/m", "price": {"input": 1, "output": 1}, **changes}
    )
    meter = Meter(made, NoLedger())  # type: ignore[arg-type]
    return Provider(judge, made, meter, clock=loop.time)


def virtually(play: Callable[[VirtualLoop], Coroutine[Any, Any, Any]]) -> Any:
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(play(loop))
    finally:
        loop.close()


def in_virtual_time(test: Callable[[VirtualLoop], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        virtually(test)

    return run


def messages(size: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": "x" * size}]


async def two_passes(judge: Judge) -> bool:
    for _ in range(2):
        await judge.complete(messages(4), SCHEMA)
    return True


async def judged(made: Provider, groups: int, *, callers: int = 8) -> int:
    """Let callers judge groups of two passes; one that would wait long is put back, as score does.

    Returns: how many were put back.
    """
    queue, put_back = list(range(groups)), 0

    async def work() -> None:
        nonlocal put_back
        while queue:
            group = queue.pop()
            try:
                await made.judgement(two_passes, PATIENT)
            except JudgeBusyError:
                put_back += 1
                queue.append(group)

    await asyncio.gather(*(work() for _ in range(callers)))
    return put_back


def every_second() -> Answer:
    number = iter(range(10**9))
    return lambda _: 0.0 if next(number) % 2 == 0 else None


def per_second(rate: float, retry_after_s: float) -> Answer:
    """A bucket of two requests."""
    tokens, last = 2.0, 0.0

    def answer(now: float) -> float | None:
        nonlocal tokens, last
        tokens, last = min(2.0, tokens + (now - last) * rate), now
        if tokens < 1.0 - 1e-9:
            return retry_after_s
        tokens -= 1.0
        return None

    return answer


def test_refusing_every_second_request_costs_no_group() -> None:
    async def play(loop: VirtualLoop) -> int:
        server = Server(loop, every_second())
        await judged(provider(server, loop), 24)
        return len(server.answered)

    assert virtually(play) == 48, "each is judged, and no pass was paid for in vain"


@pytest.mark.parametrize("retry_after_s", [0.0, 1.0])
@pytest.mark.parametrize("lasts_s", [0.4, 2.0])
def test_eight_callers_use_nine_tenths_of_a_rate(lasts_s: float, retry_after_s: float) -> None:
    async def play(loop: VirtualLoop) -> tuple[int, float]:
        server = Server(loop, per_second(2.0, retry_after_s), lasts_s)
        return await judged(provider(server, loop), 400), server.answered[-1]

    put_back, seconds = virtually(play)
    assert put_back == 0
    assert 800 / seconds >= 0.9 * 2.0


@in_virtual_time
async def test_a_long_pause_is_not_waited_for_and_a_judgement_that_is_paid_for_is_finished(
    loop: VirtualLoop,
) -> None:
    pauses = iter([None, 100.0])
    server = Server(loop, lambda _: next(pauses, None))
    made = provider(server, loop)
    assert await made.judgement(two_passes, PATIENT)
    assert loop.time() > 100.0
    made.waiting = made.waiting.paused(loop.time() + 31.0)
    with pytest.raises(JudgeBusyError, match="asked for a pause") as raised:
        await made.judgement(two_passes, PATIENT)
    assert raised.value.retry_after_s == pytest.approx(31.0)


@in_virtual_time
async def test_a_call_that_would_wait_long_for_a_limit_is_put_off(loop: VirtualLoop) -> None:
    server = Server(loop, lambda _: None)
    made = provider(server, loop, requests_per_minute=2)
    assert await made.judgement(two_passes, PATIENT)
    with pytest.raises(JudgeLimitedError) as raised:
        await made.judgement(two_passes, PATIENT)
    assert raised.value.until == MINUTE_S
    assert len(server.answered) == 2


@in_virtual_time
async def test_both_requests_of_a_call_that_is_made_twice_count(loop: VirtualLoop) -> None:
    server = Server(loop, lambda _: None)
    made = provider(server, loop, requests_per_minute=3)
    await made.judgement(two_passes, PATIENT)
    made.again()
    with pytest.raises(JudgeLimitedError):
        await made.judgement(two_passes, PATIENT)


@dataclass(frozen=True)
class Asked:
    """One call of a crowd."""

    after_s: float
    """Since the one before."""
    prompt_bytes: int
    delay_s: float
    """Between being let through and the request going out, as the ledger's write takes."""
    lasts_s: float
    ends: str


ASKED = st.builds(
    Asked,
    after_s=st.one_of(st.just(0.0), st.floats(0.0, 40.0)),
    prompt_bytes=st.integers(0, 8_000),
    delay_s=st.one_of(st.just(0.0), st.floats(0.0, 20.0)),
    lasts_s=st.floats(0.0, 90.0),
    ends=st.sampled_from(["answered", "answered", "silent", "rejected", "never sent", "cut"]),
)


def gone_out(crowd: Sequence[Asked], **limits: int) -> list[float]:
    """Let a crowd ask. Returns: when each request went out."""
    out: list[float] = []

    async def play(loop: VirtualLoop) -> None:
        class Slow(NoLedger):
            async def reserve(self, *_: Any, **__: Any) -> dict[Any, Any]:
                asked = crowd[int(asyncio.current_task().get_name())]  # type: ignore[union-attr]
                await asyncio.sleep(asked.delay_s)
                if asked.ends == "never sent":
                    raise JudgeUnavailableError("a budget is spent")
                return {}

        class One:
            model = "openai/m"

            async def complete(self, given: Any, schema: Any) -> JudgeReply:
                asked = crowd[int(asyncio.current_task().get_name())]  # type: ignore[union-attr]
                out.append(loop.time())
                await asyncio.sleep(asked.lasts_s)
                if asked.ends in ("rejected", "cut"):
                    raise JudgeUnavailableError(asked.ends, maybe_paid=asked.ends == "cut")
                told = None if asked.ends == "silent" else 9
                return JudgeReply(text="{}", prompt_tokens=told, completion_tokens=told)

        made = provider(One(), loop, **limits)
        made.meter._ledger = Slow()  # type: ignore[assignment]

        async def ask(asked: Asked) -> None:
            try:
                await made.judgement(
                    lambda one: one.complete(messages(asked.prompt_bytes), SCHEMA), ENDLESS
                )
            except JudgeUnavailableError:
                return

        async with asyncio.TaskGroup() as tasks:
            for place, asked in enumerate(crowd):
                await asyncio.sleep(asked.after_s)
                tasks.create_task(ask(asked), name=str(place))

    virtually(play)
    return out


def most_in_a_minute(out: Sequence[float]) -> int:
    """The most requests of any minute, by looking at the minute that each one ends."""
    minutes = [[at for at in out if end - MINUTE_S + 1e-6 < at <= end] for end in out]
    return max(map(len, minutes), default=0)


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(crowd=st.lists(ASKED, min_size=1, max_size=25), calls=st.sampled_from([0, 1, 2, 3, 5, 10]))
def test_no_minute_has_more_than_the_limit(crowd: list[Asked], calls: int) -> None:
    out = gone_out(crowd, requests_per_minute=calls)

    assert most_in_a_minute(out) <= (calls or len(crowd))
    assert len(out) == sum(one.ends != "never sent" for one in crowd)  # nobody waits for ever


def test_as_many_go_as_fit_the_limit() -> None:
    busy = Asked(after_s=0.0, prompt_bytes=400, delay_s=0.0, lasts_s=1.0, ends="answered")
    out = gone_out([busy] * 60, requests_per_minute=10)
    assert most_in_a_minute(out) == 10
    assert max(out) == pytest.approx(300.0)


async def test_a_group_that_is_put_off_counts_no_attempt_and_is_judged_later(bench: Bench) -> None:
    """1 call a minute, and no time passes: the second group is put off."""
    score = bench.kit.answer_with(score_by_content({"good": 0.9}, otherwise=0.1))
    server = bench.kit.serve(score)
    made = bench.settings(server.url, requests_per_minute=1, concurrency=1)
    judges = bench.open(made, hurry_s=5.0)
    worker = bench.scoring(judges, made)
    for name in ("g1", "g2"):
        bench.put(name, "good", "bad")
    for _ in range(4):
        await worker.step()

    assert bench.status("g1")[0] == "scored"
    row = bench.row("g2")
    assert (row.status, row.judge_attempts, row.judge_failures) == ("sampled", 0, None)
    assert row.lease_until == 0.0, "free for whoever may ask"
    assert bench.counts("judge_failures") == {"judge_limited": 1}
    with pytest.raises(JudgeLimitedError):  # best of N
        await judges.hurried.complete(messages(4), SCHEMA)
    assert len(server.requests) == 1


def test_the_lease_covers_every_judge_and_the_longest_wait() -> None:
    plain = JudgeSettings(model="m", passes=2, timeout_s=60.0)
    assert lease_s(plain) == 2 * 2 * (60.0 + LONGEST_STAY_S) + 60.0
    other = {"model": "n", "requests_per_minute": 5}
    two = JudgeSettings.model_validate({"model": "m", "passes": 2, "fallbacks": [other]})
    assert lease_s(two) == 2 * 2 * 2 * (60.0 + LONGEST_LIMIT_S) + 60.0
