"""A stream that refuses log lines costs these lines, never the process."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from typing import TextIO

from sidecar.logs import Lines

PROGRAM = """
import sys
import structlog
from sidecar.logs import configure_logging
from sidecar.settings import Telemetry
configure_logging(Telemetry(), "test")
for number in range(3):
    structlog.get_logger().warning("an_event", number=number)
sys.stdout.write("alive")
"""


def test_a_process_whose_log_is_on_a_full_disk_goes_on() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=full, timeout=60
        )

    assert done.stdout == b"alive"


class _Refusing(io.StringIO):
    refuses = True

    def write(self, text: str) -> int:
        if self.refuses:
            raise OSError(28, "No space left on device")
        return super().write(text)


def _written(stream: TextIO) -> list[str]:
    stream.seek(0)
    return stream.read().splitlines()


def test_the_next_line_says_how_many_are_missing_and_why() -> None:
    stream = _Refusing()
    lines = Lines(stream)
    lines.msg("first")
    lines.msg("second")
    stream.refuses = False
    lines.msg("third")
    lines.msg("fourth")

    account, *others = _written(stream)
    assert json.loads(account)["lines"] == 2
    assert "No space left" in json.loads(account)["error"]
    assert others == ["third", "fourth"]


def test_a_closed_stream_raises_nothing() -> None:
    stream = io.StringIO()
    stream.close()

    Lines(stream).msg("a line at the end of a process")
