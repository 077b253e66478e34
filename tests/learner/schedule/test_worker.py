"""The schedule's end of the process that does its runs. A program stands for the learner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from learner import command
from learner.schedule.loop import IDLE_S, Worker
from support.clock import Clock
from support.processes import is_alive, until

PROGRAM = """
import itertools, os, signal, sys
from multiprocessing.connection import Connection

def note(*words):
    with open({told!r}, "a") as file:
        print(os.getpid(), *words, file=file)

if "--measure" in sys.argv:
    note("measures")
schedule = Connection(int(sys.argv[sys.argv.index("--worker") + 1]))
for number in itertools.count():
    run_id, project = schedule.recv()
    if run_id == "other base" and number:
        sys.exit(7)
    note(run_id, project)
    if run_id == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if run_id == "fails":
        sys.exit(1)
    if run_id == "waits":
        signal.pause()
    schedule.send(3 if run_id == "nothing" else 0)
"""


class Kit:
    """A worker, and what its processes were asked."""

    def __init__(self, worker: Worker, told: Path) -> None:
        self.worker = worker
        self._told = told

    def run(self, run_id: str, project: str | None = None) -> int | None:
        self.worker.launch(run_id, project)
        until(lambda: self.worker.exit_code() is not None)
        return self.worker.exit_code()

    @property
    def told(self) -> list[tuple[int, str]]:
        """Number of the process, from 0, and the run with its project."""
        lines = [line.split(" ", 1) for line in self._told.read_text().splitlines()]
        pids = list(dict.fromkeys(pid for pid, _ in lines))
        return [(pids.index(pid), run) for pid, run in lines]

    @property
    def pid(self) -> int:
        return int(self._told.read_text().splitlines()[-1].split()[0])


@pytest.fixture
def clock() -> Clock:
    return Clock(1_000.0)


@pytest.fixture
def kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Iterator[Kit]:
    program = PROGRAM.format(told=str(tmp_path / "told"))
    monkeypatch.setattr(
        command, "own_python", lambda _, *words: (sys.executable, "-c", program, *words)
    )
    (tmp_path / "told").touch()
    worker = Worker(None, clock=clock)
    yield Kit(worker, tmp_path / "told")
    worker.stop()


PARENT = """
import os, signal, subprocess, sys
from learner import command

command.own_python = lambda *_: (sys.executable, "-S", "-c", "import time; time.sleep(600)")
child = subprocess.Popen(command.learner_command(None), stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_of_the_learner_ends_with_the_one_that_started_it() -> None:
    """The worker with its schedule, and the other processes of a run with the first."""
    killed = subprocess.run([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, check=False)

    assert killed.returncode == -signal.SIGKILL
    until(lambda: not is_alive(int(killed.stdout)))


def test_one_process_does_the_runs_of_all_lines(kit: Kit) -> None:
    assert [kit.run("a"), kit.run("nothing", "support"), kit.run("b")] == [0, 3, 0]
    assert kit.told == [(0, "a None"), (0, "nothing support"), (0, "b None")]


@pytest.mark.parametrize(("run_id", "code"), [("fails", 1), ("killed", -signal.SIGKILL)])
def test_a_run_that_ends_its_process_is_not_asked_again_and_the_next_has_a_fresh_one(
    kit: Kit, run_id: str, code: int
) -> None:
    assert [kit.run("a"), kit.run(run_id), kit.run("b")] == [0, code, 0]
    assert kit.told == [(0, "a None"), (0, f"{run_id} None"), (1, "b None")]


def test_a_process_that_was_killed_while_it_waited_costs_no_run(kit: Kit) -> None:
    kit.run("a")
    pid = kit.pid
    os.kill(pid, signal.SIGKILL)
    until(lambda: not is_alive(pid))

    assert kit.worker.exit_code() == 0
    with capture_logs() as logs:
        assert kit.run("b") == 0
    assert [(one["event"], one["exit_code"]) for one in logs] == [("worker_died_idle", -9)]
    assert kit.told == [(0, "a None"), (1, "b None")]


def test_a_run_that_finds_its_process_outdated_is_asked_of_a_fresh_one(kit: Kit) -> None:
    assert [kit.run("a"), kit.run("other base", "support")] == [0, 0]
    assert kit.told == [(0, "a None"), (1, "other base support")]


def test_it_measures_before_its_first_run_and_ends_if_none_comes(kit: Kit, clock: Clock) -> None:
    kit.worker.start("--measure")
    until(lambda: kit.told == [(0, "measures")])
    assert kit.run("a") == 0
    assert kit.told == [(0, "measures"), (0, "a None")]
    kit.worker.stop()
    kit.worker.start("--measure")
    until(lambda: kit.told[-1] == (1, "measures"))
    clock.now += IDLE_S
    kit.worker.rest()
    assert not is_alive(kit.pid)


def test_it_ends_when_it_has_waited_and_not_while_a_run_goes_on(kit: Kit, clock: Clock) -> None:
    kit.run("a")
    clock.now += IDLE_S - 1
    kit.worker.rest()
    pid = kit.pid
    assert is_alive(pid)
    clock.now += 1
    kit.worker.rest()
    assert not is_alive(pid)
    assert kit.worker.exit_code() == 0

    kit.worker.launch("waits")
    until(lambda: kit.told[-1] == (1, "waits None"))
    clock.now += 2 * IDLE_S
    kit.worker.rest()
    assert kit.worker.exit_code() is None
    assert is_alive(kit.pid)
    kit.worker.stop()
    assert kit.worker.exit_code() == -signal.SIGTERM
