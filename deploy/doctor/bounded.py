"""Run checks at the same time, and give up those that take too long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

_unfinished: list[threading.Thread] = []


def are_unfinished() -> bool:
    """Return whether a check that was given up still runs. Python would wait for it at the end: for
    threads of its own that it started, or for a lock that it holds."""
    return any(thread.is_alive() for thread in _unfinished)


def run_checks(
    checks: Mapping[str, Callable[[], Any]], limit_s: float
) -> tuple[dict[str, Any], dict[str, str]]:
    """Run each check in a thread of its own. Any: each returns what it likes.

    Returns: results by name; and, for checks without one, why.
    """
    results: dict[str, Any] = {}
    failures: dict[str, str] = {}

    def run(name: str, check: Callable[[], Any]) -> None:
        try:
            results[name] = check()
        except Exception as error:  # noqa: BLE001 - one check must not hide what the others find
            failures[name] = f"{type(error).__name__}: {error}"

    # Daemons: a check that hangs must not keep the command from ending.
    threads = {
        name: threading.Thread(target=run, args=(name, check), daemon=True)
        for name, check in checks.items()
    }
    for thread in threads.values():
        thread.start()
    deadline = time.monotonic() + limit_s
    for name, thread in threads.items():
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            _unfinished.append(thread)
            failures.setdefault(name, f"no answer within {limit_s:g} s")
    return dict(results), dict(failures)
