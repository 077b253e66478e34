"""Wait for a store that another program has locked, and for servers that may never answer.

A lock of a minute (a backup, an open `sqlite3` session) must end no run. Before a run has computed
anything it waits for `LOCKED_S`; a run that is trained waits for longer (`learner.runs.publish`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import structlog

from sidecar.errors import StoreLockedError

log = structlog.get_logger()

T = TypeVar("T")

LOCKED_S = 120.0
"""How long a start waits. Each attempt takes the 15 s of the store's busy timeout."""
PAUSE_S = 1.0


def when_unlocked(work: Callable[[], T], *, stopping: threading.Event, doing: str) -> T:
    """Do a store operation; again, while another program has locked the store.

    work: changes nothing when it raises. doing: what waits, in the log.
    Raises: StoreLockedError after `LOCKED_S`, or once `stopping` is set.
    """
    began = time.monotonic()
    while True:
        try:
            return work()
        except StoreLockedError as error:
            log.warning("locked_store_waited_for", doing=doing, error=str(error))
            if time.monotonic() - began > LOCKED_S or stopping.wait(PAUSE_S):
                raise


def in_thread(work: Callable[[], T]) -> Future[T]:
    """Do work that may never end in a thread, which keeps no process alive."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001  for whoever reads the future
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
