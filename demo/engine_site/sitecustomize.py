"""Let vLLM's processes sleep where they would spin. Python imports this at the start of each.

For a second after each message, vLLM's processes poll shared memory with `os.sched_yield`. On a
machine with two cores that takes the core on which another process computes: the engine core alone
used 61 ms of CPU a token, and uses 8 with the pause; a token takes as long as before (docs/log.md).
Only the demo and the tests do this, since they run everything on one small machine.
"""

import os
import time

PAUSE_S = 0.0002
"""A step of the demo's model takes 30 ms and waits for two messages."""


def _pause() -> None:
    time.sleep(PAUSE_S)


os.sched_yield = _pause
