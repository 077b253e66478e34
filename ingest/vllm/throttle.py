"""The gate in front of vLLM: users first."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

import structlog

from ingest.vllm.load import LoadGate
from ingest.vllm.sampler import LoadProbe

PROBE_INTERVAL_S = 0.5
"""A measurement holds this long: vLLM's metrics are 60 kB of text."""

log = structlog.get_logger()


class Throttle:
    """Says whether a candidate may be sent now, and keeps count of those that were."""

    def __init__(self, probe: LoadProbe, limit: int, *, interval_s: float) -> None:
        self._probe = probe
        self._gate = LoadGate(limit)
        self._interval_s = interval_s
        self._lock = asyncio.Lock()
        self._open = False
        self._fresh_until = 0.0
        self._in_flight = 0

    async def is_open(self) -> bool:
        """Whether users leave room. Raises: SamplingError when the load cannot be told."""
        async with self._lock:
            if monotonic() >= self._fresh_until:
                await self._measure()
            return self._open

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Around each candidate, so that our own are not taken for users'."""
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1

    async def _measure(self) -> None:
        before = self._in_flight
        load = await self._probe.load()
        # One that ended meanwhile may still be in the figures: counting it as a user's errs
        # on the users' side.
        was_open = self._open
        self._open = self._gate.update(load, own=min(before, self._in_flight))
        self._fresh_until = monotonic() + self._interval_s
        if self._open != was_open:
            log.info("sampling_gate", open=self._open, running=load.running, waiting=load.waiting)
