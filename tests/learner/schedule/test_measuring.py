"""The process that measures how long an input can be trained on: what it costs the schedule."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog

from learner import command
from learner.schedule import loop as of_measuring
from learner.schedule.loop import measuring


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have this program run in place of the learner; it writes its process id before all else."""
    program = tmp_path / "program.py"
    monkeypatch.setattr(
        command, "own_python", lambda *_: (sys.executable, str(program), str(tmp_path / "pid"))
    )
    return program


def write(program: Path, then: str) -> None:
    program.write_text(
        f"import os, sys, time\nopen(sys.argv[1], 'w').write(str(os.getpid()))\n{then}\n"
    )


def pid_of(program: Path) -> int:
    told = program.with_name("pid")
    until(lambda: told.exists() and told.read_text() != "")
    return int(told.read_text())


def has_ended(pid: int) -> bool:
    """Whether no process has this id: a child that nobody waited for still has its."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_the_block_runs_beside_it_and_ends_it(python: Path) -> None:
    write(python, "time.sleep(600)")

    with structlog.testing.capture_logs() as logs, measuring(None):
        pid = pid_of(python)
        assert not has_ended(pid)

    assert has_ended(pid)
    assert logs == []  # who stops it knows


def test_a_process_that_asks_to_be_left_alone_is_ended_too(python: Path) -> None:
    write(python, "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)")

    with measuring(None):
        pid = pid_of(python)
        os.kill(pid, signal.SIGCONT)

    assert has_ended(pid)


@pytest.mark.parametrize(
    ("then", "within_s", "told"),
    [
        ("", 300.0, []),
        ("sys.exit(3)", 300.0, [3]),
        ("os.kill(os.getpid(), 9)", 300.0, [-9]),
        ("os.kill(os.getpid(), 15)", 300.0, []),
        ("time.sleep(600)", 3.0, [None]),
    ],
)
def test_a_measurement_that_fails_is_logged_and_raises_nothing(
    then: str,
    within_s: float,
    told: list[int | None],
    python: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(of_measuring, "MEASURE_S", within_s)
    write(python, then)

    with structlog.testing.capture_logs() as logs, measuring(None):
        pid = pid_of(python)
        until(lambda: has_ended(pid))
        until(lambda: len(logs) >= len(told))

    assert [one["exit_code"] for one in logs] == told
    assert {one["event"] for one in logs} <= {"pack_tokens_not_measured"}


def until(holds: Callable[[], bool]) -> None:
    for _ in range(2_000):
        if holds():
            return
        time.sleep(0.01)
    raise AssertionError("it never holds")
