"""A run of two processes goes on after one of them was killed, and ends with the same weights.

With gloo, on the CPU. The processes find each other as those of torchrun do.
"""

from __future__ import annotations

import signal

import pytest

from learner.command import FAILED, STOPPED
from tests.learner.resume.conftest import Start, World
from tests.learner.resume.test_killed import left_by, runs

pytestmark = pytest.mark.timeout(1800)
KILLS = [  # process, event, steps that are kept
    (0, ("check", 2), 0),
    (0, ("group of a step", 2), 1),
    (0, ("checkpoint half written", 3), 1),
    (0, ("saving", 1), 3),
    (1, ("check", 1), 0),
    (1, ("group of a step", 1), 0),
]


def test_a_run_of_two_processes_goes_on_after_a_kill_to_the_same_weights(
    start: Start, world: World
) -> None:
    whole = world("whole")
    assert start(whole, "r1", processes=2)["codes"] == [0, 0]
    expected = left_by(whole)
    assert expected.groups == {**dict.fromkeys("012356", "trained"), "4": "dropped"}
    for rank, at, steps in KILLS:
        where = f"process {rank} at {at[0]} {at[1]}"
        settings = world(where)
        killed = start(settings, "r1", kill_at=at, processes=2, rank=rank)
        # The process that is left says that it lost the other.
        assert killed["codes"][rank] == -signal.SIGKILL, where
        assert killed["codes"][1 - rank] == FAILED, where

        after = start(settings, "r2", processes=2)

        assert (after["codes"], "waited" in after["events"]) == ([0, 0], False), where
        assert left_by(settings) == expected, where
        (row,) = runs(settings)
        (death,) = row.deaths or []
        assert (death["stopped"], death["step"]) == (False, steps), where


def test_a_launcher_that_is_drained_stops_a_run_which_goes_on_later(
    start: Start, world: World
) -> None:
    """The launcher sends TERM to all; which process takes it first is chance."""
    whole, settings = world("whole"), world("one")
    start(whole, "r1", processes=2)
    at = ("step", 2)
    stopped = start(settings, "r1", at, sent=signal.SIGTERM, processes=2, rank=1, to_all=True)
    assert stopped["codes"][0] == STOPPED

    assert start(settings, "r2", processes=2)["codes"] == [0, 0]

    assert left_by(settings) == left_by(whole)
    (row,) = runs(settings)
    assert [one["stopped"] for one in row.deaths or []] == [True]
