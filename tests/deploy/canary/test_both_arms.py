"""Which conversations of a ramp count as having met both arms."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from deploy.canary.controller import count_conversations
from sidecar.lines import Line
from sidecar.store.models import ExchangeRow
from tests.deploy.canary.test_ramp_counts import CANARY, ramping

if TYPE_CHECKING:
    from tests.deploy.conftest import World


def serve(
    world: World,
    session: str,
    parent: str | None = None,
    *,
    canary: bool = False,
    placed_by: str = "answered",
    weight: float = 0.2,
    fallback_from: str = "",
) -> str:
    arm = "canary" if canary else "champion"
    name = world.serve(
        session,
        adapter=CANARY if canary else "base",
        arm=arm,
        propensity=weight if canary else 1.0 - weight,
        fallback_from=fallback_from,
    )
    with world.database.write() as opened:
        row = opened.query(ExchangeRow).filter_by(exchange_id=name).one()
        row.parent_id, row.placed_by = parent, placed_by if parent else "root"
    return name


def counted(world: World, after_seq: int = 0) -> tuple[int, int]:
    canary = ramping()
    object.__setattr__(canary, "ramp_after_seq", after_seq)
    with world.database.read() as session:
        return count_conversations(session, canary, Line(name=canary.model))


@pytest.mark.both_stores
def test_a_conversation_whose_turns_met_both_arms_counts_once(world: World) -> None:
    first = serve(world, "flips")
    second = serve(world, "flips", first, canary=True)
    serve(world, "flips", second)
    stays = serve(world, "stays", canary=True)
    serve(world, "stays", stays, canary=True)
    serve(world, "single")

    assert counted(world) == (3, 1)


def test_a_larger_weight_and_a_sub_agent_are_no_flip(world: World) -> None:
    grows = serve(world, "grows", weight=0.05)
    serve(world, "grows", grows, canary=True, weight=0.2)
    agent = serve(world, "agent")
    serve(world, "agent", agent, canary=True, placed_by="called")

    assert counted(world) == (2, 0)


def test_what_was_before_the_ramp_or_taken_over_is_no_flip(world: World) -> None:
    before = serve(world, "before")
    after = serve(world, "before", before, canary=True)
    assert counted(world, after_seq=1) == (1, 0)
    assert counted(world) == (1, 1)

    lost = serve(world, "before", after, fallback_from=CANARY)
    serve(world, "before", lost, canary=True)
    assert counted(world, after_seq=2) == (1, 0)


def test_only_the_newest_exchanges_of_each_arm_are_read(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.canary.controller.NEWEST", 2)
    first = serve(world, "flips")
    serve(world, "flips", first, canary=True)
    assert counted(world) == (1, 1)
    for session in ("a", "b"):
        serve(world, session)
        serve(world, session + "c", canary=True)

    assert counted(world) == (4, 0)
