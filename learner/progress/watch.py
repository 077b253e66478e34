"""The progress of a run, in the store, a tracker, the log and a terminal.

`RunWatch` counts, and passes on a report at each change of
phase and at most every few seconds. It is told from the run's own thread. A step is stored when it
is done, so a run that fails later still has its curves. A store that is locked costs a report, and
never the run. A terminal has a sentence for each report and each step, and not the log's event too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, Protocol

import structlog
from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from learner.records import End, Part, Phase, Stage, StageName, StepMetrics, TrainingGroup
from sidecar import conditions
from sidecar.errors import StoreError
from sidecar.logs import IN_WORDS
from sidecar.store.database import Database
from sidecar.store.models import RunRow, RunStepRow

# How much of a run is done, and how long the rest will take. Pure.

COST: dict[StageName, float] = {"checking": 1.0, "anchoring": 1.0, "training": 3.0}
"""Work of a token. A backward pass takes twice the operations of a forward pass (Kaplan et al.,
arXiv:2001.08361, section 2.1). It only matters until the stage's own speed is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a run is."""

    phase: Phase
    answers_done: int = 0
    """Answers of the present phase that are done; with `answers` 0, nothing is counted yet."""
    answers: int = 0
    step: int = 0
    """The optimiser step that is computed, from 1; 0 outside of the steps."""
    steps: int = 0
    tokens_done: int = 0
    """Tokens of all passes of the run that are done."""
    tokens_left: int = 0
    left_s: float | None = None
    """Estimated seconds until the last step is done; None while nothing is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """What a stage has taken so far."""

    work: float
    """Tokens times `COST`."""
    seconds: float

    @property
    def unit_s(self) -> float | None:
        """Seconds for a unit of work; None while none is done."""
        return self.seconds / self.work if self.work > 0 else None


def stage(name: StageName, groups: Sequence[TrainingGroup], *, steps: Sequence[int] = ()) -> Stage:
    """Return a stage over these groups, in this order. steps: [groups] the optimiser step of each;
    empty: the stage takes none."""
    of_step = list(steps) or [0] * len(groups)
    return Stage(
        name=name,
        parts=tuple(_part(group, step) for group, step in zip(groups, of_step, strict=True)),
        steps=max(of_step, default=0),
    )


def _part(group: TrainingGroup, step: int) -> Part:
    rows = [row for row in group.rows if row.trainable]
    return Part(
        group_id=group.group_id,
        answers=len(rows),
        tokens=len(group.prompt_token_ids) + sum(len(row.token_ids) for row in rows),
        step=step,
    )


def time_left(stages: Sequence[Stage], done: int, measured: Timed, before: Timed) -> float | None:
    """Estimate the seconds that the stages still take.

    stages: the present one first; `done` of its parts are computed, which took `measured`.
    before: the time of the stage before it. Returns: None when neither is measured.
    """
    unit_s = measured.unit_s if measured.unit_s is not None else before.unit_s
    if unit_s is None:
        return None
    left = sum(
        COST[one.name] * sum(part.tokens for part in (one.parts[done:] if not place else one.parts))
        for place, one in enumerate(stages)
    )
    return left * unit_s


def progress(
    stages: Sequence[Stage], done: int, *, tokens_before: int, measured: Timed, before: Timed
) -> Progress:
    """Describe a run whose present stage, the first of `stages`, has `done` parts computed.
    tokens_before: of the stages that are over."""
    present = stages[0]
    computed, rest = present.parts[:done], present.parts[done:]
    return Progress(
        phase=present.name,
        answers_done=sum(part.answers for part in computed),
        answers=present.answers,
        step=rest[0].step if rest else present.steps,
        steps=present.steps,
        tokens_done=tokens_before + sum(part.tokens for part in computed),
        tokens_left=sum(part.tokens for part in rest) + sum(one.tokens for one in stages[1:]),
        left_s=time_left(stages, done, measured, before),
    )


def words(one: Progress) -> str:
    """Say in one line where a run is. The time is that of the run, the answers are the phase's."""
    if not one.answers:
        return SAID.get(one.phase, one.phase)
    at = f"step {one.step} of {one.steps}, " if one.steps else ""
    known = one.left_s is not None and one.tokens_left > 0
    left = f", {duration(one.left_s or 0.0)} left" if known else ""
    return f"{one.phase}: {at}{one.answers_done:,} of {one.answers:,} answers{left}"


SAID: dict[Phase, str] = {
    "measuring": "measuring how far the policy is from the base",
    "saving": "saving the adapter",
}
"""Phase in which nothing is counted -> its words, where its name does not say enough."""


def step_words(one: StepMetrics, *, steps: int = 0) -> str:
    """Say in one line what an optimiser step did. steps: of the run; 0: not known."""
    of = f" of {steps}" if steps else ""
    seconds = f"{one.seconds:,.0f}" if one.seconds >= 10 else f"{one.seconds:.2g}"
    return (
        f"step {one.step}{of}: reward {one.reward_mean:.2f}, spread {one.reward_spread:.2f}, "
        f"loss {one.loss:.2g}, KL {one.approx_kl:.1g}, {seconds} s"
    )


def duration(seconds: float) -> str:
    """Return an estimated duration in words: two digits of it are noise already."""
    if seconds < 90:
        return f"about {max(1, round(seconds))} s"
    if seconds < 90 * 60:
        return f"about {round(seconds / 60)} min"
    return f"about {seconds / 3600:.1f} h"


log = structlog.get_logger()

TOLD_S = 2.0
"""Least time between two reports of one phase to the store and to a terminal."""
LOGGED_S = 30.0
"""... and to the log, which keeps them."""


class Keeper(Protocol):
    """Keeps what a run tells."""

    def keep_progress(self, found: Progress) -> None:
        """Keep where the run is, in place of what was kept before."""

    def begin_steps(self, done: Sequence[StepMetrics]) -> None:
        """Keep exactly these steps, which were told before the run was killed; none: it begins."""

    def keep_step(self, metrics: StepMetrics) -> None:
        """Keep a step's figures."""

    def end(self, how: End | None, adapter: str) -> None:
        """The run has ended, and its row says so.

        how: None: another process goes on with it. adapter: the version that it made; "": none.
        """


class RunWatch:
    """Implements `Watch` for one run."""

    def __init__(
        self,
        keepers: Sequence[Keeper],
        *,
        show: Callable[[str], None] = lambda line: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """show: prints a line on a terminal. clock: seconds, which only grow."""
        self._keepers = keepers
        self._show = show
        self._clock = clock
        self._stages: list[Stage] = []
        self._places: dict[str, int] = {}
        self._done = 0
        self._skipped = 0
        self._tokens_before = 0
        self._started = clock()
        self._before = Timed(work=0.0, seconds=0.0)
        self._shown = ""
        self._told_at = self._logged_at = float("-inf")

    def phase(self, name: Phase) -> None:
        self._leave_stage()
        self._stages = []
        self._tell(Progress(phase=name, tokens_done=self._tokens_before), now=True)

    def plan(self, stages: Sequence[Stage]) -> None:
        self._leave_stage()
        self._stages = list(stages)
        self._begin_stage()

    def done(self, group_id: str) -> None:
        place = self._places.get(group_id)
        if place is None or not self._stages:
            return
        self._done = max(self._done, place + 1)
        if self._done == len(self._stages[0].parts) and len(self._stages) > 1:
            self._leave_stage()
            self._stages = self._stages[1:]
            self._begin_stage()
        else:
            self._tell(self._progress(), now=False)

    def begin_steps(self, done: Sequence[StepMetrics]) -> None:
        for keeper in self._keepers:
            keeper.begin_steps(done)
        if done and self._stages:
            parts = self._stages[0].parts
            self._done = self._skipped = sum(part.step <= len(done) for part in parts)
            self._tell(self._progress(), now=True)

    def step(self, metrics: StepMetrics) -> None:
        log.info("step_done", **metrics.flat, **{IN_WORDS: True})
        self._show(step_words(metrics, steps=self._stages[0].steps if self._stages else 0))
        for keeper in self._keepers:
            keeper.keep_step(metrics)
        if self._stages:
            self._tell(self._progress(), now=True)

    def end(self, how: End | None, adapter: str = "") -> None:
        for keeper in self._keepers:
            keeper.end(how, adapter)

    def _begin_stage(self) -> None:
        self._started = self._clock()
        self._done = self._skipped = 0
        self._places = {part.group_id: at for at, part in enumerate(self._stages[0].parts)}
        self._tell(self._progress(), now=True)

    def _leave_stage(self) -> None:
        if self._stages and self._done > self._skipped:
            self._before = self._measured()
        if self._stages:
            self._tokens_before += sum(one.tokens for one in self._stages[0].parts[: self._done])

    def _measured(self) -> Timed:
        present = self._stages[0]
        tokens = sum(part.tokens for part in present.parts[self._skipped : self._done])
        return Timed(work=COST[present.name] * tokens, seconds=self._clock() - self._started)

    def _progress(self) -> Progress:
        return progress(
            self._stages,
            self._done,
            tokens_before=self._tokens_before,
            measured=self._measured(),
            before=self._before,
        )

    def _tell(self, found: Progress, *, now: bool) -> None:
        """now: whatever was told when."""
        at = self._clock()
        if now or at - self._told_at >= TOLD_S:
            self._told_at = at
            if (line := words(found)) != self._shown:
                self._shown = line
                self._show(line)
            for keeper in self._keepers:
                keeper.keep_progress(found)
        if now or at - self._logged_at >= LOGGED_S:
            self._logged_at = at
            left_s = None if found.left_s is None else round(found.left_s)
            log.info("run_progress", **{**asdict(found), "left_s": left_s, IN_WORDS: True})


# A run's progress and steps in the store.


class StoredRun:
    """Implements `Keeper` over the store."""

    def __init__(
        self,
        database: Database,
        run_id: str,
        *,
        clock: Callable[[], float],
        holds: Callable[[Session], bool] = lambda session: True,
    ) -> None:
        """clock: Unix seconds. holds: asked in the transaction of each write, whether the run is
        still this process's."""
        self._database = database
        self._run_id = run_id
        self._clock = clock
        self._holds = holds
        self._lost = False
        self._unwritten: list[RunStepRow] = []
        self._missing: list[RunStepRow] = []
        """Steps that may be in the store already, and then keep the time that they have."""
        self._stale_after: int | None = None
        """Steps with a higher number, of an attempt that was given up, are still in the store."""

    def keep_progress(self, found: Progress) -> None:
        values = {"progress": {**asdict(found), "at": self._clock()}}
        self._write(
            "progress",
            lambda session: session.execute(
                update(RunRow).where(RunRow.run_id == self._run_id).values(values)
            ),
        )

    def begin_steps(self, done: Sequence[StepMetrics]) -> None:
        self._unwritten, self._missing = [], [self._row(one) for one in done]
        self._stale_after = len(done)
        self._write("steps", self._flush)

    def keep_step(self, metrics: StepMetrics) -> None:
        self._unwritten.append(self._row(metrics))
        self._write("steps", self._flush)

    def end(self, how: End | None, adapter: str) -> None:
        """The run's row has its end already."""

    def _row(self, metrics: StepMetrics) -> RunStepRow:
        body = {key: _number(value) for key, value in asdict(metrics).items()}
        return RunStepRow(run_id=self._run_id, step=metrics.step, at=self._clock(), body=body)

    def _flush(self, session: Session) -> None:
        of_run = RunStepRow.run_id == self._run_id
        if self._stale_after is not None:
            session.execute(delete(RunStepRow).where(of_run, RunStepRow.step > self._stale_after))
        if self._missing:
            present = set(session.scalars(select(RunStepRow.step).where(of_run)))
            for row in self._missing:
                if row.step not in present:
                    session.merge(row)
        for row in self._unwritten:
            session.merge(row)

    def _write(self, what: str, change: Callable[[Session], object]) -> None:
        if self._lost:
            return
        try:
            with self._database.write(alone=False) as session:
                if not self._holds(session):
                    self._lost = True
                    why = "the run has ended, or another process goes on with it"
                    log.warning("progress_not_kept", run_id=self._run_id, what=what, error=why)
                    return
                change(session)
        except StoreError as error:
            log.warning("progress_not_kept", run_id=self._run_id, what=what, error=str(error))
            return
        if what == "steps":
            self._unwritten, self._missing, self._stale_after = [], [], None


def _number(value: Any) -> Any:  # Any: a field of StepMetrics
    return None if isinstance(value, float) and not math.isfinite(value) else value


def how_ended(database: Database, run_id: str) -> End | None:
    """Return how a run ended; None: it did not, or the store cannot say so now, or not at all."""
    try:
        with database.read() as session:
            status = session.scalar(select(RunRow.status).where(RunRow.run_id == run_id))
    except StoreError:  # asked again when the next run begins
        return None
    return ENDS.get(status or "")


ENDS: dict[str, End] = {"finished": "ok", "skipped": "ok", "failed": "failed"}
"""`training_run.status` -> the end."""


# What runs need and the learner's machine does not have. The next successful run clears it.

MISSING = "missing "
"""How the kind of the condition begins; the setting follows."""


class Missing(NamedTuple):
    """One thing that a run needs and does not have here."""

    setting: str
    why: str
    """What is wrong, and what to do."""
    level: Literal["error", "warning"] = "error"
    """`error`: no run can work. `warning`: it works with less, or once others leave the device."""


def note_missing(lacks: Sequence[Missing], database: Database, *, now: float) -> None:
    """Log what runs lack, and store it for `sidecar status`. Raises: StoreError."""
    for one in lacks:
        event = "learner_cannot_run" if one.level == "error" else "learner_lacks"
        log.warning(event, setting=one.setting, why=one.why)
    with database.write(alone=False) as session:
        write_missing(session, lacks, now=now)


def write_missing(session: Session, lacks: Sequence[Missing], *, now: float) -> None:
    """Store what runs lack; nothing: none is known to lack any more."""
    for known in conditions.read_all(session):
        if known.kind.startswith(MISSING):
            conditions.clear(session, known.kind)
    for one in lacks:
        found = conditions.Condition(
            kind=MISSING + one.setting,
            state="act" if one.level == "error" else "look",
            code="learner_cannot_run" if one.level == "error" else "learner_lacks",
            message="the learner found at its start: "
            + " ".join(f"{one.setting}: {one.why}".split()),
            since=now,
        )
        conditions.write(session, found, now=now)
