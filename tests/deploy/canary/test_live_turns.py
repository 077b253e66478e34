"""Which turns of a ramp count for the guards, for which arm, and in which order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from deploy.canary.live_turns import LiveTurns
from deploy.evidence.live import Live
from deploy.records import Canary
from tests.deploy.canary.test_ramp_counts import CANARY, FAILED, ramping

if TYPE_CHECKING:
    from tests.deploy.conftest import World


def read(world: World, turns: LiveTurns | None = None, canary: Canary | None = None) -> Live:
    with world.database.read() as session:
        live, behind = (turns or LiveTurns(world.rules)).read(session, canary or ramping())
    assert not behind
    return live


@pytest.mark.both_stores
def test_an_outage_of_both_arms_counts_in_both(world: World) -> None:
    """500 sessions, a quarter the canary's: each of its turns fails, and its fallback fails too."""
    for number in range(500):
        if number % 4 == 0:
            world.serve(f"s{number}", fallback_from=CANARY, propensity=0.75, **FAILED)
        else:
            world.serve(f"s{number}", propensity=0.75, **FAILED)

    live = read(world)

    assert (live.canary_units, live.champion_units) == (125, 375)
    assert (live.guards["failed"].canary, live.guards["failed"].champion) == (125, 375)
    assert live.mismatch < 1.0
    assert live.guards["failed"].bets.peak < 1.0
