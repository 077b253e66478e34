"""How much a key may use: requests per minute and tokens per day. The rule is pure.

Requests: a bucket that holds one minute's requests and fills evenly. A bucket, not a sliding
window, because its state is two numbers, which fit a slot that processes share, and because the
field's `x-ratelimit-reset-requests` ("time until the limit is back in its initial state") is a
bucket's word. Its price: a client that was silent may send twice its limit within its first minute.

Tokens: what the replies of a UTC day have cost. They are known after the reply, so replies that
are under way when the allowance runs out are still given, and paid.

The clock may be set back, and processes read it a moment apart. A bucket then keeps what it has,
and never fills for time that passes twice; tokens of a day that this key has already seen begin
are never forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

DAY_S = 86_400
MINUTE_S = 60.0
CLOCK_SKEW_S = 1.0
"""A reading this much older is the same clock, read earlier; an older one is a clock set back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """A key's limits; None: no limit of that kind."""

    requests_per_minute: int | None = None
    tokens_per_day: int | None = None


class Usage(NamedTuple):
    """What is remembered of one key. A tuple, as `Standing`: two are made for each request, at a
    fifth of a frozen dataclass's cost."""

    at: float
    """Unix seconds to which the bucket is filled."""
    requests: float
    """In the bucket, 0..requests_per_minute."""
    day: int
    """Days since 1970, UTC."""
    tokens: int
    """Spent in `day`."""


class Standing(NamedTuple):
    """Where a key stands after one request was asked for."""

    refused: str | None
    """None: let through. Else the limit that says no: `requests_per_minute`, `tokens_per_day`."""
    requests_left: int
    requests_reset_s: float
    """Until the bucket is full."""
    tokens_left: int
    tokens_reset_s: float
    """Until the midnight UTC that ends the day in which they count."""
    retry_after_s: float = 0.0
    """When refused: until the same request would be let through, if nobody else asks."""


class Limiter(Protocol):
    """Counts what keys use. Never raises, never waits: called on the event loop."""

    def take(self, key_id: str, allowance: Allowance, now: float) -> Standing:
        """Ask for one request. now: unix seconds."""
        ...

    def charge(self, key_id: str, allowance: Allowance, tokens: int, now: float) -> None:
        """Tokens that a finished reply has cost."""
        ...

    def close(self) -> None: ...


def fresh(allowance: Allowance, now: float) -> Usage:
    """Of a key that was never seen."""
    return Usage(
        at=now, requests=float(allowance.requests_per_minute or 0), day=_day(now), tokens=0
    )


def is_spent_record(usage: Usage, now: float) -> bool:
    """True when forgetting it changes nothing: its bucket is full again and its day is over."""
    return usage.day < _day(now) and now - usage.at > MINUTE_S


def take(usage: Usage, allowance: Allowance, now: float) -> tuple[Usage, Standing]:
    """One request: what is remembered after it, and whether it is let through.

    A request that is refused takes nothing from the bucket.
    """
    usage = _brought_to(usage, allowance, now)
    per_minute, per_day = allowance.requests_per_minute, allowance.tokens_per_day
    to_midnight_s = (usage.day + 1) * DAY_S - now
    tokens_left = max(0, per_day - usage.tokens) if per_day is not None else 0
    refused, retry_after_s = None, 0.0
    if per_day is not None and tokens_left == 0:
        refused, retry_after_s = "tokens_per_day", to_midnight_s
    elif per_minute is not None:
        if usage.requests >= 1.0:
            usage = Usage(usage.at, usage.requests - 1.0, usage.day, usage.tokens)
        else:
            refused = "requests_per_minute"
            retry_after_s = (1.0 - usage.requests) * MINUTE_S / per_minute
    missing = per_minute - usage.requests if per_minute is not None else 0.0
    return usage, Standing(
        refused,
        int(usage.requests),
        missing * MINUTE_S / per_minute if per_minute is not None else 0.0,
        tokens_left,
        to_midnight_s,
        retry_after_s,
    )


def charge(usage: Usage, allowance: Allowance, tokens: int, now: float) -> Usage:
    """Tokens of a finished reply; they count for the day in which it ended."""
    usage = _brought_to(usage, allowance, now)
    return Usage(usage.at, usage.requests, usage.day, usage.tokens + tokens)


def _brought_to(usage: Usage, allowance: Allowance, now: float) -> Usage:
    at, requests = usage.at, usage.requests
    if now > at:
        per_minute = allowance.requests_per_minute or 0
        requests = min(float(per_minute), requests + (now - at) * per_minute / MINUTE_S)
        at = now
    elif at - now > CLOCK_SKEW_S:
        at = now
    today, day, tokens = _day(now), usage.day, usage.tokens
    if day < today:
        day, tokens = today, 0
    elif day > today + 1:  # the clock was far ahead: what was spent counts for today
        day = today
    # day == today + 1: set back over midnight. The spent tokens stay with the day that had begun.
    return Usage(at, requests, day, tokens)


def _day(now: float) -> int:
    return int(now // DAY_S)


class MemoryLimiter:
    """Counts for one process. Also what each process falls back to without the shared file.

    Nothing is thrown away: there is one record per key that has limits.
    """

    def __init__(self) -> None:
        self._usages: dict[str, Usage] = {}

    def take(self, key_id: str, allowance: Allowance, now: float) -> Standing:
        usage, standing = take(self._usages.get(key_id) or fresh(allowance, now), allowance, now)
        self._usages[key_id] = usage
        return standing

    def charge(self, key_id: str, allowance: Allowance, tokens: int, now: float) -> None:
        usage = self._usages.get(key_id) or fresh(allowance, now)
        self._usages[key_id] = charge(usage, allowance, tokens, now)

    def close(self) -> None:
        self._usages.clear()
