"""When a working thread yields the CPU, and for how long."""

from __future__ import annotations

import pytest

from sidecar.capture.recorder import Yielding


class Machine:
    """A clock that work and sleep move on. Its seconds are whole, so sums are exact; a sleep takes
    50 s more than was asked for."""

    def __init__(self) -> None:
        self.now = 5_000.0
        self.slept: list[tuple[float, float]] = []
        """(start, requested length) of each sleep."""

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append((self.now, seconds))
        self.now += seconds + 50


def test_after_each_stretch_of_work_it_pauses_once(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    monkeypatch.setattr("sidecar.capture.recorder.time", machine)
    monkeypatch.setattr("sidecar.capture.recorder.WORK_S", 300.0)
    monkeypatch.setattr("sidecar.capture.recorder.PAUSE_S", 20.0)
    pause = Yielding()

    for step in (*[100] * 10, 299, 10_000, 0, 0):
        machine.now += step
        pause()

    # Pauses at 300, wakes at 370, works for 300; pauses at 670, wakes at 740, works for 300, ...
    assert machine.slept == [(5_000 + at, 20) for at in (300, 670, 1040, 1509, 11_579)]
