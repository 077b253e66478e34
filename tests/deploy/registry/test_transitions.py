"""Transitions in the store: what belongs together changes together, and decisions latch."""

from __future__ import annotations

from typing import Any, Protocol

import pytest
from sqlalchemy.orm import Session

from deploy.errors import TransitionError
from deploy.records import Canary
from deploy.registry import routing_writer, transitions, versions
from deploy.registry.canary_rule import Hold, Move
from sidecar.store.models import AuditRow, CanaryRow, CounterRow
from tests.deploy.conftest import World

TO_GATE = Move(to="gating", candidate_state="gating", reason="loaded and live")
TO_RAMP = Move(to="ramping", candidate_state="ramping", reason="gate passed")
STEP_2 = Move(to="ramping", candidate_state="ramping", step=1, reason="step 1 passed")
PROMOTE = Move(to="promoted", candidate_state="champion", reason="ramp passed")
ROLL_BACK = Move(to="rolled_back", candidate_state="rolled_back", reason="too many errors")


class Verb(Protocol):
    """What an operator does to a canary."""

    def __call__(
        self, session: Session, row: CanaryRow, *, reason: str, now: float, actor: str
    ) -> Canary: ...


def begin(world: World, name: str) -> Canary:
    with world.database.write() as session:
        return transitions.begin(
            session, model="m", candidate=name, steps=(2_000, 5_000), now=100.0, actor="control"
        )


def go(world: World, name: str, *moves: Hold | Move, now: float = 200.0, **evidence: Any) -> bool:
    done = True
    for move in moves:
        with world.database.write() as session:
            done = transitions.apply(session, world.canary(name), move, evidence=evidence, now=now)
    return done


def by_operator(world: World, name: str, verb: Verb, now: float = 300.0) -> Canary:
    with world.database.write() as session:
        row = world.canary_row(session, name)
        return verb(session, row, reason="I say so", now=now, actor="me")


@pytest.mark.both_stores
def test_each_step_of_the_ramp_is_in_the_routing_table(world: World) -> None:
    name = world.register(1)
    begin(world, name)

    assert (world.canary(name).phase, world.adapter(name).state) == ("loading", "gating")
    go(world, name, TO_GATE)
    gating = world.table()
    go(world, name, TO_RAMP)
    first = world.table()
    go(world, name, STEP_2)
    second = world.table()

    assert (gating.canary, gating.generation) == (None, 1)
    assert (first.canary, first.canary_weight_bp, first.generation) == (name, 2_000, 2)
    assert (second.canary, second.canary_weight_bp, second.generation) == (name, 5_000, 3)
    assert first.salt == second.salt == world.canary(name).salt != ""


@pytest.mark.both_stores
def test_two_canaries_have_different_salts(world: World) -> None:
    first, second = world.register(1), world.register(2)
    begin(world, first)
    go(world, first, ROLL_BACK)
    begin(world, second)

    assert world.canary(first).salt != world.canary(second).salt


@pytest.mark.both_stores
def test_promotion_moves_aliases_states_and_table_at_once(world: World) -> None:
    first, second = world.register(1), world.register(2)
    world.promote(first)
    begin(world, second)
    go(world, second, TO_GATE, TO_RAMP, STEP_2)

    go(world, second, PROMOTE)

    assert world.aliases() == {"champion": second, "previous": first}
    assert (world.adapter(second).state, world.adapter(first).state) == ("champion", "retired")
    table = world.table()
    assert (table.champion, table.canary, table.canary_weight_bp) == (second, None, 0)
    assert world.canary(second).ended_at == 200.0


@pytest.mark.both_stores
def test_a_failure_in_the_transaction_leaves_nothing_behind(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = world.register(1)
    begin(world, name)
    go(world, name, TO_GATE, TO_RAMP, STEP_2)
    before = (world.aliases(), world.table(), world.canary(name), world.actions())

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("killed here")

    monkeypatch.setattr(routing_writer, "write", fail)
    with pytest.raises(RuntimeError, match="killed here"):
        go(world, name, PROMOTE)

    assert (world.aliases(), world.table(), world.canary(name), world.actions()) == before


@pytest.mark.both_stores
def test_a_decision_on_a_canary_that_changed_meanwhile_is_discarded(world: World) -> None:
    name = world.register(1)
    begin(world, name)
    go(world, name, TO_GATE, TO_RAMP)
    seen = world.canary(name)
    by_operator(world, name, transitions.abort)
    actions = world.actions()

    with world.database.write() as session:
        applied = transitions.apply(session, seen, PROMOTE, evidence={"late": 1}, now=400.0)

    assert not applied
    assert world.canary(name).phase == "rolled_back"
    assert "late" not in world.evidence(name)
    assert world.actions() == actions


@pytest.mark.both_stores
def test_a_decision_on_a_canary_paused_meanwhile_is_discarded(world: World) -> None:
    name = world.register(1)
    begin(world, name)
    seen = world.canary(name)
    by_operator(world, name, transitions.pause)

    with world.database.write() as session:
        assert not transitions.apply(session, seen, TO_GATE, evidence={}, now=400.0)


@pytest.mark.both_stores
def test_a_hold_says_why_without_a_generation_or_an_audit_row(world: World) -> None:
    name = world.register(1)
    canary = begin(world, name)
    actions = world.actions()

    go(world, name, Hold(reason="waiting for vLLM"), loading={"failures": 1})

    after = world.canary(name)
    assert (after.reason, after.generation) == ("waiting for vLLM", canary.generation)
    assert world.evidence(name)["loading"] == {"failures": 1}
    assert world.actions() == actions


@pytest.mark.both_stores
def test_the_clock_stands_through_holds_that_stop_it(world: World) -> None:
    name = world.register(1)
    begin(world, name)
    waits, goes = Hold(reason="away", stops_clock=True), Hold(reason="1 of 4")

    go(world, name, waits, now=110.0)
    go(world, name, waits, now=150.0)
    assert world.canary(name).stopped_at == 110.0
    go(world, name, goes, now=170.0)
    go(world, name, waits, now=180.0)
    go(world, name, goes, now=185.0)

    canary = world.canary(name)
    assert (canary.stopped_at, canary.stopped_s) == (None, 65.0)


@pytest.mark.both_stores
def test_a_transition_starts_the_clock_anew(world: World) -> None:
    name = world.register(1)
    begin(world, name)
    go(world, name, Hold(reason="away", stops_clock=True), now=110.0)

    go(world, name, TO_GATE, now=150.0)

    canary = world.canary(name)
    assert (canary.step_started_at, canary.stopped_s, canary.stopped_at) == (150.0, 0.0, None)


@pytest.mark.both_stores
def test_pause_keeps_the_weight_and_resume_goes_on(world: World) -> None:
    name = world.register(1)
    begin(world, name)
    go(world, name, TO_GATE, TO_RAMP)

    paused = by_operator(world, name, transitions.pause, now=210.0)
    again = by_operator(world, name, transitions.pause, now=220.0)
    resumed = by_operator(world, name, transitions.resume, now=250.0)

    assert paused.paused
    assert again == paused
    assert paused.weight_bp == world.table().canary_weight_bp == 2_000
    assert not resumed.paused
    assert resumed.stopped_s == 40.0
    assert world.actions()[-2:] == ["canary.paused", "canary.resumed"]


@pytest.mark.both_stores
def test_abort_may_be_repeated(world: World) -> None:
    name = world.register(1)
    begin(world, name)

    first = by_operator(world, name, transitions.abort, now=300.0)
    actions = world.actions()
    second = by_operator(world, name, transitions.abort, now=400.0)

    assert first == second
    assert first.phase == "rolled_back"
    assert world.actions() == actions


@pytest.mark.both_stores
def test_an_operator_promotes_a_ramping_canary(world: World) -> None:
    name = world.register(1)
    begin(world, name)
    go(world, name, TO_GATE, TO_RAMP)

    by_operator(world, name, transitions.promote)

    assert world.aliases() == {"champion": name, "previous": "base"}


@pytest.mark.parametrize(
    ("moves", "pause", "allowed"),
    [
        ((), False, ["pause", "abort"]),
        ((TO_GATE,), True, ["resume", "abort"]),
        ((TO_GATE, TO_RAMP), False, ["pause", "abort", "promote", "skip-step"]),
        ((TO_GATE, TO_RAMP, PROMOTE), False, ["rollback"]),
        ((ROLL_BACK,), False, []),
    ],
)
@pytest.mark.both_stores
def test_allowed_actions_follow_the_state(
    world: World, moves: tuple[Move, ...], pause: bool, allowed: list[str]
) -> None:
    name = world.register(1)
    begin(world, name)
    go(world, name, *moves)
    if pause:
        by_operator(world, name, transitions.pause)

    assert transitions.allowed_actions(world.canary(name)) == allowed


@pytest.mark.both_stores
def test_every_transition_is_audited_once_with_before_and_after(world: World) -> None:
    name = world.register(1)
    begin(world, name)
    go(world, name, TO_GATE, TO_RAMP, STEP_2, PROMOTE)

    rows = [row for row in world.rows(AuditRow) if row.subject == world.canary(name).canary_id]

    assert [(row.action, row.after["step"]) for row in rows] == [
        ("canary.loading", 0),
        ("canary.gating", 0),
        ("canary.ramping", 0),
        ("canary.ramping", 1),
        ("canary.promoted", 1),
    ]
    assert rows[3].before["weight_bp"] == 2_000
    assert rows[3].after["weight_bp"] == 5_000
    assert {row.actor for row in rows} == {"control"}


@pytest.mark.both_stores
def test_ends_are_counted(world: World) -> None:
    first, second = world.register(1), world.register(2)
    begin(world, first)
    go(world, first, Move(to="rolled_back", candidate_state="rejected", reason="NaN"))
    begin(world, second)
    go(world, second, Move(to="inconclusive", candidate_state="retired", reason="no traffic"))

    counts = {(row.stage, row.reason): row.count for row in world.rows(CounterRow)}

    assert counts == {
        ("canary", "rolled_back"): 1,
        ("adapter", "rejected"): 1,
        ("adapter", "banned"): 1,
        ("canary", "inconclusive"): 1,
    }


@pytest.mark.both_stores
def test_a_skipped_step_is_waived_once_and_the_next_one_is_not(world: World) -> None:
    name = world.register(1)
    begin(world, name)
    go(world, name, TO_GATE, TO_RAMP)

    skipped = by_operator(world, name, transitions.skip_step)
    with pytest.raises(TransitionError, match="step 1 is skipped already"):
        by_operator(world, name, transitions.skip_step)
    go(world, name, STEP_2)

    assert (skipped.step_waived, skipped.step, skipped.weight_bp) == (True, 0, 2_000)
    assert "skip-step" not in transitions.allowed_actions(skipped)
    assert not world.canary(name).step_waived
    assert "skip-step" in transitions.allowed_actions(world.canary(name))
    assert world.actions().count("canary.step_skipped") == 1


@pytest.mark.both_stores
@pytest.mark.parametrize(
    ("moves", "pause", "verb", "why"),
    [
        ((TO_GATE, TO_RAMP, PROMOTE), False, transitions.abort, "use rollback"),
        ((), False, transitions.resume, "is not paused"),
        ((TO_GATE,), False, transitions.promote, "only a ramping one"),
        ((TO_GATE,), False, transitions.skip_step, "no step to skip"),
        ((TO_GATE, TO_RAMP, ROLL_BACK), False, transitions.skip_step, "no step to skip"),
        ((TO_GATE, TO_RAMP), True, transitions.skip_step, "it is paused"),
    ],
)
def test_what_the_state_does_not_allow_is_refused(
    world: World, moves: tuple[Move, ...], pause: bool, verb: Verb, why: str
) -> None:
    name = world.register(1)
    begin(world, name)
    go(world, name, *moves)
    if pause:
        by_operator(world, name, transitions.pause)

    with pytest.raises(TransitionError, match=why):
        by_operator(world, name, verb)


def proves(*claims: str) -> dict[str, Any]:
    return {"quality": {"proven": list(claims)}}


def test_a_promoted_version_that_is_proven_better_than_the_anchor_becomes_it(world: World) -> None:
    first, second = world.register(1), world.register(2)
    begin(world, first)
    go(world, first, TO_GATE, TO_RAMP, PROMOTE, **proves("no_worse", "anchored", "over_anchor"))
    assert world.aliases()["anchor"] == first

    begin(world, second)
    go(world, second, TO_GATE, TO_RAMP, PROMOTE, **proves("no_worse", "anchored"))
    assert (world.aliases()["champion"], world.aliases()["anchor"]) == (second, first)


def test_a_champion_that_is_proven_better_becomes_the_anchor_whatever_the_candidate_is(
    world: World,
) -> None:
    first, second = world.register(1), world.register(2)
    begin(world, first)
    go(world, first, TO_GATE, TO_RAMP, PROMOTE)
    assert "anchor" not in world.aliases()

    begin(world, second)
    go(world, second, TO_GATE, TO_RAMP, ROLL_BACK, **proves("champion_over_anchor"))

    assert (world.aliases()["champion"], world.aliases()["anchor"]) == (first, first)


def test_an_anchor_that_an_operator_moved_meanwhile_stays(world: World) -> None:
    first, second = world.register(1), world.register(2)
    begin(world, first)
    with world.database.write() as session:
        versions.move_alias(
            session, model="m", alias="anchor", to=second, now=150.0, actor="me", reason="mine"
        )

    go(world, first, TO_GATE, TO_RAMP, PROMOTE, **proves("over_anchor"))

    assert world.aliases()["anchor"] == second


def test_a_second_try_knows_the_first_against_the_same_champion_alone(world: World) -> None:
    first, second = world.register(1), world.register(2)
    gave_up = Move(to="inconclusive", candidate_state="retired", reason="no traffic")
    tried = begin(world, first)
    go(world, first, TO_GATE, TO_RAMP, gave_up)

    again = begin(world, first)
    assert (again.tries, again.tried_since) == ((tried.canary_id,), 100.0)
    go(world, first, TO_GATE, TO_RAMP, gave_up)
    begin(world, second)
    go(world, second, TO_GATE, TO_RAMP, PROMOTE)

    against_another = begin(world, first)
    assert (against_another.tries, against_another.tried_since) == ((), None)
