"""Times of replies, twice: Unix seconds for programs that compute, ISO 8601 for all others. Pure.

A field of Unix seconds is called `at`, `..._at`, `since` or `until`. Its sibling is called `time`,
`..._time`, `since_time` or `until_time`, and is null where there is no such time.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

NO_TIMES = frozenset({"pass_at", "reached_at", "fails_at", "errs_at", "stops_at"})
"""Fields that end as times do and hold a score, the number of an observation or of checks, or a
stage."""
SCHEMA = {
    "anyOf": [{"type": "string", "format": "date-time"}, {"type": "null"}],
    "description": "The same in ISO 8601, UTC.",
    "readOnly": True,
}


def sibling(name: str) -> str | None:
    """Return the name of the ISO field beside this one; None: it is no time."""
    if name in NO_TIMES:
        return None
    if name in ("since", "until"):
        return f"{name}_time"
    if name == "at" or name.endswith("_at"):
        return f"{name[:-2]}time"
    return None


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


def with_siblings(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields, each time followed by its sibling."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        found[name] = value
        other = sibling(name)
        if other is not None and other not in fields:
            found[other] = iso(value)
    return found


def deep(value: Any) -> Any:  # Any: JSON
    """Return a JSON value with the siblings of all times inside it."""
    if isinstance(value, Mapping):
        return with_siblings({key: deep(one) for key, one in value.items()})
    if isinstance(value, list | tuple):
        return [deep(one) for one in value]
    return value


def describe_siblings(schema: dict[str, Any]) -> None:
    """Add the siblings to a JSON schema of an object."""
    properties = schema.get("properties", {})
    for name in list(properties):
        other = sibling(name)
        if other is not None and other not in properties:
            properties[other] = dict(SCHEMA, title=other.replace("_", " ").title())
            if name in schema.get("required", ()):
                schema["required"].append(other)
