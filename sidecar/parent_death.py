"""Run a command that ends when its parent ends.

Usage: `python sidecar/parent_death.py PARENT_PID COMMAND...`. The kernel is asked to send
TERM when the parent dies, in whatever way, and then the command replaces this process. `preexec_fn`
would run between fork and exec, where a lock held by another thread of the parent can block it.
Only the standard library is used, isolated from the working folder and the environment; the command
gets both unchanged.
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
    if os.getppid() != parent:  # the parent died before the kernel was asked
        return 1
    try:
        os.execvp(argv[1], argv[1:])
    except OSError as error:
        sys.stderr.write(f"{argv[1]} cannot be started: {error.strerror}; correct the command\n")
        return 127


def guarded_command() -> tuple[str, ...]:
    """Return what to put before a command line, so that the command ends with this process."""
    return (sys.executable, "-I", "-S", str(Path(__file__).resolve()), str(os.getpid()))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
