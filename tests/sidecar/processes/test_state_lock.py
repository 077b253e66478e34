"""One process of a kind for each `state_dir`, and what its end, however it comes, leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sidecar.errors import StateLockError
from sidecar.processes import (
    VARIABLE,
    holder,
    only_one,
    own_environment,
    own_python,
    read_report,
    tell_ready,
)

HOLDER = (
    "import sys, time; from pathlib import Path\n"
    "from sidecar.processes import only_one\n"
    "with only_one(Path(sys.argv[1]), 'ingest'): print('held', flush=True); time.sleep(60)"
)


def test_a_lock_names_its_holder_and_is_free_when_the_holder_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()

        held_by = holder(tmp_path, "ingest")
        with pytest.raises(StateLockError, match=rf"runs already \(pid {process.pid}\)"):
            only_one(tmp_path, "ingest").__enter__()
        other = holder(tmp_path, "control")
        process.kill()

    assert held_by == f"pid {process.pid}"
    assert other is None
    assert holder(tmp_path, "ingest") is None
    with only_one(tmp_path, "ingest"):
        assert holder(tmp_path, "ingest") == f"pid {os.getpid()}"
    assert holder(tmp_path, "ingest") is None


def test_a_link_to_the_same_folder_is_the_same_folder(tmp_path: Path) -> None:
    folder, link = tmp_path / "state", tmp_path / "link"
    folder.mkdir()
    link.symlink_to(folder)

    with only_one(folder, "up"), pytest.raises(StateLockError, match="runs already"):
        only_one(link, "up").__enter__()


def test_a_state_dir_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(StateLockError, match=r"file/state cannot be written \(Not a directory\)"):
        only_one(tmp_path / "file" / "state", "up").__enter__()


def test_a_child_gets_no_entry_of_the_path_that_means_the_working_folder() -> None:
    paths = {"": None, ":/a": "/a", "/a::/b": "/a:/b", ":": None, "/a": "/a"}

    given = {path: own_environment({"PYTHONPATH": path}).get("PYTHONPATH") for path in paths}

    assert given == paths
    assert own_environment({"A": "1"}) == {"A": "1", "PYTHONSAFEPATH": "1"}
    assert own_python("ingest", "--x") == (sys.executable, "-P", "-m", "ingest", "--x")


def test_ready_is_told_once_through_the_pipe_of_the_supervisor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)
    monkeypatch.setenv(VARIABLE, str(theirs))

    before = read_report(ours)
    tell_ready("http://127.0.0.1:1")
    told = read_report(ours)
    tell_ready("again")

    assert (before, told) == ((None, []), ("http://127.0.0.1:1", []))
    assert read_report(ours) == (None, [])
    assert VARIABLE not in os.environ
    os.close(ours)


@pytest.mark.parametrize("value", ["", "x", "-1", "999999", str(2**70)])
def test_a_process_that_nobody_waits_for_tells_nothing(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv(VARIABLE, value)

    tell_ready()

    assert VARIABLE not in os.environ


def test_a_new_state_dir_is_for_its_owner_only(tmp_path: Path) -> None:
    with only_one(tmp_path / "new" / "state", "control"):
        assert (tmp_path / "new" / "state").stat().st_mode & 0o777 == 0o700
