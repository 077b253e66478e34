"""Limits: the rule by hand, and one contract for one process's limiter and the shared table."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from sidecar.access.limits import (
    DAY_S,
    Allowance,
    Limiter,
    MemoryLimiter,
    TableLimiter,
    charge,
    fresh,
    take,
)
from sidecar.metrics.families import shared_memory

MIDNIGHT = 20_000 * float(DAY_S)
NOON = MIDNIGHT + 43_200.0


def unexpected(reason: str) -> None:
    raise AssertionError(reason)


def make_table() -> Limiter:
    return TableLimiter(shared_memory(1), unchecked=unexpected, lost=unexpected, lock_wait_s=10.0)


@pytest.fixture(params=[MemoryLimiter, make_table])
def limiter(request: pytest.FixtureRequest) -> Limiter:
    made: Limiter = request.param()
    return made


def let_through(limiter: Limiter, allowance: Allowance, times: list[float]) -> int:
    return sum(limiter.take("k", allowance, now).refused is None for now in times)


def test_the_bucket_fills_evenly_and_a_refused_request_takes_nothing(limiter: Limiter) -> None:
    allowance = Allowance(requests_per_minute=6)
    assert let_through(limiter, allowance, [NOON] * 9) == 6

    refused = limiter.take("k", allowance, NOON + 4.0)
    let_through(limiter, allowance, [NOON + second for second in range(4, 10)])
    after_10_s = limiter.take("k", allowance, NOON + 10.001)

    assert refused.refused == "requests_per_minute"
    assert refused.retry_after_s == pytest.approx(6.0)
    assert refused.requests_left == 0
    assert refused.requests_reset_s == pytest.approx(56.0)
    assert after_10_s.refused is None


def test_a_standing_says_what_is_left_of_this_key(limiter: Limiter) -> None:
    allowance = Allowance(requests_per_minute=60, tokens_per_day=10**13)
    limiter.take("k", allowance, NOON)
    limiter.charge("k", allowance, 10**13 - 1, NOON)

    assert limiter.take("k", allowance, NOON) == (None, 58, 2.0, 1, 43_200.0, 0.0)
    assert limiter.take("other", allowance, NOON) == (None, 59, 1.0, 10**13, 43_200.0, 0.0)


def test_a_lowered_limit_holds_at_the_same_instant(limiter: Limiter) -> None:
    limiter.take("k", Allowance(requests_per_minute=100), NOON)

    standing = limiter.take("k", Allowance(requests_per_minute=10), NOON)

    assert standing == (None, 9, 6.0, 0, 43_200.0, 0.0)


def test_tokens_of_the_day_end_at_midnight_utc(limiter: Limiter) -> None:
    allowance = Allowance(tokens_per_day=100)
    limiter.charge("k", allowance, 100, NOON)

    spent = limiter.take("k", allowance, NOON + 43_199.0)
    next_day = limiter.take("k", allowance, NOON + 43_200.0)

    assert (spent.refused, spent.retry_after_s, spent.tokens_left) == ("tokens_per_day", 1.0, 0)
    assert (next_day.refused, next_day.tokens_left) == (None, 100)


def test_a_reply_may_cost_more_than_was_left_and_is_paid(limiter: Limiter) -> None:
    allowance = Allowance(tokens_per_day=100)
    limiter.charge("k", allowance, 99, NOON)

    last = limiter.take("k", allowance, NOON)
    limiter.charge("k", allowance, 5_000, NOON)

    assert (last.refused, last.tokens_left) == (None, 1)
    assert limiter.take("k", allowance, NOON).refused == "tokens_per_day"


def test_a_request_refused_for_its_tokens_leaves_the_bucket_alone(limiter: Limiter) -> None:
    allowance = Allowance(requests_per_minute=2, tokens_per_day=10)
    limiter.charge("k", allowance, 10, NOON)
    let_through(limiter, allowance, [NOON] * 5)

    assert let_through(limiter, allowance, [MIDNIGHT + DAY_S] * 5) == 2


@pytest.mark.parametrize("back_s", [0.5, 30.0, 3_600.0, 400 * float(DAY_S)])
def test_a_clock_set_back_gives_nothing_and_locks_nobody_out(
    limiter: Limiter, back_s: float
) -> None:
    allowance = Allowance(requests_per_minute=6, tokens_per_day=100)
    let_through(limiter, allowance, [NOON] * 6)
    limiter.charge("k", allowance, 40, NOON)

    at_once = limiter.take("k", allowance, NOON - back_s)
    later = limiter.take("k", allowance, NOON - back_s + 11.0)

    assert (at_once.refused, at_once.tokens_left) == ("requests_per_minute", 60)
    assert (later.refused, later.tokens_left) == (None, 60)


def test_a_clock_set_back_over_midnight_does_not_renew_the_day(limiter: Limiter) -> None:
    allowance = Allowance(tokens_per_day=100)
    limiter.charge("k", allowance, 100, MIDNIGHT + 1.0)

    before = limiter.take("k", allowance, MIDNIGHT - 1.0)
    after = limiter.take("k", allowance, MIDNIGHT + 2.0)
    next_day = limiter.take("k", allowance, MIDNIGHT + DAY_S)

    assert (before.refused, before.retry_after_s) == ("tokens_per_day", DAY_S + 1.0)
    assert (after.refused, next_day.refused) == ("tokens_per_day", None)


def test_a_clock_that_was_years_ahead_locks_the_key_until_midnight_only(limiter: Limiter) -> None:
    allowance = Allowance(tokens_per_day=100)
    limiter.charge("k", allowance, 100, NOON + 5_000 * DAY_S)

    today = limiter.take("k", allowance, NOON)
    tomorrow = limiter.take("k", allowance, MIDNIGHT + DAY_S)

    assert (today.refused, tomorrow.refused) == ("tokens_per_day", None)


def test_processes_that_read_the_clock_a_moment_apart_fill_the_bucket_once(
    limiter: Limiter,
) -> None:
    times = [NOON] * 60 + [NOON + 1.0, NOON + 0.1] * 50

    assert let_through(limiter, Allowance(requests_per_minute=60), times) == 61


@given(
    st.integers(1, 50),
    st.lists(st.floats(0.0, 30.0, allow_nan=False), min_size=1, max_size=200),
)
def test_never_more_than_a_burst_and_the_filling(per_minute: int, gaps: list[float]) -> None:
    allowance = Allowance(requests_per_minute=per_minute)
    usage, now, passed = fresh(allowance, NOON), NOON, 0
    for gap in gaps:
        now += gap
        usage, standing = take(usage, allowance, now)
        passed += standing.refused is None
        assert 0.0 <= usage.requests <= per_minute

    assert passed <= per_minute + (now - NOON) * per_minute / 60.0 + 1e-6


@given(st.lists(st.tuples(st.floats(-9e5, 9e5), st.integers(0, 100)), max_size=60))
def test_no_clock_forgets_tokens_of_the_newest_day(moves: list[tuple[float, int]]) -> None:
    """Only a day that is newer than any seen begins at zero."""
    allowance = Allowance(tokens_per_day=10**9)
    usage = charge(fresh(allowance, NOON), allowance, 7, NOON)
    for offset, tokens in moves:
        before = usage
        usage = charge(usage, allowance, tokens, NOON + offset)
        newer_day = int((NOON + offset) // DAY_S) > before.day
        assert usage.tokens == tokens + (0 if newer_day else before.tokens)


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b", "c"]),
            st.floats(-2e5, 2e5, allow_nan=False),
            st.integers(0, 40),
        ),
        max_size=40,
    )
)
def test_the_table_says_what_one_processs_memory_says(asks: list[tuple[str, float, int]]) -> None:
    allowance = Allowance(requests_per_minute=3, tokens_per_day=100)
    one, other = MemoryLimiter(), make_table()
    for key, offset, tokens in asks:
        assert one.take(key, allowance, NOON + offset) == other.take(key, allowance, NOON + offset)
        one.charge(key, allowance, tokens, NOON + offset)
        other.charge(key, allowance, tokens, NOON + offset)


def test_one_process_forgets_records_that_say_nothing_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sidecar.access.limits.SWEEP_AT", 3)
    limiter = MemoryLimiter()
    for key in ("a", "b", "c"):
        limiter.take(key, Allowance(requests_per_minute=1), NOON)

    limiter.take("d", Allowance(requests_per_minute=1), NOON + DAY_S)

    assert [key for key, _ in limiter.records()] == ["d"]
