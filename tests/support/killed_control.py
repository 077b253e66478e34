"""A real `sidecar control`, or a command, that SIGKILL ends at a chosen point.

It runs the product's own `main` in a process of its own, forked from one that has imported it, so
that a start takes no seconds of imports. The product knows nothing of the points: its functions are
wrapped here, in the forked process. The judge is the tests' fake one; vLLM is asked over HTTP.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, cast

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from sidecar.store.database import Database
from sidecar.store.models import AuditRow
from support.fake_judge import FakeJudge

When = Literal["before", "after"]
PRELOADED = (
    "support.killed_control",
    "deploy.__main__",
    "deploy.process",
    "deploy.cli.app",
    "deploy.registry.rollback",
    "deploy.engine.validation",
    "learner.runs.publish",
    "uvicorn.protocols.http.h11_impl",
    "uvicorn.lifespan.off",
)


@dataclass(frozen=True, slots=True)
class Point:
    """Where a process dies: at the first such event of its life."""

    when: When
    what: str
    """`load` or `unload`: of an adapter, by vLLM's reply. Any other: the commit of a transaction
    that adds an audit row of this action."""

    def __str__(self) -> str:
        return f"{self.when} {self.what}"


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a process does."""

    argv: tuple[str, ...]
    """Empty: control. Else the arguments of `sidecar`, without `--config`."""
    config: Path
    log: Path
    point: Point | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    """Content of an answer -> the judge's score."""
    constants: Mapping[str, float] = field(default_factory=dict)
    """`module:NAME` -> another value, for waits of half a minute."""


def start(asked: Start) -> BaseProcess:
    """Start a process. Its `exitcode` is -9 when it died at its point."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    process = context.Process(target=_run, args=(asked,))
    process.start()
    return process


def _run(asked: Start) -> None:
    log = os.open(asked.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    for place, value in asked.constants.items():
        module, _, name = place.partition(":")
        assert hasattr(import_module(module), name)
        setattr(import_module(module), name, value)
    _judge_by(asked.scores)
    if asked.point is not None:
        _die_at(asked.point)
    if asked.argv:
        from deploy.cli.main import main as command

        raise SystemExit(command(["--config", str(asked.config), *asked.argv]))
    from deploy.__main__ import main as control

    raise SystemExit(control(["--config", str(asked.config)]))


def _judge_by(scores: Mapping[str, float]) -> None:
    import deploy.process

    class Judges:
        def __init__(self, *_: object) -> None:
            self.patient = FakeJudge(model="fake")
            self.patient.scores = dict(scores)

        async def aclose(self) -> None:
            pass

    vars(deploy.process)["ProcessJudges"] = Judges


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_at(point: Point) -> None:
    if point.what in ("load", "unload"):
        from deploy.engine.vllm_control import VllmControl

        call = cast(Callable[..., Awaitable[None]], getattr(VllmControl, point.what))

        async def dies(*arguments: Any) -> None:
            if point.when == "before":
                _die()
            await call(*arguments)
            _die()

        setattr(VllmControl, point.what, dies)
        return
    write = Database.write

    @contextmanager
    def watched(self: Database, *, alone: bool = True) -> Iterator[Session]:
        with write(self, alone=alone) as session:
            newest = select(func.max(AuditRow.seq))
            known = session.scalar(newest) or 0
            yield session
            session.flush()
            added = session.scalars(select(AuditRow.action).where(AuditRow.seq > known)).all()
            due = point.what in added
            if due and point.when == "before":
                _die()
        if due:
            _die()

    Database.write = watched  # type: ignore[method-assign]
