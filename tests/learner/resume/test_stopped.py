"""A run that is asked to stop (TERM) goes on at the next start, to the same weights."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from learner.command import STOPPED
from tests.learner.resume.test_killed import left_by, runs

if TYPE_CHECKING:
    from tests.learner.resume.conftest import Start, World

pytestmark = pytest.mark.timeout(1800)


STOPS = [  # event, steps that are kept
    (("check", 2), 0),
    (("group of a step", 1), 0),
    (("step", 2), 2),  # the step is done: its checkpoint is written all the same
    (("checkpoint half written", 3), 2),
    (("group of a step", 5), 2),
    (("saving", 1), 3),
]


def test_a_run_that_is_asked_to_stop_goes_on_at_the_next_start(start: Start, world: World) -> None:
    whole = world("whole")
    start(whole, "r1")
    expected = left_by(whole)
    for at, steps in STOPS:
        settings = world(f"{at[0]} {at[1]}")
        stopped = start(settings, "r1", kill_at=at, sent=signal.SIGTERM)
        assert (stopped["signal"], stopped["code"]) == (0, STOPPED), at
        (row,) = runs(settings)
        assert row.status == "running", at
        assert row.reason == "asked to stop; the next start goes on with it", at

        after = start(settings, "r2")

        assert (after["code"], "waited" in after["events"]) == (0, False), at
        assert left_by(settings) == expected, at
        (row,) = runs(settings)
        (stop,) = row.deaths or []
        assert (stop["stopped"], stop["step"], row.reason) == (True, steps, None), at


def test_stops_count_towards_no_limit(start: Start, world: World) -> None:
    settings = world("one")
    for number in range(4):
        again = start(settings, f"r{number}", kill_at=("check of 2", 1), sent=signal.SIGTERM)
        assert again["code"] == STOPPED

    assert start(settings, "r9")["code"] == 0

    (row,) = runs(settings)
    assert (row.run_id, row.status, len(row.deaths or [])) == ("r0", "finished", 4)
    assert left_by(settings).groups == {**dict.fromkeys("012356", "trained"), "4": "dropped"}


def test_a_stopped_run_whose_settings_changed_gives_its_groups_to_a_new_one(
    start: Start, world: World
) -> None:
    settings = world("one")
    start(settings, "r1", kill_at=("check of 2", 1), sent=signal.SIGTERM)
    learner = settings.learner.model_copy(update={"groups_per_step": 3})

    assert start(settings.model_copy(update={"learner": learner}), "r2")["code"] == 0

    dead, done = runs(settings)
    assert dead.reason == "it was stopped, and not resumed: learner.groups_per_step was 2 and is 3"
    assert (done.status, done.deaths) == ("finished", None)
    assert left_by(settings).groups == {**dict.fromkeys("012356", "trained"), "4": "dropped"}
