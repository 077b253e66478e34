"""Let vLLM's processes start as one and sleep where they would spin. Python imports this at the
start of each. Only the demo and the tests do this, since they run everything on one small machine.

- The engine core and its worker import what the API server imports, one after the other: 62 s to
  the first reply on two slow cores. Forked from a process that imports it beside the API server:
  27 s (docs/log.md). vLLM forks elsewhere; on a CPU it spawns.
- For a second after each message, vLLM's processes poll shared memory with `os.sched_yield`. On two
  cores that takes the core on which another process computes: the engine core alone used 61 ms of
  CPU a token, and uses 8 with the pause; a token takes as long as before (docs/log.md).
"""

import multiprocessing
import os
import time
from multiprocessing import forkserver

PAUSE_S = 0.0002
"""A step of the demo's model takes 30 ms and waits for two messages."""
STARTED = "DEMO_ENGINE_STARTED"
"""In the environment of every process below the first one."""
PRELOADED = ["vllm.v1.engine.core", "vllm.v1.worker.cpu_worker"]
"""What cannot be imported is left out without a word, and imported where it is needed."""

_context = multiprocessing.get_context


def _pause() -> None:
    time.sleep(PAUSE_S)


def _forked(method: str | None = None) -> multiprocessing.context.BaseContext:
    return _context("forkserver" if method == "spawn" else method)


os.sched_yield = _pause
multiprocessing.get_context = _forked  # type: ignore[assignment]
if STARTED not in os.environ:
    os.environ[STARTED] = "1"
    multiprocessing.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()
