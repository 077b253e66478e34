"""What clients tell of a ramp's sessions: which of it counts, and the canary that it ends."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import update

from deploy.canary.client_reports import ClientReports
from deploy.evidence.live import ClientReportState, Live
from deploy.registry.proof_rule import ratios_of
from ingest.feedback.deriving import save_feedback
from sidecar.feedback import Caller, Kind, decode_feedback, encode_feedback, read_feedback
from sidecar.store.models import ExchangeRow
from support import api_keys
from tests.deploy.canary.test_ramp_counts import CANARY, ramping
from tests.deploy.conftest import World


def tell(world: World, body: dict[str, Any], caller: Caller | None = None) -> None:
    """A request of a client, as the proxy reads it and ingest stores it."""
    kind: Kind = "feedback" if "score" in body else "outcome"
    world.exchanges += 1
    record = read_feedback(
        kind,
        json.dumps(body).encode(),
        caller or Caller(project="default"),
        idempotency_key="",
        fresh_id=f"{world.exchanges:032x}",
        now=world.clock.now,
    )
    with world.database.write() as session:
        save_feedback(session, [decode_feedback(encode_feedback(record))], now=world.clock.now)


def serve(world: World, name: str, *, canary: bool, **changes: Any) -> str:
    """A turn of a session with a user of its own."""
    arm: dict[str, Any] = {"adapter": CANARY, "arm": "canary"} if canary else {}
    adapter = changes.pop("adapter", None)
    propensity = changes.pop("propensity", None)
    exchange = world.serve(f"h:{name}", propensity=propensity, **arm)
    with world.database.write() as session:
        values = {"user": name, **changes, **({"adapter": adapter} if adapter else {})}
        session.execute(
            update(ExchangeRow).where(ExchangeRow.exchange_id == exchange).values(**values)
        )
    return exchange


def heard(world: World) -> Live:
    live = Live(ratios_of())
    with world.database.read() as session:
        reader = ClientReports(world.rules.turn_wait_s, world.line)
        canary = replace(ramping(), ramp_began_at=100.0)
        assert not reader.read(session, canary, live, world.clock.now)
    return live


def means(state: ClientReportState) -> tuple[float | None, float | None]:
    return state.mean(canary=True), state.mean(canary=False)


@pytest.mark.both_stores
def test_each_session_counts_once_and_who_tells_nothing_is_unknown(world: World) -> None:
    for name, canary in (("a", True), ("b", True), ("c", False), ("d", False), ("quiet", True)):
        serve(world, name, canary=canary)
    tell(world, {"session_id": "a", "success": False})
    tell(world, {"session_id": "a", "success": False})
    tell(world, {"session_id": "b", "value": 0.75})
    tell(world, {"session_id": "c", "success": True, "value": 0.0})
    tell(world, {"session_id": "d", "done": True, "cost": 1.0})
    tell(world, {"session_id": "d", "score": -0.5})

    live = heard(world)

    assert live.told["outcome"].units == {True: 2, False: 1}
    assert means(live.told["outcome"]) == (0.375, 1.0)
    assert means(live.told["feedback"]) == (None, 0.25)


def test_a_correction_counts_that_comes_before_it_is_used_also_after_a_restart(
    world: World,
) -> None:
    world.rules = world.rules.model_copy(update={"turn_wait_s": 60.0})
    serve(world, "a", canary=True)
    tell(world, {"session_id": "a", "success": False})
    world.clock.now += 30.0
    tell(world, {"session_id": "a", "success": True})
    assert heard(world).told["outcome"].units[True] == 0

    world.clock.now += 31.0
    at_first = heard(world)
    tell(world, {"session_id": "a", "success": False})
    world.clock.now += 120.0

    assert means(at_first.told["outcome"]) == (1.0, None)
    assert means(heard(world).told["outcome"]) == (1.0, None)


@pytest.mark.parametrize(
    "changes",
    [
        {"origin": "rehearsal"},
        {"propensity": 1.0},
        {"started_at": 1.0},
        {"adapter": "m--v9-cccc"},
        {"public_model": "other"},
    ],
)
def test_a_session_that_is_not_all_of_one_arm_of_the_ramp_says_nothing(
    changes: dict[str, Any], world: World
) -> None:
    serve(world, "a", canary=False)
    serve(world, "a", canary=False, **changes)
    serve(world, "b", canary=False)
    serve(world, "b", canary=True)
    serve(world, "c", canary=False)
    for name in ("a", "b", "c"):
        tell(world, {"session_id": name, "success": True})

    assert heard(world).told["outcome"].units == {True: 0, False: 1}


def test_a_number_that_is_no_success_rate_says_nothing_and_no_other_is_heard_less(
    world: World,
) -> None:
    other = Caller(project="default", key_id="other")
    world.serve("h:rehearsal", adapter=CANARY, arm="canary", origin="rehearsal")
    for name in ("a", "b", "c"):
        serve(world, name, canary=True)
    for name in ("rehearsal", "a", "b"):
        tell(world, {"session_id": name, "value": 80.0}, other)
    tell(world, {"session_id": "a", "value": 0.25})
    tell(world, {"session_id": "c", "value": 80.0, "success": True})

    live = heard(world)

    assert live.told["outcome"].units[True] == 2
    assert means(live.told["outcome"]) == (0.625, None)


@pytest.mark.both_stores
def test_a_voice_that_tells_200_times_first_keeps_no_other_one_out(world: World) -> None:
    serve(world, "a", canary=True)
    for _ in range(200):
        caller = Caller(project="default", key_id="liar")
        tell(world, {"session_id": "a", "success": False}, caller)
    tell(world, {"session_id": "a", "success": True}, Caller(project="default", key_id="owner"))

    assert means(heard(world).told["outcome"]) == (0.5, None)


def test_a_key_is_one_voice_and_many_sources_of_it_move_nothing(world: World) -> None:
    serve(world, "a", canary=True)
    liar = Caller(project="default", key_id="liar")
    voices, _ = api_keys.create(world.database, scopes=frozenset({"infer", "voices"}))
    for number in range(50):
        tell(world, {"session_id": "a", "score": 1, "source": f"s{number}"}, liar)
    for number in range(3):
        body = {"session_id": "a", "score": -1, "source": f"u{number}"}
        tell(world, body, Caller(project="default", key_id=voices))

    assert means(heard(world).told["feedback"]) == (0.25, None)


@pytest.mark.parametrize(("callers", "phase"), [(1_000, "rolled_back"), (2, "inconclusive")])
async def test_a_canary_whose_users_press_thumbs_down_ends(
    callers: int, phase: str, world: World
) -> None:
    name = await world.to_ramp()
    control = world.controller()
    for number in range(120):
        canary = number % 5 == 0
        arm: dict[str, Any] = {"adapter": name, "arm": "canary"} if canary else {}
        exchange = world.serve(f"h:s{number}", **arm)
        with world.database.write() as session:
            session.execute(
                update(ExchangeRow)
                .where(ExchangeRow.exchange_id == exchange)
                .values(user=f"u{number % callers}")
            )
        tell(world, {"session_id": f"s{number}", "score": -1 if canary else 1})
        if canary:
            await control.tick()
        if not world.canary(name).active:
            break

    ended = world.canary(name)
    assert ended.phase == phase
    assert (ended.reason or "").startswith("mean feedback (0 bad, 1 good) 0.00 in ")
    assert " caller" in (ended.reason or "")
    assert world.actions().count("adapter.banned") == (phase == "rolled_back")
    assert world.evidence(name)["guards"]["feedback"]["mean"] == {"canary": 0.0, "champion": 1.0}
    assert ended.told
    assert (ended.reason or "").startswith(ended.told[0])
