"""Ctrl-C while a process starts: one line and 130, whichever process it is."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from sidecar.processes import ends_in_one_line


@pytest.mark.tier_2
@pytest.mark.parametrize(
    ("command", "name"),
    [
        (("sidecar",), "sidecar proxy"),
        (("deploy",), "sidecar control"),
        (("deploy.cli.main", "up"), "sidecar"),
        (("deploy.cli.main", "ingest"), "sidecar ingest"),
    ],
)
def test_ctrl_c_at_the_start_is_one_line_and_130(
    tmp_path: Path, command: tuple[str, ...], name: str
) -> None:
    # A process waits for a writer when its settings file is a pipe: then it is sure to be starting.
    config = tmp_path / "sidecar.toml"
    os.mkfifo(config)
    module, *words = command
    arguments = [sys.executable, "-m", module, "--config", str(config), *words]

    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) as process:
        writer = _writer_once_it_is_read(config)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
        os.close(writer)

    assert process.returncode == 130
    assert error == f"{name}: interrupted\n"


def _writer_once_it_is_read(pipe: Path) -> int:
    """Wait until a process reads the pipe. Returns: the end to write to."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):  # ENXIO: nobody reads yet
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        time.sleep(0.02)
    raise AssertionError("nobody reads the pipe")


def test_pythons_own_interrupt_is_one_line_too(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)

    with pytest.raises(SystemExit) as ended, ends_in_one_line("sidecar x"):
        raise KeyboardInterrupt

    assert ended.value.code == 130
    assert capsys.readouterr().err == "sidecar x: interrupted\n"
    assert signal.getsignal(signal.SIGINT) is before


def test_a_main_that_runs_in_another_thread_sets_no_handler() -> None:
    done = []

    def run() -> None:
        with ends_in_one_line("sidecar x"):
            done.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()

    assert done == [before]


def test_a_package_of_an_extra_that_is_not_installed_is_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended, ends_in_one_line("sidecar x"):
        raise ModuleNotFoundError(name="alembic.config")
    assert ended.value.code == 1
    assert capsys.readouterr().err == (
        "sidecar x: alembic cannot be imported; run `pip install 'learning-sidecar[control]'`, or "
        "`pip install '.[control]'` in a clone\n"
    )
    with pytest.raises(ModuleNotFoundError), ends_in_one_line("sidecar x"):  # no extra has it
        raise ModuleNotFoundError(name="settings")
