"""Times of records: which fields are times, and a time in ISO 8601. Pure.

A field of Unix seconds is called `at`, `..._at`, `since` or `until`.
"""

from __future__ import annotations

from datetime import UTC, datetime

NO_TIMES = frozenset({"pass_at", "reached_at", "fails_at", "errs_at", "stops_at"})
"""Fields that end as times do and hold a score, the number of an observation or of checks, or a
stage."""


def is_time(key: str, value: object) -> bool:
    """True for a field of Unix seconds, by its name and its kind."""
    named = key in ("at", "since", "until") or key.endswith("_at")
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return named and number and key not in NO_TIMES


def iso(at: object) -> str | None:
    """Return a time such as `2026-03-01T09:30:00.250Z`. at: Unix seconds; None: no time.

    A damaged time, which no calendar has, is None too.
    """
    if not isinstance(at, int | float) or isinstance(at, bool):
        return None
    try:
        moment = datetime.fromtimestamp(at, UTC)
    except (OverflowError, ValueError, OSError):
        return None
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
