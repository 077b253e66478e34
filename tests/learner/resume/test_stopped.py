"""A run that is asked to stop (TERM) goes on at the next start, to the same weights."""

from __future__ import annotations

import signal

import pytest

from learner.command import STOPPED
from tests.learner.resume.conftest import Start, World
from tests.learner.resume.test_killed import left_by, runs

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
