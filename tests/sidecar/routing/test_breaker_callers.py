"""The breaker and clients that are bad to the canary alone, under a new session name each time."""

from __future__ import annotations

import random

import pytest

from sidecar.metrics.proxy import Metrics
from sidecar.routing.breaker import CUT, EMPTY, ERROR, SHORT, SLOW, Breaker, canary_tag
from sidecar.routing.breaker_rule import FEW_CALLERS
from sidecar.routing.table import RoutingTable

TABLE = RoutingTable(
    model="m", canary="m--v1-aaaaaaaaaaaa", canary_weight_bp=2000, salt="s", generation=1
)
TAG = canary_tag(TABLE)


def a_breaker() -> tuple[Breaker, list[str]]:
    why: list[str] = []
    breaker = Breaker(Metrics(), on_trip=lambda _, reason: why.append(reason))
    breaker.follow(TABLE)
    return breaker, why


@pytest.mark.parametrize("bad", [CUT, EMPTY, SHORT, SLOW])
@pytest.mark.parametrize("share", [0.05, 0.20])
def test_a_caller_with_a_fifth_of_the_requests_takes_no_canary_out(share: float, bad: int) -> None:
    rng = random.Random(1)
    for _ in range(5):
        breaker, why = a_breaker()
        for number in range(3_000):
            his, canary = rng.random() < share, rng.random() < 0.2
            breaker.reply(
                TAG,
                "canary" if canary else "champion",
                f"{number}",
                bad if his and canary else 0,
                caller="his" if his else f"{number % 50}",
            )
        assert why == []


def test_one_caller_s_bad_replies_take_the_canary_out_and_blame_nobody() -> None:
    breaker, why = a_breaker()
    for number in range(60):
        breaker.reply(TAG, "champion", f"b{number}", 0, caller="one key for all")
    for number in range(20):
        breaker.reply(TAG, "canary", f"a{number}", CUT, caller="one key for all")

    assert why == [
        "8 of the canary's last 8 replies were bad (cut), 0 of the champion's 60 in the same time; "
        "first ones of 1 caller; too few callers to blame the adapter"
    ]
    assert why[0].endswith(FEW_CALLERS)


def test_bad_replies_of_many_callers_blame_the_adapter() -> None:
    breaker, why = a_breaker()
    for number in range(60):
        breaker.reply(TAG, "champion", f"b{number}", 0, caller=f"b{number}")
    for number in range(20):
        breaker.reply(TAG, "canary", f"a{number}", CUT, caller=f"a{number}")

    assert len(why) == 1
    assert why[0].endswith("first ones of 8 callers")


def test_errors_blame_the_adapter_whoever_the_caller_is() -> None:
    breaker, why = a_breaker()
    for number in range(60):
        breaker.reply(TAG, "champion", f"b{number}", 0, caller="one key for all")
    for number in range(20):
        breaker.reply(TAG, "canary", f"a{number}", ERROR, caller="one key for all")

    assert why == [
        "8 of the canary's last 8 replies were bad (error), 0 of the champion's 60 in the same time"
    ]
