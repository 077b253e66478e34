"""The days and hours of budgets, in UTC, and the counter rows in which they are kept. Pure."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

LARGEST = 2**53
"""A larger count is damage: no day has so many tokens or nano-dollars."""


def day_of(now: float) -> str:
    """Return the UTC day of a time in Unix seconds, such as 2026-11-21."""
    return _utc(now).date().isoformat()


def hour_of(now: float) -> str:
    """Return the UTC hour of a time in Unix seconds, such as 2026-11-21T12."""
    return _utc(now).strftime("%Y-%m-%dT%H")


def next_midnight(now: float) -> datetime:
    """Return when the budgets of a day are renewed: the next midnight UTC."""
    return _utc(now).replace(hour=0, minute=0, second=0, microsecond=0) + timedelta(days=1)


def next_hour(now: float) -> datetime:
    """Return when the budgets of an hour are renewed."""
    return _utc(now).replace(minute=0, second=0, microsecond=0) + timedelta(hours=1)


def is_count(stored: object) -> bool:
    """Tell whether a counter's row holds a believable count."""
    return isinstance(stored, int) and 0 <= stored < LARGEST


def _utc(now: float) -> datetime:
    return datetime.fromtimestamp(now, UTC)
