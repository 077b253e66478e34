"""Which turns of a ramp count for the guards, for which arm, and in which order."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from sqlalchemy import select

from deploy.canary import live_turns
from deploy.canary.live_turns import LiveTurns
from deploy.evidence import live as in_order
from deploy.evidence.live import Live
from deploy.records import Canary
from sidecar.store.models import ExchangeRow
from tests.deploy.canary.test_ramp_counts import CANARY, FAILED, ramping
from tests.deploy.conftest import World


def read(world: World, turns: LiveTurns | None = None, canary: Canary | None = None) -> Live:
    with world.database.read() as session:
        live, behind = (turns or LiveTurns(world.rules, world.line)).read(
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
    return LiveTurns(world.rules, world.line)


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


def test_a_clock_that_is_set_back_takes_back_nothing_that_was_counted(world: World) -> None:
    turns = LiveTurns(world.rules, world.line)
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


def test_many_exchanges_are_read_in_parts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hours without control: each tick reads so many pages of each kind, and little is held."""
    monkeypatch.setattr(live_turns, "TURNS_PAGE", 20)
    monkeypatch.setattr("deploy.evidence.live.MOST_UNITS", 399)
    turns = waiting(world)
    with world.together():
        for number in range(400):
            world.serve(f"s{number}", propensity=0.5, outcome="upstream_error", content=None)
            world.clock.now += 5.0
    world.clock.now += 100.0 + in_order.QUIET_S
    ticks, most_held, behind = 0, 0, True
    while behind:
        with world.database.read() as session:
            live, behind = turns.read(session, ramping(), world.clock.now)
        ticks, most_held = ticks + 1, max(most_held, len(turns._order))

    assert ticks == 400 // (20 * live_turns.PAGES) + 1
    assert most_held <= 60 / 5 + 20, "60 s of requests, and what was read"
    assert live.champion_units == live.guards["failed"].champion == 400
    assert live.forgotten == 1
