"""What one client can cause ends no canary with a verdict on the candidate."""

from __future__ import annotations

import random
from typing import Any

import pytest
from sqlalchemy import update

from deploy.evidence.live import GUARDS, Live, Turn
from deploy.registry.proof_rule import guard_doubt, guard_harm, ratios_of
from sidecar.store.models import ExchangeRow
from tests.deploy.conftest import World

CAUSABLE = [kind for kind in GUARDS if kind != "failed"]


def a_turn(
    number: int,
    kind: str,
    *,
    canary: bool = True,
    bad: bool = True,
    caller: str = "",
    address: str = "",
) -> Turn:
    """A session of its own; a fifth of them are the canary's."""
    return Turn(
        unit=f"u{number}",
        canary=canary,
        weight=0.2,
        bad=frozenset({kind} if bad else ()),
        caller=caller,
        address=address,
    )


def live_after(*turns: Turn) -> Live:
    live = Live(ratios_of())
    live.read(turns)
    return live


def ends(live: Live) -> tuple[bool, bool]:
    """Whether the guards end the canary with a verdict, and whether without one."""
    harm, doubt = guard_harm(live.guards), guard_doubt(live.guards)
    return harm is not None, doubt is not None


@pytest.mark.parametrize("kind", CAUSABLE)
@pytest.mark.parametrize("share", [0.02, 0.05, 0.10, 0.20])
def test_one_caller_that_is_bad_to_the_canary_alone_never_gets_a_candidate_banned(
    kind: str, share: float
) -> None:
    """He sees the arm by some means of his own; of the other sessions 2% are bad in either arm."""
    rng = random.Random(f"{kind}-{share}")
    for _ in range(20):
        live = Live(ratios_of())
        for number in range(int(40 / share)):
            his, canary = rng.random() < share, rng.random() < 0.2
            bad = canary if his else rng.random() < 0.02
            caller = "key his" if his else f"key {number % 50}"
            live.read([a_turn(number, kind, canary=canary, bad=bad, caller=caller)])
            verdict, doubt = ends(live)
            assert not verdict
            if doubt:
                break


def test_a_verdict_says_from_how_many_callers_it_comes() -> None:
    one = live_after(*(a_turn(number, "cut", caller="key a") for number in range(5)))
    five = live_after(*(a_turn(number, "cut", caller=f"key {number}") for number in range(5)))

    assert guard_harm(one.guards) is None
    assert guard_doubt(one.guards) == (
        "5 of the canary's sessions and 0 of the champion's were cut by the client: evidence from "
        "1 caller: 102, the limit is 100; it is 2 where each caller counts once, so it may be "
        "their doing"
    )
    assert guard_harm(five.guards) == (
        "5 of the canary's sessions and 0 of the champion's were cut by the client: evidence from "
        "5 callers: 102, the limit is 100"
    )


def test_two_callers_are_too_few_even_where_they_would_prove_it() -> None:
    turns = [
        Turn(unit=name, canary=True, weight=0.001, bad=frozenset({"cut"}), caller=name)
        for name in ("a", "b", "c")
    ]

    assert live_after(*turns[:2]).guards["cut"].by_caller.peak > 4.7  # log(100) is 4.605
    assert ends(live_after(*turns[:2])) == (False, True)
    assert ends(live_after(*turns)) == (True, True)


def test_where_each_session_has_a_caller_of_its_own_nothing_is_found_later() -> None:
    rng = random.Random(3)
    turns = [
        a_turn(
            number,
            "short",
            canary=(canary := rng.random() < 0.2),
            bad=rng.random() < (0.3 if canary else 0.02),
            caller=f"key {number}",
        )
        for number in range(300)
    ]
    state = live_after(*turns).guards["short"]

    assert state.by_caller == state.bets
    assert state.callers == state.canary > 10


@pytest.mark.parametrize(("callers", "verdict"), [(100, True), (4, False)])
def test_harm_that_many_callers_meet_is_a_verdict(callers: int, verdict: bool) -> None:
    """Half of the sessions are the canary's. Most of its bad ones are their callers' first."""
    rng = random.Random(5)
    live = Live(ratios_of())
    for number in range(200):
        canary = rng.random() < 0.5
        turn = Turn(
            unit=f"u{number}",
            canary=canary,
            weight=0.5,
            bad=frozenset({"short"} if rng.random() < (0.6 if canary else 0.02) else ()),
            caller=f"key {rng.randrange(callers)}",
        )
        live.read([turn])
        if any(ends(live)):
            break

    assert ends(live) == (verdict, True)


def test_a_failure_that_the_champion_does_not_share_is_no_client_s_doing() -> None:
    alone = [a_turn(number, "failed", caller="key a") for number in range(5)]
    shared = [
        Turn(unit=one.unit, canary=True, weight=0.2, bad=one.bad, caller="key a", shared=True)
        for one in alone
    ]

    assert ends(live_after(*alone)) == (True, True)
    assert ends(live_after(*shared)) == (False, True)


def test_an_invented_name_of_a_user_is_no_second_caller() -> None:
    """Ten addresses send healthy sessions; from an eleventh come users that nobody knows."""
    healthy = [
        a_turn(number, "cut", canary=number % 5 == 0, bad=False, address=f"{number % 10:04x}")
        for number in range(100)
    ]
    invented = [
        a_turn(1_000 + number, "cut", caller=f"user {number}", address="ffff")
        for number in range(10)
    ]

    live = live_after(*healthy, *invented)

    assert live.guards["cut"].callers == 1
    assert ends(live) == (False, True)


def test_an_address_that_half_of_all_sessions_come_from_names_its_users() -> None:
    """It is a gateway, or the application itself."""
    named = [a_turn(number, "cut", caller=f"user {number}", address="0001") for number in range(10)]
    unnamed = [a_turn(number, "cut", address="0001") for number in range(10)]

    assert live_after(*named).guards["cut"].callers == 10
    assert ends(live_after(*named)) == (True, True)
    assert live_after(*unnamed).guards["cut"].callers == 1
    assert ends(live_after(*unnamed)) == (False, True)


@pytest.mark.parametrize(
    ("who", "phase", "state"),
    [
        ({"key_id": "k1", "user": "one of many"}, "inconclusive", "retired"),
        ({"address_hash": "00ff"}, "inconclusive", "retired"),
        ({}, "rolled_back", "rolled_back"),  # recorded by an older proxy: nobody knows the callers
    ],
)
async def test_a_canary_that_one_caller_ends_is_inconclusive_and_bans_nothing(
    who: dict[str, str], phase: str, state: str, world: World
) -> None:
    name = await world.to_ramp()
    for number in range(12):
        world.serve(f"c{number}", adapter=name, arm="canary", outcome="cut")
    if who:
        with world.database.write() as session:
            session.execute(update(ExchangeRow).values(**who))

    await world.controller().tick()

    assert (world.canary(name).phase, world.adapter(name).state) == (phase, state)
    assert world.actions().count("adapter.banned") == (phase == "rolled_back")


async def test_an_error_of_vllm_alone_bans_also_where_there_is_one_caller(world: World) -> None:
    name = await world.to_ramp()
    for number in range(12):
        world.serve(f"c{number}", adapter="base", fallback_from=name, propensity=0.8)
    with world.database.write() as session:
        session.execute(update(ExchangeRow).values(key_id="k1"))

    await world.controller().tick()

    assert world.canary(name).phase == "rolled_back"
    assert "evidence from 1 caller: " in (world.canary(name).reason or "")
    assert world.actions().count("adapter.banned") == 1


# The level and the power of the guards that read what clients tell.


def play(
    seed: str,
    *,
    canary: float,
    champion: float,
    sessions: int,
    weights: tuple[float, ...],
    drift: float = 0.0,
    tells: tuple[float, float] = (1.0, 1.0),
    callers: int | None = None,
) -> tuple[str, int]:
    """Play sessions whose success has these chances, and grows by `drift` over all of them.

    tells: share of the canary's and of the champion's sessions with an outcome. callers: None: each
    session has one of its own. Returns: how it ended, and with how many of the canary's sessions.
    """
    rng, live = random.Random(seed), Live(ratios_of())
    for number in range(sessions):
        weight = weights[number * len(weights) // sessions]
        is_canary = rng.random() < weight
        chance = (canary if is_canary else champion) + drift * (number / sessions - 0.5)
        caller = f"key {number if callers is None else rng.randrange(callers)}"
        turn = Turn(unit=f"s{number}", canary=is_canary, weight=weight, caller=caller)
        success = rng.random() < chance
        if rng.random() < tells[not is_canary]:
            live.hear("outcome", turn, float(success))
        if guard_harm(live.told) is not None:
            return "harm", live.told["outcome"].units[True]
        if guard_doubt(live.told) is not None:
            return "doubt", live.told["outcome"].units[True]
    return "", live.told["outcome"].units[True]


RAMP = (0.05, 0.1, 0.25, 0.5)


@pytest.mark.parametrize(
    "world",
    [
        {},
        {"drift": -0.7, "canary": 0.6, "champion": 0.6},
        {"drift": 0.7, "canary": 0.6, "champion": 0.6},
        {"tells": (0.9, 0.3)},
    ],
)
def test_an_equal_candidate_is_not_ended_more_often_than_the_level_says(
    world: dict[str, Any],
) -> None:
    """0.5% of 100 are 0.5; three or more of 100 would have a chance of 1.4%."""
    given: dict[str, Any] = {
        "canary": 0.8,
        "champion": 0.8,
        "sessions": 600,
        "weights": RAMP,
    } | world
    ended = [play(f"null-{number}", **given)[0] for number in range(100)]

    assert sum(map(bool, ended)) < 3


@pytest.mark.parametrize(("weight", "most"), [(0.5, 150), (0.05, 110)])
def test_a_success_rate_that_falls_from_0_8_to_0_5_is_found(weight: float, most: int) -> None:
    found = [
        play(f"harm-{number}", canary=0.5, champion=0.8, sessions=6_000, weights=(weight,))
        for number in range(9)
    ]

    assert {how for how, _ in found} == {"harm"}
    assert sorted(sessions for _, sessions in found)[4] <= most


def test_what_few_callers_tell_is_no_verdict_on_the_candidate() -> None:
    ended, _ = play("few", canary=0.0, champion=1.0, sessions=600, weights=(0.5,), callers=2)

    assert ended == "doubt"


def test_a_key_that_tells_of_all_sessions_is_one_caller_unless_it_may_speak_for_many() -> None:
    def told_by(*tellers: str) -> Live:
        live = Live(ratios_of())
        for number in range(200):
            turn = Turn(
                unit=f"s{number}",
                canary=number % 2 == 0,
                weight=0.5,
                caller=f"user {number}",
                tellers=tellers,
            )
            live.hear("outcome", turn, float(number % 2))
        return live

    assert guard_harm(told_by("key app").told) is None
    assert "evidence from 1 caller" in (guard_doubt(told_by("key app").told) or "")
    assert "evidence from 100 callers" in (guard_harm(told_by().told) or "")
