"""The loop that judges further prompts during a ramp, beside the controller's.

It is a loop of its own, because a judge may take minutes or hang: the controller's guards must not
wait for it. It writes comparisons and decides nothing.
"""

from __future__ import annotations

import asyncio

from deploy.canary.gate import Gate
from deploy.records import Canary
from deploy.registry import canaries
from sidecar.store.database import Database

EVERY_S = 2.0
"""Interval between two batches, when there is anything to compare."""


class Shadow:
    """Feeds the evidence of the canary that is ramping. One for each line of adapters."""

    def __init__(self, database: Database, gate: Gate, model: str) -> None:
        self._database = database
        self._gate = gate
        self._model = model

    async def tick(self) -> None:
        """Make one batch of comparisons, if a canary is ramping. Raises: StoreError."""
        canary = await asyncio.to_thread(self._ramping)
        if canary is not None:
            await self._gate.shadow(canary)

    def _ramping(self) -> Canary | None:
        with self._database.read() as session:
            canary = canaries.active(session, self._model)
        if canary is None or canary.phase != "ramping" or canary.paused:
            return None
        return canary
