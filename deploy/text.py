"""Records as text for people: fields, tables, dates with an age. Pure.

A field of Unix seconds is called `at`, `..._at`, `since` or `until`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

NO_TIMES = frozenset({"pass_at", "reached_at", "fails_at", "errs_at", "stops_at"})
"""Fields that end as times do and hold a score, the number of an observation or of checks, or a
stage."""


def is_time(key: str, value: object) -> bool:
    """True for a field of Unix seconds, by its name and its kind."""
    named = key in ("at", "since", "until") or key.endswith("_at")
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return named and number and key not in NO_TIMES


def moment(at: object) -> datetime | None:
    """Return a time of the store in UTC; None for what is no time of our calendar: a damaged row.
    at: Unix seconds."""
    if isinstance(at, bool) or not isinstance(at, int | float):
        return None
    try:
        return datetime.fromtimestamp(at, UTC)
    except (OverflowError, ValueError, OSError):
        return None


def iso(at: object) -> str | None:
    """Return a time such as `2026-03-01T09:30:00.250Z`; None for what is none. at: Unix seconds."""
    found = moment(at)
    if found is None:
        return None
    return found.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def capital(text: str) -> str:
    """The text with a capital at its start, unless it begins with a name such as `vLLM`."""
    return text if text.startswith("vLLM") else text[:1].upper() + text[1:]


def percent(basis_points: float) -> str:
    return f"{basis_points / 100:g}%"


def paused_words(project: str | None) -> str:
    of = "" if project is None else f" --project {project}"
    return f"the learner is paused until `sidecar learner resume{of}`"


UNITS = ((86_400.0, "day"), (3_600.0, "h"), (60.0, "min"))


def shown_time(at: float, now: float) -> str:
    """A time such as `2026-03-01T09:30:00Z (3 min ago)`. at, now: Unix seconds."""
    found = moment(at)
    return str(at) if found is None else f"{found:%Y-%m-%dT%H:%M:%SZ} ({shown_age(now - at)})"


def shown_age(age_s: float) -> str:
    """`3 min ago`, `in 2 days`, `now`."""
    length = shown_length(abs(age_s))
    if abs(age_s) < 1:
        return "now"
    return f"{length} ago" if age_s > 0 else f"in {length}"


def shown_length(length_s: float) -> str:
    """The number of whole units of the largest unit that fits: `45 s`, `3 min`, `26 h`, `2 days`.

    Hours go on to two days: "30 h" tells more than "1 day".
    """
    for unit_s, unit in UNITS:
        count = int(length_s // unit_s)
        if count >= (2 if unit == "day" else 1):
            return f"{count} {unit}s" if unit == "day" else f"{count} {unit}"
    return f"{int(length_s)} s"


# A table for a terminal: columns as wide as what stands in them, the last one wrapped. Pure.

GAP = "  "
LEAST = 20
"""Characters that the last column has at least, however narrow the terminal is."""
WHOLE = 10_000
"""A width in which nothing is wrapped: for output that goes to a file or to another program."""


def table_lines(
    heads: Sequence[str], rows: Sequence[Sequence[str]], width: int = WHOLE
) -> list[str]:
    """Return the lines of a table; "none" without rows.

    The last column is wrapped to `width` characters a line: nothing is cut off.
    """
    if not rows:
        return ["none"]
    shown = [[" ".join(cell.split()) for cell in row] for row in (heads, *rows)]
    widths = [max(len(row[k]) for row in shown) for k in range(len(heads) - 1)]
    left = sum(widths) + len(GAP) * len(widths)
    lines = []
    for row in shown:
        first = GAP.join(map(str.ljust, row, widths)) + GAP if widths else ""
        parts = textwrap.wrap(row[-1], max(LEAST, width - left)) or [""]
        lines += [
            f"{first if place == 0 else ' ' * left}{part}".rstrip()
            for place, part in enumerate(parts)
        ]
    return lines


def record_lines(found: Mapping[str, Any], now: float) -> list[str]:
    """Return the text of one record or of a listing. now: Unix seconds. Pure."""
    if "items" not in found:
        return _lines(found, now)
    lines: list[str] = []
    for block in found["items"]:
        lines += ["", *_lines(block, now)] if lines else _lines(block, now)
    return lines or ["none"]


def _lines(block: Mapping[str, Any], now: float, indent: int = 0) -> list[str]:
    """Indented `key: value` lines; lists and objects below their key, each item after a dash."""
    pad = "  " * indent
    lines: list[str] = []
    for key, value in block.items():
        if isinstance(value, dict) and value:
            lines += [f"{pad}{key}:", *_lines(value, now, indent + 1)]
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            lines.append(f"{pad}{key}:")
            for item in value:
                first, *rest = _lines(item, now, indent + 2) or [f"{pad}    -"]
                lines += [f"{pad}  - {first[len(pad) + 4 :]}", *rest]
        else:
            lines.append(f"{pad}{key}: {_shown(key, value, now)}")
    return lines


def _shown(key: str, value: Any, now: float) -> str:
    """Return a value in words: no value of Python's, times with an age, basis points in percent."""
    if is_time(key, value):
        over = key == "next_step_earliest_at" and value < now
        more = "; the step has lasted long enough, and `reason` says what else it needs"
        return shown_time(value, now) + (more if over else "")
    if isinstance(value, bool):
        return "yes" if value else "no"
    if key.endswith("_bp") and isinstance(value, int):
        return f"{value} ({percent(value)})"
    if isinstance(value, list):
        if key == "steps":  # of a canary's ramp
            value = [percent(weight_bp) for weight_bp in value]
        return ", ".join(map(str, value)) or "-"
    return str(value) if value or value == 0 else "-"  # a limit of "none" would read as 0
