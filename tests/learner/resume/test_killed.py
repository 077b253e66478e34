"""A run that SIGKILL ends anywhere ends, at the next start, with the weights that it would have
had."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from sqlalchemy import select

from learner.adapter_folder import folder_digest
from learner.grpo.checkpoint import TENSORS
from learner.resume import WorkFolder, resumed_words
from sidecar.settings import Settings
from sidecar.store.database import Database
from sidecar.store.models import AdapterRow, GroupRow, RunRow, RunStepRow
from tests.learner.resume.conftest import Start, World

pytestmark = pytest.mark.timeout(1800)
"""A run takes two seconds of CPU, and half a minute beside a load of 25."""
SEED = 3
EVERYWHERE = (
    "claimed",
    "check",
    "group of a step",
    "checkpoint begins",
    "checkpoint half written",
    "file or folder synced",
    "saving",
    "placed, not registered",
    "registered, not committed",
    "committed",
)
"""One kill at each of these: at a random one of all times that the run comes there."""


@dataclass(frozen=True)
class Kept:
    """What a finished run left."""

    digest: str
    run_id: str
    steps: list[int]
    groups: Mapping[str, str]
    folders: list[str]


def places(events: list[str]) -> list[tuple[int, str]]:
    """Return (number, name) of the events to be killed at; of all with SIDECAR_TEST_KILLS=all."""
    numbered = list(enumerate(events, 1))
    if os.environ.get("SIDECAR_TEST_KILLS") == "all":
        return numbered
    rng = random.Random(SEED)
    return [rng.choice([one for one in numbered if one[1] == name]) for name in EVERYWHERE]


def left_by(settings: Settings) -> Kept:
    database = Database(settings.store.url)
    with database.read() as session:
        adapter = session.scalars(select(AdapterRow)).one()
        groups = {row.group_id: row.status for row in session.scalars(select(GroupRow))}
        steps = select(RunStepRow.step).where(RunStepRow.run_id == adapter.run_id)
        found = Kept(
            digest=folder_digest(Path(adapter.path)),
            run_id=adapter.run_id or "",
            steps=sorted(session.scalars(steps)),
            groups=groups,
            folders=sorted(one.name for one in settings.learner.adapters_dir.iterdir()),
        )
        assert found.digest == adapter.digest
    database.close()
    return found


def runs(settings: Settings) -> list[RunRow]:
    database = Database(settings.store.url)
    with database.read() as session:
        found = list(session.scalars(select(RunRow).order_by(RunRow.started_at)))
    database.close()
    return found


def test_a_run_that_is_killed_anywhere_ends_with_the_same_weights(
    start: Start, world: World
) -> None:
    whole = world("whole")
    done = start(whole, "r1")
    assert done["code"] == 0
    expected = left_by(whole)
    assert expected.groups == {**dict.fromkeys("012356", "trained"), "4": "dropped"}
    for place, name in places(done["events"]):
        settings = world(f"killed at {place}")
        killed = start(settings, "r1", kill_at=("", place))
        assert (killed["signal"], killed["events"][-1]) == (signal.SIGKILL, name)
        after = start(settings, "r2")
        if name == "committed":  # all was done
            assert after["code"] == 3
            assert left_by(settings).run_id == "r1"
        else:
            assert after["code"] == 0, name
            assert "waited" not in after["events"], "the process that held the lease is dead"
        found = left_by(settings)
        name = f"{name}, event {place}"
        assert found.digest == expected.digest, name
        assert found.steps == [1, 2, 3], name
        assert found.groups == expected.groups, name
        assert found.folders == [found.digest], name
        # At the first event what it claimed is not written down yet: nothing to go on with.
        begun = place > 1
        assert found.run_id == ("r1" if begun else "r2"), name


def test_a_killed_run_goes_on_from_its_last_step(start: Start, world: World) -> None:
    settings = world("one")
    start(settings, "r1", kill_at=("step", 3))

    assert start(settings, "r2")["code"] == 0

    (row,) = runs(settings)
    assert row.deaths is not None
    (death,) = row.deaths
    assert (row.status, row.run_id, death["step"], death["steps"]) == ("finished", "r1", 2, 3)
    assert [step["step"] for step in row.metrics] == [1, 2, 3]
    assert [step["left_out"] for step in row.metrics] == [{"groups.drift": 1}] * 3


def test_a_damaged_checkpoint_is_discarded_and_the_run_begins_anew(
    start: Start, world: World
) -> None:
    whole, settings = world("whole"), world("one")
    start(whole, "r1")
    start(settings, "r1", kill_at=("step", 3))
    checkpoint = WorkFolder(settings.learner.adapters_dir, "r1").newest()
    assert checkpoint is not None
    tensors = checkpoint / TENSORS
    damaged = bytearray(tensors.read_bytes())
    damaged[-1] ^= 1
    tensors.write_bytes(bytes(damaged))

    assert start(settings, "r2")["code"] == 0

    assert left_by(settings) == left_by(whole)
    (row,) = runs(settings)
    assert resumed_words(row.deaths) == "resumed before its first step"


@pytest.mark.parametrize(
    ("sent", "changes", "why"),
    [
        (
            signal.SIGTERM,
            {"groups_per_step": 3},
            "stopped, and not resumed: learner.groups_per_step was 2 and is 3",
        ),
        (
            signal.SIGKILL,
            {"alpha": 4, "rank": 2},
            "killed, and not resumed: learner.alpha was 8 and is 4; learner.rank was 4 and is 2",
        ),
    ],
)
def test_a_run_whose_settings_changed_meanwhile_begins_anew(
    start: Start, world: World, sent: int, changes: dict[str, int], why: str
) -> None:
    settings = world("one")
    start(settings, "r1", kill_at=("step", 2), sent=sent)
    learner = settings.learner.model_copy(update=changes)

    assert start(settings.model_copy(update={"learner": learner}), "r2")["code"] == 0

    dead, done = runs(settings)
    assert (dead.run_id, dead.status) == ("r1", "failed")
    assert dead.reason == f"it was {why}"
    assert (done.run_id, done.status, done.deaths) == ("r2", "finished", None)
    assert left_by(settings).groups == {**dict.fromkeys("012356", "trained"), "4": "dropped"}


def test_a_run_that_dies_in_the_same_group_is_given_up_and_the_others_train(
    start: Start, world: World
) -> None:
    settings = world("one")
    for run_id in ("r1", "r2", "r3"):
        killed = start(settings, run_id, kill_at=("check of 2", 1))
        assert killed["signal"] == signal.SIGKILL

    assert start(settings, "r4", kill_at=("check of 2", 1))["code"] == 0

    dead, done = runs(settings)
    assert (dead.run_id, dead.status, dead.reason) == (
        "r1",
        "failed",
        "it died 3 times while it computed group 2",
    )
    assert (done.run_id, done.status) == ("r4", "finished")
    assert left_by(settings).groups == {
        **dict.fromkeys("01356", "trained"),
        "2": "dropped",
        "4": "dropped",
    }
