"""The throttle in front of vLLM: candidates are sent only while users leave capacity."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

import structlog

from ingest.vllm.load import LoadGate
from ingest.vllm.sampler import LoadProbe

PROBE_INTERVAL_S = 0.5
"""How long a measurement of the load is valid: vLLM's metrics are 60 kB of text."""

log = structlog.get_logger()


class Throttle:
    """Decides whether a candidate may be sent now, and counts those in flight."""

    def __init__(self, probe: LoadProbe, limit: int, *, interval_s: float) -> None:
        self._probe = probe
        self._gate = LoadGate(limit)
        self._interval_s = interval_s
        self._lock = asyncio.Lock()
        self._open = False
        self._fresh_until = 0.0
        self._in_flight = 0

    async def is_open(self) -> bool:
        """Return True when users leave capacity. Raises: SamplingError when the load is unknown."""
        async with self._lock:
            if monotonic() >= self._fresh_until:
                await self._measure()
            return self._open

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Count a candidate as in flight, so that it is not taken for a user's request."""
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1

    async def _measure(self) -> None:
        before = self._in_flight
        load = await self._probe.load()
        # A candidate that ended meanwhile may still be in the figures. It then counts as a user's
        # request, which errs in favour of users.
        was_open = self._open
        self._open = self._gate.update(load, own=min(before, self._in_flight))
        self._fresh_until = monotonic() + self._interval_s
        if self._open != was_open:
            log.info("sampling_gate", open=self._open, running=load.running, waiting=load.waiting)
