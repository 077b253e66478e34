"""The back-off after unanswered calls, by hand-worked times."""

from __future__ import annotations

from ingest.ruler.outage import Outage


def test_the_first_unanswered_call_begins_an_outage_and_an_answer_ends_it() -> None:
    outage = Outage()
    assert not outage.lasts
    assert outage.unanswered(100.0)
    assert outage.lasts
    assert outage.retry_at == 101.0
    assert not outage.unanswered(101.0)
    assert outage.answered(130.0) == 30.0
    assert not outage.lasts
    assert outage.retry_at == 0.0


def test_an_answer_without_an_outage_ends_nothing() -> None:
    assert Outage().answered(5.0) is None


def test_the_wait_doubles_up_to_a_minute() -> None:
    outage = Outage()
    now, waits = 0.0, []
    for _ in range(9):
        outage.unanswered(now)
        waits.append(outage.retry_at - now)
        now = outage.retry_at
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_calls_that_fail_together_count_once() -> None:
    outage = Outage()
    for _ in range(8):
        outage.unanswered(10.0)
    assert outage.retry_at == 11.0


def test_a_new_outage_begins_with_the_short_wait() -> None:
    outage = Outage()
    for now in (0.0, 1.0, 3.0):
        outage.unanswered(now)
    outage.answered(7.0)
    assert outage.unanswered(8.0)
    assert outage.retry_at == 9.0


def test_a_service_that_asks_for_time_gets_it_up_to_a_limit() -> None:
    outage = Outage()
    outage.unanswered(0.0, retry_after_s=20.0)
    assert outage.retry_at == 20.0
    outage.unanswered(1.0, retry_after_s=5.0)
    assert outage.retry_at == 20.0
    outage.unanswered(20.0, retry_after_s=1e9)
    assert outage.retry_at == 320.0


def test_the_longest_wait_can_be_another_one() -> None:
    outage = Outage()
    now = 0.0
    for _ in range(12):
        outage.unanswered(now, longest_s=300.0)
        wait_s, now = outage.retry_at - now, outage.retry_at
    assert wait_s == 300.0
