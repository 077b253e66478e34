"""Ctrl-C while a process starts or ends: one line and exit code 130, in place of a traceback.

A process that runs handles the signals itself and stops in order. Before it gets that far it
imports libraries for a second or more, and after it has stopped Python's own handler is back.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130
"""The exit code that shells give a program which SIGINT ended: 128 + 2."""


@contextmanager
def one_line_at_interrupt(name: str) -> Iterator[None]:
    """Run the body of a process's `main`.

    name: the command, as the line shows it.
    Raises: SystemExit with code 130 at Ctrl-C, unless the body has set a handler of its own.
    """

    def end(_number: int = 0, _frame: FrameType | None = None) -> NoReturn:
        sys.stderr.write(f"{name}: interrupted\n")
        raise SystemExit(INTERRUPTED)

    # Only the main thread may set a handler; Python delivers the signal to no other thread.
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, end) if is_main else None
    try:
        yield
    except KeyboardInterrupt:  # an event loop that ended restored Python's own handler
        end()
    finally:
        if is_main:
            signal.signal(signal.SIGINT, before or signal.SIG_DFL)
