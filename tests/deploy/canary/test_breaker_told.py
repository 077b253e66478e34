"""What control makes of a trip of the proxy's breaker, and of outages and hanging canaries."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from deploy.errors import TransitionError
from deploy.registry import transitions
from deploy.registry.canary_rule import Move
from sidecar.routing.breaker_rule import FEW_CALLERS
from sidecar.store.models import BreakerTripRow

if TYPE_CHECKING:
    from tests.deploy.conftest import World


async def tick(world: World, times: int = 1) -> None:
    for _ in range(times):
        await world.controller().tick()


@pytest.fixture
async def name(world: World) -> str:
    """A candidate in the first step of its ramp."""
    found = str(world.register(1))
    world.hold_out(4)
    world.clock.now += 1.0
    await tick(world, 3)
    assert world.canary(found).phase == "ramping"
    return found


def trip(world: World, name: str, reason: str = "8 of 8 were empty") -> None:
    """What a proxy writes."""
    canary = world.canary(name)
    with world.database.write() as session:
        session.add(
            BreakerTripRow(
                model=canary.model,
                canary=name,
                salt=canary.salt,
                at=1.0,
                reason=reason,
            )
        )


def act(world: World, name: str, action: str) -> None:
    with world.database.write() as session:
        row = world.canary_row(session, name)
        getattr(transitions, action)(
            session, row, reason="by hand", now=world.clock.now, actor="test"
        )


async def test_a_canary_that_the_breaker_took_out_is_rolled_back(world: World, name: str) -> None:
    trip(world, name)

    await tick(world)

    canary = world.canary(name)
    assert canary.phase == "rolled_back"
    assert canary.reason == "the proxy's breaker took it out: 8 of 8 were empty"
    assert world.table().canary is None
    assert world.adapter(name).state == "rolled_back"


async def test_a_trip_that_few_callers_may_have_caused_is_inconclusive_and_bans_nothing(
    world: World, name: str
) -> None:
    trip(world, name, f"8 of 8 were cut{FEW_CALLERS}")

    await tick(world)

    assert world.canary(name).phase == "inconclusive"
    assert world.table().canary is None
    assert world.adapter(name).state == "retired"
    assert "adapter.banned" not in world.actions()


async def test_a_paused_canary_loses_its_traffic_and_stays_paused(world: World, name: str) -> None:
    act(world, name, "pause")
    assert world.table().canary == name
    trip(world, name)

    await tick(world, 3)

    canary = world.canary(name)
    assert (canary.phase, canary.paused, canary.weight_bp) == ("ramping", True, 0)
    assert canary.reason == "paused; the proxy's breaker took it out: 8 of 8 were empty"
    assert world.table().canary is None
    assert world.actions().count("canary.taken_out") == 1


async def test_a_resume_gives_the_canary_its_traffic_under_a_new_salt(
    world: World, name: str
) -> None:
    act(world, name, "pause")
    before = world.table().salt
    trip(world, name)
    await tick(world)

    act(world, name, "resume")
    await tick(world, 2)

    assert world.canary(name).phase == "ramping"
    assert world.canary(name).weight_bp == 2_000
    assert world.table().canary == name
    assert world.table().salt not in ("", before)


async def test_the_replies_that_tripped_the_breaker_are_not_judged_again_after_a_resume(
    world: World, name: str
) -> None:
    act(world, name, "pause")
    for number in range(8):
        world.serve(f"c{number}", adapter="base", fallback_from=name)
        world.serve(f"b{number}")
    trip(world, name)
    await tick(world)
    world.clock.now += 60.0

    with world.database.write() as session:
        row = world.canary_row(session, name)
        transitions.resume(session, row, reason="mended", now=world.clock.now, actor="test")
    await tick(world, 3)

    assert world.canary(name).phase == "ramping"
    assert world.canary(name).weight_bp == 2_000


async def test_a_pause_and_resume_without_a_trip_keep_the_sessions_where_they_are(
    world: World, name: str
) -> None:
    before = world.table().salt
    act(world, name, "pause")
    act(world, name, "resume")

    assert world.table().salt == before


async def test_what_the_breaker_took_out_is_not_promoted_by_hand(world: World, name: str) -> None:
    act(world, name, "pause")
    trip(world, name)
    await tick(world)

    with pytest.raises(TransitionError, match="resume the canary before promoting it"):
        act(world, name, "promote")


@pytest.mark.parametrize("paused", [False, True])
async def test_a_trip_that_control_has_not_seen_yet_keeps_a_person_from_promoting(
    world: World, name: str, paused: bool
) -> None:
    if paused:
        act(world, name, "pause")
    trip(world, name)

    with pytest.raises(TransitionError, match="resume the canary before promoting it"):
        act(world, name, "promote")


async def test_a_resume_before_control_has_seen_the_trip_gives_a_new_salt(
    world: World, name: str
) -> None:
    act(world, name, "pause")
    before = world.table().salt
    trip(world, name)

    act(world, name, "resume")
    await tick(world, 2)

    assert world.canary(name).weight_bp == 2_000
    assert world.table().salt != before


async def test_a_trip_that_comes_while_the_ramp_decides_wins(world: World, name: str) -> None:
    canary = world.canary(name)
    move = Move(to="promoted", candidate_state="champion", reason="passed")
    trip(world, name)

    with world.database.write() as session:
        applied = transitions.apply(session, canary, move, evidence={}, now=1.0)

    assert not applied
    assert world.aliases()["champion"] == "base"


async def test_a_canary_that_hangs_is_rolled_back_although_no_reply_came(
    world: World, name: str
) -> None:
    for number in range(60):
        world.serve(f"c{number}", adapter=name, arm="canary", outcome="cut", status=0, content=None)
        world.serve(f"b{number}")

    await tick(world)

    assert world.canary(name).phase == "rolled_back"
    assert "were cut by the client" in (world.canary(name).reason or "")


@pytest.mark.parametrize("canary_share", [1, 4], ids=["half", "four fifths"])
async def test_an_outage_of_both_arms_leaves_the_canary_in(
    world: World, name: str, canary_share: int
) -> None:
    """Five seconds in which every request fails, at the start of a step, when the champion has
    only good replies from before."""
    weight = canary_share / (canary_share + 1)
    for number in range(20):
        world.clock.now -= 1.0
        world.serve(f"before{number}")
        world.clock.now += 1.0
    for second in range(5):
        for number in range(canary_share):
            world.serve(
                f"c{second}-{number}", adapter=name, arm="canary",
                outcome="upstream_error", status=502, content=None, propensity=weight,
            )  # fmt: skip
        world.serve(
            f"b{second}", outcome="upstream_error", status=502, content=None, propensity=1 - weight
        )
        world.clock.now += 1.0

    await tick(world)

    assert world.canary(name).phase == "ramping"
