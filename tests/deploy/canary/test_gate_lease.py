"""A control that loses its lease in the middle of a gate leaves the rest to the next one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from deploy.errors import LostLeaseError
from sidecar.store.models import JudgeCallRow

if TYPE_CHECKING:
    from tests.deploy.conftest import World

DUE = 8
"""Judge calls of a gate of four prompts with two passes."""


async def gating(world: World) -> str:
    """A candidate that is loaded, and whose gate has not begun."""
    name = world.register(1)
    world.hold_out(4)
    await world.controller().tick()
    assert world.canary(name).phase == "gating"
    return name


async def test_a_control_that_lost_its_lease_asks_the_judge_no_more(world: World) -> None:
    """It was stopped for longer than its lease while the first calls were under way."""
    name = await gating(world)
    before = world.canary(name)
    controller = world.controller()
    world.acts = lambda: not world.judge.conversations

    with pytest.raises(LostLeaseError):
        await controller.tick()

    under_way = len(world.judge.conversations)
    assert under_way in (1, 2), "two comparisons at once, one call of each"
    assert world.canary(name) == before, "it decides nothing either"

    world.acts = lambda: True
    world.clock.now += 60.0
    for _ in range(4):
        await controller.tick()
    assert world.canary(name).phase == "ramping"
    assert len(world.judge.conversations) == under_way + DUE
    assert len(world.rows(JudgeCallRow)) == under_way + DUE, "what was paid for is kept"


async def test_without_the_lease_nothing_is_sampled(world: World) -> None:
    await gating(world)
    world.acts = lambda: False

    with pytest.raises(LostLeaseError):
        await world.controller().tick()

    assert world.sampler.requests == []
    assert world.judge.conversations == []


async def test_a_comparison_whose_last_answer_came_is_stored_without_the_lease(
    world: World,
) -> None:
    """It is paid for, and the next control need not make it again."""
    await gating(world)
    world.acts = lambda: len(world.judge.conversations) < 4

    with pytest.raises(LostLeaseError):
        await world.controller().tick()

    assert len(world.rows(JudgeCallRow)) == 4
