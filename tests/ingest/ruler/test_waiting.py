"""The one clock of waiting against scripted providers, in virtual time."""

from __future__ import annotations

import heapq
from collections.abc import Callable

import pytest
from hypothesis import given, settings, strategies as st

from ingest.ruler.waiting import LONGEST_RETRY_AFTER_S, MINUTE_S, SLOWEST, Waiting

Provider = Callable[[float], float | None]
"""(time of a request) -> None: it takes it; or the `Retry-After` of its refusal, 0: none."""
LATENCY_S = 0.4
REFUSED_S = 0.05
"""A refusal comes at once."""


def bucket(rate: float, burst: int, retry_after_s: float = 0.0) -> Provider:
    """A token bucket, as most gateways have one."""
    tokens, last = float(burst), 0.0

    def ask(now: float) -> float | None:
        nonlocal tokens, last
        tokens, last = min(float(burst), tokens + (now - last) * rate), now
        if tokens < 1.0 - 1e-9:
            return retry_after_s
        tokens -= 1.0
        return None

    return ask


def window(per_minute: int, *, says_when: bool) -> Provider:
    """So many in each minute of the clock, refused ones included in the count of none."""
    minute, used = -1.0, 0

    def ask(now: float) -> float | None:
        nonlocal minute, used
        if now // 60 != minute:
            minute, used = now // 60, 0
        used += 1
        return None if used <= per_minute else (60 - now % 60 if says_when else 0.0)

    return ask


def alternating() -> Provider:
    """Refuses every second request, whatever the pace."""
    number = 0

    def ask(_: float) -> float | None:
        nonlocal number
        number += 1
        return 0.0 if number % 2 else None

    return ask


def play(
    provider: Provider, seconds: float, *, callers: int = 80, latency_s: float = LATENCY_S
) -> list[float]:
    """Let callers ask as fast as the clock of waiting lets them.

    Returns: when each request was taken.
    """
    state, taken, order = Waiting(), list[float](), 0
    events: list[tuple[float, int, int, float | None]] = []
    idle, now = callers, 0.0
    while now < seconds:
        at, _ = state.free_at(now)
        if idle and (not events or at <= events[0][0]):
            now, idle, order = at, idle - 1, order + 1
            state = state.booked(now)
            state = state.sent(state.asked, now)
            answer = provider(now)
            lasts_s = latency_s if answer is None else REFUSED_S
            heapq.heappush(events, (now + lasts_s, order, state.asked, answer))
            if answer is None:
                taken.append(now)
            continue
        now, _, number, answer = heapq.heappop(events)
        idle += 1
        state = state.accepted(number) if answer is None else state.limited(number, now, answer)
    return [at for at in taken if at < seconds]


@pytest.mark.parametrize("latency_s", [0.05, 3.0])
@pytest.mark.parametrize(
    ("provider", "rate"),
    [
        (lambda: bucket(2.0, 1), 2.0),
        (lambda: bucket(2.0, 10), 2.0),
        (lambda: bucket(2.0, 60), 2.0),
        (lambda: bucket(2.0, 1, 1.0), 2.0),
        (lambda: bucket(2.0, 5, 1.0), 2.0),
        (lambda: bucket(1.0, 1), 1.0),
        (lambda: bucket(20.0, 20), 20.0),
        (lambda: bucket(0.25, 3), 0.25),
        (lambda: window(120, says_when=True), 2.0),
        (lambda: window(120, says_when=False), 2.0),
        (lambda: window(30, says_when=True), 0.5),
    ],
)
def test_nine_tenths_of_a_providers_rate_are_reached_without_a_setting(
    provider: Callable[[], Provider], rate: float, latency_s: float
) -> None:
    seconds = 60.0 if rate > 2 else 600.0
    taken = play(provider(), seconds, latency_s=latency_s)
    assert len(taken) >= 0.9 * rate * seconds


def test_a_provider_that_refuses_whatever_the_pace_is_asked_on() -> None:
    assert len(play(alternating(), 600.0)) >= 0.45 * SLOWEST * 600.0


def test_a_steady_limit_is_met_by_few_refusals() -> None:
    provider, refused = bucket(2.0, 1), 0

    def counted(now: float) -> float | None:
        nonlocal refused
        answer = provider(now)
        refused += answer is not None and now > 300.0
        return answer

    play(counted, 900.0)
    assert refused <= 0.03 * 1_200


def test_the_wait_after_failures_doubles_once_per_wait_and_an_answer_ends_it() -> None:
    state, now, waits = Waiting(), 0.0, list[float]()
    for _ in range(8):
        for _ in range(3):  # in flight together
            state = state.failed(now)
        waits.append(state.retry_at - now)
        now = state.retry_at
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]
    assert state.free_at(now - 1.0) == (now, "failing")
    assert state.free_at(now - 1.0, trying=True) == (now - 1.0, "free")
    assert state.answered().failed(now).retry_at == now + 1.0


def test_so_many_failures_in_a_row_make_an_outage() -> None:
    state = Waiting().failed(1.0, opens_after=3).failed(2.0, opens_after=3)
    assert state.retry_at == 0.0
    assert state.answered().failed(3.0, opens_after=3).retry_at == 0.0
    assert state.failed(3.0, opens_after=3).retry_at == 4.0
    assert state.failing_since == 1.0


TIMES = st.floats(0.0, 1_000.0)


@settings(max_examples=100)
@given(events=st.lists(st.tuples(st.sampled_from("bslfapw"), TIMES), max_size=40), later=TIMES)
def test_no_reason_to_wait_is_forgotten(events: list[tuple[str, float]], later: float) -> None:
    """Whatever happened in whatever order, the latest of the reasons decides."""
    state, now = Waiting(), 0.0
    for event, number in events:
        now += number / 50.0
        match event:
            case "b":
                state = state.booked(now)
            case "s":
                state = state.sent(state.asked, now).accepted(state.asked)
            case "l":
                state = state.limited(state.asked, now, number)
            case "f":
                state = state.failed(now, retry_after_s=number)
            case "a":
                state = state.answered()
            case "p":
                state = state.paused(now + number)
            case "w":
                state = state.withheld(now + number)
    at, reason = state.free_at(now + later, 3)
    waits = (state.next_at, state.paused_until, state.retry_at, state.withheld_until)
    assert at >= max(now + later, *waits)
    assert at <= max(now + later + MINUTE_S, *waits)
    assert (reason == "free") == (at == now + later)
    assert state.pace >= SLOWEST
    assert state.delay_s <= LONGEST_RETRY_AFTER_S
