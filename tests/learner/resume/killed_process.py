"""A process that starts runs of the real trainer, each in a process of its own, and kills them.

Forked from one process, because torch takes seconds to import. Each line of standard input is a
JSON object: `settings`, `run_id`, and `kill_at`, a name and a number: SIGKILL ends the process at
the nth event of this name; name "": of any; 0: never. The answer is a JSON line: `signal` that
ended it, its `code`, and the `events` that it went through.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import learner.grpo.checks
import learner.grpo.files.checkpoint
import learner.grpo.files.saving
import learner.grpo.trainer
import learner.resume.work_folder
import learner.runs.material
import learner.runs.publish
import learner.runs.train
from learner.once import run_once
from learner.records import TrainingGroup
from sidecar.settings import Settings
from sidecar.store.database import Database

BEFORE: list[tuple[str, Any, str]] = [
    ("claimed", learner.runs.train, "gather"),
    ("check", learner.grpo.checks, "_recompute"),
    ("group of a step", learner.grpo.trainer, "_add_group"),
    ("step", learner.grpo.trainer, "step_metrics"),
    ("checkpoint begins", learner.grpo.files.checkpoint, "save_snapshot"),
    ("checkpoint half written", learner.grpo.files.checkpoint, "file_digest"),
    ("file or folder synced", learner.resume.work_folder, "sync"),
    ("saving", learner.grpo.files.saving, "save_adapter"),
    ("sealing", learner.runs.train, "seal"),
    ("placing", learner.runs.train, "place"),
    ("placed, not registered", learner.runs.train, "register"),
    ("registered, not committed", learner.runs.train, "end_run"),
]
"""Event -> a function before whose call it is."""


class Events:
    """Counts events, and ends the process at one of them."""

    def __init__(self, name: str, number: int, path: Path) -> None:
        self._kill_at = (name, number)
        self._path = path
        self._seen: Counter[str] = Counter()

    def at(self, name: str, *more: str) -> None:
        """more: names of the same event that say more."""
        with self._path.open("a") as file:
            file.write(f"{name}\n")
        for one in ("", name, *more):
            self._seen[one] += 1
            if (one, self._seen[one]) == self._kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    def before(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def told(*arguments: Any, **named: Any) -> Any:
            groups = [one for one in arguments if isinstance(one, TrainingGroup)]
            self.at(name, *(f"{name} of {one.group_id}" for one in groups))
            return call(*arguments, **named)

        return told

    def hook(self) -> None:
        for name, module, function in BEFORE:
            setattr(module, function, self.before(name, getattr(module, function)))
        publish = learner.runs.train.Run._publish

        def published(*arguments: Any) -> Any:
            found = publish(*arguments)
            self.at("committed")
            return found

        setattr(learner.runs.train.Run, "_publish", published)  # noqa: B010  mypy refuses the other


def run(asked: dict[str, Any], events: Path) -> int:
    settings = Settings.model_validate(asked["settings"])
    name, number = asked["kill_at"]
    Events(name, number, events).hook()
    database = Database(settings.store.url)
    sys.stdout = sys.stderr
    return run_once(
        settings,
        database,
        run_id=asked["run_id"],
        clock=time.time,
        stopping=Waiting(events),
    )


class Waiting(threading.Event):
    """Notes that the run waits for the lease of another."""

    def __init__(self, events: Path) -> None:
        super().__init__()
        self._events = events

    def wait(self, timeout: float | None = None) -> bool:
        with self._events.open("a") as file:
            file.write("waited\n")
        return super().wait(timeout)


def main() -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        events = Path(asked["events"])
        events.write_text("")
        child = os.fork()
        if child == 0:
            code = 99
            try:
                code = run(asked, events)
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        answer = {
            "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0,
            "code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
            "events": events.read_text().splitlines(),
        }
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
