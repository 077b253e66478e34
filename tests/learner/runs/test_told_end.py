"""What a tracker is told when a run ends, and that it is told last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from sqlalchemy import select

from learner.errors import NonFiniteError, RankLostError
from learner.progress import export
from learner.progress.watch import Progress
from learner.records import End, StepMetrics, TrainingJob
from learner.runs.train import Run
from sidecar.store.database import Database
from sidecar.store.models import AdapterRow, RunRow
from tests.learner.conftest import FakeTrainer, NewRun


class Tracker:
    """Keeps how the run ended, and what its row and the registry had then."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.facts: dict[str, Any] = {}
        self.told: list[tuple[End | None, str, str, list[str]]] = []

    def keep_progress(self, found: Progress) -> None: ...
    def begin_steps(self, done: Sequence[StepMetrics]) -> None: ...
    def keep_step(self, metrics: StepMetrics) -> None: ...

    def end(self, how: End | None, adapter: str) -> None:
        with self.database.read() as session:
            status = session.get_one(RunRow, "r1").status
            made = list(session.scalars(select(AdapterRow.name)))
        self.told.append((how, adapter, status, made))


@pytest.fixture
def tracker(database: Database, monkeypatch: pytest.MonkeyPatch) -> Tracker:
    made = Tracker(database)

    def exported(setting: str, run_id: str, *, facts: Callable[[], Any]) -> Tracker:
        made.facts = dict(facts())
        return made

    monkeypatch.setattr(export, "exported_run", exported)
    return made


@pytest.fixture
def run(new_run: NewRun, two_groups: None) -> Run:
    return new_run()


def test_a_run_ends_well_once_its_version_is_registered(run: Run, tracker: Tracker) -> None:
    candidate = run.start()

    assert tracker.told == [("ok", candidate.adapter, "finished", [candidate.adapter])]
    assert (tracker.facts["parent"], tracker.facts["learner.rank"]) == ("base", 4)


def test_a_publication_that_fails_is_a_failure(
    run: Run, tracker: Tracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("learner.runs.train.seal", refuse)

    with pytest.raises(OSError, match="Input/output"):
        run.start()

    assert tracker.told == [("failed", "", "failed", [])]


def stop(run: Run, job: TrainingJob, _: Database) -> None:
    run.stop()
    job.check_stop()


def lose_a_process(*_: object) -> None:
    raise RankLostError("process 1 is gone")


def diverge(*_: object) -> None:
    raise NonFiniteError("step 1: its loss is nan")


def stand_still(_run: Run, _job: TrainingJob, database: Database) -> None:
    with database.write() as session:
        row = session.get_one(RunRow, "r1")
        row.holder = {**(row.holder or {}), "token": "of another process"}


@pytest.mark.parametrize(
    ("cause", "told"),
    [
        (stop, ("killed", "", "running", [])),
        (lose_a_process, ("killed", "", "running", [])),
        (diverge, ("failed", "", "failed", [])),
        (stand_still, (None, "", "running", [])),
    ],
)
def test_a_run_that_is_cut_short_says_how(
    cause: Callable[[Run, TrainingJob, Database], None],
    told: tuple[End | None, str, str, list[str]],
    run: Run,
    tracker: Tracker,
    database: Database,
    fake_trainer: FakeTrainer,
) -> None:
    fake_trainer.on_train = lambda job: cause(run, job, database)

    with pytest.raises(Exception, match=r"stop|gone|nan|lease"):
        run.start()

    assert tracker.told == [told]
