"""Which Python is measured, and that the result says so."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.relay import interpreter


@pytest.fixture(autouse=True)
def choose_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(interpreter.CHOICE, raising=False)
    interpreter.chosen.cache_clear()
    yield
    interpreter.chosen.cache_clear()


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str | None], None]:
    """Let this Python seem to have been built with these arguments, and `tmp_path` to be where the
    system keeps its own."""
    monkeypatch.setattr(interpreter, "SYSTEMS", tmp_path)

    def configure(arguments: str | None) -> None:
        monkeypatch.setattr(sysconfig, "get_config_var", lambda name: arguments)

    return configure


def program(path: Path, prints: str) -> Path:
    path.write_text(f"#!/bin/sh\necho {prints}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.mark.parametrize("arguments", ["'--enable-shared'", "", None])
def test_instead_of_a_plain_build_the_systems_own_is_measured(
    arguments: str | None, configured: Callable[[str | None], None], tmp_path: Path
) -> None:
    configured(arguments)
    minor = f"{sys.version_info.major}.{sys.version_info.minor}"
    path = program(tmp_path / f"python{minor}", f"{minor}.99")

    found = interpreter.chosen()

    assert found.path == str(path)
    assert found.what == f"CPython {minor}.99, the system's own"


def test_it_runs_what_an_environment_has_installed() -> None:
    python = interpreter.chosen()
    env = interpreter.packages_of(Path(sys.prefix))
    assert env == {"PYTHONPATH": sysconfig.get_path("purelib")}

    done = subprocess.run(
        [python.path, "-P", "-c", "import msgspec, uvloop; print(msgspec.json.encode(1))"],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.stdout.strip() == "b'1'", done.stderr
