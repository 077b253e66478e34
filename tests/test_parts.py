"""`scripts/tests`: the suite in parts, each a pytest of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "tests"
PASSES = "def test_passes(): pass\n"
FAILS = "def test_fails(): assert False\ndef test_passes(): pass\n"
SKIPS = "import pytest\n\ndef test_skips(): pytest.skip('no broker')\n"
WAITS = """
import os, time
from pathlib import Path

def test_waits():
    Path("new").write_text(str(os.getpid()))
    Path("new").rename("pid")
    time.sleep(300)
"""


def tree(folder: Path, **rooms: str) -> Path:
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -ra\n")
    (folder / "conftest.py").write_text(
        "def pytest_addoption(parser): parser.addoption('--tier')\n"
    )
    for room, text in rooms.items():
        (folder / "tests" / room).mkdir(parents=True)
        (folder / "tests" / room / f"test_{room}.py").write_text(text)
    return folder


def run(folder: Path, *given: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *given]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_what_failed_is_printed_and_kept_and_the_other_parts_go_on(tmp_path: Path) -> None:
    done = run(tree(tmp_path, sidecar=FAILS, ingest=PASSES, deploy=SKIPS))

    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILED tests/sidecar/test_sidecar.py::test_fails" in done.stdout
    assert "no broker" in done.stdout
    counted = done.stdout.splitlines()[-1].partition(", in ")[0].split(", ")
    assert sorted(counted) == ["1 failed", "1 skipped", "2 passed"]
    kept = json.loads((tmp_path / ".pytest_cache/v/cache/lastfailed").read_text())
    assert kept == {"tests/sidecar/test_sidecar.py::test_fails": True}


@pytest.mark.parametrize(
    ("text", "code"),
    [(PASSES, 0), ("x = y\n", 3), ("import os\n\ndef test_ends(): os._exit(0)\n", 3)],
)
def test_a_part_that_does_not_run_to_its_end_is_no_success(
    tmp_path: Path, text: str, code: int
) -> None:
    assert run(tree(tmp_path, learner=text, ingest=PASSES)).returncode == code


def test_a_mistyped_path_is_no_success(tmp_path: Path) -> None:
    assert run(tree(tmp_path, learner=PASSES), "tests/lerner").returncode == 2


def test_a_signal_ends_what_was_started(tmp_path: Path) -> None:
    tree(tmp_path, sidecar=WAITS)
    with subprocess.Popen([sys.executable, str(SCRIPT)], cwd=tmp_path) as running:
        while not (tmp_path / "pid").exists():
            assert running.poll() is None
            time.sleep(0.05)
        running.send_signal(signal.SIGTERM)
        assert running.wait() == 128 + signal.SIGTERM

    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
