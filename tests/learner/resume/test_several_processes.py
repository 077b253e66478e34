"""A run of two processes goes on after one of them was killed, and ends with the same weights.

With gloo, on the CPU. The processes find each other as those of torchrun do.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from learner.command import FAILED, STOPPED
from tests.learner.resume.test_killed import left_by, runs

if TYPE_CHECKING:
    from tests.learner.resume.conftest import Start, World

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


def test_a_run_of_two_processes_with_a_shared_base_goes_on_too(start: Start, world: World) -> None:
    changes = {"shard_base": True}
    whole, settings = world("whole", **changes), world("one", **changes)
    start(whole, "r1", processes=2)
    killed = start(settings, "r1", kill_at=("group of a step", 1), processes=2, rank=1)
    assert killed["codes"] == [FAILED, -signal.SIGKILL]

    assert start(settings, "r2", processes=2)["codes"] == [0, 0]

    assert left_by(settings) == left_by(whole)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_launcher_that_is_drained_stops_a_run_which_goes_on_later(
    start: Start, world: World, rank: int
) -> None:
    """The launcher sends TERM to all; which process takes it first is chance."""
    whole, settings = world("whole"), world("one")
    start(whole, "r1", processes=2)
    stopped = start(
        settings,
        "r1",
        kill_at=("step", 2),
        sent=signal.SIGTERM,
        processes=2,
        rank=rank,
        to_all=True,
    )
    assert stopped["codes"][0] == STOPPED

    assert start(settings, "r2", processes=2)["codes"] == [0, 0]

    assert left_by(settings) == left_by(whole)
    (row,) = runs(settings)
    assert [one["stopped"] for one in row.deaths or []] == [True]


def test_another_number_of_processes_begins_anew(start: Start, world: World) -> None:
    """Sums of two processes round otherwise than those of one."""
    settings = world("one")
    start(settings, "r1", kill_at=("step", 2), processes=2)

    assert start(settings, "r2")["code"] == 0

    dead, done = runs(settings)
    assert dead.reason == ("it was killed, and not resumed: learner.processes was 2 and is 1")
    assert (done.status, done.deaths) == ("finished", None)


def test_a_run_whose_process_dies_at_one_place_again_and_again_is_given_up(
    start: Start, world: World
) -> None:
    settings = world("one")
    for number in range(3):
        killed = start(settings, f"r{number}", kill_at=("check", 1), processes=2, rank=1)
        assert killed["codes"] == [FAILED, -signal.SIGKILL]

    assert start(settings, "r9", processes=2)["codes"] == [0, 0]

    dead, done = runs(settings)
    assert (dead.status, done.status) == ("failed", "finished")
    assert dead.reason == "it died 3 times while it loaded, stepped or saved"
