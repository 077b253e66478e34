"""What `.ci/run` does with tests that failed: each one runs once more, alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

AGAIN = Path(__file__).resolve().parent.parent / ".ci" / "again"
PYTEST = [sys.executable, "-m", "pytest", "-q"]
FAILS_ONCE = """
from pathlib import Path

def test_a():
    seen = Path("seen")
    first = not seen.exists()
    seen.touch()
    assert not first
"""
FAILS = "\ndef test_b(): assert False\n"
SIX = "import pytest\n\n@pytest.mark.parametrize('n', range(6))\ndef test_c(n): assert False\n"


@pytest.mark.parametrize(
    ("tests", "exit_code", "said"),
    [
        (FAILS_ONCE, 0, ["unstable: test_one.py::test_a"]),
        (
            FAILS_ONCE + FAILS,
            1,
            ["unstable: test_one.py::test_a", "failed again: test_one.py::test_b"],
        ),
        (SIX, 1, ["ci: 6 failed tests in pytest's cache, 1 to 5 are run again"]),
        ("def test_d(): pass\n", 1, ["ci: 0 failed tests in pytest's cache, 1 to 5 are run again"]),
    ],
)
def test_failed_tests_run_once_more(
    tmp_path: Path, tests: str, exit_code: int, said: list[str]
) -> None:
    (tmp_path / "pytest.ini").touch()
    (tmp_path / "test_one.py").write_text(tests)
    subprocess.run(PYTEST, cwd=tmp_path, capture_output=True, check=False)

    again = [sys.executable, str(AGAIN), *PYTEST, "-p", "no:cacheprovider"]
    done = subprocess.run(again, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert done.returncode == exit_code, done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if ": test_one" in line or "ci:" in line] == (
        said
    )
