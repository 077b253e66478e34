"""A store that cannot be opened ends a process in one line, never in a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sidecar.errors import StoreError
from sidecar.store.database import Database

ROOT = Path(__file__).resolve().parents[2]
PROCESSES = {
    "ingest": ("ingest",),
    "score": ("ingest.score",),
    "learn": ("learner", "--once"),
    "control": ("deploy",),
    "command": ("deploy.cli.main", "keys", "create", "--project", "p"),
}


@pytest.mark.parametrize("name", PROCESSES)
def test_each_process_says_why_in_one_line_and_ends_with_1(tmp_path: Path, name: str) -> None:
    (tmp_path / "sidecar.toml").write_text(
        '[store]\nurl = "sqlite:////proc/no/store.db"\n[judge]\nmodel = "openai/m"\n'
    )
    module, *arguments = PROCESSES[name]

    ended = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert ended.returncode == 1, ended.stderr
    assert "No such file or directory: /proc/no" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    assert not ended.stdout


def test_a_folder_that_cannot_be_made_is_named_with_what_to_do() -> None:
    with pytest.raises(StoreError) as caught:
        Database("sqlite:////proc/no/store.db")

    assert str(caught.value) == (
        "store sqlite:////proc/no/store.db: cannot be made or opened (No such file or directory: "
        "/proc/no); make its folder writable, or set store.url"
    )


def test_a_parameter_that_the_driver_does_not_take_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r": its parameter timeout is not what pysqlite takes"):
        Database(f"sqlite:///{tmp_path}/s.db?timeout=maybe&isolation_level=DEFERRED")

    assert not list(tmp_path.iterdir())


def test_what_is_no_database_is_one_line() -> None:
    with pytest.raises(StoreError) as caught:
        Database("sqlite:////dev/null").upgrade()

    assert str(caught.value) == (
        "store sqlite:////dev/null: cannot be upgraded: disk I/O error; look whether the disk of "
        "its file is full, failing or gone"
    )
