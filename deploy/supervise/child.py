"""One process under `sidecar up`: start it, read its reports, notice its end, restart it.

The child has its own log and its own process group, so that Ctrl-C on the terminal does not reach
it. If the supervisor is killed, the kernel ends the child (`sidecar.processes.parent_death`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import IO

import structlog

from deploy.supervise.processes import (
    ASKED_TO_END,
    RESTARTS,
    ProcessSpec,
    describe_exit,
    is_hopeless,
)
from sidecar.backoff import STEADY_S, Waits
from sidecar.processes.children import own_environment
from sidecar.processes.parent_death import guarded_command
from sidecar.processes.readiness import VARIABLE as READY_VARIABLE
from sidecar.processes.readiness import read_report

log = structlog.get_logger()

LAST_BYTES = 2_000
"""How much of the end of a log is searched for its last line."""


class Child:
    """One supervised process and its log file."""

    def __init__(self, spec: ProcessSpec, log_path: Path) -> None:
        self.spec = spec
        self.log_path = log_path
        self.process: subprocess.Popen[bytes] | None = None
        self.started_at = 0.0
        self._waits = Waits(RESTARTS)
        self.restart_at = 0.0
        self.worked = False
        """True once it was ready, or ran for `STEADY_S`: it is then always started again."""
        self.address: str | None = None
        """The address that it reported; "" if it listens nowhere. None: it is not ready."""
        self.died: str | None = None
        """How it ended the last time; None while it runs."""
        self._said: list[str] = []
        self._lives_s: list[float] = []
        """Seconds of each life."""
        self._log_file: IO[bytes] | None = None
        self._log_start = 0
        self._ready_pipe: int | None = None

    @property
    def is_failing(self) -> bool:
        """True if it does not run now, or died and was never ready."""
        return self.died is not None or (bool(self._lives_s) and not self.worked)

    @property
    def is_hopeless(self) -> bool:
        return not self.worked and is_hopeless(self._lives_s)

    def start(self, now: float) -> None:
        """Raises: OSError when the log cannot be written or no process can be started."""
        self.log_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._log_file = self.log_path.open("ab")
        self._log_start = self._log_file.tell()
        env, told_by = self._environment(), list[int]()
        if self.spec.tells_ready:
            self._ready_pipe, theirs = os.pipe()
            os.set_blocking(self._ready_pipe, False)
            env[READY_VARIABLE] = str(theirs)
            told_by.append(theirs)
        self.started_at, self.address = now, None
        try:
            self.process = subprocess.Popen(
                (*guarded_command(), *self.spec.command),
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=self._log_file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=told_by,
            )
        except OSError:
            self._close()
            raise
        finally:
            for descriptor in told_by:
                os.close(descriptor)
        self.died = None
        log.info("process_started", name=self.spec.name, pid=self.process.pid)

    def _environment(self) -> dict[str, str]:
        """The child's environment. The operator's vLLM gets ours unchanged."""
        inherited = dict(os.environ) if not self.spec.tells_ready else own_environment(os.environ)
        return {**inherited, **self.spec.env}

    def check(self, now: float) -> None:
        """Read whether it is ready, notice its end, plan a restart, and carry it out when due."""
        if self.process is None:
            if now >= self.restart_at:
                self._start_again(now)
            return
        self._read_report()
        code = self.process.poll()
        if code is not None:
            self._note_end(now, describe_exit(code), asked=code in ASKED_TO_END)

    def _start_again(self, now: float) -> None:
        try:
            self.start(now)
        except OSError as error:  # out of memory or processes, a full disk
            self._note_end(now, f"could not be started: {error.strerror}", asked=False)

    def _read_report(self) -> None:
        if self._ready_pipe is None:
            return
        address, said = read_report(self._ready_pipe)
        if address is not None:
            self.address, self.worked = address, True
        self._said += [_printable(line) for line in said]

    def take_said(self) -> list[str]:
        """Return the lines for the terminal that it reported since the last call."""
        said, self._said = self._said, []
        return said

    def _note_end(self, now: float, how: str, *, asked: bool) -> None:
        """Plan the restart. asked: somebody told it to end, and it did; that is no error."""
        lived_s = now - self.started_at
        self.worked = self.worked or lived_s >= STEADY_S
        self._lives_s.append(lived_s)
        wait_s = self._waits.restart_s(lived_s)
        self.restart_at = now + wait_s
        last_line = self.last_line()
        self.died = f"{how}: {last_line}" if last_line else how
        if asked and self.worked:
            log.info("process_ended", name=self.spec.name, how=how, restart_in_s=wait_s)
        else:
            log.error(
                "process_died",
                name=self.spec.name,
                how=how,
                restart_in_s=wait_s,
                log=str(self.log_path),
                last_line=last_line,
            )
        self.process = self.address = None
        self._close()

    def last_line(self) -> str:
        """The last line that this life of the child wrote to its log; "" if it wrote none."""
        try:
            with self.log_path.open("rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(self._log_start, end - LAST_BYTES))
                tail = file.read(LAST_BYTES)
        except OSError:
            return ""
        lines = tail.decode("utf-8", "replace").strip().splitlines()
        return _printable(lines[-1])[:300] if lines else ""

    def terminate(self, number: signal.Signals = signal.SIGTERM) -> None:
        if self.process is not None and self.process.poll() is None:
            self._signal(number)

    def join(self, deadline: float) -> None:
        if self.process is None:
            return
        try:
            self.process.wait(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            log.warning("process_killed", name=self.spec.name, why="it did not end in time")
            self._signal(signal.SIGKILL)
            self.process.wait()
        self._close()

    def _signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        try:
            os.killpg(self.process.pid, number)  # its own group: start_new_session
        except ProcessLookupError:
            log.debug("process_already_gone", name=self.spec.name)

    def _close(self) -> None:
        if self._log_file is not None:
            self._log_file.close()
            self._log_file = None
        if self._ready_pipe is not None:
            os.close(self._ready_pipe)
            self._ready_pipe = None


def _printable(line: str) -> str:
    return "".join(one if one.isprintable() else "?" for one in line)
