"""Steps of the scenarios: what a controller, users and an operator do, told in one line each."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from deploy.registry.rollback import RollbackResult, rollback
from support.adapter_endpoints import MODEL
from tests.deploy.conftest import World

OPERATOR = "operator"


@dataclass
class Stage:
    """A world, and its audit since the scenario began."""

    world: World
    known: int

    @property
    def events(self) -> list[str]:
        """Actions of the audit since the scenario began."""
        return self.world.actions()[self.known :]

    async def tick(self, times: int = 1) -> None:
        """Each by a controller of its own: nothing may live in its memory."""
        for _ in range(times):
            await self.world.controller().tick()

    async def to_gate(self, name: str) -> None:
        await self.tick()
        assert self.world.canary(name).phase == "gating"

    async def pass_step(self, name: str) -> None:
        """Three users of each arm, and the time of a step."""
        champion = self.world.table().champion
        step = self.world.canary(name).step
        for number in range(3):
            self.world.serve(f"c{step}-{number}", adapter=name, arm="canary")
            self.world.serve(f"b{step}-{number}", adapter=champion)
        self.world.clock.now += 10.0
        await self.tick()

    def roll_back(self, to: str = "previous") -> RollbackResult:
        world = self.world
        return rollback(
            world.database, MODEL, to=to, reason="bad", actor=OPERATOR, now=world.clock.now
        )


@pytest.fixture
def stage(world: World) -> Stage:
    """A store as control's first start leaves it, and nobody came yet."""
    return Stage(world, len(world.actions()))
