"""The queue: one canary runs, one waits, the newest request wins, nothing is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from deploy.records import Canary
from deploy.registry import aliases, canaries, candidates, transitions
from deploy.registry.canary_rule import Move
from sidecar.store.models import AuditRow

if TYPE_CHECKING:
    from tests.deploy.conftest import World

STEPS = (2_000, 5_000)
GATE = Move(to="gating", candidate_state="gating", reason="loaded")
RAMP = Move(to="ramping", candidate_state="ramping", reason="gate passed")
PROMOTE = Move(to="promoted", candidate_state="champion", reason="ramp passed")
GIVE_UP = Move(to="inconclusive", candidate_state="retired", reason="no traffic")


def start(world: World, name: str) -> Canary:
    with world.database.write() as session:
        return candidates.start(
            session, "m", name, steps=STEPS, now=world.clock(), actor="me", reason="try it"
        )


def go(world: World, name: str, *moves: Move) -> None:
    for move in moves:
        with world.database.write() as session:
            canary = world.canary(name)
            assert transitions.apply(session, canary, move, evidence={}, now=world.clock())


def abort(world: World, canary_id: str) -> Canary:
    with world.database.write() as session:
        row = canaries.find_row(session, canary_id)
        return transitions.abort(session, row, reason="not now", now=world.clock(), actor="me")


def by_id(world: World, canary_id: str) -> Canary:
    with world.database.read() as session:
        return canaries.to_canary(canaries.find_row(session, canary_id))


def waiting(world: World) -> str | None:
    with world.database.read() as session:
        found = canaries.queued(session, "m")
        return found.candidate if found is not None else None


@pytest.mark.both_stores
def test_a_second_start_waits_and_takes_no_traffic(world: World) -> None:
    first, second = world.register(1), world.register(2)
    start(world, first)

    queued = start(world, second)
    again = start(world, second)

    assert (queued.phase, queued.weight_bp, queued.active) == ("queued", 0, False)
    assert queued.reason == f"queued behind the canary of {first}"
    assert again.canary_id == queued.canary_id
    assert transitions.allowed_actions(queued) == ["abort"]
    assert world.aliases()["canary"] == first
    assert world.canary(first).active


@pytest.mark.both_stores
async def test_the_queued_one_begins_by_a_new_control_against_the_champion_of_then(
    world: World,
) -> None:
    first, second = world.register(1), world.register(2)
    start(world, first)
    queued = start(world, second)
    await world.controller().tick()
    assert by_id(world, queued.canary_id).phase == "queued"
    go(world, first, RAMP, PROMOTE)
    world.clock.now += 50.0

    await world.controller().tick()

    begun = by_id(world, queued.canary_id)
    assert (begun.phase, begun.champion, begun.steps) == ("gating", first, STEPS)
    assert (begun.created_at, begun.generation) == (world.clock.now, 3)
    assert (world.aliases()["canary"], waiting(world)) == (second, None)
    assert world.adapter(second).state == "gating"


@pytest.mark.both_stores
def test_a_newer_request_replaces_the_one_that_waits_and_says_so(world: World) -> None:
    first, second, third = world.register(1), world.register(2), world.register(3)
    start(world, second)
    go(world, second, GIVE_UP)
    start(world, first)
    replaced = start(world, second)

    start(world, third)

    left = by_id(world, replaced.canary_id)
    assert (left.phase, left.reason) == ("withdrawn", f"superseded by {third}")
    assert left.ended_at == world.clock.now
    assert waiting(world) == third
    # It had ended without a verdict before, and is again what it was.
    assert (world.adapter(second).state, world.adapter(second).reason) == ("retired", "no traffic")
    with world.database.read() as session:
        rows = session.query(AuditRow).filter(AuditRow.subject == replaced.canary_id).all()
        told = [(row.action, row.reason) for row in rows]
    assert told == [
        ("canary.queued", "try it"),
        ("canary.withdrawn", f"superseded by {third}"),
    ]


@pytest.mark.both_stores
async def test_what_the_learner_makes_joins_the_same_queue(world: World) -> None:
    first, by_hand = world.register(1), world.register(2)
    start(world, first)
    replaced = start(world, by_hand)
    learned = world.register(3)

    await world.controller().tick()

    assert waiting(world) == learned
    assert by_id(world, replaced.canary_id).reason == f"superseded by {learned}"
    assert world.adapter(by_hand).state == "retired"
    start(world, by_hand)
    assert waiting(world) == by_hand
    assert (world.adapter(learned).state, world.adapter(learned).reason) == (
        "retired",
        f"superseded by {by_hand}",
    )
    await world.controller().tick()
    assert waiting(world) == by_hand, "the one that was replaced does not come back"


@pytest.mark.both_stores
def test_an_abort_takes_it_out_of_the_queue(world: World) -> None:
    first, second = world.register(1), world.register(2)
    start(world, first)
    queued = start(world, second)

    ended = abort(world, queued.canary_id)
    again = abort(world, queued.canary_id)

    assert (ended.phase, ended.reason, again.generation) == ("withdrawn", "not now", 2)
    assert (waiting(world), world.canary(first).phase) == (None, "loading")
    assert world.adapter(second).state == "retired"


async def test_what_may_no_longer_be_tried_leaves_the_queue(world: World) -> None:
    first, second, third = world.register(1), world.register(2), world.register(3)
    start(world, first)
    queued = start(world, second)
    with world.database.write() as session:
        aliases.ban(session, second, now=1.0, actor="me", reason="it is rude")
    go(world, first, GIVE_UP)

    await world.controller().tick()

    left = by_id(world, queued.canary_id)
    assert left.phase == "withdrawn"
    assert left.reason is not None
    assert "it is rude" in left.reason
    assert world.adapter(third).state == "retired"


async def test_the_learners_descendant_of_a_rolled_back_one_leaves_the_queue(world: World) -> None:
    first = world.register(1)
    start(world, first)
    child = world.register(2, parent=first)
    await world.controller().tick()
    assert waiting(world) == child
    bad = Move(to="rolled_back", candidate_state="rolled_back", reason="it failed")
    go(world, first, bad)

    await world.controller().tick()

    assert waiting(world) is None
    assert world.canary(child).phase == "withdrawn"
    assert world.adapter(child).state == "retired"
