"""`python -m benchmarks NAME [OPTIONS]`: run one benchmark, or all of them in turn."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from types import FrameType

NAMES = {
    "relay": "benchmarks.relay.run",
    "ingest": "benchmarks.ingest.run",
    "sessions": "benchmarks.sessions.run",
    "ruler": "benchmarks.ruler.run",
    "groups": "benchmarks.groups.run",
    "learning": "benchmarks.learning.run",
    "tasks": "benchmarks.tasks.run",
    "learner": "benchmarks.learner.run",
    "rollback": "benchmarks.rollback.run",
    "canary": "benchmarks.canary.run",
    "sabotage": "benchmarks.sabotage.run",
}
"""Name -> the module whose `main(argv)` runs it and returns the exit code."""


def main(argv: Sequence[str]) -> int:
    if argv and argv[0] not in (*NAMES, "all"):
        known = ", ".join((*NAMES, "all"))
        print(f"benchmarks: no benchmark {argv[0]!r}; there are: {known}", file=sys.stderr)
        return 2
    chosen = list(NAMES) if not argv or argv[0] == "all" else [argv[0]]
    codes = []
    for name in chosen:
        run: Callable[[Sequence[str]], int] = import_module(NAMES[name]).main
        codes.append(run(argv[1:]))
    return max(codes)


def _leave(number: int, _frame: FrameType | None) -> None:
    """As Ctrl-C does: unwind, so that what was started is stopped."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _leave)
    sys.exit(main(sys.argv[1:]))
