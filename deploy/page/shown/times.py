"""Times for people who look at the page: short, in UTC, which the page says once. Pure."""

from __future__ import annotations

from datetime import UTC, datetime

UNITS = ((86_400.0, "day"), (3_600.0, "hour"), (60.0, "minute"), (1.0, "second"))


def moment(at: object) -> datetime | None:
    """Return a time of the store in UTC; None for what is no time of our calendar."""
    if isinstance(at, bool) or not isinstance(at, int | float):
        return None
    try:
        return datetime.fromtimestamp(at, UTC)
    except (OverflowError, ValueError, OSError):
        return None


def clock(at: object, now: float) -> str:
    """`03:10`, `22 Nov 03:10`, `22 Nov 2025 03:10`: as short as it is clear. at: Unix seconds."""
    found, today = moment(at), moment(now)
    if found is None or today is None:
        return "an unreadable time"
    if found.date() == today.date():
        return f"{found:%H:%M}"
    if found.year == today.year:
        return f"{found.day} {found:%b %H:%M}"
    return f"{found.day} {found:%b %Y %H:%M}"


def iso(at: object) -> str:
    """The `datetime` attribute of a time; empty for what is none."""
    found = moment(at)
    return "" if found is None else f"{found:%Y-%m-%dT%H:%M:%SZ}"


def length(seconds: float) -> str:
    """`1 second`, `45 seconds`, `3 minutes`, `26 hours`, `2 days`. Hours go on to two days."""
    for unit_s, unit in UNITS:
        number = int(max(0.0, seconds) // unit_s)
        if number >= (2 if unit == "day" else 1):
            return f"{number} {unit}" if number == 1 else f"{number} {unit}s"
    return "less than a second"


def short_length(seconds: float) -> str:
    """A measured time: `412 ms`, `1.8 s`, `3 minutes`."""
    if (milliseconds := round(max(0.0, seconds) * 1000)) < 1000:
        return f"{milliseconds} ms"
    tenths = round(seconds, 1)
    return f"{tenths:.1f} s" if tenths < 60.0 else length(max(seconds, tenths))
