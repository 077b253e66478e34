"""What users' sessions prove: guards and the split of traffic, by hand."""

from __future__ import annotations

import math
import random

import pytest

from deploy.evidence import live as module
from deploy.evidence.betting import begin, bet, bet_on_arm
from deploy.evidence.live import GUARDS, WORSE, Live, Turn

RATIOS: dict[str, float] = dict.fromkeys(GUARDS, 1.5)


def turn(unit: str, canary: bool, *bad: str, weight: float = 0.2) -> Turn:
    return Turn(unit=unit, canary=canary, weight=weight, bad=frozenset(bad))


def after(*turns: Turn) -> Live:
    live = Live(RATIOS)
    live.read(turns)
    return live


def test_one_bad_unit_by_hand() -> None:
    """The odds under the null hypothesis are 1.5 * 0.2 / 0.8 = 3/8, a share of 3/11. A belief of
    30 times that multiplies a wealth by 30 / (1 + 29 * 3/11) when it is the canary's. Of a wealth
    of 13, a fifth is kept back; 1 / 22 of that is paid to the six who bet on first turns alone."""
    live = after(turn("a", True, "failed"))

    *gamblers, kept = live.guards["failed"].bets.log_wealth
    began, paid = 10.4 / 12, 10.4 / 12 + 2.6 / 22 / 6
    assert gamblers == pytest.approx(
        [
            math.log(wealth * belief / (1 + (belief - 1) * 3 / 11))
            for wealth in (began, paid)
            for belief in WORSE
        ]
    )
    assert math.exp(gamblers[-1]) == pytest.approx(paid * 30 / (1 + 29 * 3 / 11))
    assert math.exp(kept) == pytest.approx(2.6 * 21 / 22)


def test_a_later_bad_turn_moves_only_those_who_bet_on_bad_units() -> None:
    live = after(turn("a", True), turn("a", True, "failed"))

    wealth = live.guards["failed"].bets.log_wealth
    began = math.log(10.4 / 12)
    assert all(one > began for one in wealth[:6])
    assert wealth[6:] == pytest.approx([*[began] * 6, math.log(2.6)])


@pytest.mark.parametrize(
    ("units", "turns", "champion", "candidate"), [(1_000, 20, 0.5, 0.25), (300, 20, 0.6, 0.2)]
)
def test_of_long_sessions_that_begin_together_the_better_arm_s_bad_turns_come_last(
    units: int, turns: int, champion: float, candidate: float
) -> None:
    """The candidate is better at every turn, so more and more of those without a bad turn so far
    are its own, and in the end nearly each session that still gets one is the candidate's."""
    rng = random.Random(units)
    arms = [rng.random() < 0.5 for _ in range(units)]
    live = Live(RATIOS)
    for _ in range(turns):
        for place, canary in enumerate(arms):
            fails = rng.random() < (candidate if canary else champion)
            live.read([turn(f"s{place}", canary, *["failed"] * fails, weight=0.5)])

    assert live.guards["failed"].bets.peak < math.log(10)


def test_harm_behind_long_health_is_found_almost_as_soon_as_at_once() -> None:
    """Both arms had 400 bad units, a fifth of them the canary's; then nine of ten are."""

    def needed(healthy: int) -> int:
        live = after(*(turn(f"h{number}", number % 5 == 0, "failed") for number in range(healthy)))
        assert live.guards["failed"].bets.peak < math.log(3)
        for number in range(healthy):
            live.read([turn(f"b{number}", number % 10 > 0, "failed")])
            if live.guards["failed"].bets.peak >= math.log(100):
                return number
        return healthy

    assert needed(400) <= 30, "without what is kept back it takes 98"


def test_betting_on_an_arm_is_betting_on_a_mean_with_another_stake() -> None:
    """With a fixed weight a belief is a fixed bet, so the vectors of confseq hold for it too: the
    stake `fraction / mean` of `bet` that gives the same wealth after a canary's unit."""
    share = 3 / 11
    one_belief = bet_on_arm(begin(1), True, share / (1 - share), (2.0,))
    fraction = (math.exp(one_belief.log_e) - 1) * share / (1 - share)
    both = bet_on_arm(one_belief, False, share / (1 - share), (2.0,))

    assert math.exp(one_belief.log_e) == pytest.approx(1 + fraction / share * (1 - share))
    assert both.log_e - one_belief.log_e == pytest.approx(math.log(1 - fraction))
    assert bet(begin(7), 0.0, share).log_wealth[-1] == pytest.approx(math.log(1 - 0.95))


def test_a_unit_counts_once_for_each_guard_however_many_turns_it_has() -> None:
    live = after(*[turn("popular", True, "failed", "cut")] * 50, turn("other", False, "failed"))

    assert (live.guards["failed"].canary, live.guards["failed"].champion) == (1, 1)
    assert (live.guards["cut"].canary, live.guards["cut"].champion) == (1, 0)
    assert (live.canary_units, live.champion_units) == (1, 1)


def test_an_outage_of_both_arms_proves_nothing() -> None:
    """One of five units is the canary's, as the weight says."""
    live = after(*(turn(str(number), number % 5 == 0, "failed") for number in range(500)))

    assert live.guards["failed"].bets.peak < math.log(3)


def test_turns_of_a_certain_arm_say_nothing() -> None:
    live = after(turn("a", True, "failed", weight=1.0), turn("b", False, "failed", weight=0.0))

    assert live.guards["failed"].bets.observations == 0
    assert (live.canary_units, live.champion_units) == (0, 0)


def test_the_evidence_follows_a_weight_that_grows() -> None:
    """A bad unit of the canary proves much at 1% and little at 50%."""
    small = after(turn("a", True, "failed", weight=0.01)).guards["failed"].bets.log_e
    large = after(turn("a", True, "failed", weight=0.5)).guards["failed"].bets.log_e

    assert small > 3 * large > 0


def test_the_split_notices_one_in_ten_units_lost_by_an_arm() -> None:
    """45% arrive where the weight says 50%: noticed within 4,000 units, and never at 50%."""
    rng = random.Random(5)

    def peak(share: float) -> float:
        live = Live(RATIOS)
        live.read(turn(str(n), rng.random() < share, weight=0.5) for n in range(4_000))
        return live.mismatch

    assert peak(0.45) >= math.log(1_000)
    assert max(peak(0.5) for _ in range(5)) < math.log(100)


def test_beyond_the_limit_the_unit_met_longest_ago_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A guard that sees no new session would be blind from then on."""
    monkeypatch.setattr(module, "MOST_UNITS", 2)
    met = (turn("a", True), turn("b", False), turn("a", True, "failed"), turn("c", True, "cut"))

    live = after(*met, turn("a", True, "failed"))

    assert (live.canary_units, live.champion_units, live.forgotten) == (2, 1, 1)
    assert (live.guards["failed"].canary, live.guards["cut"].canary) == (1, 1)
    again = after(*met, turn("b", False))
    assert (again.champion_units, again.forgotten) == (2, 2)


def test_turns_read_at_once_or_one_by_one_give_the_same_state_to_the_last_bit() -> None:
    rng = random.Random(9)
    turns = [
        turn(str(rng.randrange(200)), rng.random() < 0.3, *rng.sample(GUARDS, k=1), weight=0.3)
        for _ in range(600)
    ]
    at_once, one_by_one = after(*turns), Live(RATIOS)
    for one in turns:
        one_by_one.read([one])

    assert one_by_one.guards == at_once.guards
    assert one_by_one.split == at_once.split
