"""What lost its traffic does not come back by itself; what lost nothing may be tried again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from deploy.errors import TransitionError
from deploy.registry import aliases, candidates, flags, transitions
from deploy.registry.canary_rule import Move
from deploy.registry.rollback import rollback
from sidecar.store.models import AuditRow, BannedDigestRow

if TYPE_CHECKING:
    from deploy.records import Canary
    from tests.deploy.conftest import World


def start(world: World, name: str, actor: str = "me") -> Canary:
    with world.database.write() as session:
        return candidates.start(
            session, "m", name, steps=(2_000,), now=world.clock(), actor=actor, reason="again"
        )


def end(world: World, name: str, move: Move, actor: str = "control") -> None:
    world.clock.now += 1.0
    with world.database.write() as session:
        assert transitions.apply(
            session, world.canary(name), move, evidence={}, now=world.clock(), actor=actor
        )


def banned(world: World) -> list[str]:
    return [row.adapter for row in world.rows(BannedDigestRow)]


@pytest.mark.both_stores
def test_an_inconclusive_candidate_is_tried_again_in_a_canary_of_its_own(world: World) -> None:
    name = world.register(1)
    first = start(world, name)
    end(world, name, Move(to="inconclusive", candidate_state="retired", reason="no traffic"))
    world.clock.now += 1.0

    second = start(world, name)

    assert second.canary_id != first.canary_id
    assert world.canary(name).canary_id == second.canary_id
    assert (second.phase, world.adapter(name).state) == ("loading", "gating")
    assert banned(world) == []
    with world.database.read() as session:
        ended = session.get(type(world.canary_row(session, name)), first.canary_id)
        assert ended is not None
        assert (ended.state, ended.reason) == ("inconclusive", "no traffic")


def test_an_aborted_one_may_be_tried_again_and_one_that_lost_may_not(world: World) -> None:
    aborted, lost = world.register(1), world.register(2, values=(0.3, 0.1))
    start(world, aborted)
    gone = Move(to="rolled_back", candidate_state="rolled_back", reason="30% errors")
    end(world, aborted, gone, actor="token:1234")
    start(world, lost)
    end(world, lost, gone)

    assert banned(world) == [lost]
    with pytest.raises(TransitionError, match="are banned: m--v2"):
        start(world, lost)
    assert start(world, aborted).candidate == aborted


def test_a_ban_holds_for_the_files_and_ends_by_an_operator_alone(world: World) -> None:
    name = world.register(1)
    copy = world.register(2)  # the same numbers, so the same digest
    assert world.adapter(name).digest == world.adapter(copy).digest
    with world.database.write() as session:
        assert aliases.ban(session, name, now=1.0, actor="me", reason="rude") is True
        assert aliases.ban(session, copy, now=2.0, actor="me", reason="rude") is False

    with pytest.raises(TransitionError, match="adapters allow"):
        start(world, copy)
    with world.database.write() as session:
        assert aliases.lift(session, copy, now=3.0, actor="me", reason="it was the judge") is True
        assert aliases.lift(session, copy, now=4.0, actor="me", reason="again") is False

    assert start(world, copy).candidate == copy
    told = [row.action for row in world.rows(AuditRow) if row.action.startswith("adapter.")]
    assert told == ["adapter.banned", "adapter.allowed"]


def test_the_champion_and_a_child_of_what_is_banned_are_refused(
    world: World,
) -> None:
    first = world.register(1)
    world.promote(first)
    second = world.register(2, parent=first, values=(0.3, 0.1))
    third = world.register(3, parent=second, values=(0.2, 0.2))

    with pytest.raises(TransitionError, match="is champion"):
        start(world, first)
    running = start(world, second)
    assert start(world, second) == running
    end(world, second, Move(to="rolled_back", candidate_state="rejected", reason="worse"))
    with pytest.raises(TransitionError, match=f"descends from {second}"):
        start(world, third)


@pytest.mark.parametrize("bans_it", [True, False])
async def test_what_is_allowed_again_is_retired_and_its_child_is_tried(
    world: World, bans_it: bool
) -> None:
    world.promote(world.register(1))
    second = world.register(2, values=(0.3, 0.1))
    world.promote(second)
    rollback(world.database, "m", reason="rude", actor="me", now=world.clock(), ban=bans_it)
    assert world.adapter(second).state == "rolled_back"

    with world.database.write() as session:
        assert aliases.lift(session, second, now=3.0, actor="me", reason="it was the judge") is True
        assert aliases.lift(session, second, now=4.0, actor="me", reason="again") is False

    assert (world.adapter(second).state, world.adapter(second).reason) == (
        "retired",
        "allowed again: it was the judge",
    )
    (told,) = [row for row in world.rows(AuditRow) if row.action == "adapter.allowed"]
    assert ((told.before or {})["state"], told.after) == (
        "rolled_back",
        {"banned": False, "state": "retired"},
    )
    child = world.register(3, parent=second, values=(0.2, 0.2))
    await world.controller().tick()
    assert world.canary(child).phase == "gating"


@pytest.mark.both_stores
def test_a_rollback_bans_what_it_takes_away_and_pauses_the_learner(world: World) -> None:
    first, second = world.register(1), world.register(2, values=(0.3, 0.1))
    world.promote(first)
    world.promote(second)
    on_canary = world.register(3, values=(0.2, 0.2))
    world.ramp(on_canary)

    done = rollback(world.database, "m", reason="rude", actor="me", now=world.clock())
    again = rollback(world.database, "m", reason="rude", actor="me", now=world.clock())

    assert sorted(banned(world)) == [second, on_canary]
    assert (done.learner_paused, again.learner_paused, again.changed) == (True, True, False)
    with world.database.read() as session:
        assert flags.read(session, "m").paused is True
    with pytest.raises(TransitionError, match="banned"):
        start(world, second)


def test_a_rollback_that_names_a_banned_version_lifts_its_ban(world: World) -> None:
    first, second = world.register(1), world.register(2, values=(0.3, 0.1))
    world.promote(first)
    world.promote(second)
    rollback(world.database, "m", reason="rude", actor="me", now=world.clock())

    rollback(world.database, "m", to="v2", reason="it was v1", actor="me", now=world.clock())

    assert banned(world) == [first]
    assert world.aliases()["champion"] == second


def test_a_rollback_that_changes_nothing_pauses_nothing(world: World) -> None:
    done = rollback(world.database, "m", to="base", reason="drill", actor="me", now=world.clock())

    assert (done.changed, done.learner_paused) == (False, False)
    with world.database.read() as session:
        assert flags.read(session, "m").paused is False
