"""The throttle in front of one vLLM: candidates are sent only while users leave capacity."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

import structlog

from ingest.errors import SamplingError
from ingest.vllm.load import LoadGate, LoadLimits
from ingest.vllm.sampler import LoadProbe

PROBE_INTERVAL_S = 0.5
"""How long a measurement of the load is valid: vLLM's metrics are 60 kB of text."""
UNKNOWN_INTERVALS = 10
"""How many times as long a failed one is: it may have cost its whole time limit, for which the
candidates of all replicas wait."""

log = structlog.get_logger()


class Throttle:
    """Decides whether a candidate may be sent now, and counts those in flight."""

    def __init__(
        self, probe: LoadProbe, limits: LoadLimits, *, interval_s: float, replica: str = ""
    ) -> None:
        """replica: base URL of the vLLM, for the log."""
        self._probe = probe
        self._gate = LoadGate(limits)
        self._interval_s = interval_s
        self._log = log.bind(replica=replica)
        self._lock = asyncio.Lock()
        self._open = False
        self._unknown: SamplingError | None = None
        """Why the load is not known."""
        self._fresh_until = 0.0
        self.in_flight = 0
        """Candidates that wait for their answer."""

    async def is_open(self) -> bool:
        """Return True when users leave capacity. Raises: SamplingError when the load is unknown."""
        async with self._lock:
            if monotonic() >= self._fresh_until:
                await self._measure()
            if self._unknown is not None:
                raise self._unknown
            return self._open

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Count a candidate as in flight, so that it is not taken for a user's request."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    async def _measure(self) -> None:
        before, was_open, was_unknown = self.in_flight, self._open, self._unknown
        try:
            load = await self._probe.load()
        except SamplingError as error:
            self._open, self._unknown = False, error
            self._fresh_until = monotonic() + UNKNOWN_INTERVALS * self._interval_s
            if was_unknown is None:
                self._log.warning("sampling_load_unknown", why=str(error))
            return
        self._fresh_until = monotonic() + self._interval_s
        self._unknown = None
        # A candidate that ended meanwhile may still be in the figures. It then counts as a user's
        # request, which errs in favour of users.
        self._open = self._gate.update(load, own=min(before, self.in_flight))
        if self._open != was_open:
            self._log.info(
                "sampling_gate",
                open=self._open,
                running=load.running,
                waiting=load.waiting,
                kv_cache_usage=load.kv_cache_usage,
            )
