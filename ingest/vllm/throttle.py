"""The throttle in front of one vLLM: candidates are sent only while users leave capacity."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

import structlog

from ingest.errors import SamplingError
from ingest.vllm.load import LoadGate, LoadLimits
from ingest.vllm.sampler import LoadProbe
from ingest.vllm.slowdown import SlowdownLimit

PROBE_INTERVAL_S = 0.5
"""How long a measurement of the load is valid: vLLM's metrics are 60 kB of text."""
UNKNOWN_INTERVALS = 10
"""How many times as long a failed one is: it may have cost its whole time limit, for which the
candidates of all replicas wait."""
TELL_INTERVAL_S = 60.0
"""Least time between two lines of the log about the limit."""

log = structlog.get_logger()


class Throttle:
    """Decides whether a candidate may be sent now, and counts those in flight."""

    def __init__(
        self, probe: LoadProbe, limits: LoadLimits, *, interval_s: float, replica: str = ""
    ) -> None:
        """replica: base URL of the vLLM, for the log."""
        self._probe = probe
        self._gate = LoadGate(limits)
        self._limit = SlowdownLimit(limits.max_slowdown) if limits.max_slowdown > 0 else None
        self._told: int | None = None
        """Bits of the limit that the log said last; None: that it is not known."""
        self._tell_at = 0.0
        self._began = -math.inf
        """When the last candidate was sent."""
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
            return self._open and self.has_slot()

    @property
    def is_gate_open(self) -> bool:
        """True while nothing but the limit on the slow-down keeps a candidate back."""
        return self._open and self._unknown is None

    def has_slot(self) -> bool:
        """Return True when one more candidate slows users by no more than the limit.

        It is asked in the moment of sending: others may have been sent since `is_open`.
        """
        if self._limit is None:
            return True
        now = monotonic()
        due = now - self._began >= self._limit.gap_s()
        return due and self.in_flight < self._limit.allowed(now)

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Count a candidate as in flight, so that it is not taken for a user's request."""
        self.in_flight += 1
        began = self._began = monotonic()
        try:
            yield
            if self._limit is not None:
                self._limit.candidate_ended(monotonic() - began)
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
        own = min(before, self.in_flight)
        self._open = self._gate.update(load, own=own)
        if self._limit is not None:
            self._limit.measured(
                monotonic(), load.work, users=max(0, load.running + load.waiting - own)
            )
            self._tell_limit(self._limit)
        if self._open != was_open:
            self._log.info(
                "sampling_gate",
                open=self._open,
                running=load.running,
                waiting=load.waiting,
                kv_cache_usage=load.kv_cache_usage,
            )

    def _tell_limit(self, limit: SlowdownLimit) -> None:
        """Log the limit when it is known or no longer is, begins or ends to allow candidates beside
        users, or doubles; once a minute at most."""
        cost, most = limit.cost, limit.beside_one_user()
        told, now = most.bit_length() if most is not None else None, monotonic()
        if told == self._told or now < self._tell_at:
            return
        self._told, self._tell_at = told, now + TELL_INTERVAL_S
        self._log.info(
            "sampling_limit",
            beside_one_user=most,
            step_ms=None if cost is None else round(1000 * cost.step_s, 2),
            request_ms=None if cost is None else round(1000 * cost.request_s, 3),
            start_gap_s=round(limit.gap_s(), 2),
        )
