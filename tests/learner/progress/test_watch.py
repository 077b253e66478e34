"""Who is told what a run does, and when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import select, text
from structlog.testing import capture_logs

from learner.progress.watch import TOLD_S, Progress, RunWatch, StoredRun
from learner.records import Part, Stage, StepMetrics
from learner.runs.runs import open_run
from sidecar.logs import IN_WORDS
from sidecar.store.database import Database
from sidecar.store.models import RunRow, RunStepRow
from support.clock import Clock

NUMBERS: dict[str, Any] = {
    **dict.fromkeys(StepMetrics.__dataclass_fields__, 0.0),
    "left_out": {},
}


@dataclass
class Kept:
    """Keeps everything in memory."""

    seen: list[Progress] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    ended: list[tuple[str | None, str]] = field(default_factory=list)

    def keep_progress(self, found: Progress) -> None:
        self.seen.append(found)

    def begin_steps(self, done: Sequence[StepMetrics]) -> None:
        self.steps[:] = [one.step for one in done]

    def keep_step(self, metrics: StepMetrics) -> None:
        self.steps.append(metrics.step)

    def end(self, how: str | None, adapter: str) -> None:
        self.ended.append((how, adapter))


def a_step(number: int, **changes: Any) -> StepMetrics:
    return StepMetrics(**{**NUMBERS, "step": number, **changes})


def two_stages() -> list[Stage]:
    parts = tuple(Part(group_id=name, answers=1, tokens=10, step=1) for name in "abc")
    return [Stage(name="checking", parts=parts), Stage(name="training", parts=parts, steps=1)]


def test_each_phase_is_told_at_once_and_groups_at_most_every_few_seconds() -> None:
    kept, clock = Kept(), Clock(0.0)
    shown: list[str] = []
    watch = RunWatch([kept], show=shown.append, clock=clock)

    watch.phase("loading")
    clock.now += 100.0
    watch.plan(two_stages())
    watch.done("a")  # at once after the phase: not told
    clock.now += TOLD_S
    watch.done("b")
    watch.done("c")  # the last one: the steps begin

    assert [(one.phase, one.answers_done) for one in kept.seen] == [
        ("loading", 0),
        ("checking", 0),
        ("checking", 2),
        ("training", 0),
    ]
    # 100 s of loading are in no estimate: 20 tokens took 2 s, and 10 + 3 * 30 are left.
    assert kept.seen[2].left_s == 0.1 * (10 + 3 * 30)
    assert kept.seen[3].tokens_done == 30
    assert shown[0] == "loading"
    assert len(shown) == 4


def test_a_group_of_no_stage_is_no_progress() -> None:
    kept = Kept()
    watch = RunWatch([kept])

    watch.done("a")
    watch.plan(two_stages())
    watch.done("foreign")

    assert [one.answers_done for one in kept.seen] == [0]


def test_a_step_is_one_line_at_the_terminal_and_one_event_of_the_log() -> None:
    shown: list[str] = []
    watch = RunWatch([], show=shown.append)
    figures = {
        "reward_mean": 0.3930583333333334,
        "reward_spread": 0.1521737811385441,
        "loss": 0.01569626131780535,
        "approx_kl": 0.0005008608525295944,
        "seconds": 28.983795123000164,
    }
    parts = tuple(Part(group_id=name, answers=1, tokens=10, step=1) for name in "abc")
    watch.plan([Stage(name="training", parts=parts, steps=3)])

    with capture_logs() as logs:
        watch.step(a_step(2, **figures))
        watch.plan([Stage(name="training", parts=parts, steps=3)])
        watch.step(a_step(3, **{**figures, "seconds": 1_234.5}))

    assert "step 2 of 3: reward 0.39, spread 0.15, loss 0.016, KL 0.0005, 29 s" in shown
    assert len(set(shown)) == len(shown)  # what is no news is not shown again
    assert shown[-1].endswith("KL 0.0005, 1,234 s")
    event, _ = [one for one in logs if one["event"] == "step_done"]
    assert {key: event[key] for key in figures} == figures
    assert event[IN_WORDS]


def a_run(database: Database) -> None:
    with database.write() as session:
        open_run(session, run_id="r1", model="m", parent="base", settings={}, now=1.0)


def test_progress_and_steps_are_in_the_store_while_the_run_goes_on(
    database: Database, clock: Clock
) -> None:
    a_run(database)
    kept = StoredRun(database, "r1", clock=clock)

    kept.keep_progress(Progress(phase="checking", answers_done=1, answers=4))
    kept.begin_steps(())
    kept.keep_step(a_step(1, reward_mean=0.5))
    kept.keep_step(a_step(2))
    kept.begin_steps(())
    kept.keep_step(a_step(1, reward_mean=0.75, loss=float("nan")))

    with database.read() as session:
        row = session.get_one(RunRow, "r1")
        assert row.status == "running"
        assert row.progress is not None
        assert (row.progress["phase"], row.progress["answers"]) == ("checking", 4)
        assert row.progress["at"] == clock.now
        (step,) = session.scalars(select(RunStepRow)).all()
        assert (step.step, step.at) == (1, clock.now)
        assert (step.body["reward_mean"], step.body["loss"]) == (0.75, None)


def test_a_store_that_refuses_costs_a_report_and_the_step_comes_with_the_next(
    database: Database, clock: Clock
) -> None:
    a_run(database)
    kept = StoredRun(database, "r1", clock=clock)

    _rename(database, "run_step", "away")
    kept.keep_step(a_step(1))
    _rename(database, "away", "run_step")
    kept.keep_step(a_step(2))

    with database.read() as session:
        assert session.scalars(select(RunStepRow.step).order_by(RunStepRow.step)).all() == [1, 2]


def test_a_run_that_is_another_process_s_by_now_keeps_its_steps_and_progress(
    database: Database, clock: Clock
) -> None:
    a_run(database)
    held = True
    first = StoredRun(database, "r1", clock=clock, holds=lambda session: held)
    first.keep_progress(Progress(phase="checking"))
    first.keep_step(a_step(1, loss=0.5))
    held = False

    with capture_logs() as logs:
        first.begin_steps(())
        first.keep_step(a_step(1, loss=0.25))
        first.keep_progress(Progress(phase="training"))

    with database.read() as session:
        row = session.get_one(RunRow, "r1")
        assert (row.progress or {})["phase"] == "checking"
        (step,) = session.scalars(select(RunStepRow)).all()
        assert step.body["loss"] == 0.5
    assert [entry["event"] for entry in logs] == ["progress_not_kept"]  # once


def _rename(database: Database, old: str, new: str) -> None:
    with database.write() as session:
        session.execute(text(f"ALTER TABLE {old} RENAME TO {new}"))
