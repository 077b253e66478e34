"""The queue: one canary runs, one waits, the newest request wins, nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.errors import TransitionError
from deploy.records import Canary
from deploy.registry import bans, canaries, flags, transitions, versions
from deploy.registry.canary_rule import Move
from deploy.registry.candidates import best_so_far, pace, sessions_a_day, steps_days
from deploy.registry.rollback import rollback
from sidecar.lines import Line
from sidecar.settings import Canary as CanarySettings
from sidecar.store.models import AuditRow, BannedDigestRow
from support.adapter_endpoints import MODEL
from support.made_canary import made_canary
from tests.deploy.conftest import World

GATE = Move(to="gating", candidate_state="gating", reason="loaded")
RAMP = Move(to="ramping", candidate_state="ramping", reason="gate passed")
PROMOTE = Move(to="promoted", candidate_state="champion", reason="ramp passed")
GIVE_UP = Move(to="inconclusive", candidate_state="retired", reason="no traffic")


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
    world.start(first)

    queued = world.start(second)
    again = world.start(second)

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
    world.start(first)
    queued = world.start(second)
    await world.controller().tick()
    assert by_id(world, queued.canary_id).phase == "queued"
    world.move(first, RAMP, PROMOTE)
    world.clock.now += 50.0

    await world.controller().tick()

    begun = by_id(world, queued.canary_id)
    assert (begun.phase, begun.champion, begun.steps) == ("gating", first, world.rules.steps)
    assert (begun.created_at, begun.generation) == (world.clock.now, 3)
    assert (world.aliases()["canary"], waiting(world)) == (second, None)
    assert world.adapter(second).state == "gating"


@pytest.mark.both_stores
def test_a_newer_request_replaces_the_one_that_waits_and_says_so(world: World) -> None:
    first, second, third = world.register(1), world.register(2), world.register(3)
    world.start(second)
    world.move(second, GIVE_UP)
    world.start(first)
    replaced = world.start(second)

    world.start(third)

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
    world.start(first)
    replaced = world.start(by_hand)
    learned = world.register(3)

    await world.controller().tick()

    assert waiting(world) == learned
    assert by_id(world, replaced.canary_id).reason == f"superseded by {learned}"
    assert world.adapter(by_hand).state == "retired"
    world.start(by_hand)
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
    world.start(first)
    queued = world.start(second)

    ended = abort(world, queued.canary_id)
    again = abort(world, queued.canary_id)

    assert (ended.phase, ended.reason, again.generation) == ("withdrawn", "not now", 2)
    assert (waiting(world), world.canary(first).phase) == (None, "loading")
    assert world.adapter(second).state == "retired"


async def test_what_may_no_longer_be_tried_leaves_the_queue(world: World) -> None:
    first, second, third = world.register(1), world.register(2), world.register(3)
    world.start(first)
    queued = world.start(second)
    with world.database.write() as session:
        bans.ban(session, second, now=1.0, actor="me", reason="it is rude")
    world.move(first, GIVE_UP)

    await world.controller().tick()

    left = by_id(world, queued.canary_id)
    assert left.phase == "withdrawn"
    assert left.reason is not None
    assert "it is rude" in left.reason
    assert world.adapter(third).state == "retired"


async def test_the_learners_descendant_of_a_rolled_back_one_leaves_the_queue(world: World) -> None:
    first = world.register(1)
    world.start(first)
    child = world.register(2, parent=first)
    await world.controller().tick()
    assert waiting(world) == child
    bad = Move(to="rolled_back", candidate_state="rolled_back", reason="it failed")
    world.move(first, bad)

    await world.controller().tick()

    assert waiting(world) is None
    assert world.canary(child).phase == "withdrawn"
    assert world.adapter(child).state == "retired"


# What lost its traffic does not come back by itself; what lost nothing may be tried again.


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
    first = world.start(name)
    end(world, name, Move(to="inconclusive", candidate_state="retired", reason="no traffic"))
    world.clock.now += 1.0

    second = world.start(name)

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
    world.start(aborted)
    gone = Move(to="rolled_back", candidate_state="rolled_back", reason="30% errors")
    end(world, aborted, gone, actor="token:1234")
    world.start(lost)
    end(world, lost, gone)

    assert banned(world) == [lost]
    with pytest.raises(TransitionError, match="are banned: m--v2"):
        world.start(lost)
    assert world.start(aborted).candidate == aborted


def test_a_ban_holds_for_the_files_and_ends_by_an_operator_alone(world: World) -> None:
    name = world.register(1)
    copy = world.register(2)  # the same numbers, so the same digest
    assert world.adapter(name).digest == world.adapter(copy).digest
    with world.database.write() as session:
        assert bans.ban(session, name, now=1.0, actor="me", reason="rude") is True
        assert bans.ban(session, copy, now=2.0, actor="me", reason="rude") is False

    with pytest.raises(TransitionError, match="adapters allow"):
        world.start(copy)
    with world.database.write() as session:
        assert bans.lift(session, copy, now=3.0, actor="me", reason="it was the judge") is True
        assert bans.lift(session, copy, now=4.0, actor="me", reason="again") is False

    assert world.start(copy).candidate == copy
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
        world.start(first)
    running = world.start(second)
    assert world.start(second) == running
    end(world, second, Move(to="rolled_back", candidate_state="rejected", reason="worse"))
    with pytest.raises(TransitionError, match=f"descends from {second}"):
        world.start(third)


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
        assert bans.lift(session, second, now=3.0, actor="me", reason="it was the judge") is True
        assert bans.lift(session, second, now=4.0, actor="me", reason="again") is False

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
        world.start(second)


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


# How long a canary takes at a site's traffic, and the distance to the best so far.


RULES = CanarySettings()
LINE = Line(name=MODEL)
DAY_S = 86_400.0


def measured(world: World) -> float:
    with world.database.read() as session:
        return sessions_a_day(session, LINE, world.clock.now)


def test_sessions_are_counted_once_over_the_last_week(world: World) -> None:
    world.clock.now = 100 * DAY_S
    world.serve("long-ago")
    world.clock.now += 8 * DAY_S
    for number in range(14):
        world.serve(f"s{number}")
        world.serve(f"s{number}")

    assert measured(world) == pytest.approx(2.0)


def test_an_evening_is_not_taken_for_a_day(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six sessions of two requests in the last hours of each of ten days; it is asked after."""
    monkeypatch.setattr("deploy.registry.candidates.EXAMINED", 24)
    for day in range(10):
        for number in range(6):
            world.clock.now = (100 + day) * DAY_S - (6 - number) * 3600.0
            world.serve(f"{day}-{number}")
            world.serve(f"{day}-{number}")
    world.clock.now += 60.0

    assert measured(world) == pytest.approx(6.0)


def test_a_store_that_has_just_begun_is_taken_for_a_day_old(world: World) -> None:
    assert measured(world) == 0.0
    for number in range(3):
        world.serve(f"s{number}")

    assert measured(world) == pytest.approx(3.0)


def test_the_steps_of_twenty_sessions_a_day_take_a_week() -> None:
    assert steps_days((2_000, 5_000), RULES, 20.0) == pytest.approx([5.0, 2.0])
    assert steps_days((2_000, 5_000), RULES, 20.0, seen=16) == pytest.approx([1.0, 2.0])
    assert steps_days((2_000,), RULES, 0.0) == [float("inf")]


def test_the_pace_names_days_traffic_and_groups() -> None:
    gating = made_canary(phase="gating", steps=(2_000, 5_000))
    last = made_canary(steps=(2_000, 5_000), step=1, proven=frozenset({"no_worse", "anchored"}))
    evidence: dict[str, Any] = {"quality": {"groups": 40}, "step_2": {"sessions": 15}}

    assert pace(gating, evidence, RULES, 20.0) == (
        "About 7 days at today's traffic (20 sessions a day) for its steps, about 19 days in all "
        "for an equal candidate: it needs about 310 more judged groups, and new sessions bring "
        "16 a day."
    )
    assert pace(last, evidence, RULES, 20.0) == (
        "Less than a day at today's traffic (20 sessions a day) for its steps."
    )
    never = RULES.model_copy(update={"step_min_sessions": 400})
    assert pace(gating, evidence, never, 20.0) == (
        "No step can end at today's traffic (20 sessions a day): one wants 400 sessions, and ends "
        "after 28 days; lower canary.step_min_sessions."
    )
    assert pace(last, evidence, RULES, 0.0) == (
        "No end can be told: there was no session in the last week."
    )


def test_the_distance_to_the_best_is_that_of_the_newest_canary_which_measured_it(
    world: World,
) -> None:
    first, second = world.register(1), world.register(2)
    world.promote(first)
    with world.database.write() as session:
        versions.move_alias(
            session, model=MODEL, alias="anchor", to=first, now=1.0, actor="control", reason="best"
        )
        assert best_so_far(session, MODEL, first, first) == (
            f"The champion {first} is the best so far (the anchor)."
        )
    world.promote(second)
    with world.database.write() as session:
        row = world.canary_row(session, second)
        assert best_so_far(session, MODEL, second, first).endswith("was not compared with it yet.")
        measured = {"candidate": [-0.04, 0.02], "champion": [-1.0, 1.0]}
        row.evidence = {**row.evidence, "quality": {"to_anchor": measured}}
        session.flush()
        assert best_so_far(session, MODEL, second, first) == (
            f"The best so far is {first} (the anchor); the champion's difference to it is -0.040 "
            f"to +0.020, by the groups of canary {row.canary_id}."
        )
        assert best_so_far(session, MODEL, "base", "base") == ""
