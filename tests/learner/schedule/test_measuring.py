"""The process that measures how long an input can be trained on: what it costs the schedule."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest
import structlog

from learner import command
from learner.schedule import loop
from learner.schedule.loop import measuring


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have this program run in place of the learner."""
    program = tmp_path / "program.py"
    monkeypatch.setattr(command, "own_python", lambda *_: (sys.executable, str(program)))
    return program


def test_the_block_runs_beside_it_and_ends_it(python: Path) -> None:
    told = python.with_name("pid")
    os.mkfifo(told)
    python.write_text(
        "import os, pathlib, signal\n"
        f"pathlib.Path({str(told)!r}).write_text(str(os.getpid()))\n"
        "signal.pause()\n"
    )

    with structlog.testing.capture_logs() as logs, measuring(None):
        pid = int(told.read_text())
        os.kill(pid, 0)

    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert logs == []  # who stops it knows


@pytest.mark.parametrize(
    ("program", "within_s", "told"),
    [
        ("", 300.0, []),
        ("import sys; sys.exit(3)", 300.0, [3]),
        ("import os; os.kill(os.getpid(), 9)", 300.0, [-9]),
        ("import os; os.kill(os.getpid(), 15)", 300.0, []),
        ("import signal; signal.pause()", 0.1, [None]),
    ],
)
def test_a_measurement_that_fails_is_logged_and_raises_nothing(
    program: str,
    within_s: float,
    told: list[int | None],
    python: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop, "MEASURE_S", within_s)
    python.write_text(program)

    with structlog.testing.capture_logs() as logs, measuring(None):
        for watcher in threading.enumerate():
            if watcher.name == loop.WATCHER:
                watcher.join()

    assert [one["exit_code"] for one in logs] == told
    assert {one["event"] for one in logs} <= {"pack_tokens_not_measured"}
