"""Rehearsals beside users' traffic while a canary runs: no figure of users counts them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from deploy.canary.gate_store import live_prompts
from deploy.canary.live_turns import LiveTurns, count_ramp
from deploy.doctor.collect import read_recent
from deploy.registry.candidates import sessions_a_day
from ingest.intake.choose import recent_demand
from sidecar.lines import Line
from sidecar.store.database import count
from support.adapter_endpoints import MODEL
from tests.deploy.canary.test_ramp_counts import CANARY, FAILED, ramping

if TYPE_CHECKING:
    from tests.deploy.conftest import World

LINE = Line(name=MODEL)
DAY_S = 86_400.0


def serve(world: World, attempts: int) -> None:
    """40 sessions of two turns, a quarter of them the canary's; so many attempts between them."""
    world.clock.now = 2_000.0
    with world.together():
        for number in range(40):
            canary = {"adapter": CANARY, "arm": "canary"} if number % 4 == 0 else {}
            for _ in range(2):
                world.serve(f"s{number}", propensity=0.75 if not canary else 0.25, **canary)  # type: ignore[arg-type]
            for attempt in range(attempts // 40):
                failed = FAILED if attempt % 2 else {}
                name = f"h:rehearsal-{number}-{attempt}"
                world.serve(name, arm="rehearsal", origin="rehearsal", propensity=1.0, **failed)
    world.clock.now += 600.0


@pytest.mark.both_stores
@pytest.mark.parametrize("attempts", [0, 1_000])
def test_no_figure_of_users_counts_attempts(world: World, attempts: int) -> None:
    serve(world, attempts)
    with world.database.write() as session:
        if attempts:
            count(session, "selection", "rehearsal", attempts)

    with world.database.read() as session:
        evidence = count_ramp(session, ramping(), step_min_exchanges=30, step_min_sessions=20)
        live, behind = LiveTurns(world.rules).read(session, ramping(), world.clock.now)
        a_day = sessions_a_day(session, LINE, world.clock.now)
        recent = read_recent(session)
        prompts = live_prompts(
            session, ramping(), LINE, after=0.0, until=world.clock.now, limit=100, known=()
        )

    assert not behind
    assert (evidence.candidate.replies, evidence.champion.replies) == (20, 60)
    assert (evidence.candidate.errors, evidence.champion.errors) == (0, 0)
    assert (evidence.seen, evidence.sessions) == (20, 10)
    assert (live.canary_units, live.champion_units) == (10, 30)
    assert live.guards["failed"].champion == 0
    assert a_day == pytest.approx(40.0)
    assert recent.sessions == 40
    assert not any(one.session_id.startswith("h:rehearsal") for one in prompts)


def test_no_caller_gets_a_share_for_attempts(world: World) -> None:
    serve(world, 400)
    with world.database.write() as session:
        from sqlalchemy import update

        from sidecar.store.models import ExchangeRow

        row = ExchangeRow
        session.execute(
            update(row).where(row.origin == "rehearsal").values(selection="rehearsal", user="agent")
        )

    with world.database.read() as session:
        demand, _ = recent_demand(session, now=world.clock.now)

    assert [caller.user for caller in demand] == [""]
