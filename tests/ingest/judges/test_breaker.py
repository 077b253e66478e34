"""When a judge is left alone, and when it is tried again."""

from __future__ import annotations

from ingest.judges.limited import LIMITED_FOR_LONG_S, Breaker

LIMIT = "429"


def fail(breaker: Breaker, now: float) -> None:
    tried = breaker.begin(now)
    breaker.failed(now, "away", tried=tried)
    breaker.end(tried=tried)


def limit(breaker: Breaker, now: float, retry_after_s: float = 0.0) -> None:
    tried = breaker.begin(now)
    breaker.limited(now, LIMIT, tried=tried, retry_after_s=retry_after_s)
    breaker.end(tried=tried)


def test_three_failures_in_a_row_open_it_and_an_answer_between_them_does_not() -> None:
    breaker = Breaker()
    fail(breaker, 0.0)
    fail(breaker, 1.0)
    breaker.answered()
    fail(breaker, 2.0)
    fail(breaker, 3.0)
    assert breaker.admits(3.0)
    fail(breaker, 4.0)

    assert not breaker.admits(4.0)
    assert not breaker.admits(8.9)
    seen = breaker.seen("a")
    assert (seen.breaker, seen.since, seen.until, seen.error) == ("open", 2.0, 9.0, "away")


def test_one_judgement_tries_it_after_the_wait_and_others_do_not() -> None:
    breaker = Breaker()
    for _ in range(3):
        fail(breaker, 0.0)
    assert breaker.admits(5.0)
    assert breaker.seen("a").breaker == "open", "nobody tries it yet"

    tried = breaker.begin(5.0)
    assert breaker.seen("a").breaker == "half_open"

    assert tried
    assert not breaker.admits(5.0)
    breaker.answered()
    breaker.end(tried=tried)
    assert breaker.admits(5.0)
    assert breaker.seen("a").breaker == "closed"


def test_the_wait_doubles_up_to_five_minutes_and_begins_anew_after_an_answer() -> None:
    breaker, now, waits = Breaker(), 0.0, []
    for _ in range(3):
        fail(breaker, now)
    for _ in range(8):
        until = breaker.seen("a").until
        assert until is not None
        waits.append(until - now)
        now = until
        fail(breaker, now)
    assert waits == [5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0]

    breaker.answered()
    for _ in range(3):
        fail(breaker, now)
    assert breaker.seen("a").until == now + 5.0


def test_calls_that_fail_together_count_as_one_outage() -> None:
    breaker = Breaker()
    in_flight = [breaker.begin(0.0) for _ in range(20)]
    for tried in in_flight:
        breaker.failed(1.0, "away", tried=tried)
        breaker.end(tried=tried)
    fail(breaker, 2.0)  # as of a judge without another behind it, which is always asked
    assert breaker.seen("a").until == 6.0


def test_a_judgement_that_is_cancelled_lets_another_try() -> None:
    breaker = Breaker()
    for _ in range(3):
        fail(breaker, 0.0)
    tried = breaker.begin(5.0)
    breaker.end(tried=tried)
    assert breaker.admits(5.0)


def test_a_short_rate_limit_is_waited_for_and_a_long_one_opens_it() -> None:
    breaker = Breaker()
    for now in (0.0, 1.0, 5.0, LIMITED_FOR_LONG_S - 0.1):
        limit(breaker, now, retry_after_s=2.0)
    assert breaker.is_closed
    limit(breaker, LIMITED_FOR_LONG_S)
    assert not breaker.is_closed

    long = Breaker()
    limit(long, 0.0, retry_after_s=120.0)
    assert long.seen("a").until == 120.0
    endless = Breaker()
    limit(endless, 0.0, retry_after_s=1e9)
    assert endless.seen("a").until == 300.0
