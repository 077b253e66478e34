"""Which turns of a ramp count for the guards, for which arm, and in which order."""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import String, cast, insert, literal, select

from deploy.canary import live_turns
from deploy.canary.live_turns import LiveTurns
from deploy.evidence import live as in_order
from deploy.evidence.live import Live
from deploy.records import Canary
from sidecar.store.models import ExchangeRow
from tests.deploy.canary.test_ramp_counts import CANARY, FAILED, ramping

if TYPE_CHECKING:
    from tests.deploy.conftest import World


def read(world: World, turns: LiveTurns | None = None, canary: Canary | None = None) -> Live:
    with world.database.read() as session:
        live, behind = (turns or LiveTurns(world.rules)).read(
            session, canary or ramping(), world.clock.now
        )
    assert not behind
    return live


@pytest.mark.both_stores
def test_an_outage_of_both_arms_counts_in_both(world: World) -> None:
    """500 sessions, a quarter the canary's: each of its turns fails, and its fallback fails too."""
    with world.together():
        for number in range(500):
            due = CANARY if number % 4 == 0 else ""
            world.serve(f"s{number}", fallback_from=due, propensity=0.75, **FAILED)

    live = read(world)

    assert (live.canary_units, live.champion_units) == (125, 375)
    assert (live.guards["failed"].canary, live.guards["failed"].champion) == (125, 375)
    assert live.mismatch < 1.0
    assert live.guards["failed"].bets.peak < 1.0


def ended(world: World, unit: str, took_s: float, *, canary: bool) -> None:
    """A request that began `took_s` before now and ends now."""
    adapter, arm = (CANARY, "canary") if canary else ("base", "champion")
    name = world.serve(unit, propensity=0.5, adapter=adapter, arm=arm)
    with world.database.write() as session:
        row = session.query(ExchangeRow).filter_by(exchange_id=name).one()
        row.started_at = world.clock.now - took_s


def passes(world: World, seconds: float) -> None:
    """Time goes on: a request whose arm was certain ends, which says nothing of an adapter."""
    world.clock.now += seconds
    world.serve("certain", propensity=1.0)


def waiting(world: World, wait_s: float = 60.0) -> LiveTurns:
    world.rules = world.rules.model_copy(update={"turn_wait_s": wait_s})
    world.clock.now = 2_000.0
    return LiveTurns(world.rules)


def play_latency(world: World, turns: LiveTurns, seconds: int, *, hanging_s: float = 40.0) -> Live:
    """Two sessions begin each second, the canary's with a half; its replies take 40 s and the
    champion's 5 s. The state is read each ten seconds. hanging_s: time of each seventh reply of the
    canary."""
    rng, due = random.Random(7), list[tuple[float, float, str, bool]]()
    began = world.clock.now
    for number in range(2 * seconds):
        canary, at = rng.random() < 0.5, began + number / 2
        slow_s = 40.0 if number % 7 else hanging_s
        due.append((at + (slow_s if canary else 5.0), at, f"s{number}", canary))
    live = Live({})
    for place, (ends, at, unit, canary) in enumerate(sorted(due)):
        if ends > began + seconds:
            break
        world.clock.now = ends
        ended(world, unit, ends - at, canary=canary)
        if place % 20 == 0:
            live = read(world, turns)
    return live


def test_an_arm_that_answers_slower_is_not_taken_for_one_that_gets_fewer_sessions(
    world: World,
) -> None:
    turns = waiting(world)

    live = play_latency(world, turns, 120)

    assert live.mismatch < 2.0
    assert abs(live.canary_units - live.champion_units) < 25
    assert live.late == {"canary": 0, "champion": 0}


@pytest.mark.parametrize("timings", [{"total_s": 50.0}, {}])
def test_a_second_request_waits_for_what_the_first_reply_was_too_quick(
    world: World, timings: Any
) -> None:
    """It came 50 s after the first, and 150 s is the longest interval; where the time of the reply
    is not known, it is until it was stored."""
    turns = waiting(world)
    ended(world, "a", 50.0, canary=True)
    with world.database.write() as session:
        session.query(ExchangeRow).one().timings = timings
    ended(world, "a", 0.0, canary=True)
    with world.database.write() as session:
        newest = select(ExchangeRow).order_by(ExchangeRow.seq.desc()).limit(1)
        session.scalars(newest).one().outcome = "upstream_error"

    passes(world, 159.0)
    assert read(world, turns).guards["failed"].canary == 0
    passes(world, 1.0)
    assert read(world, turns).guards["failed"].canary == 1


def test_a_turn_is_counted_when_those_that_began_before_it_have_ended(world: World) -> None:
    turns = waiting(world)
    ended(world, "fast", 1.0, canary=True)
    world.clock.now += 30.0
    ended(world, "slow", 40.0, canary=False)
    assert read(world, turns).canary_units == 0

    passes(world, 25.0)
    live = read(world, turns)
    assert (live.champion_units, live.canary_units) == (1, 0), "the canary's has waited 56 s"
    passes(world, 5.0)
    assert read(world, turns).canary_units == 1


def test_a_turn_that_takes_longer_than_the_wait_is_late_and_counts(world: World) -> None:
    """An adapter that hangs must not be left out."""
    turns = waiting(world)
    ended(world, "hung", 600.0, canary=True)
    passes(world, 60.0)

    live = read(world, turns)

    assert (live.canary_units, live.late["canary"]) == (1, 1)


@pytest.mark.parametrize("page", [3, 500])
def test_reading_again_after_a_restart_ends_in_the_same_state(
    world: World, monkeypatch: pytest.MonkeyPatch, page: int
) -> None:
    turns = waiting(world)
    play_latency(world, turns, 120, hanging_s=80.0)
    world.clock.now += 1.0
    before = read(world, turns)
    monkeypatch.setattr(live_turns, "TURNS_PAGE", page)
    monkeypatch.setattr(live_turns, "PAGES", 1_000)

    after = read(world)

    assert after.split == before.split
    assert before.canary_units + before.champion_units > 60
    assert before.late["canary"] > 2
    assert dict(after.guards) == dict(before.guards)


def test_what_waits_is_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = waiting(world)
    monkeypatch.setattr(in_order, "MOST_HELD", 3)
    for number in range(5):
        ended(world, f"s{number}", 1.0, canary=False)

    live = read(world, turns)

    assert (live.champion_units, live.late["champion"]) == (2, 2), "they are not counted in order"


def test_a_request_that_never_ends_keeps_nobody_waiting(world: World) -> None:
    """What is still in flight is in no table, and the wait for it ends."""
    turns = waiting(world)
    began = world.clock.now
    world.clock.now += 1.0
    ended(world, "beside it", 0.5, canary=True)
    passes(world, 60.0)

    assert read(world, turns).canary_units == 1

    world.clock.now = began + 50_000.0
    ended(world, "never ends", 50_000.0, canary=True)
    ended(world, "newer", 1.0, canary=False)
    passes(world, 5.0)
    live = read(world, turns)
    assert (live.canary_units, live.late["canary"]) == (2, 1)
    assert live.champion_units == 0, "it waits for those that began before it"


def test_a_proxy_whose_clock_is_a_day_ahead_waits_an_hour_and_no_more(world: World) -> None:
    turns = waiting(world)
    ended(world, "from tomorrow", -86_400.0, canary=True)
    passes(world, 3_650.0)
    assert read(world, turns).canary_units == 0

    passes(world, 10.0)

    assert read(world, turns).canary_units == 1


def test_processes_that_read_at_different_times_end_in_the_same_state(world: World) -> None:
    """Two controls, and rows of two ingest processes: each stores its batch when it is full, so the
    table's order is not that of the ends."""
    turns, other = waiting(world), LiveTurns(world.rules)
    rng = random.Random(3)
    live = Live({})
    for batch in range(12):
        began = world.clock.now
        for number in rng.sample(range(20), 20):
            world.clock.now = began + number / 2
            ended(world, f"{batch}-{number}", rng.uniform(0.0, 50.0), canary=number % 3 == 0)
        world.clock.now = began + 10.0
        live = read(world, turns)
        if batch == 7:
            read(world, other)
    late = read(world, other)

    assert late.split == live.split
    assert dict(late.guards) == dict(live.guards)
    assert live.canary_units > 40


def test_many_exchanges_are_read_in_parts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hours without control: each tick reads four pages of each kind, and little is held."""
    turns, count = waiting(world), 20_000
    monkeypatch.setattr("deploy.evidence.live.MOST_UNITS", count)
    began = world.clock.now
    first = world.serve("first", propensity=0.5, outcome="upstream_error", content=None)
    number = select(literal(0).label("n")).cte("number", recursive=True)
    number = number.union_all(select(number.c.n + 1).where(number.c.n < count - 1))
    # One statement: through the ORM the rows take longer to write than to read.
    like = {column.key: column for column in ExchangeRow.__table__.columns if column.key != "seq"}
    copied: dict[str, Any] = like | {
        "exchange_id": "y" + cast(number.c.n, String),
        "session_key": "s" + cast(number.c.n, String),
        "started_at": began + number.c.n / 10.0,
        "stored_at": began + number.c.n / 10.0 + 1.0,
    }
    rows = (
        select(*copied.values())
        .join_from(number, ExchangeRow, ExchangeRow.exchange_id == first)
        .order_by(number.c.n)
    )
    with world.database.write() as session:
        session.execute(insert(ExchangeRow).from_select(list(copied), rows))
    world.clock.now = began + count / 10 + 100.0 + in_order.QUIET_S
    ticks, most_held, behind = 0, 0, True
    while behind:
        with world.database.read() as session:
            live, behind = turns.read(session, ramping(), world.clock.now)
        ticks, most_held = ticks + 1, max(most_held, len(turns._order))

    assert ticks == count // (live_turns.TURNS_PAGE * live_turns.PAGES) + 1
    assert most_held <= 10 * 60 + live_turns.TURNS_PAGE, (
        "60 s of ten requests each, and what was read"
    )
    assert live.champion_units == live.guards["failed"].champion == count + 1
    assert live.forgotten == 1


def test_a_clock_that_is_set_back_takes_back_nothing_that_was_counted(world: World) -> None:
    turns = LiveTurns(world.rules.model_copy(update={"turn_wait_s": 0.0}))
    canary = ramping()
    for number in range(4):
        world.serve(
            f"s{number}", adapter=CANARY, arm="canary", propensity=0.5, outcome="upstream_error"
        )
    before = read(world, turns, canary)
    assert before.guards["failed"].canary == 4

    back = dataclasses.replace(canary, step_started_at=90.0, ramp_began_at=90.0)
    world.clock.now = 100.0
    world.serve("later", adapter=CANARY, arm="canary", propensity=0.5, outcome="upstream_error")

    after = read(world, turns, back)
    assert (after.guards["failed"].canary, after.canary_units) == (5, 5)
