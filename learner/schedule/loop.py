"""Run the learner on its schedule. A child process does the runs of all lines (`Worker`).

Every `POLL_S` it polls the operator's flags, active canaries, waiting groups, users'
requests and its child process. The admin API sets the flags `learner_paused` and
`learner_run_requested` ("1" or "0"). Its newest decision is a condition (`SCHEDULE`). A
scheduled time that came round stays due, also over a restart, until a run starts or too few groups
wait; it is due again when that run failed or found no room (`hold`).
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from datetime import UTC
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import Protocol

import structlog
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.interval import IntervalTrigger
from sqlalchemy.orm import Session

from learner.command import (
    HELD,
    NO_ROOM,
    NO_ROOM_FLAG,
    NOTHING_TO_LEARN,
    RENEW,
    STOPPED,
    TRAINED,
    ended_words,
    learner_command,
)
from learner.errors import ParentError
from learner.progress.watch import write_missing
from learner.runs.interrupted import GOES_ON
from learner.runs.runs import abandon, can_go_on, find_parent, is_dead, unfinished
from learner.runs.source import blame_for_death, count_fresh
from learner.schedule.rule import (
    HELD_S,
    IDLE_WINDOW_S,
    Decision,
    Situation,
    UserRate,
    decide,
    hold_s,
    requests_of_users,
    turns_of,
    undecided_canary,
)
from sidecar.conditions import Condition, write
from sidecar.errors import StoreError
from sidecar.lines import flag_of
from sidecar.processes import own_environment, tell_ready
from sidecar.settings import Settings
from sidecar.store.database import Database, get_flag, set_flag
from sidecar.store.models import RunRow, ScheduleJobRow

# What the end of the last run means for the next: how long it waits, and for what. Pure.

DONE = (TRAINED, NOTHING_TO_LEARN, HELD, NO_ROOM, STOPPED)
POLL_S = 2.0
"""Seconds between two polls of flags, canaries and waiting groups."""
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

        goes_on: the run is unfinished, and the next start goes on with it in any case; one that was
        stopped before it claimed groups is not. What the reward watch holds is asked again at the
        next scheduled time (docs/reward-watch.md).
        """
        if self.code in (NO_ROOM, STOPPED):
            return not goes_on
        return 0 < self.failures < TRIES and not goes_on


SCHEDULE = "schedule"
"""Kind of the condition that has the schedule's newest decision in a line: its code is the kind of
the decision (`learner.schedule.rule.Kind`)."""
log = structlog.get_logger()

PAUSED_FLAG = "learner_paused"
REQUESTED_FLAG = "learner_run_requested"
DUE_FLAG = "learner_due"
NICENESS = 10
"""Niceness of a run's process: it yields the CPU to vLLM and the proxy."""
STOP_TIMEOUT_S = 20.0
IDLE_S = 900.0
"""How long a process that keeps a base waits for its next run: longer than `HELD_S`, after which
what was held asks again. It saves a run 15 s of CPU (docs/log.md), and holds the base's memory."""
STATUS_S = 60.0
"""Longest time between two writes of the same decision."""


class Child(Protocol):
    """A run in its own process."""

    def exit_code(self) -> int | None:
        """Return the exit code; None while it runs; negative when killed by that signal."""

    def stop(self) -> None:
        """Ask the process to end, and wait until it has."""


class Worker:
    """The process that does the runs (`learner.once.serve`), one at a time; as a `Child`, its run.

    It is started when a run is asked for and it is not there. The kernel stops it when the thread
    that started it dies: APScheduler's or the main one, which live as long as this process.
    """

    def __init__(self, config: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._config, self._clock = config, clock
        self._process: subprocess.Popen[bytes] | None = None
        self._asked: tuple[str, str | None] = ("", None)
        self._code: int | None = None
        self._ended_at = clock()

    def start(self, *words: str) -> None:
        """Start the process. words: of its command line; it does what they say before a run."""
        self._connection, theirs = Pipe()
        words = ("--worker", str(theirs.fileno()), "--nice", str(NICENESS), *words)
        with theirs:
            self._process = subprocess.Popen(
                learner_command(self._config, *words),
                stdin=subprocess.DEVNULL,
                env=own_environment(os.environ),
                pass_fds=[theirs.fileno()],
            )

    def launch(self, run_id: str, project: str | None = None) -> Worker:
        """Ask for a run. project: whose line of adapters it trains; None: the default line.

        Raises: OSError when no process can be started."""
        code = self._process.poll() if self._process is not None else STOPPED
        if code not in (None, self._code, STOPPED, RENEW):
            log.warning("worker_died_idle", exit_code=code)
        self._asked, self._code = (run_id, project), None
        if code is not None:
            self.start()
        with suppress(OSError):  # it is gone: `exit_code` says how
            self._connection.send(self._asked)
        return self

    def exit_code(self) -> int | None:
        if self._code is None and self._process is not None:
            code = self._process.poll()
            with suppress(EOFError, OSError):  # it has ended, or is about to
                code = self._connection.recv() if self._connection.poll() else code
            if code == RENEW:
                self.launch(*self._asked)
                return None
            self._code, self._ended_at = code, self._clock()
        return self._code

    def stop(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            log.warning("run_killed", pid=self._process.pid, after_s=STOP_TIMEOUT_S)
            self._process.kill()
            self._process.wait()

    def rest(self) -> None:
        """Stop the process when it has waited for `IDLE_S`, so that others have its memory."""
        waits = self._code is not None or not self._asked[0]
        if waits and self._clock() - self._ended_at >= IDLE_S:
            self.stop()


class Schedule:
    """Starts and watches the runs of one line of adapters. APScheduler calls `poll`, by way of
    `InTurn` (see `start_clock`)."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        launch: Callable[[str], Child],
        *,
        clock: Callable[[], float],
    ) -> None:
        """settings: of the line. launch: starts the run with this id. Raises: SettingsError."""
        self._settings = settings
        self.line = settings.line
        self._database = database
        self._launch = launch
        self._clock = clock
        self._by_groups = settings.learner.schedule == "groups"
        self._turns = turns_of(settings.learner)
        self._users = UserRate(IDLE_WINDOW_S)
        self._child: Child | None = None
        self._run_id = ""
        self._of_turn = False
        """True when the child process was started for a scheduled time, not only on request."""
        self._requested = False
        """True when it was asked for."""
        self._hold = Hold()
        self._logged: Decision | None = None
        self._told: Condition | None = None
        self._told_at = 0.0

    @property
    def running(self) -> bool:
        """True while a run has the device; see `reap`."""
        return self._child is not None

    def reap(self) -> None:
        """Record the end of the child process, if it has ended and the store can be written."""
        try:
            self._reap()
        except (StoreError, OSError) as error:  # `poll` tries again
            _waits(error)

    def poll(self, elsewhere: bool = False) -> Decision | None:
        """Poll the child process, then start a run if one is due.

        elsewhere: a run of another line has the device.
        Returns: the decision; None while the store is unreachable or no process can be started.
        """
        try:
            self._come_round()
            self._reap()
            with self._database.read() as session:
                seen = self._situation(session, elsewhere)
            decision = decide(seen)
            if decision.start:
                timed = self._turns is not None
                self._of_turn = timed and (seen.due or seen.unfinished is not None)
                self._requested = seen.requested
                self._start(decision)
            if decision.spent and seen.due and not self._by_groups:
                with self._database.write(alone=False) as session:
                    self._flag(session, DUE_FLAG, "0")
            self._tell(decision)
        except (StoreError, OSError) as error:  # what was due or asked for still is
            _waits(error)
            return None
        if self._logged is None or decision.kind != self._logged.kind:
            event = "learn_waits" if not decision.start else "learn_starts"
            log.info(event, line=self.line.name, why=decision.why)
        self._logged = decision
        return decision

    def stop(self) -> None:
        """Stop the child process, if there is one, and record its end."""
        if self._child is not None:
            self._child.stop()
            self._reap(stopped=True)

    def _flag(self, session: Session, flag: str, value: str) -> None:
        set_flag(session, flag_of(flag, self.line.name), value, now=self._clock())

    def _come_round(self) -> None:
        """Mark a run as due when a scheduled time has come, and store when the next one does. Times
        that were missed count as one; those of earlier settings are dropped."""
        turns, model, now = self._turns, self.line.name, self._clock()
        with self._database.read() as session:
            row = session.get(ScheduleJobRow, model)
        if turns is None:
            if row is not None:
                with self._database.write(alone=False) as session:
                    self._flag(session, DUE_FLAG, "0")
                    session.delete(row)
            return
        last = row.next_run_time if row is not None and turns.go_on_from(row, now) else None
        if last is not None and now < last:
            return
        following = turns.after(now, last)
        with self._database.write(alone=False) as session:
            state = turns.state
            session.merge(ScheduleJobRow(id=model, next_run_time=following, job_state=state))
            if last is not None:
                self._flag(session, DUE_FLAG, "1")
        if last is None:
            if row is not None:
                log.warning("schedule_row_replaced", job=model, was=row.job_state)
            log.info("schedule_begins", trigger=turns.words, next_at=following)

    def _tell(self, decision: Decision) -> None:
        now = self._clock()
        new = Condition(
            kind=SCHEDULE,
            line=self.line.name,
            code=decision.kind,
            message=decision.why,
            until=decision.again_at,
        )
        if new == self._told and 0 <= now - self._told_at < STATUS_S:
            return
        with self._database.write(alone=False) as session:
            write(session, new, now=now)
        self._told, self._told_at = new, now

    def _start(self, decision: Decision) -> None:
        run_id = uuid.uuid4().hex
        self._child, self._run_id = self._launch(run_id), run_id
        with self._database.write() as session:
            self._flag(session, REQUESTED_FLAG, "0")
        log.info("run_launched", run_id=run_id, why=decision.why)

    def _reap(self, *, stopped: bool = False) -> None:
        """Record the end of a child process. stopped: we stopped it, so no group is blamed."""
        code = self._child.exit_code() if self._child is not None else None
        if code is None:
            return
        reason = f"its process ended with {code}"
        hold = copy(self._hold)
        with self._database.write() as session:
            # A killed process cannot end its own run. The next start goes on with it where that is
            # possible; else it is ended here, or its lease blocks the next.
            goes_on = can_go_on(session, self._run_id, self._settings.learner.adapters_dir)
            if not goes_on:
                culprits = {} if stopped else blame_for_death(session, self._run_id, reason)
                abandon(session, self._run_id, reason, now=self._clock(), culprits=culprits)
            elif code < 0:
                self._say_killed(session, code)
            why = get_flag(session, flag_of(NO_ROOM_FLAG, self.line.name)) or ""
            if code == TRAINED:
                write_missing(session, (), now=self._clock())
            hold.begin(code, now=self._clock(), no_room=why)
            again = self._of_turn and hold.tries_again(goes_on=goes_on)
            if again:
                self._flag(session, DUE_FLAG, "1")
            stopped = code == STOPPED or (stopped and code < 0)
            if self._requested and stopped and not goes_on:
                self._flag(session, REQUESTED_FLAG, "1")
        self._child, self._hold = None, hold
        log.info("run_ended", run_id=self._run_id, exit_code=code, held_s=hold.wait_s)

    def _say_killed(self, session: Session, code: int) -> None:
        row = session.get_one(RunRow, self._run_id)
        if is_dead(row, self._clock()):  # else somebody goes on with it already
            row.reason = f"its process {ended_words(code)}; {GOES_ON}"

    def _situation(self, session: Session, elsewhere: bool) -> Situation:
        model, settings, now = self.line.name, self._settings.learner, self._clock()
        self._hold.shorten(now)
        groups = count_fresh(
            session,
            line=self.line,
            parent=find_parent(session, model).name,
            max_age=settings.max_age_versions,
        )
        if settings.idle_below:
            self._users.see(now, requests_of_users(session))

        def flag(name: str) -> bool:
            return get_flag(session, flag_of(name, model)) == "1"

        return Situation(
            running=self._child is not None,
            elsewhere=elsewhere,
            paused=flag(PAUSED_FLAG),
            requested=flag(REQUESTED_FLAG),
            due=self._by_groups or flag(DUE_FLAG),
            canary=undecided_canary(session, model),
            groups=groups,
            min_groups=settings.min_groups,
            now=now,
            hold_until=self._hold.until,
            held=self._hold.code == HELD,
            no_room=self._hold.no_room,
            failed=self._hold.failed,
            idle_below=settings.idle_below,
            users_per_minute=self._users.per_minute,
            unfinished=unfinished(session, model, now),
        )


def _waits(error: StoreError | OSError) -> None:
    of_store = isinstance(error, StoreError | ParentError)
    log.warning("learn_waits", kind="store" if of_store else "process", why=str(error))


class InTurn:
    """Polls the schedules of all lines of adapters, which share one device. After a run the other
    lines are asked first, in a circle, so that none waits for ever."""

    def __init__(self, schedules: Sequence[Schedule]) -> None:
        self._schedules = list(schedules)

    def poll(self) -> None:
        for schedule in self._schedules:
            schedule.reap()
        for schedule in list(self._schedules):
            busy = next((one for one in self._schedules if one.running), None)
            elsewhere = busy is not None and busy is not schedule
            decision = schedule.poll(elsewhere)
            if decision is not None and decision.start:
                self._schedules.remove(schedule)
                self._schedules.append(schedule)

    def stop(self) -> None:
        """Stop the child process, if there is one, and record its end."""
        for schedule in self._schedules:
            schedule.stop()


def start_clock(poll_s: float, poll: Callable[[], None]) -> BackgroundScheduler:
    """Have APScheduler call `poll` from its own thread every so many seconds."""
    clock = BackgroundScheduler(timezone=UTC)
    clock.add_job(poll, IntervalTrigger(seconds=poll_s), max_instances=1, coalesce=True)
    clock.start()
    return clock


def run_schedule(
    settings: Settings,
    database: Database,
    config: Path | None,
    *,
    clock: Callable[[], float],
    stopping: threading.Event,
    measure: bool = False,
) -> int:
    """Run the schedules of all lines until `stopping` is set.

    measure: begin with what `--measure` does, in the process of the runs: this one loads no torch.
    Returns: the exit code, 0. Raises: SettingsError when `learner.cron` is no cron expression.
    """
    worker = Worker(config)
    schedules = [
        Schedule(
            settings.of_line(line),
            database,
            partial(worker.launch, project=line.project),
            clock=clock,
        )
        for line in settings.lines
    ]
    turns = InTurn(schedules)
    if measure:
        worker.start("--measure")

    def poll() -> None:
        turns.poll()
        worker.rest()

    ticking = start_clock(POLL_S, poll)
    log.info("learn_ready", schedule=settings.learner.schedule, lines=len(schedules))
    tell_ready()
    stopping.wait()
    ticking.shutdown(wait=True)
    turns.stop()
    worker.stop()
    log.info("learner_stopped")
    return 0
