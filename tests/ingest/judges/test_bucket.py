"""No minute has more than its limit, whoever asks and whenever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingest.judges.bucket import Bucket

GAPS = st.lists(st.floats(0.0, 90.0), min_size=1, max_size=200)


@given(per_minute=st.integers(1, 500), gaps=GAPS)
def test_no_minute_has_more_calls_than_its_limit(per_minute: int, gaps: list[float]) -> None:
    bucket, now, starts = Bucket(per_minute, now=0.0), 0.0, []
    for gap in gaps:
        now += gap
        wait_s = bucket.take(1, now, longest_s=float("inf"))
        assert wait_s is not None
        starts.append(now + wait_s)

    assert starts == sorted(starts), "first come, first served"
    for begin in starts:
        # A hair less than a minute: calls at its very ends are in two minutes.
        inside = [one for one in starts if begin <= one < begin + 60.0 - 1e-6]
        assert len(inside) <= per_minute


@given(
    per_minute=st.integers(11, 100_000),  # up to 10 the units are whole: calls
    needs=st.lists(st.tuples(st.floats(0.0, 30.0), st.floats(0.0, 1.0)), min_size=1, max_size=60),
)
def test_no_minute_has_more_tokens_than_its_limit(
    per_minute: int, needs: list[tuple[float, float]]
) -> None:
    """Requests of up to half a minute's tokens; one that is larger counts for half."""
    bucket, now = Bucket(per_minute, now=0.0), 0.0
    taken: list[tuple[float, float]] = []
    for gap, share in needs:
        now += gap
        units = share * per_minute / 2
        wait_s = bucket.take(units, now, longest_s=float("inf"))
        assert wait_s is not None
        taken.append((now + wait_s, units))

    for begin, _ in taken:
        inside = sum(units for at, units in taken if begin <= at < begin + 60.0 - 1e-6)
        first = max(units for at, units in taken if at == begin)
        # The one with which the minute begins may have waited for its tokens before it.
        assert inside <= per_minute + first + 1e-6


def test_a_busy_bucket_still_lets_ninety_percent_of_its_limit_through() -> None:
    bucket, starts, now = Bucket(600, now=0.0), 0, 0.0
    while now < 600.0:
        wait_s = bucket.take(1, now, longest_s=60.0)
        assert wait_s is not None
        now += wait_s
        starts += 1
    assert 0.9 * 6_000 <= starts <= 6_000


def test_a_wait_beyond_what_it_is_worth_takes_nothing() -> None:
    bucket = Bucket(60, now=0.0)  # 6 at once, then 54 a minute
    for _ in range(6):
        assert bucket.take(1, 0.0, longest_s=0.0) == 0.0
    assert bucket.take(1, 0.0, longest_s=1.0) is None
    assert bucket.take(1, 0.0, longest_s=2.0) == pytest.approx(60 / 54)
    assert bucket.free_in_s(1, 0.0) == pytest.approx(120 / 54)


def test_what_was_estimated_is_corrected_both_ways() -> None:
    bucket = Bucket(6_000, now=0.0)  # 600 at once, then 90 a second
    assert bucket.take(600, 0.0, longest_s=0.0) == 0.0
    bucket.correct(taken=600, used=150, now=0.0)
    assert bucket.take(450, 0.0, longest_s=0.0) == 0.0
    bucket.correct(taken=450, used=900, now=0.0)
    assert bucket.free_in_s(90, 0.0) == pytest.approx(6.0)


def test_a_request_larger_than_a_minute_is_let_through_all_the_same() -> None:
    """The provider alone can say whether it takes it; for ever would be a long wait."""
    bucket = Bucket(1_000, now=0.0)
    wait_s = bucket.take(50_000, 0.0, longest_s=30.0)
    assert wait_s == pytest.approx(400 / 15)  # half a minute's tokens, of which 100 are there
