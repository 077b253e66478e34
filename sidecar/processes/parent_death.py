"""Run a command that ends when its starter ends: `python sidecar/processes/parent_death.py
PARENT_PID COMMAND...`.

The kernel is asked to send TERM when the parent dies, however it dies, and then the command takes
this process's place. A step of its own, and not `preexec_fn`, because code between fork and exec
may meet a lock that a thread of the parent held. It needs the standard library alone, so it runs
isolated from the working folder and from the environment, which the command then gets as they are.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> int:
    parent = int(argv[0])
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before the kernel was asked
        return 1
    try:
        os.execvp(argv[1], argv[1:])
    except OSError as error:
        sys.stderr.write(f"{argv[1]} cannot be started: {error.strerror}; correct the command\n")
        return 127


def guarded_command() -> tuple[str, ...]:
    """Put before a command line: the command ends with the process that calls this."""
    return (sys.executable, "-I", "-S", str(Path(__file__).resolve()), str(os.getpid()))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
