"""A process that is gone is known as gone; one that cannot be looked up is not."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from learner import resume
from learner.resume import is_gone, present_holder


def of_child(program: str) -> tuple[subprocess.Popen[str], dict[str, object]]:
    """Start a process and return it with its holder."""
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    child.stdout.readline()
    started = resume._start_time(child.pid)
    assert started is not None
    stored = asdict(replace(present_holder(), pid=child.pid, started=started))
    return child, stored


def test_this_process_is_there() -> None:
    mine = present_holder()

    assert (mine.pid, is_gone(asdict(mine))) == (os.getpid(), False)
    assert mine.token != present_holder().token


def test_a_killed_process_is_gone_also_before_its_parent_has_noticed() -> None:
    child, stored = of_child("print(flush=True); input()")
    assert not is_gone(stored)

    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie

    assert is_gone(stored), "it is a zombie: nobody has waited for it"
    child.communicate()
    assert is_gone(stored)


def test_a_pid_that_was_given_again_is_another_process() -> None:
    mine = present_holder()

    assert is_gone(asdict(replace(mine, started=mine.started - 1)))


@pytest.mark.parametrize(
    "machine",
    ["another start of this machine, or another one", ""],
)
def test_a_process_elsewhere_is_not_known_to_be_gone(machine: str) -> None:
    assert not is_gone(asdict(replace(present_holder(), pid=2**30, machine=machine)))


def test_without_proc_nothing_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gone = asdict(replace(present_holder(), pid=2**30))
    assert is_gone(gone)
    monkeypatch.setattr(resume, "_BOOT_ID", tmp_path / "none")

    assert not is_gone(gone)
    assert present_holder().machine == ""


@pytest.mark.parametrize("stored", [None, [], "x", {}, {"pid": "1", "started": 2}, {"pid": True}])
def test_a_damaged_holder_is_not_known_to_be_gone(stored: object) -> None:
    assert not is_gone(stored)
