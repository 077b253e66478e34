"""When a working thread yields the CPU, and for how long."""

from __future__ import annotations

import pytest

from sidecar.capture.recorder import PAUSE_S, WORK_S, Yielding


class Machine:
    """A clock that work and sleep move on. Its seconds are whole, so sums are exact; a sleep takes
    50 s more than was asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[tuple[float, float]] = []
        """(start, requested length) of each sleep."""

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


def yielding(machine: Machine) -> Yielding:
    return Yielding(work_s=300.0, pause_s=20.0, clock=machine.clock, sleep=machine.sleep)


def test_short_work_is_not_interrupted(machine: Machine) -> None:
    pause = yielding(machine)

    machine.work(299)
    pause()

    assert machine.slept == []


def test_after_the_whole_stretch_it_pauses_once_for_the_set_time(machine: Machine) -> None:
    pause = yielding(machine)

    machine.work(300)
    pause()
    pause()

    assert machine.slept == [(300, 20)]


def test_stretches_are_added_up_over_many_steps(machine: Machine) -> None:
    pause = yielding(machine)

    for _ in range(10):
        machine.work(100)
        pause()

    # Pauses at 300, wakes at 370, works for 300; pauses at 670, wakes at 740, works for 300.
    assert [at for at, _ in machine.slept] == [300, 670, 1040]


def test_the_time_of_the_pause_is_no_work(machine: Machine) -> None:
    pause = yielding(machine)
    machine.work(300)
    pause()

    machine.work(299)
    pause()
    assert len(machine.slept) == 1
    machine.work(2)
    pause()

    assert [at for at, _ in machine.slept] == [300, 671]


def test_one_long_step_is_followed_by_one_pause(machine: Machine) -> None:
    pause = yielding(machine)

    machine.work(10_000)
    for _ in range(5):
        pause()

    assert [at for at, _ in machine.slept] == [10_000]


def test_time_before_it_was_made_does_not_count(machine: Machine) -> None:
    machine.work(5_000)
    pause = yielding(machine)

    machine.work(200)
    pause()

    assert machine.slept == []


def test_the_default_times_are_the_measured_ones(machine: Machine) -> None:
    pause = Yielding(clock=machine.clock, sleep=machine.sleep)

    machine.work(WORK_S / 2)
    pause()
    assert machine.slept == []
    machine.work(WORK_S / 2)
    pause()

    assert [seconds for _, seconds in machine.slept] == [PAUSE_S]
