"""`python -m learner --once`: its line, its exit code, and how it takes TERM."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from learner import once
from learner.command import NO_ROOM_FLAG, STOPPED
from learner.distributed.place import Place
from learner.errors import RunInProgressError, TinkerServerError
from learner.once import as_launched, run_once, start_when_free, trainer_of
from learner.policy import memory
from learner.records import Candidate, Part, Stage
from learner.resume import how_released
from learner.runs.interrupted import GOES_ON
from sidecar.errors import SettingsError
from sidecar.settings import Learner, Settings
from sidecar.store.database import Database, get_flag
from sidecar.store.models import GroupRow, RunRow
from support.clock import Clock
from tests.learner.conftest import FakeTrainer, PutGroup, make_scored_group


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """Give the process its signal handlers back."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.fixture
def stopping() -> threading.Event:
    return threading.Event()


@pytest.fixture
def run(
    settings: Settings,
    database: Database,
    clock: Clock,
    fake_trainer: FakeTrainer,
    monkeypatch: pytest.MonkeyPatch,
    stopping: threading.Event,
) -> Callable[[], int]:
    monkeypatch.setattr(once, "torch_trainer", lambda: fake_trainer)
    return lambda: run_once(settings, database, run_id="r1", clock=clock, stopping=stopping)


@pytest.mark.usefixtures("two_groups")
def test_a_tinker_server_that_is_away_fails_the_run_in_one_line_and_costs_no_group(
    run: Callable[[], int],
    fake_trainer: FakeTrainer,
    database: Database,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake_trainer.error = TinkerServerError("the Tinker server at http://t failed at connecting")

    assert run() == 1

    said = capsys.readouterr().err
    assert said == "learner: the Tinker server at http://t failed at connecting\n"
    with database.read() as session:
        groups = session.execute(select(GroupRow.status, GroupRow.attempts)).all()
    assert [tuple(one) for one in groups] == [("scored", 0), ("scored", 0)]


def test_the_settings_name_the_trainer(learner_settings: Learner) -> None:
    tinker = learner_settings.model_copy(update={"tinker_url": "http://trainer:8000"})

    assert type(trainer_of(tinker, None)).__name__ == "TinkerTrainer"
    assert type(trainer_of(learner_settings, None)).__name__ == "GrpoTrainer"
    several = learner_settings.model_copy(update={"processes": 2})
    assert type(trainer_of(several, None)).__name__ == "RankedTrainer"


def test_a_launcher_beside_a_tinker_server_is_refused(settings: Settings) -> None:
    tinker = settings.learner.model_copy(update={"tinker_url": "http://trainer:8000"})
    settings = settings.model_copy(update={"learner": tinker})

    with pytest.raises(SettingsError, match="start one process"):
        as_launched(settings, Place(0, 2, 0, 2))


@pytest.mark.usefixtures("two_groups")
def test_a_trained_run_says_how_many_groups_it_left_out_and_why(
    run: Callable[[], int], put_group: PutGroup, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(3):
        put_group(make_scored_group([0.5, 0.5], group_id=f"flat {number}"))
    put_group(make_scored_group([0.0, 1.0], group_id="of nobody", adapter="gone"))

    assert run() == 0
    first, last = capsys.readouterr().out.splitlines()[-2:]
    assert first == (
        "2 groups used; left out: 3 no_spread, 1 unknown_adapter (`sidecar groups ls`)"
    )
    assert last.startswith("trained m--v1-")
    assert last.endswith(" from base")


def test_nothing_to_learn_exits_3_and_says_why(
    run: Callable[[], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run() == 3
    assert "0 fresh scored groups wait" in capsys.readouterr().out


@pytest.mark.usefixtures("two_groups")
def test_a_run_that_would_not_fit_exits_5_takes_nothing_and_tells_the_schedule(
    run: Callable[[], int],
    database: Database,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "room_of", lambda *_: memory.Room(total=10**9, free=1, share=1.0))

    assert run() == 5

    assert capsys.readouterr().out.startswith("no room, nothing was trained: a run needs about ")
    with database.read() as session:
        assert session.scalars(select(RunRow)).all() == []
        assert set(session.scalars(select(GroupRow.status))) == {"scored"}
        told = get_flag(session, NO_ROOM_FLAG)
    assert told is not None
    assert told.startswith("a run needs about ")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.usefixtures("two_groups")
def test_a_person_at_a_terminal_sees_where_the_run_is(
    run: Callable[[], int], fake_trainer: FakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = Part(group_id="a", answers=2, tokens=9)
    fake_trainer.on_train = lambda job: job.watch.plan([Stage(name="checking", parts=(part,))])
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)

    assert run() == 0

    lines = terminal.getvalue().splitlines()
    assert "loading" in lines
    assert "checking: 0 of 2 answers" in lines


@pytest.mark.usefixtures("two_groups")
def test_term_stops_the_run_which_the_next_start_goes_on_with(
    run: Callable[[], int],
    fake_trainer: FakeTrainer,
    database: Database,
    stopping: threading.Event,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def be_terminated(job: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        job.check_stop()

    fake_trainer.on_train = be_terminated

    assert run() == STOPPED
    said = capsys.readouterr().out
    assert said.endswith("stopped run r1: the next start goes on with it\n")
    with database.read() as session:
        assert {row.status for row in session.query(GroupRow)} == {"claimed"}
        row = session.get_one(RunRow, "r1")
        assert (row.status, row.place, how_released(row.holder)) == ("running", "", "stopped")

    fake_trainer.on_train = lambda job: None
    stopping.clear()  # another process
    assert run() == 0
    said = capsys.readouterr().out
    assert ", in run r1, resumed before its first step" in said


@pytest.mark.usefixtures("two_groups")
def test_a_signal_that_came_before_the_run_stops_it(
    run: Callable[[], int], stopping: threading.Event, fake_trainer: FakeTrainer, database: Database
) -> None:
    stopping.set()
    fake_trainer.on_train = lambda job: job.check_stop()

    assert run() == STOPPED
    with database.read() as session:
        assert session.get_one(RunRow, "r1").reason == f"asked to stop; {GOES_ON}"


def candidate() -> Candidate:
    return Candidate(adapter="a", parent="base", version=1, digest="d", path=Path("/p"))


def never_woken(_seconds: float) -> bool:
    return False


def test_a_dead_runs_lease_is_waited_for() -> None:
    answers: list[Any] = [RunInProgressError("dead", 1.0), RunInProgressError("dead", 1.0)]

    def start() -> Candidate:
        if answers:
            raise answers.pop()
        return candidate()

    assert start_when_free(start, wait=never_woken) == candidate()


def test_a_run_that_lives_is_not_waited_for() -> None:
    beats = iter([1.0, 1.0, 4.0])

    def start() -> Candidate:
        raise RunInProgressError("alive", next(beats))

    with pytest.raises(RunInProgressError):
        start_when_free(start, wait=never_woken)
    assert next(beats, None) is None


def test_waiting_for_a_lease_ends_when_asked() -> None:
    def start() -> Candidate:
        raise RunInProgressError("dead", 1.0)

    with pytest.raises(RunInProgressError):
        start_when_free(start, wait=lambda _seconds: True)


@pytest.mark.tier_2
def test_a_killed_learner_process_stops_cleanly(tmp_path: Path, database: Database) -> None:
    """The real schedule as a process: it says it is ready, and TERM ends it with 0."""
    config = tmp_path / "sidecar.toml"
    config.write_text(f'[store]\nurl = "{database.url}"\n[learner]\nschedule = "manual"\n')
    command = [sys.executable, "-m", "learner", "--config", str(config)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        killer = threading.Timer(60, process.kill)
        killer.start()
        try:
            assert process.stderr is not None
            seen = next(line for line in process.stderr if "learn_ready" in line)
            assert "manual" in seen
            process.terminate()
            assert process.wait(30) == 0
        finally:
            killer.cancel()


def test_only_the_trainer_loads_torch() -> None:
    """Deploy reads the learner's records and folders, and the schedule idles for days."""
    room = Path(once.__file__).parent
    modules = {
        ".".join(path.relative_to(room.parent).with_suffix("").parts)
        for path in room.rglob("*.py")
        if path.name not in ("__init__.py", "__main__.py")
    }
    with_torch = {
        f"learner.{name}"
        for name in (
            "distributed.exchange",
            "distributed.sharded",
            "distributed.trainer",
            "grpo.base_kl",
            "grpo.checkpoint",
            "grpo.checks",
            "grpo.losses",
            "grpo.optimizer",
            "grpo.trainer",
            "policy.adapter_io",
            "policy.architecture",
            "policy.attention",
            "policy.costs",
            "policy.kept",
            "policy.logprobs",
            "policy.memory",
            "policy.self_test",
            "tinker",
        )
    }
    without = sorted(modules - with_torch)
    assert with_torch < modules
    program = "\n".join(
        [
            "import sys",
            *(f"import {name}" for name in without),
            "loaded = {'torch', 'transformers', 'peft'} & sys.modules.keys()",
            "assert not loaded, loaded",
        ]
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
