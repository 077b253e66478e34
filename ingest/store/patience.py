"""Repeat a transaction while the store is locked or away, since what it stores has cost money."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from time import monotonic
from typing import TypeVar

from sidecar.backoff import Backoff
from sidecar.errors import StoreError

PAUSES = Backoff(first_s=1.0, last_s=5.0)

Result = TypeVar("Result")


async def patiently(
    work: Callable[[], Result],
    *,
    on_failure: Callable[[StoreError, float], None],
    longest_s: float = math.inf,
) -> Result:
    """Run a store operation in a thread; again, after growing pauses, while the store refuses.

    on_failure: is told each error that is followed by another attempt, and the pause in seconds.
    Raises: StoreError when the store still refuses after `longest_s` seconds.
    """
    give_up_at = monotonic() + longest_s
    failures = 0
    while True:
        try:
            return await asyncio.to_thread(work)
        except StoreError as error:
            failures += 1
            pause_s = PAUSES.wait_s(failures)
            if monotonic() + pause_s > give_up_at:
                raise
            on_failure(error, pause_s)
            await asyncio.sleep(pause_s)
