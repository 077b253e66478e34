"""What the end of the last run means for the next: how long it waits, and for what. Pure."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from learner.schedule.rule import HELD_S, hold_s

TRAINED, NOTHING_TO_LEARN, HELD, NO_ROOM, STOPPED = 0, 3, 4, 5, 6
"""Exit codes of a run (`learner.once`)."""
DONE = (TRAINED, NOTHING_TO_LEARN, HELD, NO_ROOM, STOPPED)
TRIES = 8
"""Failures in a row after which a run waits for its next scheduled time: the hold has reached its
hour by then, and what still fails is for a person to mend."""


@dataclass(slots=True)
class Hold:
    """The wait after the last run, of one line of adapters."""

    code: int | None = None
    """Exit code of the last run; negative: killed by that signal; None: none has ended yet."""
    failures: int = 0
    """Failed runs in a row."""
    wait_s: float = 0.0
    until: float = 0.0
    """Unix seconds; no run starts before then, unless requested."""
    no_room: str = ""
    """Why the last run did not fit into memory; empty: it did."""

    @property
    def held(self) -> bool:
        return self.code == HELD

    @property
    def failed(self) -> str:
        """How the last run failed, in words; empty: it did not."""
        if not self.failures or self.code is None:
            return ""
        in_a_row = f", {self.failures} in a row" if self.failures > 1 else ""
        return f"the last run {ended_words(self.code)}{in_a_row}"

    def begin(self, code: int, *, now: float, no_room: str) -> None:
        """Take the exit code of a run that ended now. no_room: its reason, where it found none."""
        self.code = code
        self.failures = 0 if code in DONE else self.failures + 1
        self.no_room = no_room if code == NO_ROOM else ""
        self.wait_s = HELD_S if code in (HELD, NO_ROOM) else hold_s(self.failures)
        self.until = now + self.wait_s

    def shorten(self, now: float) -> None:
        """Keep a clock that is set back from lengthening the wait by its jump."""
        self.until = min(self.until, now + self.wait_s)

    def tries_again(self, *, goes_on: bool) -> bool:
        """Return True when the scheduled time that the last run used up is due again.

        goes_on: the run is unfinished, and the next start goes on with it in any case. What the
        reward watch holds is asked again at the next scheduled time (docs/reward-watch.md).
        """
        if self.code == NO_ROOM:
            return True
        return 0 < self.failures < TRIES and not goes_on


def ended_words(code: int) -> str:
    """Say how a process failed. code: its exit code; negative: killed by that signal."""
    if code >= 0:
        return f"failed (exit code {code})"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal
        name = f"signal {-code}"
    return f"was killed ({name})"
