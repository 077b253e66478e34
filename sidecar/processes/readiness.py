"""Report to `sidecar up` through an inherited pipe: that a child process works, and what a person
at the terminal must know.

Only a child of this start has the pipe, so another program on the same port is never taken for it.
"""

from __future__ import annotations

import os
import stat

import structlog

VARIABLE = "SIDECAR_READY_FD"
"""Environment variable with the descriptor of the pipe."""
_READY = "ready"
_SAY = "say"
MAX_SAID = 900
"""Characters of a line for the terminal: in UTF-8 it fits what a pipe takes in one piece."""
_READ_BYTES = 65_536
"""What a pipe holds."""

log = structlog.get_logger()


class Report:
    """A child's end of the pipe. Says nothing in a process that a person started."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def ready(self, address: str = "") -> None:
        """Report that this process works. address: the base URL at which it listens."""
        self._write(f"{_READY} {address}")

    def say(self, line: str) -> None:
        """Have `sidecar up` show a line on its terminal."""
        self._write(f"{_SAY} {' '.join(line.split())[:MAX_SAID]}")

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _write(self, line: str) -> None:
        if self._descriptor is None:
            return
        try:
            os.write(self._descriptor, f"{line}\n".encode())
        except OSError as error:
            log.warning("ready_not_told", why=str(error))


def open_report() -> Report:
    """Return this process's end of the pipe; the first caller gets it."""
    number = os.environ.pop(VARIABLE, "")  # children of this process do not inherit the pipe
    if not number.isdigit():
        return Report(None)
    try:
        descriptor = int(number)
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            os.set_inheritable(descriptor, False)
            os.set_blocking(descriptor, False)  # a `sidecar up` that hangs must hold up nobody
            return Report(descriptor)
    except (OSError, OverflowError) as error:
        log.warning("ready_not_told", why=str(error))
    return Report(None)


def tell_ready(address: str = "") -> None:
    """Report readiness once, and nothing more; see `Report.ready`."""
    report = open_report()
    report.ready(address)
    report.close()


def read_report(descriptor: int) -> tuple[str | None, list[str]]:
    """Read what the child reported since the last call through its non-blocking pipe.

    Returns: its address, "" when it listens nowhere, None when it did not report that it is ready;
    and the lines for the terminal.
    """
    try:
        text = os.read(descriptor, _READ_BYTES).decode("utf-8", "replace")
    except BlockingIOError:
        return None, []
    reports = [line.partition(" ") for line in text.split("\n")]
    ready = [rest for word, _, rest in reports if word == _READY]
    return (ready[0] if ready else None), [rest for word, _, rest in reports if word == _SAY]
