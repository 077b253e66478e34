"""The order of a ramp's turns: by hand, and for agents that never pause."""

from __future__ import annotations

import pytest

from deploy.evidence import in_order
from deploy.evidence.in_order import InOrder, LongReplies
from deploy.evidence.live import Turn


def said(order: InOrder, unit: str, at: float, took_s: float, *, canary: bool = False) -> None:
    turn = Turn(unit=unit, canary=canary, weight=0.5)
    order.add(turn, started_at=at, stored_at=at + took_s, took_s=took_s, place=len(order))


def taken(order: InOrder, now: float) -> list[str]:
    return [turn.unit for turn in order.take(now)]


def test_the_second_request_of_a_quick_conversation_waits_for_that_of_a_slow_one() -> None:
    """No reply is known to be shorter than the wait of 60 s, so both count from 60 s on."""
    order = InOrder(60.0)
    said(order, "quick", 0.0, 5.0, canary=True)
    said(order, "slow", 1.0, 30.0)
    said(order, "quick", 5.0, 5.0, canary=True)
    said(order, "slow", 31.0, 30.0)

    assert taken(order, 61.0) == ["quick", "slow"]
    assert taken(order, 119.0) == []
    assert taken(order, 121.0) == ["quick", "slow"]


def test_a_pause_of_the_user_is_waited_for_no_longer() -> None:
    order = InOrder(60.0)
    said(order, "a", 0.0, 20.0)
    said(order, "a", 500.0, 20.0)

    assert taken(order, 599.0) == ["a"]
    assert taken(order, 600.0) == ["a"], "40 s, which the first reply was too quick, and 60 s"


def test_what_quick_replies_make_wait_ends_and_requests_at_once_do_not_add_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(in_order, "LONGEST_LAG_S", 100.0)
    order = InOrder(60.0)
    for number in range(5):
        said(order, "parallel", float(number), 9.0)
    said(order, "parallel", 20.0, 9.0)
    for number in range(10):
        said(order, "long", 10.0 * number, 1.0)

    lags = {place: at - began for at, began, place, _ in order._held}
    assert [lags[place] for place in range(6)] == [0.0, 51.0, 51.0, 51.0, 51.0, 51.0]
    assert [lags[place] for place in range(6, 16)] == [0.0, 59.0] + [100.0] * 8


def test_a_long_reply_is_that_of_the_slower_arm() -> None:
    long = LongReplies(120.0)
    assert long.long_s == 120.0
    for _ in range(200):
        long.add(8.0, canary=True)
    assert long.long_s == 120.0, "nothing is known of the champion yet"

    for _ in range(200):
        long.add(30.0, canary=False)

    assert 30.0 <= long.long_s <= 30.0 * 1.25
