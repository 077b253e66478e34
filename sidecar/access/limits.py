"""How much a key may use: requests per minute and tokens per day. The rule is pure.

Requests: a token bucket that holds one minute's requests and refills evenly. A bucket and not a
sliding window, because its state is two numbers, which fit one slot of the shared table, and as
`x-ratelimit-reset-requests` ("time until the limit is back in its initial state") describes a
bucket. Its price: a client that was idle may send twice its limit within its first minute.

Tokens: what the replies of a UTC day have cost. The cost is known after the reply, so replies in
flight when the allowance runs out are still delivered, and charged.

The clock may be set back, and processes read it a moment apart. The bucket then keeps its level and
never refills twice for the same time; tokens of a day that has begun for a key are never forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

DAY_S = 86_400
MINUTE_S = 60.0
CLOCK_SKEW_S = 1.0
"""A reading at most this much older comes from the same clock, read earlier; an older one means
that the clock was set back."""
MAX_TOKENS = 2**53
"""Most tokens that a key is charged in a day: no reply costs as many, and every reader of JSON
holds that number exactly. A reply that tells more is damaged, or vLLM is not what answers."""
SWEEP_AT = 4096
"""Records in `MemoryLimiter` from which on it looks for records that may be forgotten."""


Count = Callable[[str], None]
"""Counts one event by reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """A key's limits; None: no limit of that kind."""

    requests_per_minute: int | None = None
    tokens_per_day: int | None = None


class Usage(NamedTuple):
    """What is remembered of one key. A tuple, as `Standing` is: each request makes two of them, and
    a frozen dataclass costs five times as much."""

    at: float
    """Unix seconds of the last refill of the bucket."""
    requests: float
    """Requests left in the bucket, 0..requests_per_minute."""
    day: int
    """Days since 1970, UTC."""
    tokens: int
    """Tokens spent in `day`."""


class Standing(NamedTuple):
    """What is left of a key's limits after one request."""

    refused: str | None
    """None: admitted. Else the limit that is used up: `requests_per_minute`, `tokens_per_day`."""
    requests_left: int
    requests_reset_s: float
    """Seconds until the bucket is full."""
    tokens_left: int
    tokens_reset_s: float
    """Seconds until the midnight UTC that ends the day in which the tokens count."""
    retry_after_s: float = 0.0
    """When refused: seconds until the same request is admitted, if no other comes before it."""


class Limiter(Protocol):
    """Counts what keys use. Never raises and never waits longer than 2 ms: the event loop calls
    it."""

    def take(self, key_id: str, allowance: Allowance, now: float) -> Standing:
        """Ask for one request. now: unix seconds."""
        ...

    def charge(self, key_id: str, allowance: Allowance, tokens: int, now: float) -> None:
        """Count the tokens of a finished reply."""
        ...


def fresh(allowance: Allowance, now: float) -> Usage:
    """The usage of a key that was never seen: a full bucket, no tokens spent."""
    return Usage(
        at=now, requests=float(allowance.requests_per_minute or 0), day=_day(now), tokens=0
    )


def is_spent_record(usage: Usage, now: float) -> bool:
    """True when forgetting it changes nothing: the bucket is full again, the day is over."""
    return usage.day < _day(now) and now - usage.at > MINUTE_S


def take(usage: Usage, allowance: Allowance, now: float) -> tuple[Usage, Standing]:
    """Take one request from the bucket. Returns: the usage after it, and whether it is admitted.

    A refused request takes nothing from the bucket.
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
    """Add the tokens of a finished reply; they count for the day in which it ended."""
    usage = _brought_to(usage, allowance, now)
    return Usage(usage.at, usage.requests, usage.day, min(usage.tokens + tokens, MAX_TOKENS))


def believed(tokens: int, lost: Count) -> int:
    """The tokens of a reply, at most `MAX_TOKENS`; what is more is counted as `too_large`."""
    if tokens <= MAX_TOKENS:
        return tokens
    lost("too_large")
    return MAX_TOKENS


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
    """A `Limiter` for one process. Workers fall back to it when they cannot use the shared table.

    It holds one record for each key with limits that was used today. Keys come from the store, so
    a client cannot make it grow.
    """

    def __init__(self, lost: Count = lambda _: None) -> None:
        """lost: counts tokens that are not charged, as `believed` does."""
        self._lost = lost
        self._usages: dict[str, Usage] = {}
        self._sweep_at = SWEEP_AT

    def take(self, key_id: str, allowance: Allowance, now: float) -> Standing:
        usage, standing = take(self._usage(key_id, allowance, now), allowance, now)
        self._usages[key_id] = usage
        return standing

    def charge(self, key_id: str, allowance: Allowance, tokens: int, now: float) -> None:
        tokens = believed(tokens, self._lost)
        self._usages[key_id] = charge(self._usage(key_id, allowance, now), allowance, tokens, now)

    def records(self) -> list[tuple[str, Usage]]:
        """Each key id with its usage."""
        return list(self._usages.items())

    def restore(self, records: Iterable[tuple[str, Usage]]) -> None:
        """Take over what `records` of an earlier process returned."""
        self._usages.update(records)

    def _usage(self, key_id: str, allowance: Allowance, now: float) -> Usage:
        usage = self._usages.get(key_id)
        if usage is not None:
            return usage
        if len(self._usages) >= self._sweep_at:
            kept = {key: one for key, one in self._usages.items() if not is_spent_record(one, now)}
            self._usages = kept
            self._sweep_at = max(SWEEP_AT, 2 * len(kept))
        return fresh(allowance, now)
