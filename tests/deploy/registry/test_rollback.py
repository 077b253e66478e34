"""Rollback: one call, no helper, the same again changes nothing."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from deploy.errors import TransitionError, UnknownAdapterError
from deploy.registry import audit, routing_writer, versions
from deploy.registry.rollback import RollbackResult, rollback
from sidecar.metrics.proxy import Metrics
from sidecar.routing.source import RoutingSource
from sidecar.store.database import Database
from sidecar.store.models import AuditRow, BannedDigestRow, TableTakenRow
from support.planted import NO_UTF8, plant
from tests.deploy.conftest import PASSING, World


def roll_back(world: World, to: str = "previous", now: float = 2_000.0) -> RollbackResult:
    return rollback(world.database, "m", to=to, reason="it rambles", actor="me", now=now)


def ramp(world: World) -> str:
    """Register a fourth version and give it traffic. Returns: its name."""
    fourth: str = world.register(4)
    world.ramp(fourth)
    return fourth


@pytest.fixture
def served(world: World) -> tuple[str, str, str]:
    """Three versions, promoted one after the other."""
    first = world.register(1)
    world.promote(first)
    second = world.register(2, parent=first)
    world.promote(second)
    third = world.register(3, parent=second)
    world.promote(third)
    return first, second, third


@pytest.mark.both_stores
def test_back_to_the_previous_champion(world: World, served: tuple[str, ...]) -> None:
    _, second, third = served
    generation = world.table().generation

    result = roll_back(world)

    assert result == RollbackResult(
        before=third,
        after=second,
        ended_canary=None,
        changed=True,
        learner_paused=True,
        generation=generation + 1,
        banned=(third,),
    )
    assert world.table().champion == second
    assert world.adapter(third).state == "rolled_back"
    assert world.adapter(third).reason == "it rambles"
    assert world.adapter(second).state == "champion"


def test_rolling_back_twice_is_rolling_back_once(world: World, served: tuple[str, ...]) -> None:
    _, second, _ = served
    roll_back(world)
    before = (world.aliases(), world.table(), world.actions())

    again = roll_back(world)

    assert again.after == second
    assert not again.changed
    assert (world.aliases(), world.table(), world.actions()) == before


def test_previous_is_set_anew_by_the_next_promotion(world: World, served: tuple[str, ...]) -> None:
    _, second, _ = served
    roll_back(world)
    assert world.aliases() == {"champion": second, "previous": second}

    fourth = world.register(4, parent=second)
    world.promote(fourth)

    assert world.aliases() == {"champion": fourth, "previous": second}
    assert roll_back(world).after == second


@pytest.mark.parametrize("to", ["base", "1", "v1"])
def test_back_to_a_named_version_or_the_base(
    world: World, served: tuple[str, ...], to: str
) -> None:
    expected = "base" if to == "base" else served[0]

    assert roll_back(world, to).after == expected
    assert roll_back(world, to).changed is False
    assert world.table().champion == expected


@pytest.mark.both_stores
def test_a_rollback_may_be_taken_back_by_name(world: World, served: tuple[str, ...]) -> None:
    third = served[2]
    roll_back(world)

    undone = roll_back(world, third)
    assert (undone.after, undone.banned) == (third, ())
    assert world.adapter(third).state == "champion"
    assert world.adapter(served[1]).state == "retired", "the champion has learned from it"


@pytest.mark.both_stores
def test_it_ends_a_running_canary_in_the_same_transaction(
    world: World, served: tuple[str, ...]
) -> None:
    fourth = ramp(world)

    result = roll_back(world)

    assert result.ended_canary == world.canary(fourth).canary_id
    assert world.canary(fourth).phase == "rolled_back"
    assert world.adapter(fourth).state == "rolled_back"
    assert (world.table().canary, world.table().champion) == (None, served[1])


@pytest.mark.both_stores
@pytest.mark.parametrize(("phase", "bans"), [("loading", 0), ("gating", 0), ("ramping", 1)])
def test_a_candidate_that_no_user_met_is_not_banned_with_the_champion(
    world: World, phase: str, bans: int
) -> None:
    champion = world.register(1)
    world.promote(champion)
    candidate = world.register(2, parent=champion, values=(0.3, 0.1))
    world.begin(candidate, PASSING[: ("loading", "gating", "ramping").index(phase)])

    result = roll_back(world)

    expected = [champion, candidate][: 1 + bans]
    assert list(result.banned) == expected
    assert sorted(row.adapter for row in world.rows(BannedDigestRow)) == expected
    assert world.canary(candidate).phase == "rolled_back"
    told = [row for row in world.rows(AuditRow) if row.action == "rollback"][-1]
    assert told.after["banned"] == ", ".join(expected)


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("canary", "evidence", "'{\"steps\": [20'"),
        ("canary", "evidence", "'[]'"),
        ("canary", "evidence", '\'{"steps": [null], "clock": [], "tick_errors": 7}\''),
        ("canary", "evidence", "'{\"steps\": [99999999]}'"),
        ("canary", "candidate", NO_UTF8),
        ("canary", "canary_id", NO_UTF8),
        ("alias", "adapter", NO_UTF8),
        ("routing_table", "body", NO_UTF8),
        ("routing_table", "body", "'{\"model\": '"),
        ("routing_table", "body", "'{}'"),
    ],
)
def test_no_damaged_row_holds_up_a_rollback(
    world: World, served: tuple[str, ...], table: str, column: str, value: str
) -> None:
    candidate = ramp(world)
    where = {"canary": f"candidate = '{candidate}'", "alias": "alias = 'champion'"}
    active = where.get(table, "1")
    plant(world.database, table, column, active, value)

    result = roll_back(world)

    assert (result.after, result.changed) == (served[1], True)
    assert (world.table().canary, world.table().champion) == (None, served[1])
    if column == "evidence":
        assert world.canary(candidate).phase == "rolled_back"


@pytest.mark.parametrize(
    ("body", "column", "told"),
    [
        (2**53 - 1, 2**53 - 1, False),
        (2**53 - 1, None, False),
        (2**40 - 1, 2**40 - 1, False),
        (0, None, False),
        (0, 0, True),
        (None, 0, False),
        (1, 1, True),
    ],
)
def test_a_running_proxy_takes_a_rollback_after_a_damaged_generation(
    world: World, served: tuple[str, ...], body: int | None, column: int | None, told: bool
) -> None:
    """told: the proxy has told the store which table it took."""
    source = RoutingSource(world.database.url, "m", poll_s=3_600.0, metrics=Metrics())
    source.poll()
    took = source.table.generation
    if told:
        with world.database.write() as session:
            session.add(TableTakenRow(proxy="p", model="m", generation=took, taken_at=1.0))
    if body is not None:
        now = f"replace(body, '\"generation\":{took}', '\"generation\":{body}')"
        plant(world.database, "routing_table", "body", "1", now)
    if column is not None:
        plant(world.database, "routing_table", "generation", "1", str(column))
    source.poll()

    result = roll_back(world, "base")
    source.poll()

    assert result.changed
    assert source.table == world.table()
    assert source.table.champion == "base"
    source.stop()


@pytest.mark.parametrize("weight", ["99999999", "-1", "10001"])
def test_a_weight_beyond_all_sessions_gives_the_canary_none(
    world: World, served: tuple[str, ...], weight: str
) -> None:
    candidate = ramp(world)
    steps = f"'{{\"steps\": [{weight}]}}'"
    plant(world.database, "canary", "evidence", f"candidate = '{candidate}'", steps)

    assert world.canary(candidate).weight_bp == 0


async def test_control_writes_a_damaged_routing_table_anew(
    world: World, served: tuple[str, ...]
) -> None:
    plant(world.database, "routing_table", "body", "1", "'['")

    await world.controller().tick()

    assert world.table().champion == served[2]


@pytest.mark.both_stores
def test_a_version_that_never_passed_a_canary_is_refused(
    world: World, served: tuple[str, ...]
) -> None:
    world.register(4)

    with pytest.raises(TransitionError, match="has never been champion") as refused:
        roll_back(world, "4")
    assert str(refused.value).endswith(f"roll back to previous, base, {served[1]}, {served[0]}")
    assert world.table().champion == served[2]


def test_an_unknown_version_is_refused(world: World) -> None:
    with pytest.raises(UnknownAdapterError):
        roll_back(world, "77")


@pytest.mark.both_stores
def test_the_audit_says_who_why_and_from_where_to_where(
    world: World, served: tuple[str, ...]
) -> None:
    roll_back(world)

    row = world.rows(AuditRow)[-1]
    assert (row.action, row.actor, row.reason) == ("rollback", "me", "it rambles")
    assert row.before == {"champion": served[2], "canary": None}
    assert row.after["champion"] == served[1]


@pytest.mark.parametrize("started", [True, False])
def test_it_needs_nothing_but_a_store(tmp_path: Path, started: bool) -> None:
    """As `sidecar rollback --offline`: no vLLM, no judge, no control process, a new connection."""
    with closing(Database(f"sqlite:///{tmp_path / 'store.db'}")) as database:
        database.upgrade()
        if started:
            with database.write() as session:
                routing_writer.initialise(session, "m", now=0.0, actor=audit.CONTROL)

        result = rollback(database, "m", to="base", reason="test", actor="offline", now=1.0)

    assert (result.after, result.changed) == ("base", False)


def anchored(world: World, *names: str) -> None:
    for name in names:
        with world.database.write() as session:
            versions.move_alias(
                session, model="m", alias="anchor", to=name, now=1.0, actor="control", reason="best"
            )


def test_an_anchor_that_is_rolled_back_goes_where_it_was_before(
    world: World, served: tuple[str, str, str]
) -> None:
    first, second, third = served
    anchored(world, first, third)

    roll_back(world)

    assert (world.aliases()["champion"], world.aliases()["anchor"]) == (second, first)


def test_an_anchor_whose_forerunner_was_rolled_back_too_is_the_champion(
    world: World, served: tuple[str, str, str]
) -> None:
    first, second, third = served
    anchored(world, second, third)

    roll_back(world, to=second)
    anchored(world, third, second)
    roll_back(world, to=first)

    assert world.aliases()["anchor"] == first


def test_an_anchor_that_is_not_taken_away_stays(world: World, served: tuple[str, str, str]) -> None:
    anchored(world, served[0])

    roll_back(world)

    assert world.aliases()["anchor"] == served[0]
