"""The waits between attempts: their numbers, their ceiling, their jitter and their reset; and
what a server asks for."""

from __future__ import annotations

import time
from random import Random

import pytest

from sidecar.backoff import STEADY_S, Backoff, Waits, retry_after_s

FIVE = Backoff(first_s=0.5, last_s=5.0)


def test_each_failure_in_a_row_doubles_the_wait_up_to_the_ceiling() -> None:
    assert [FIVE.wait_s(failures) for failures in range(1, 7)] == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0]
    assert FIVE.wait_s(100_000) == 5.0, "a count that a float power cannot hold"
    assert Backoff(first_s=2.0, factor=3.0).wait_s(4) == 54.0


def test_jitter_takes_away_no_more_than_its_share_and_only_with_a_source_of_chance() -> None:
    jittered = Backoff(first_s=4.0, last_s=4.0, jitter=0.25)
    rng = Random(7)

    drawn = [jittered.wait_s(1, rng) for _ in range(500)]

    assert 3.0 <= min(drawn) < 3.02
    assert 3.98 < max(drawn) <= 4.0
    assert jittered.wait_s(1) == 4.0


def test_a_wait_that_follows_another_is_the_one_of_the_count() -> None:
    waits = Waits(FIVE)

    assert [waits.next_s() for _ in range(6)] == [FIVE.wait_s(n) for n in range(1, 7)]


def test_a_process_that_lived_long_starts_at_the_first_wait_again() -> None:
    waits = Waits(FIVE)

    assert [waits.restart_s(STEADY_S - 0.1) for _ in range(3)] == [0.5, 1.0, 2.0]
    assert waits.restart_s(STEADY_S) == 0.5


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ("20", 20.0),
        ("0.5", 0.5),
        ("-3", 0.0),
        ("Thu, 01 Jan 1970 00:01:00 GMT", 50.0),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0),
        ("nan", None),
        ("inf", None),
        ("soon", None),
        ("", None),
        ("9" * 400, None),
    ],
)
def test_a_retry_after_is_seconds_or_a_date_or_nothing(said: str, seconds: float | None) -> None:
    assert retry_after_s({"retry-after": said}, 10.0) == seconds


@pytest.mark.parametrize("said", ["Thu Jan  1 00:01:00 1970", "Thu, 01 Jan 1970 00:01:00 -0000"])
def test_a_date_without_a_zone_is_gmt_wherever_the_machine_stands(
    monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        assert retry_after_s({"retry-after": said}, 10.0) == 50.0
    finally:
        monkeypatch.undo()
        time.tzset()
