"""Logs: short numbers for people, nothing that a terminal is told in words already; a stream that
refuses lines costs these lines, never the process."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import pytest

from sidecar.logs import Lines, rounded

PROGRAM = """
import sys
import structlog
from sidecar.logs import IN_WORDS, configure_logging
from sidecar.settings import Telemetry
configure_logging(Telemetry(log_json=sys.argv[1] == "json"), "test")
log = structlog.get_logger()
log.info("in_words_too", loss=0.01569626131780535, **{IN_WORDS: True})
log.info("last", loss=0.01569626131780535)
sys.stdout.write("alive")
"""


def said(form: str, *, terminal: bool) -> list[str]:
    """Return the log's lines. terminal: stderr is one."""
    ours, its = os.openpty() if terminal else os.pipe()
    try:
        subprocess.run([sys.executable, "-c", PROGRAM, form], stderr=its, timeout=60, check=True)
        return os.read(ours, 100_000).decode().splitlines()
    finally:
        os.close(its)
        os.close(ours)


def test_a_terminal_has_no_event_that_it_is_told_in_words() -> None:
    (line,) = said("text", terminal=True)

    assert "last" in line
    assert "0.0157" in line
    assert "0.01569" not in line


def test_a_file_has_every_event_with_numbers_that_can_be_read() -> None:
    first, last = said("text", terminal=False)

    assert "in_words_too " in first
    assert "loss=0.0157 " in last
    assert "in_words=" not in first


@pytest.mark.parametrize("terminal", [True, False])
def test_json_has_every_event_with_all_digits(terminal: bool) -> None:
    first, last = (json.loads(line) for line in said("json", terminal=terminal))

    assert (first["event"], last["event"]) == ("in_words_too", "last")
    assert first["loss"] == 0.01569626131780535
    assert "in_words" not in first


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (39.93959176700082, 39.94),
        (0.00031253193554125336, 0.0003125),
        (1_764_222_000.75, 1_764_222_001),
        (float("inf"), float("inf")),
        (2078048256, 2078048256),
        (True, True),
        ("1.23456", "1.23456"),
    ],
)
def test_numbers_have_four_digits_and_lose_none_before_the_point(
    value: object, shown: object
) -> None:
    assert rounded(value) == shown


def test_a_process_whose_log_is_on_a_full_disk_goes_on() -> None:
    command = [sys.executable, "-c", PROGRAM, "text"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, timeout=60)

    assert done.stdout == b"alive"


class _Refusing(io.StringIO):
    refuses = True

    def write(self, text: str) -> int:
        if self.refuses:
            raise OSError(28, "No space left on device")
        return super().write(text)


def test_the_next_line_says_how_many_are_missing_and_why() -> None:
    stream = _Refusing()
    lines = Lines(stream)
    lines.msg("first")
    lines.msg("second")
    stream.refuses = False
    lines.msg("third")
    lines.msg("fourth")

    account, *others = stream.getvalue().splitlines()
    assert json.loads(account)["lines"] == 2
    assert "No space left" in json.loads(account)["error"]
    assert others == ["third", "fourth"]


def test_a_closed_stream_raises_nothing() -> None:
    stream = io.StringIO()
    stream.close()

    Lines(stream).msg("a line at the end of a process")
