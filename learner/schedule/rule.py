"""When a run of the learner starts: the rule, the scheduled times, and what a run waits for.

`decide` is the rule. `Turns` are the scheduled times of an interval or of a line of cron; the row
`schedule_job` of the store has the next one, so they go on after a restart. `UserRate` counts the
requests that `learner.idle_below` waits for.

Cron is read by CronSim as Debian's cron does, in the zone of `learner.timezone`: where day of month
and weekday are both given, either is enough. A change of the clock: a line whose minute or hour
begins with `*` goes by the clock; the times of any other come once, one that is left out at the end
of the hour that is. (APScheduler's own trigger counts Monday as 0, asks for both days, and goes
back in time at the end of summer time.)
"""

from __future__ import annotations

import json
import math
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from typing import Literal
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from sidecar.backoff import Backoff
from sidecar.capture.outbox import REQUESTS
from sidecar.errors import SettingsError
from sidecar.settings import Learner
from sidecar.store.models import AdapterRow, CanaryRow, CounterRow, ScheduleJobRow
from sidecar.visible import counted

# Decide when a run starts or waits, and why. Pure.

Kind = Literal[
    "start", "running", "paused", "not_due", "canary", "held_back", "held", "no_room",
    "too_few_groups", "users_busy",
]  # fmt: skip
IDLE_WINDOW_S = 300.0
"""Seconds over which the users' requests are counted for `learner.idle_below`. Proxies write their
counts every 5 s. After its start the learner must first watch for this long."""
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
    elsewhere: bool = False
    """A run of another line of adapters has the device; which, a project's token must not learn."""
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
        return Decision("running", "a run of another line is in progress")
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
    again_at = seen.hold_until
    if seen.held:
        return Decision("held", "the reward watch holds the learner", again_at)
    if seen.no_room:
        return Decision("no_room", seen.no_room, again_at)
    goes_on = f"; run {seen.unfinished} goes on" if seen.unfinished else ""
    return Decision("held_back", f"{seen.failed or 'the last run failed'}{goes_on}", again_at)


def _busy(seen: Situation) -> str:
    rate = seen.users_per_minute
    if rate is None:
        return f"users' requests are not watched for {IDLE_WINDOW_S:g} s yet"
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
    """Return the seconds to wait after this many failed runs in a row, which would fail again at
    once; doubles up to an hour."""
    return HOLDS.wait_s(failures) if failures else 0.0


NICKNAMES = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}


class Cron:
    """The times of a line of cron."""

    def __init__(self, line: str, zone: tzinfo = UTC) -> None:
        """Raises: ValueError."""
        self.zone = zone
        self._line = NICKNAMES.get(line.strip().lower(), line)
        if (fields := len(self._line.split())) != 5:  # CronSim reads six: seconds
            raise ValueError(f"has {fields} fields instead of 5")
        try:
            CronSim(self._line, datetime.now(zone))
        except CronSimError as error:
            raise ValueError(f"{line!r}: {error}") from error

    def after(self, moment: datetime) -> datetime | None:
        """Return the first time after a moment, in UTC; None when none comes within 50 years."""
        times = CronSim(self._line, moment.astimezone(self.zone))
        # In an hour that is repeated CronSim begins with its first pass.
        in_utc = (at.astimezone(UTC) for at in times)
        return next((at for at in in_utc if at > moment), None)


def read_cron(learner: Learner) -> Cron:
    """Read `learner.cron`. Raises: SettingsError, also for a day that never comes."""
    zone = UTC if learner.timezone == "UTC" else ZoneInfo(learner.timezone)
    try:
        cron = Cron(learner.cron, zone)
    except ValueError as error:
        raise SettingsError(
            f"setting learner.cron: {error}; give five fields: minute, hour, day, month, weekday"
        ) from error
    if cron.after(datetime.now(UTC)) is None:
        raise SettingsError(
            "setting learner.cron: names a day that never comes, so no run would ever start; "
            "correct day and month"
        )
    return cron


def next_times(learner: Learner, now: datetime, count: int = 3) -> list[datetime]:
    """Return the next times of `learner.cron`, in its zone. Raises: SettingsError."""
    cron = read_cron(learner)
    at = cron.after(now)
    found: list[datetime] = []
    while at is not None and len(found) < count:
        found.append(at.astimezone(cron.zone))
        at = cron.after(at)
    return found


def shown_cron(learner: Learner, now: float) -> str:
    """The next three times of `learner.cron`; "" under another schedule. Raises: SettingsError."""
    if learner.schedule != "cron":
        return ""
    times = next_times(learner, datetime.fromtimestamp(now, UTC))
    shown = ", ".join(f"{one:%a %Y-%m-%d %H:%M}" for one in times)
    return f"{shown} ({learner.timezone})"


# The scheduled times of `learner.schedule`, which go on after a restart.

SLACK_S = 1.0
"""A row may name a time that is later than the next one by this: both are rounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """The scheduled times of an interval, or of a line of cron. Times in Unix seconds."""

    words: str
    """The setting in words."""
    interval_s: float = 0.0
    cron: Cron | None = None
    """None: they are those of the interval."""

    def after(self, now: float, last: float | None = None) -> float:
        """Return the first time after `now`. last: an earlier time, whose rhythm an interval keeps;
        None: it begins now."""
        if self.cron is not None:
            found = self.cron.after(datetime.fromtimestamp(now, UTC))
            return math.inf if found is None else found.timestamp()
        begun = now if last is None else last
        return begun + ((now - begun) // self.interval_s + 1) * self.interval_s

    @property
    def state(self) -> str:
        """Text of the column `job_state`: a row of other settings has another."""
        return json.dumps({"does": "turn", "trigger": self.words}, separators=(",", ":"))

    def go_on_from(self, row: ScheduleJobRow, now: float) -> bool:
        """Return False when the times begin anew: a row is of other settings, or later than the
        next time can be."""
        latest = self.after(now) + SLACK_S
        return row.job_state == self.state and row.next_run_time <= latest


def turns_of(learner: Learner) -> Turns | None:
    """Return the times of a schedule that has some; None for others. Raises: SettingsError."""
    if learner.schedule == "interval":
        seconds = int(learner.interval_s)
        return Turns(words=f"every {seconds} s", interval_s=seconds)
    if learner.schedule == "cron":
        zone = "" if learner.timezone == "UTC" else f" {learner.timezone}"
        return Turns(words=f"cron {learner.cron}{zone}", cron=read_cron(learner))
    return None


# What a run waits for, as the store has it: canaries that are not decided, and users.

UNDECIDED = ("loading", "gating", "ramping")


def undecided_canary(session: Session, model: str) -> str | None:
    """Return a version whose canary is active or still to come; None when all are decided."""
    on_canary = select(CanaryRow.candidate).where(
        CanaryRow.model == model, CanaryRow.state.in_(UNDECIDED)
    )
    registered = select(AdapterRow.name).where(
        AdapterRow.model == model, AdapterRow.state == "registered"
    )
    return session.scalar(on_canary.limit(1)) or session.scalar(registered.limit(1))


def requests_of_users(session: Session) -> int:
    """Return the users' requests that the proxies have counted since the store was made."""
    total = session.scalar(select(func.sum(CounterRow.count)).where(CounterRow.stage == REQUESTS))
    return int(total or 0)


# How many requests users make, as the proxies count them in the store. Pure.


class UserRate:
    """Requests of users over the last seconds, from a counter that only grows. The proxies tell
    their counts every five seconds, so the rate is that much behind."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._seen: deque[tuple[float, int]] = deque()

    def see(self, now: float, total: int) -> None:
        """Take the counter's value. A smaller one, or an earlier time, begins anew."""
        if self._seen and (now < self._seen[-1][0] or total < self._seen[-1][1]):
            self._seen.clear()
        self._seen.append((now, total))
        while len(self._seen) > 2 and self._seen[1][0] <= now - self._window_s:
            self._seen.popleft()

    @property
    def per_minute(self) -> float | None:
        """Requests a minute; None until the counter was watched for the whole window."""
        if not self._seen:
            return None
        (began, first), (now, last) = self._seen[0], self._seen[-1]
        return 60 * (last - first) / (now - began) if now - began >= self._window_s else None
