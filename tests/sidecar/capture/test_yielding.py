"""When a thread that works rests, and for how long."""

from __future__ import annotations

import pytest

from sidecar.capture.yielding import REST_S, WORK_S, Yielding


class Machine:
    """A clock that work and sleep move on. Its seconds are whole, so sums are exact; a sleep takes
    50 s more than was asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[tuple[float, float]] = []
        """When, and how long."""

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append((self.now, seconds))
        self.now += seconds + 50

    def work(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def machine() -> Machine:
    return Machine()


def rests(machine: Machine) -> Yielding:
    return Yielding(work_s=300.0, rest_s=20.0, clock=machine.clock, sleep=machine.sleep)


def test_short_work_is_not_interrupted(machine: Machine) -> None:
    rest = rests(machine)

    machine.work(299)
    rest()

    assert machine.slept == []


def test_after_the_whole_stretch_it_rests_once_for_as_long_as_was_said(machine: Machine) -> None:
    rest = rests(machine)

    machine.work(300)
    rest()
    rest()

    assert machine.slept == [(300, 20)]


def test_stretches_are_added_up_over_many_steps(machine: Machine) -> None:
    rest = rests(machine)

    for _ in range(10):
        machine.work(100)
        rest()

    # At 300; it wakes at 370, works 300 more, rests at 670; wakes at 740, rests at 1040.
    assert [at for at, _ in machine.slept] == [300, 670, 1040]


def test_the_time_of_the_rest_is_no_work(machine: Machine) -> None:
    rest = rests(machine)
    machine.work(300)
    rest()

    machine.work(299)
    rest()
    assert len(machine.slept) == 1
    machine.work(2)
    rest()

    assert [at for at, _ in machine.slept] == [300, 671]


def test_one_long_step_is_followed_by_one_rest(machine: Machine) -> None:
    rest = rests(machine)

    machine.work(10_000)
    for _ in range(5):
        rest()

    assert [at for at, _ in machine.slept] == [10_000]


def test_time_before_it_was_made_does_not_count(machine: Machine) -> None:
    machine.work(5_000)
    rest = rests(machine)

    machine.work(200)
    rest()

    assert machine.slept == []


def test_by_itself_it_takes_the_measured_times(machine: Machine) -> None:
    rest = Yielding(clock=machine.clock, sleep=machine.sleep)

    machine.work(WORK_S / 2)
    rest()
    assert machine.slept == []
    machine.work(WORK_S / 2)
    rest()

    assert [seconds for _, seconds in machine.slept] == [REST_S]
