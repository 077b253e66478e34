"""The breaker's test: what takes a canary out, and what does not."""

from __future__ import annotations

import random

import pytest

from sidecar.routing.breaker_rule import KINDS, REPLIES, TALLY, Excess, ExcessTest

FAR = 100_000
"""Requests after which a simulation gives up."""


class Ramp:
    """Replies of both arms of one ramp, in the order in which a proxy would see them."""

    def __init__(self, seed: int) -> None:
        self.canary = [0.0] * TALLY
        self.champion = [0.0] * TALLY
        self.test = ExcessTest()
        self._rng = random.Random(seed)

    def reply(self, weight: float, canary_bad: float, champion_bad: float, kind: int = 0) -> bool:
        """One request. weight: the canary's share; the others: probabilities of a bad reply.
        Returns: True when the canary is taken out."""
        in_canary = self._rng.random() < weight
        arm, bad = (self.canary, canary_bad) if in_canary else (self.champion, champion_bad)
        arm[REPLIES] += 1
        arm[1 + kind] += self._rng.random() < bad
        return in_canary and self.test.check(self.canary, self.champion) is not None

    def hurt(self, weight: float, canary_bad: float, champion_bad: float, kind: int = 0) -> int:
        """Go on until the canary is taken out. Returns: how many bad replies it gave meanwhile."""
        before = self.canary[1 + kind]
        for _ in range(FAR):
            if self.reply(weight, canary_bad, champion_bad, kind):
                return int(self.canary[1 + kind] - before)
        raise AssertionError(f"not taken out after {FAR} requests")


def test_eight_bad_replies_in_a_row_take_the_canary_out_when_the_champion_is_well() -> None:
    test = ExcessTest()
    champion = [1_000.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    checks = [test.check([bad, bad, 0.0, 0.0, 0.0, 0.0], champion) for bad in (1.0, 2.0, 7.0, 8.0)]

    # ln(0.55 / 0.1) = 1.705 nats each; ln(500,000) = 13.12 is passed by the eighth.
    assert checks[:3] == [None, None, None]
    assert checks[3] == Excess(
        kind="error", canary_bad=8, canary_replies=8, champion_bad=0, champion_replies=1_000
    )


@pytest.mark.parametrize("weight", [0.01, 0.5])
@pytest.mark.parametrize("kind", range(len(KINDS)), ids=KINDS)
def test_a_canary_of_which_every_reply_is_bad_hurts_at_most_20_users(
    weight: float, kind: int
) -> None:
    hurt = [Ramp(seed).hurt(weight, 1.0, 0.0, kind) for seed in range(20)]

    assert max(hurt) <= 20


def test_an_equal_canary_is_taken_out_in_fewer_than_1_percent_of_ramps() -> None:
    """Both arms fail 10% of all requests, in the two default steps and 400 requests each."""
    out = 0
    for seed in range(1_000):
        ramp = Ramp(seed)
        out += any(ramp.reply(weight, 0.1, 0.1) for weight in (0.2, 0.5) for _ in range(400))

    assert out < 10


@pytest.mark.parametrize("weight", [0.05, 0.5])
def test_an_outage_of_both_arms_leaves_the_canary_in(weight: float) -> None:
    """The champion was well for long before, and both fail every request for a while."""
    for seed in range(20):
        ramp = Ramp(seed)
        for _ in range(2_000):
            assert not ramp.reply(weight, 0.01, 0.01)
        assert not any(ramp.reply(weight, 1.0, 1.0) for _ in range(1_000))
        assert not any(ramp.reply(weight, 0.01, 0.01) for _ in range(2_000))


def test_a_raised_rate_is_noticed_and_a_slightly_raised_one_is_left_to_the_controller() -> None:
    assert Ramp(1).hurt(0.5, 0.6, 0.02) <= 40
    slightly = Ramp(1)
    assert not any(slightly.reply(0.5, 0.12, 0.02) for _ in range(5_000))
