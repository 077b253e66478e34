"""Decide when a run starts or waits, and why. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sidecar.backoff import Backoff
from sidecar.plurals import counted

Kind = Literal[
    "start",
    "running",
    "paused",
    "not_due",
    "canary",
    "held_back",
    "held",
    "no_room",
    "too_few_groups",
    "users_busy",
]
HOLDS = Backoff(first_s=30.0, last_s=3600.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """The inputs of a decision at one moment."""

    running: bool
    paused: bool
    requested: bool
    """True when the operator requested a run; it starts even with few groups."""
    due: bool
    """True when a run is scheduled now; always True when only the number of groups decides."""
    canary: str | None
    """The adapter with an undecided canary; None when there is none."""
    groups: int
    """Number of fresh scored groups that wait."""
    min_groups: int
    now: float
    hold_until: float
    """Unix seconds; after a failure no run starts before then, unless requested."""
    elsewhere: str = ""
    """Another line of adapters, in words, whose run has the device; empty: none."""
    unfinished: str | None = None
    """A run that was killed or stopped: a start goes on with it, however few groups wait."""
    held: bool = False
    """True when the reward watch held the last run; it is asked again after `hold_until`."""
    no_room: str = ""
    """Why the last run did not fit into memory; it is tried again after `hold_until`."""
    failed: str = ""
    """How the last run failed, in words; empty: it did not."""
    idle_below: float = 0.0
    """Users' requests a minute below which a run starts; 0: whatever they are."""
    users_per_minute: float | None = None
    """None: not watched for long enough."""


@dataclass(frozen=True, slots=True)
class Decision:
    kind: Kind
    why: str
    again_at: float | None = None
    """Unix seconds when the hold ends that this decision is about."""

    @property
    def start(self) -> bool:
        return self.kind == "start"

    @property
    def spent(self) -> bool:
        """True when this decision uses up the scheduled time: the next one is waited for."""
        return self.kind in ("start", "too_few_groups")


def decide(seen: Situation) -> Decision:
    """Decide whether to start a run.

    A pause stops every run. A request overrides the clock, the hold, the number of groups and the
    users, but not an active canary: the next run must start from the champion that the canary
    decides. While a run of another line has the device, nothing starts.
    """
    found = _decide(seen)
    if found.start and seen.elsewhere:
        return Decision("running", f"a run of {seen.elsewhere} is in progress")
    return found


def _decide(seen: Situation) -> Decision:
    if seen.running:
        return Decision("running", "a run is in progress")
    if seen.paused:
        return Decision("paused", "paused by the operator")
    if not (seen.requested or seen.due or seen.unfinished):
        return _not_due(seen)
    if seen.canary is not None:
        return Decision("canary", f"the canary of {seen.canary} is not decided")
    if seen.requested:
        return Decision("start", "the operator asked for it")
    if seen.now < seen.hold_until:
        return _held_back(seen)
    if seen.unfinished:
        return Decision("start", f"run {seen.unfinished} was killed or stopped, and goes on")
    if seen.groups < seen.min_groups:
        wait = "waits" if seen.groups == 1 else "wait"
        why = f"{seen.groups} of {counted(seen.min_groups, 'group')} {wait}"
        return Decision("too_few_groups", why)
    if seen.idle_below and (busy := _busy(seen)):
        return Decision("users_busy", busy)
    return Decision("start", counted(seen.groups, "group waits", "groups wait"))


def _not_due(seen: Situation) -> Decision:
    """A run that was asked for by hand, or failed too often, is not tried again by itself."""
    if seen.no_room:
        asks = "`sidecar learner run` asks for another"
        return Decision("no_room", f"{seen.no_room}; {asks}")
    failed = f"; {seen.failed}, and is not tried again before" if seen.failed else ""
    return Decision("not_due", f"the schedule has not come round{failed}")


def _held_back(seen: Situation) -> Decision:
    """Say what the last run ended with, and until when the next one waits for it."""
    again_at = seen.hold_until
    if seen.held:
        return Decision("held", "the reward watch holds the learner", again_at)
    if seen.no_room:
        return Decision("no_room", seen.no_room, again_at)
    goes_on = f"; run {seen.unfinished} goes on" if seen.unfinished else ""
    return Decision("held_back", f"{seen.failed or 'the last run failed'}{goes_on}", again_at)


def _busy(seen: Situation) -> str:
    """Say why the users are not known to be few; empty when they are."""
    rate = seen.users_per_minute
    if rate is None:
        return "users' requests are not watched for learner.idle_window_s yet"
    if rate < seen.idle_below:
        return ""
    return (
        f"users make {rate:.1f} requests a minute; a run starts below {seen.idle_below:g} "
        "(learner.idle_below)"
    )


HELD_S = 600.0
"""Seconds until the reward watch is asked again, when only the number of groups decides: users'
answers change it, and those of a few minutes are some hundred. As long until memory is measured
again for a run that did not fit."""


def hold_s(failures: int) -> float:
    """Return the seconds to wait after this many failed runs in a row; doubles up to an hour.

    A failure gives its groups back, so without a wait the same run would fail again at once.
    """
    return HOLDS.wait_s(failures) if failures else 0.0
