"""Run a command that ends when its starter ends: `python -m deploy.leash PARENT_PID COMMAND...`.

The kernel is asked to send TERM when the parent dies, however it dies, and then the command takes
this process's place. A step of its own, and not `preexec_fn`, because code between fork and exec
may meet a lock that a thread of the parent held.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> int:
    parent = int(argv[0])
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before the kernel was asked
        return 1
    os.execvp(argv[1], argv[1:])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
