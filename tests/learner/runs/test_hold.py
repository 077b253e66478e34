"""The reward watch before a run: what it does to rows and groups."""

from __future__ import annotations

import threading

import pytest
from sqlalchemy import select
from structlog.testing import capture_logs

from ingest.reward_watch.store import Override, write_override
from ingest.reward_watch.traits import Profile, RateOf, write_body
from learner.errors import HeldError
from learner.once import run_once
from learner.runs.runs import open_run
from learner.schedule.loop import REQUESTED_FLAG, Schedule
from learner.schedule.rule import HELD_S
from sidecar.settings import Settings
from sidecar.store.database import Database, set_flag
from sidecar.store.models import AdapterProfileRow, GroupRow, RunRow
from support.clock import Clock
from tests.learner.conftest import (
    FakeTrainer,
    NewRun,
    PutGroup,
    PutVersion,
    counters,
    make_scored_group,
)

pytestmark = pytest.mark.both_stores


def put_profile(database: Database, adapter: str, share: float) -> None:
    rates = {"refusal": RateOf(n=1_000, hits=round(1_000 * share), weight=1_000.0, sessions=1_000)}
    body = write_body(Profile(answers=1_000, sessions=1_000, newest=9, rates=rates))  # type: ignore[arg-type]
    with database.write() as session:
        session.merge(AdapterProfileRow(model="m", adapter=adapter, at=1.0, body=body))


@pytest.fixture
def refusing(database: Database, put_version: PutVersion, put_group: PutGroup) -> str:
    """A champion that refuses ten times as often as the base, and groups to learn from."""
    champion = put_version(1, champion=True)
    put_profile(database, "base", 0.02)
    put_profile(database, champion, 0.2)
    for name in ("a", "b"):
        put_group(make_scored_group([0.0, 1.0], group_id=name, adapter=champion))
    return champion


def rows(database: Database) -> list[RunRow]:
    with database.read() as session:
        return list(session.scalars(select(RunRow).order_by(RunRow.started_at)))


def group_states(database: Database) -> set[tuple[str, str | None]]:
    with database.read() as session:
        return {(row.status, row.run_id) for row in session.scalars(select(GroupRow))}


def test_a_held_run_is_a_row_with_its_figures_and_takes_nothing(
    refusing: str, database: Database, new_run: NewRun, fake_trainer: FakeTrainer
) -> None:
    with capture_logs() as logs, pytest.raises(HeldError, match=r"20\.0%"):
        new_run("r1").start()

    (row,) = rows(database)
    assert (row.status, row.parent, row.adapter) == ("held", refusing, None)
    assert "20.0% of the champion's answers are refusals" in str(row.reason)
    assert row.held is not None
    assert row.held["findings"][0]["check"] == "refusal"
    assert row.held["findings"][0]["figures"]["before"] == 0.02
    assert row.ended_at is not None
    assert fake_trainer.jobs == []
    assert group_states(database) == {("scored", None)}
    assert counters(database, "watch") == {"held_refusal": 1}
    assert [one["log_level"] for one in logs if one["event"] == "run_held"] == ["error"]


def test_asked_again_it_keeps_one_row_and_one_alarm(
    refusing: str, database: Database, new_run: NewRun, clock: Clock
) -> None:
    levels = []
    for name in ("r1", "r2", "r3"):
        with capture_logs() as logs, pytest.raises(HeldError):
            new_run(name).start()
        levels += [one["log_level"] for one in logs if one["event"] == "run_held"]
        clock.now += 600.0

    (row,) = rows(database)
    assert row.run_id == "r1"
    assert row.held is not None
    assert row.held["checks"] == 3
    assert row.ended_at == row.started_at + 1_200.0
    assert levels == ["error", "info", "info"]
    assert counters(database, "watch") == {"held_refusal": 1}


@pytest.mark.parametrize(
    "held", [{}, {"findings": 1, "checks": "x"}, {"findings": [{}], "checks": 1}]
)
def test_a_damaged_row_of_a_held_run_holds_all_the_same(
    refusing: str, database: Database, new_run: NewRun, held: dict[str, object]
) -> None:
    with pytest.raises(HeldError):
        new_run("r1").start()
    with database.write() as session:
        session.get_one(RunRow, "r1").held = held

    with pytest.raises(HeldError):
        new_run("r2").start()

    assert {row.run_id for row in rows(database)} == {"r1", "r2"}


def test_it_goes_on_when_the_figures_are_good_again(
    refusing: str, database: Database, new_run: NewRun, clock: Clock
) -> None:
    with pytest.raises(HeldError):
        new_run("r1").start()
    clock.now += 600.0
    put_profile(database, refusing, 0.02)

    new_run("r2").start()

    assert [row.status for row in rows(database)] == ["held", "finished"]
    assert group_states(database) == {("trained", "r2")}


def test_an_override_lets_runs_go_on_and_is_said(
    refusing: str, database: Database, new_run: NewRun
) -> None:
    with database.write() as session:
        write_override(session, "m", Override(champion=refusing, checks=("refusal",), at=1.0))

    with capture_logs() as logs:
        new_run("r1").start()

    assert [row.status for row in rows(database)] == ["finished"]
    assert "reward_watch_waived" in {one["event"] for one in logs}


def test_a_hold_takes_no_lease_and_ends_no_other_run(
    refusing: str, database: Database, new_run: NewRun, clock: Clock
) -> None:
    with database.write() as session:
        open_run(session, run_id="alive", model="m", parent="base", settings={}, now=clock.now)

    with pytest.raises(HeldError):
        new_run("r1").start()

    assert {row.run_id: row.status for row in rows(database)} == {"alive": "running", "r1": "held"}


def test_a_run_by_hand_that_is_held_ends_with_4_and_says_what_to_do(
    refusing: str,
    database: Database,
    settings: Settings,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)

    code = run_once(settings, database, run_id="r1", clock=clock, stopping=threading.Event())

    assert code == 4
    out = capsys.readouterr().out
    assert "held by the reward watch, nothing was trained: 20.0%" in out
    assert "sidecar learner override" in out


class _HeldChild:
    def exit_code(self) -> int:
        return 4

    def stop(self) -> None:
        """It has ended."""


def test_the_schedule_asks_again_after_a_while_and_at_once_when_told_to(
    refusing: str, database: Database, settings: Settings, clock: Clock
) -> None:
    launched: list[str] = []

    def launch(run_id: str) -> _HeldChild:
        launched.append(run_id)
        return _HeldChild()

    schedule = Schedule(settings, database, launch, clock=clock)
    schedule.poll()
    for _ in range(3):
        decision = schedule.poll()
        assert decision is not None
        assert decision.kind == "held"
        clock.now += 10.0
    assert len(launched) == 1

    clock.now += HELD_S
    schedule.poll()
    assert len(launched) == 2

    with database.write() as session:
        set_flag(session, REQUESTED_FLAG, "1", now=clock.now)
    schedule.poll()
    schedule.poll()
    assert len(launched) == 3
