"""A process that starts runs of the real trainer, each in a process of its own, and kills them.

Forked from one process, because torch takes seconds to import. Each line of standard input is a
JSON object: `settings`, `run_id`, `processes` of the run, and `kill_at`, a name and a number: at
the nth event of this name (name "": of any; 0: never) process `rank` sends itself `signal`. The
answer is a JSON line: the `signal` that ended that process, its `code`, the `events` that it went
through, and the `codes` of all; with `to_all` the signal goes to each. Several processes find each
other as those of a launcher do.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import transformers
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import learner.distributed.trainer
import learner.grpo.checkpoint
import learner.grpo.checks
import learner.grpo.trainer
import learner.progress.export
import learner.resume
import learner.runs.material
import learner.runs.publish
import learner.runs.train
from learner.distributed.place import ADDRESS, PORT, RANK, SIZE, Place
from learner.once import as_launched, follow, lead, run_once
from learner.records import TrainingGroup
from sidecar.settings import Settings
from sidecar.store.database import Database

BEFORE: list[tuple[str, Any, str]] = [
    ("claimed", learner.runs.train, "gather"),
    ("check", learner.grpo.checks, "_recompute"),
    ("group of a step", learner.grpo.trainer, "_add_group"),
    ("step", learner.grpo.trainer, "step_metrics"),
    ("checkpoint begins", learner.grpo.checkpoint, "save_snapshot"),
    ("checkpoint half written", learner.grpo.checkpoint, "file_digest"),
    ("file or folder synced", learner.resume, "sync"),
    ("saving", learner.grpo.checkpoint, "save_adapter"),
    ("sealing", learner.runs.train, "seal"),
    ("placing", learner.runs.publish, "place"),
    ("placed, not registered", learner.runs.train, "register"),
    ("registered, not committed", learner.runs.train, "end_run"),
]
"""Event -> a function before whose call it is."""


LOADED = (transformers.AutoModelForCausalLM, transformers.LlamaForCausalLM)
"""Parts that are imported when they are first named: here, and not in each process."""


def draw_nothing(steps: Sequence[Any], path: Path, *, title: str) -> None:
    """In place of the curves, which take longer than the run of a tiny model."""
    path.write_bytes(title.encode())


class Events:
    """Counts events, and ends the process at one of them."""

    def __init__(self, name: str, number: int, path: Path, send: Callable[[], None]) -> None:
        self._kill_at, self._send = (name, number), send
        self._path = path
        self._seen: Counter[str] = Counter()

    def at(self, name: str, *more: str) -> None:
        """more: names of the same event that say more."""
        with self._path.open("a") as file:
            file.write(f"{name}\n")
        for one in ("", name, *more):
            self._seen[one] += 1
            if (one, self._seen[one]) == self._kill_at:
                self._send()

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


def run(asked: dict[str, Any], events: Path, rank: int) -> int:
    settings = Settings.model_validate(asked["settings"])
    name, number = asked["kill_at"] if rank == asked["rank"] else ("", 0)

    def send() -> None:
        pids = Path(asked["pids"]).read_text().split() if asked["to_all"] else [os.getpid()]
        for pid in pids:
            os.kill(int(pid), asked["signal"])

    Events(name, number, events, send).hook()
    sys.stdout = sys.stderr
    place = Place(rank, asked["processes"], rank, asked["processes"]) if asked["port"] else None
    settings = as_launched(settings, place)
    if place is not None:
        os.environ.update({ADDRESS: "127.0.0.1", PORT: str(asked["port"]), RANK: str(rank)})
        os.environ[SIZE] = str(place.size)
    if rank > 0 and place is not None:
        return follow(settings.learner, place, threading.Event())
    database = Database(settings.store.url)
    return lead(
        settings.learner,
        None,
        place,
        lambda trainer: run_once(
            settings,
            database,
            run_id=asked["run_id"],
            clock=time.time,
            stopping=Waiting(events),
            trainer=trainer,
        ),
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


def fork(asked: dict[str, Any], rank: int) -> int:
    """Return the pid of a process of the run."""
    events = Path(f"{asked['events']}-{rank}")
    events.write_text("")
    child = os.fork()
    if child == 0:
        code = 99
        try:
            code = run(asked, events, rank)
        finally:
            os._exit(code)
    return child


def prepare() -> None:
    """Do once what each process of a run would do anew: what libraries import and build at their
    first use. To search the imported libraries for garbage takes a process half a second."""
    get_checkpoint_conversion_mapping("llama")
    gc.collect()
    gc.freeze()


def main() -> None:
    prepare()
    learner.progress.export.draw = draw_nothing
    for line in sys.stdin:
        asked = json.loads(line)
        size, rank = asked["processes"], asked["rank"]
        asked["pids"] = f"{asked['events']}-pids"
        children = [fork(asked, number) for number in range(size)]
        Path(asked["pids"]).write_text(" ".join(map(str, children)))
        ends = [os.waitpid(child, 0)[1] for child in children]
        answer = {
            "signal": os.WTERMSIG(ends[rank]) if os.WIFSIGNALED(ends[rank]) else 0,
            "code": os.WEXITSTATUS(ends[rank]) if os.WIFEXITED(ends[rank]) else None,
            "codes": [os.waitstatus_to_exitcode(end) for end in ends],
            "events": Path(f"{asked['events']}-{rank}").read_text().splitlines(),
        }
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
