"""No minute has more than its limits, by the times when requests go out, whoever asks and when."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ingest.errors import JudgeUnavailableError
from ingest.judges.limited import MINUTE_S, LimitedJudge, Limits, Window, free_in_s
from ingest.judges.spending import Ticket, estimate_call
from ingest.ruler.judge import JudgeReply
from sidecar.settings import Judge as JudgeSettings
from support.virtual_time import VirtualLoop

SCHEMA = {"properties": {"scores": {"items": {"properties": {"id": {"enum": ["a", "b"]}}}}}}


@dataclass(frozen=True)
class Asked:
    """One call of a simulated crowd."""

    after_s: float
    """Since the one before."""
    prompt_bytes: int
    delay_s: float
    """Between being let through and the request going out, as the ledger's write takes."""
    lasts_s: float
    share: float
    """The share of the estimated tokens that a call uses."""
    ends: str


ASKED = st.builds(
    Asked,
    after_s=st.one_of(st.just(0.0), st.floats(0.0, 40.0)),
    prompt_bytes=st.integers(0, 8_000),
    delay_s=st.one_of(st.just(0.0), st.floats(0.0, 20.0)),
    lasts_s=st.floats(0.0, 90.0),
    share=st.floats(0.0, 1.0),
    ends=st.sampled_from(["answered", "answered", "silent", "refused", "never sent", "cut"]),
)


def messages(asked: Asked) -> list[dict[str, str]]:
    return [{"role": "user", "content": "x" * asked.prompt_bytes}]


class Provider:
    """Notes what goes out: when, and the tokens that are used."""

    model = "m"

    def __init__(self, limits: Limits, asked: Asked, out: list[tuple[float, float]]) -> None:
        self._limits, self._asked, self._out = limits, asked, out

    async def complete(
        self, given: Sequence[Mapping[str, str]], schema: Mapping[str, Any]
    ) -> JudgeReply:
        asked = self._asked
        await asyncio.sleep(asked.delay_s)
        if asked.ends == "never sent":
            raise JudgeUnavailableError("a budget is spent")
        self._limits.sent()
        estimate = estimate_call(given, schema, {}, None).tokens
        used = {"silent": estimate, "cut": estimate, "refused": 0}.get(
            asked.ends, math.floor(asked.share * estimate)
        )
        self._out.append((asyncio.get_running_loop().time(), used))
        await asyncio.sleep(asked.lasts_s)
        if asked.ends in ("refused", "cut"):
            raise JudgeUnavailableError(asked.ends, maybe_paid=asked.ends == "cut")
        return JudgeReply(
            text="{}",
            prompt_tokens=None if asked.ends == "silent" else used,
            completion_tokens=None if asked.ends == "silent" else 0,
        )


def gone_out(crowd: Sequence[Asked], **limits: int) -> list[tuple[float, float]]:
    """Let a crowd ask, in virtual time. Returns: (when, tokens used) of each request."""
    shared = Limits(JudgeSettings.model_validate({"model": "m", **limits}))
    out: list[tuple[float, float]] = []

    async def ask(asked: Asked) -> None:
        judge = LimitedJudge(
            Provider(shared, asked, out), shared, Ticket(), longest_s=1e9, longest_begun_s=1e9
        )
        try:
            await judge.complete(messages(asked), SCHEMA)
        except JudgeUnavailableError:
            return

    async def come() -> None:
        async with asyncio.TaskGroup() as tasks:
            for asked in crowd:
                await asyncio.sleep(asked.after_s)
                tasks.create_task(ask(asked))

    loop = VirtualLoop()
    try:
        with mock.patch("ingest.judges.limited.monotonic", loop.time):
            loop.run_until_complete(come())
    finally:
        loop.close()
    return out


def most_in_a_minute(out: Sequence[tuple[float, float]]) -> tuple[int, float]:
    """The most requests and tokens of any minute, by looking at the minute that each one ends."""
    minutes = [
        [tokens for at, tokens in out if end - MINUTE_S + 1e-6 < at <= end] for end, _ in out
    ]
    return max(map(len, minutes), default=0), max(map(sum, minutes), default=0)


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    crowd=st.lists(ASKED, min_size=1, max_size=25),
    calls=st.sampled_from([0, 1, 2, 3, 5, 10]),
    tokens=st.sampled_from([0, 2_600, 4_000, 10_000]),
)
def test_no_minute_has_more_than_either_limit(crowd: list[Asked], calls: int, tokens: int) -> None:
    """The largest call is estimated at 2,512 tokens."""
    out = gone_out(crowd, requests_per_minute=calls, tokens_per_minute=tokens)

    requests, used = most_in_a_minute(out)
    assert requests <= (calls or len(crowd))
    assert used <= (tokens or math.inf)
    assert len(out) == sum(one.ends != "never sent" for one in crowd)  # nobody waits for ever


BUSY = Asked(after_s=0.0, prompt_bytes=400, delay_s=0.0, lasts_s=1.0, share=1.0, ends="answered")


def test_with_both_limits_as_many_go_as_fit_both() -> None:
    """Ten calls of 612 tokens fit both limits."""
    crowd = [BUSY] * 60

    out = gone_out(crowd, requests_per_minute=10, tokens_per_minute=6_200)

    assert most_in_a_minute(out) == (10, 10 * 612)
    assert max(at for at, _ in out) == pytest.approx(300.0)  # and all of the limit is used


def test_the_whole_limit_gets_through_each_minute() -> None:
    out = gone_out([BUSY] * 60, requests_per_minute=20)

    assert [at for at, _ in out] == pytest.approx([0.0] * 20 + [60.0] * 20 + [120.0] * 20)


def test_a_request_beyond_the_whole_token_limit_goes_out_alone() -> None:
    large = Asked(
        after_s=0.0, prompt_bytes=8_000, delay_s=0.0, lasts_s=1.0, share=1.0, ends="answered"
    )

    out = gone_out([BUSY, large, BUSY], tokens_per_minute=1_000)

    assert [(at, tokens) for at, tokens in out] == [(0.0, 612), (60.0, 2_512), (120.0, 612)]


def test_a_request_that_is_slow_to_go_out_counts_until_a_minute_after_it_went() -> None:
    slow = Asked(
        after_s=0.0, prompt_bytes=400, delay_s=70.0, lasts_s=1.0, share=1.0, ends="answered"
    )

    out = gone_out([slow, BUSY], requests_per_minute=1)

    assert [at for at, _ in out] == pytest.approx([70.0, 130.0], abs=1.0)


def test_what_was_not_used_goes_to_those_that_wait() -> None:
    cheap = Asked(
        after_s=0.0, prompt_bytes=400, delay_s=0.0, lasts_s=5.0, share=0.1, ends="answered"
    )

    out = gone_out([cheap] * 3, tokens_per_minute=1_224)

    assert [at for at, _ in out] == pytest.approx([0.0, 0.0, 5.0], abs=1.0)


def test_the_wait_is_told_beforehand_with_those_that_wait_already() -> None:
    calls, tokens = Window(2), Window(1_000)
    first = calls.book(1, 0.0), tokens.book(600, 0.0)
    calls.sent(first[0], 5.0)
    tokens.sent(first[1], 5.0)

    def wait_s(*needs: float) -> float:
        return free_in_s([calls, tokens], [(1, one) for one in needs], 10.0)

    assert wait_s(400) == 0.0
    assert wait_s(500) == 55.0  # at 65, when the first ends to count
    assert wait_s(400, 600) == 55.0
    assert wait_s(400, 601) == 60.0  # the 400 go out at 10
    assert wait_s(400, 600, 1) == 60.0  # the third call of two a minute
    tokens.correct(first[1], 100, 20.0)
    assert wait_s(900) == 0.0
