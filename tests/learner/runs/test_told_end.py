"""What a tracker is told when a run ends, and that it is told last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import select

from learner.errors import NonFiniteError, RankLostError
from learner.progress import export
from learner.progress.watch import Progress
from learner.records import End, StepMetrics, TrainingJob
from learner.runs.train import Run
from sidecar.settings import Settings
from sidecar.store.database import Database
from sidecar.store.models import AdapterRow, RunRow
from support.clock import Clock

if TYPE_CHECKING:
    from tests.learner.conftest import FakeTrainer, MakeScoredGroup, PutGroup


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
def run(
    settings: Settings,
    database: Database,
    clock: Clock,
    fake_trainer: FakeTrainer,
    put_group: PutGroup,
    scored_group: MakeScoredGroup,
) -> Run:
    put_group(scored_group([0.0, 1.0], group_id="a"))
    put_group(scored_group([0.2, 0.6], group_id="b"))
    trainer = lambda: fake_trainer  # noqa: E731
    return Run(settings, database, trainer, run_id="r1", clock=clock, heartbeat_s=0.01)


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


def stop(run: Run, _database: Database) -> Callable[[TrainingJob], None]:
    def act(job: TrainingJob) -> None:
        run.stop()
        job.check_stop()

    return act


def lose_a_process(_run: Run, _database: Database) -> Callable[[TrainingJob], None]:
    def act(job: TrainingJob) -> None:
        raise RankLostError("process 1 is gone")

    return act


def diverge(_run: Run, _database: Database) -> Callable[[TrainingJob], None]:
    def act(job: TrainingJob) -> None:
        raise NonFiniteError("step 1: its loss is nan")

    return act


def stand_still(_run: Run, database: Database) -> Callable[[TrainingJob], None]:
    def act(job: TrainingJob) -> None:
        with database.write() as session:
            row = session.get_one(RunRow, "r1")
            row.holder = {**(row.holder or {}), "token": "of another process"}

    return act


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
    cause: Callable[[Run, Database], Callable[[TrainingJob], None]],
    told: tuple[End | None, str, str, list[str]],
    run: Run,
    tracker: Tracker,
    database: Database,
    fake_trainer: FakeTrainer,
) -> None:
    fake_trainer.on_train = cause(run, database)

    with pytest.raises(Exception, match=r"stop|gone|nan|lease"):
        run.start()

    assert tracker.told == [told]
