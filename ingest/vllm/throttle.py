"""How many candidates an engine may answer at once without slowing users beyond a limit. Pure.

A step of the engine takes about `step_s + request_s * running` seconds. Both are fitted to vLLM's
own counters over a sliding window. k candidates then slow `users` requests by the share
`k * request_s / (step_s + request_s * users)`, and as many are allowed as keep it within the limit.
The prefill of a candidate holds up one step of the users: starts are so far apart that prefills
take at most the same share of the time.

On an engine that even one candidate slows too much, candidates run one at a time while users are
away. The pause of the users after which one begins follows from how often they come, so that at
most `MET` of users that come at random meet a candidate.

Between two measurements the users are not seen. What candidates cost beside the time of steps, such
as room in caches, is not modelled.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic

import structlog

from ingest.errors import SamplingError
from ingest.vllm.load import EngineWork, LoadGate, LoadLimits
from ingest.vllm.sampler import LoadProbe

WINDOW_S = 600.0
"""Sliding window of the fit."""
MAX_POINTS = 1_200
"""Measurements in the window at the interval of the throttle, 0.5 s."""
MIN_POINTS = 20
"""Ten seconds of traffic."""
ERRORS = 2.0
"""Standard errors that are added to what a request adds. On two cores shared with other work, 12
points and one error gave every number of candidates from none to all within seconds."""
MIN_SPREAD = 0.3
"""Least standard deviation of the running requests that shows what one of them costs."""
LEARNING_S = 30.0
"""How long the users' own coming and going is watched for it before a candidate helps."""
RATE_WINDOW_S = 60.0
MET = 0.005
"""Share of the users who may meet a candidate that slows them beyond the limit: half of the 1% that
a p99 leaves out."""
LONGEST_PAUSE_S = 30.0
"""After this pause of the users an engine counts as idle, however seldom they come: else one user
every ten minutes would keep it from all candidates for an hour."""
FIRST_CANDIDATE_S = 5.0
"""How long a candidate takes, before one has ended."""
NEW_SHARE = 0.2
"""Weight of the last candidate in the mean of how long they take."""
ALL = 1_000_000_000
"""More than any engine runs at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """How long a step of the engine takes."""

    step_s: float
    request_s: float
    """What each running request adds, >= 0."""


@dataclass(frozen=True, slots=True)
class Point:
    """What happened between two measurements."""

    at: float
    tokens: float
    running: float
    """Mean requests in a step of one engine."""
    token_s: float
    """Mean seconds from a token to the next."""
    ended: float
    prefills_s: float


def fit(points: Sequence[Point]) -> StepCost | None:
    """Fit the cost of a step, weighted by tokens (least squares).

    What a request adds is taken `ERRORS` higher than fitted, and a fit below 0 as 0: an error costs
    candidates, not users. Returns: None when the points are too few, too alike, or so large that
    the fit is no finite number.
    """
    try:
        cost = _fit(points)
    except OverflowError:
        return None
    finite = cost is not None and math.isfinite(cost.step_s) and math.isfinite(cost.request_s)
    return cost if finite else None


def _fit(points: Sequence[Point]) -> StepCost | None:
    told = [one for one in points if one.tokens > 0]
    if len(told) < MIN_POINTS:
        return None
    weight = sum(one.tokens for one in told)
    x = sum(one.tokens * one.running for one in told) / weight
    y = sum(one.tokens * one.token_s for one in told) / weight
    spread = sum(one.tokens * (one.running - x) ** 2 for one in told) / weight
    if spread < MIN_SPREAD**2:
        return None
    both = sum(one.tokens * (one.running - x) * (one.token_s - y) for one in told) / weight
    slope = both / spread
    rest = (
        sum(one.tokens * (one.token_s - y - slope * (one.running - x)) ** 2 for one in told)
        / weight
    )
    error = math.sqrt(rest / spread / (len(told) - 2))
    request_s = max(0.0, slope) + ERRORS * error
    return StepCost(step_s=max(0.0, y - request_s * x), request_s=request_s)


def most_candidates(cost: StepCost, users: float, limit: float) -> int:
    """Return how many candidates slow the users of one engine by at most `limit`, a share.

    users: their requests; none counts as one, who may arrive at any time.
    """
    room_s = limit * (cost.step_s + cost.request_s * max(1.0, users))
    if room_s >= ALL * cost.request_s:
        return ALL
    # The smallest excess over a whole number is rounding, not a broken limit.
    return math.floor(room_s / cost.request_s * (1 + 1e-12))


def pause_s(users_per_s: float, candidate_s: float) -> float:
    """Return the pause of the users after which a candidate begins, in seconds.

    With users who come at random, exp(-rate * pause) of the gaps between two are longer, and a
    candidate that begins in one is met by at most 1 + rate * candidate_s of them.
    """
    if users_per_s <= 0:
        return 0.0
    met = 1 + users_per_s * candidate_s
    return min(LONGEST_PAUSE_S, math.log(met / MET) / users_per_s)


class SlowdownLimit:
    """The limit of one vLLM, from measurement to measurement. Times are seconds of one clock."""

    def __init__(self, limit: float) -> None:
        """limit: share by which users may be slowed, > 0."""
        self._limit = limit
        self._points: deque[Point] = deque(maxlen=MAX_POINTS)
        self._last: EngineWork | None = None
        self._began = 0.0
        """When vLLM first told its work; 0: it does not."""
        self._users = 0
        self._user_seen = -math.inf
        self._users_ended = 0.0
        """Requests that ended and are not known to be candidates; below 0: vLLM counts them yet."""
        self._arrivals: deque[tuple[float, float]] = deque(maxlen=MAX_POINTS)
        self._own_ended = 0
        self._candidate_s = FIRST_CANDIDATE_S
        self.cost: StepCost | None = None
        """None: not known."""

    def candidate_ended(self, took_s: float) -> None:
        """Note an answered candidate."""
        self._own_ended += 1
        self._candidate_s += NEW_SHARE * (took_s - self._candidate_s)

    def measured(self, now: float, work: EngineWork | None, *, users: int) -> None:
        """Note a measurement. users: their running and waiting requests."""
        last, self._last, self._users = self._last, work, users
        if users:
            self._user_seen = now
        if work is None:
            self._points.clear()
            self.cost, self._began = None, 0.0
            return
        restarted = last is not None and (work.steps < last.steps or work.ended < last.ended)
        if last is None or restarted:
            self._points.clear()
            self._began = self._began or now
            self._own_ended, self._users_ended = 0, 0.0
        else:
            self._add(now, last, work)
        while self._points and self._points[0].at < now - WINDOW_S:
            self._points.popleft()
        while self._arrivals and self._arrivals[0][0] < now - RATE_WINDOW_S:
            self._arrivals.popleft()
        self.cost = fit(self._points)

    def _add(self, now: float, last: EngineWork, work: EngineWork) -> None:
        tokens, steps = work.tokens - last.tokens, work.steps - last.steps
        ended = work.ended - last.ended
        running = tokens / steps if steps > 0 else 0.0
        token_s = (work.tokens_s - last.tokens_s) / tokens if tokens > 0 else 0.0
        prefills_s = work.prefills_s - last.prefills_s
        if tokens > 0 or ended > 0:
            self._points.append(Point(now, tokens, running, token_s, ended, prefills_s))
        # vLLM may count a candidate before its answer is here, or after: what ended is a user's
        # when the next measurement does not explain it either.
        before, self._users_ended = self._users_ended, self._users_ended + ended - self._own_ended
        self._own_ended = 0
        users = min(before, self._users_ended)
        if users > 0:
            self._arrivals.append((now, users))
            self._user_seen = now
            self._users_ended -= users

    def allowed(self, now: float) -> int:
        """Return how many candidates may be in flight.

        One at a time while vLLM does not tell what a request costs.
        """
        if self._last is None:
            return 1
        if self.cost is None:
            long = now - self._began >= LEARNING_S
            return int(long if self._users else self._away(now))
        engines = self._last.engines
        most = engines * most_candidates(self.cost, self._users / engines, self._limit)
        return most or int(self._users == 0 and self._away(now))

    def beside_one_user(self) -> int | None:
        """Return how many candidates one engine may answer beside one user; None: not known."""
        return None if self.cost is None else most_candidates(self.cost, 1, self._limit)

    def gap_s(self) -> float:
        """Return the least time between the starts of two candidates, in seconds."""
        if self._users == 0 or self._last is None:
            return 0.0
        ended = sum(one.ended for one in self._points)
        prefills_s = sum(one.prefills_s for one in self._points)
        return prefills_s / ended / self._limit / self._last.engines if ended > 0 else 0.0

    def _away(self, now: float) -> bool:
        """Return True when the users have been away long enough for one candidate."""
        if not self._arrivals:
            return now > self._user_seen
        began = max(self._began, now - RATE_WINDOW_S)
        rate = sum(number for _, number in self._arrivals) / max(1.0, now - began)
        return now - self._user_seen >= pause_s(rate, self._candidate_s)


# The throttle in front of one vLLM: candidates are sent only while users leave capacity.

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
