"""Times for people: when, in UTC, and how long ago. Pure."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from deploy.iso_times import sibling

if TYPE_CHECKING:
    from sidecar.settings import Learner

UNITS_S = {"m": 60, "h": 3600, "d": 86_400, "w": 604_800}
UNITS = ((86_400.0, "day"), (3_600.0, "h"), (60.0, "min"))


def is_time(key: str, value: object) -> bool:
    """True for a field of Unix seconds, by its name (`deploy.iso_times.sibling`) and its kind."""
    return (
        sibling(key) is not None and isinstance(value, int | float) and not isinstance(value, bool)
    )


def shown_time(at: float, now: float) -> str:
    """A time such as `2026-03-01T09:30:00Z (3 min ago)`. at, now: Unix seconds."""
    try:
        moment = datetime.fromtimestamp(int(at), UTC)
    except (OverflowError, ValueError, OSError):  # no time of our calendar: a damaged row
        return str(at)
    return f"{moment:%Y-%m-%dT%H:%M:%SZ} ({shown_age(now - at)})"


def shown_cron(learner: Learner, now: float) -> str:
    """The next three times of `learner.cron`; "" under another schedule. now: Unix seconds.

    Raises: SettingsError.
    """
    if learner.schedule != "cron":
        return ""
    from learner.schedule.cron import next_times

    times = next_times(learner, datetime.fromtimestamp(now, UTC))
    shown = ", ".join(f"{one:%a %Y-%m-%d %H:%M}" for one in times)
    return f"{shown} ({learner.timezone})"


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


def read_length(text: str) -> int | None:
    """Read a length of time such as `90m`, `12h`, `30d`, `8w`, in seconds; None when it is none."""
    match = re.fullmatch(r"([1-9][0-9]{0,5})([mhdw])", text)
    return int(match[1]) * UNITS_S[match[2]] if match else None
