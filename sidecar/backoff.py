"""How long to wait before the next attempt after failures in a row. Pure: no clock, no sleep.

`Backoff` holds the numbers. Callers that store a count of failures ask `Backoff.wait_s`; callers
that keep the state in memory use `Waits`. `retry_after_s` reads what a server asks for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from random import Random

STEADY_S = 60.0
"""A process that lived for this many seconds is restarted after the shortest wait."""
_MOST_STEPS = 64
"""More steps change no wait that has a ceiling, and a float power overflows at 1,024."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Waits that grow by a factor from the first one to a ceiling."""

    first_s: float
    """Seconds after the first failure."""
    last_s: float = math.inf
    """The ceiling in seconds. No ceiling: the caller bounds the number of attempts."""
    factor: float = 2.0
    jitter: float = 0.0
    """The largest share of a wait, 0 to 1, that chance takes away, so that clients which failed
    together do not return together."""

    def wait_s(self, failures: int, rng: Random | None = None) -> float:
        """Return the seconds to wait.

        failures: failures in a row, 1 or more. rng: the source of the jitter; None: no jitter.
        """
        steps = min(failures - 1, _MOST_STEPS)
        wait_s = min(self.first_s * self.factor**steps, self.last_s)
        return wait_s if rng is None else wait_s * (1.0 - self.jitter * rng.random())

    def after_s(self, previous_s: float) -> float:
        """Return the wait that follows a wait of `previous_s` seconds; 0.0: no wait came before."""
        return min(previous_s * self.factor, self.last_s) if previous_s else self.first_s


class Waits:
    """The waits of one series of failures, in memory."""

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self._previous_s = 0.0

    def next_s(self) -> float:
        """Note a failure. Returns: the seconds to wait before the next attempt."""
        self._previous_s = self._backoff.after_s(self._previous_s)
        return self._previous_s

    def restart_s(self, lived_s: float) -> float:
        """Note the end of a process. Returns: the seconds to wait before its next start.

        lived_s: how long the process lived. After `STEADY_S` the waits start again at the first.
        """
        if lived_s >= STEADY_S:
            self.reset()
        return self.next_s()

    def reset(self) -> None:
        """Note a success: the next wait is the first one again."""
        self._previous_s = 0.0


def retry_after_s(headers: Mapping[str, str], now: float) -> float | None:
    """Return the seconds of a valid `Retry-After` header, else None. now: Unix seconds."""
    value = headers.get("retry-after", "").strip()
    try:
        seconds = float(value)
    except ValueError:
        try:
            date = parsedate_to_datetime(value)
            # A date of HTTP is in GMT, also in the old form that does not say so.
            seconds = (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp() - now
        except (ValueError, OverflowError):
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None
