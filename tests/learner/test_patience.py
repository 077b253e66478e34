"""A store that is locked for a while ends no run that has just begun."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from learner import once, patience
from learner.__main__ import main
from learner.once import run_once
from learner.patience import when_unlocked
from learner.runs import source, train
from learner.runs.runs import end_run
from sidecar.errors import StoreError, StoreLockedError
from sidecar.settings import Settings
from sidecar.store.database import Database
from support.clock import Clock
from tests.learner.conftest import FakeTrainer, PutGroup, make_scored_group

LOCKED = StoreLockedError("store s: database is locked: end that program, then try again")


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "PAUSE_S", 0.0)


def refusing(errors: Iterator[StoreError], work: Callable[..., Any]) -> Callable[..., Any]:
    """Raise each of the errors, then do the work."""

    def do(*given: Any, **named: Any) -> Any:
        for error in errors:
            raise error
        return work(*given, **named)

    return do


def test_a_locked_store_is_asked_again() -> None:
    work = refusing(iter([LOCKED] * 3), lambda: "done")

    assert when_unlocked(work, stopping=threading.Event(), doing="it") == "done"


def test_a_store_with_another_fault_is_not_asked_again() -> None:
    errors = iter([StoreError("disk full"), StoreError("asked again")])

    with pytest.raises(StoreError, match="disk full"):
        when_unlocked(refusing(errors, str), stopping=threading.Event(), doing="it")


def test_waiting_ends_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "LOCKED_S", -1.0)

    with pytest.raises(StoreLockedError, match="then try again"):
        when_unlocked(refusing(iter([LOCKED]), str), stopping=threading.Event(), doing="it")


def test_waiting_ends_when_asked() -> None:
    stopping = threading.Event()
    stopping.set()

    with pytest.raises(StoreLockedError):
        when_unlocked(refusing(iter([LOCKED]), str), stopping=stopping, doing="it")


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (once, "with_pack_tokens"),
        (train, "check_hold"),
        (train, "take_over"),
        (source, "drop"),
        (source, "claim"),
    ],
)
def test_a_lock_while_a_run_begins_costs_it_nothing(
    settings: Settings,
    database: Database,
    clock: Clock,
    fake_trainer: FakeTrainer,
    put_group: PutGroup,
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    name: str,
) -> None:
    put_group(make_scored_group([0.0, 1.0], group_id="a"))
    put_group(make_scored_group([0.2, 0.6], group_id="b"))
    put_group(make_scored_group([0.2, 0.6], group_id="of nobody", adapter="gone"))
    monkeypatch.setattr(module, name, refusing(iter([LOCKED] * 2), getattr(module, name)))

    stopping = threading.Event()
    code = run_once(
        settings,
        database,
        run_id="r",
        clock=clock,
        stopping=stopping,
        trainer=lambda: fake_trainer,
    )

    assert code == 0
    assert fake_trainer.jobs[0].groups


def test_a_lock_while_a_run_ends_without_a_result_costs_it_nothing(
    settings: Settings,
    database: Database,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(train, "end_run", refusing(iter([LOCKED] * 2), end_run))

    code = run_once(settings, database, run_id="r", clock=clock, stopping=threading.Event())

    assert code == 3
    assert "nothing to learn: 0 fresh scored groups wait" in capsys.readouterr().out


def test_a_lock_at_the_start_is_waited_for(
    tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "sidecar.toml"
    config.write_text(f'state_dir = "{tmp_path}/state"\n[store]\nurl = "{database.url}"\n')
    upgrade = refusing(iter([LOCKED] * 2), Database.upgrade)
    monkeypatch.setattr(Database, "upgrade", upgrade)
    monkeypatch.setattr(once, "_check_room", lambda _: None)

    assert main(["--once", "--config", str(config)]) == 3
