"""The order of a ramp's turns: by hand, and for agents that never pause."""

from __future__ import annotations

import heapq
import math
import random

import pytest

from deploy.evidence import live as in_order
from deploy.evidence.live import QUIET_S, InOrder, Live, LongIntervals, Turn


def said(order: InOrder, unit: str, at: float, took_s: float, *, canary: bool = False) -> None:
    turn = Turn(unit=unit, canary=canary, weight=0.5)
    order.add(turn, started_at=at, stored_at=at + took_s, took_s=took_s, place=len(order))


def passed(order: InOrder, now: float) -> None:
    """A request of nobody in particular ends, which moves the time on."""
    said(order, "nobody", now, 0.0)


def taken(order: InOrder, now: float) -> list[str]:
    return [turn.unit for turn in order.take(now)]


def test_the_second_request_of_a_quick_conversation_waits_for_that_of_a_slow_one() -> None:
    """No interval is known to be shorter than 150 s, so both count from then on."""
    order = InOrder(60.0)
    said(order, "quick", 0.0, 5.0, canary=True)
    said(order, "slow", 1.0, 30.0)
    said(order, "quick", 5.0, 5.0, canary=True)
    said(order, "slow", 31.0, 30.0)

    assert taken(order, 61.0) == ["quick", "slow"]
    passed(order, 209.0)
    assert taken(order, 209.0) == []
    passed(order, 212.0)
    assert taken(order, 212.0) == ["quick", "slow"]


def test_a_pause_of_the_user_is_waited_for_no_longer() -> None:
    order = InOrder(60.0)
    said(order, "a", 0.0, 20.0)
    said(order, "a", 500.0, 20.0)

    passed(order, 560.0)
    assert taken(order, 559.0) == ["a"]
    assert taken(order, 560.0) == ["a"], "after more than the longest interval of 150 s"


@pytest.mark.tier_2
def test_an_arm_whose_users_pause_for_less_time_is_not_taken_for_worse() -> None:
    """Each conversation is of 20 requests, one in ten of them bad; pauses are 10 s or 90 s."""
    rng = random.Random(1)
    for pauses_s in (90.0, 10.0):
        live, order = Live({"failed": 1.5}), InOrder(120.0)
        due: list[tuple[float, int, int, bool]] = []
        for number in range(3_000):
            heapq.heappush(due, (number / 5.0, number, 20, number % 2 == 0))
        while due:
            at, number, left, canary = heapq.heappop(due)
            bad = frozenset({"failed"} if rng.random() < 0.1 else ())
            turn = Turn(unit=str(number), canary=canary, weight=0.5, bad=bad)
            order.add(turn, started_at=at, stored_at=at + 2.0, took_s=1.0, place=number)
            live.read(order.take(at + 2.0))
            pause_s = rng.expovariate(1.0 / (10.0 if canary else pauses_s))
            if left > 1 and at < 900.0:
                heapq.heappush(due, (at + 1.0 + pause_s, number, left - 1, canary))
        assert live.guards["failed"].bets.peak < math.log(20.0), pauses_s


def test_what_ingest_stores_late_is_counted_in_the_order_of_the_beginnings() -> None:
    """It stood still for 300 s; meanwhile control looked on, and counted nothing out of order."""
    order = InOrder(60.0)
    for at in range(0, 100, 10):
        order.add(
            Turn(unit=f"a{at}", canary=False, weight=0.5),
            started_at=at,
            stored_at=at + 31.0,
            took_s=30.0,
            place=at,
        )
    early = taken(order, 131.0) + taken(order, 400.0)
    for at in (5, 95, 200):
        order.add(
            Turn(unit=f"b{at}", canary=True, weight=0.5),
            started_at=at,
            stored_at=420.0,
            took_s=40.0 if at == 5 else 30.0,
            place=1_000 + at,
        )
    passed(order, 300.0)

    assert early == [f"a{at}" for at in range(0, 70, 10)]
    late = list(order.take(421.0))
    assert [one.unit for one in late] == ["b5", "a70", "a80", "a90", "b95", "b200"]
    assert [one.unit for one in late if one.late] == ["b5"], "a60 was counted before it"


@pytest.mark.parametrize("ahead_s", [150.0, 300.0, -300.0])
def test_the_clocks_of_all_proxies_may_be_off(ahead_s: float) -> None:
    """Replies of 8 s beside 30 s: in the order of their ends the quick arm's would come first."""
    order, live = InOrder(120.0), Live({"failed": 1.5})
    rng, due = random.Random(2), list[tuple[float, float, int, bool]]()
    for number in range(6_000):
        canary, at = rng.random() < 0.5, number / 10.0
        due.append((at + (8.0 if canary else 30.0), at, number, canary))
    for ends, at, number, canary in sorted(due):
        turn = Turn(unit=str(number), canary=canary, weight=0.5)
        began, took_s = at + ahead_s, ends - at
        order.add(turn, started_at=began, stored_at=ends + 0.5, took_s=took_s, place=number)
        live.read(order.take(ends + 0.5))

    assert live.mismatch < math.log(20.0)
    assert live.canary_units + live.champion_units > 2_000
    assert live.late == {"canary": 0, "champion": 0}


def test_a_clock_that_was_set_back_stops_nothing() -> None:
    order = InOrder(60.0)
    said(order, "before", 100_000.0, 1.0)
    for at in range(0, 200, 10):
        said(order, f"after {at}", float(at), 1.0)

    assert taken(order, 191.0) == [f"after {at}" for at in range(0, 140, 10)]


def test_after_a_while_without_requests_nothing_is_waited_for() -> None:
    order = InOrder(60.0)
    said(order, "last", 0.0, 1.0)

    assert taken(order, QUIET_S + 59.0) == []
    assert taken(order, QUIET_S + 60.0) == ["last"]


def test_what_quick_replies_make_wait_ends_and_requests_at_once_do_not_add_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(in_order, "LONGEST_LAG_S", 100.0)
    monkeypatch.setattr(in_order, "MOST_INTERVAL", 100.0 / 60.0)
    order = InOrder(60.0)
    for number in range(5):
        said(order, "parallel", float(number), 9.0)
    said(order, "parallel", 20.0, 9.0)
    for number in range(10):
        said(order, "long", 10.0 * number, 1.0)

    lags = {place: at - began for at, began, place, _ in order._held}
    assert [lags[place] for place in range(6)] == [0.0, 99.0, 98.0, 97.0, 96.0, 80.0]
    assert [lags[place] for place in range(6, 16)] == [0.0, 90.0] + [100.0] * 8


def test_a_long_interval_is_that_of_the_slower_arm() -> None:
    long = LongIntervals(120.0)
    assert long.long_s == 120.0
    for _ in range(200):
        long.add(8.0, canary=True)
    assert long.long_s == 120.0, "nothing is known of the champion yet"

    for _ in range(200):
        long.add(30.0, canary=False)

    assert 30.0 <= long.long_s <= 30.0 * 1.25


def test_a_request_that_never_ends_keeps_nobody_waiting_and_counts_as_late_when_it_ends() -> None:
    """What is still in flight is in no table, and an adapter that hangs must not be left out."""
    order = InOrder(60.0)
    said(order, "beside it", 0.5, 0.5)
    passed(order, 61.0)
    assert taken(order, 61.0) == ["beside it"]

    said(order, "hung", 0.0, 1_000.0)
    said(order, "newer", 999.0, 1.0)
    passed(order, 1_005.0)
    late = list(order.take(1_005.0))

    assert [one.unit for one in late] == ["nobody", "hung"], "newer waits for what began before it"
    assert [one.late for one in late] == [False, True]


def test_what_waits_is_bounded_and_what_was_pushed_out_is_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(in_order, "MOST_HELD", 3)
    order = InOrder(60.0)
    for at in range(5):
        said(order, f"s{at}", float(at), 1.0)

    assert [(one.unit, one.late) for one in order.take(6.0)] == [("s0", True), ("s1", True)]


def test_a_clock_that_is_a_day_ahead_makes_a_turn_wait_an_hour_and_no_more() -> None:
    order = InOrder(60.0)
    turn = Turn(unit="from tomorrow", canary=True, weight=0.5)
    order.add(turn, started_at=86_400.0, stored_at=0.0, took_s=1.0, place=0)
    passed(order, 3_650.0)
    assert taken(order, 3_650.0) == []
    passed(order, 3_660.0)

    assert taken(order, 3_660.0) == ["from tomorrow"]
