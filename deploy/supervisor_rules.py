"""The supervisor's rules: names and order of the processes, restarts, when to give up. Pure."""

from __future__ import annotations

import signal
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from sidecar.backoff import STEADY_S, Backoff
from sidecar.processes import own_python

if TYPE_CHECKING:
    from sidecar.settings import Settings


RESTARTS = Backoff(first_s=0.5, last_s=30.0)
GIVE_UP_DEATHS = 5
GIVE_UP_WITHIN_S = STEADY_S
"""Seconds. The supervisor gives up, and `sidecar up` ends, when a child that was never ready died
`GIVE_UP_DEATHS` times and lived no longer than this in total: another try would not help. A child
that was ready once is always started again."""
ASKED_TO_END = frozenset({0, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP})
"""Exit codes of a process that a person told to stop or to reload. Our own processes return 0 for
nothing else."""

ENGINE = "engine"
"""The name of the vLLM that `sidecar up` starts."""
MODULES = {
    "proxy": "sidecar",
    "ingest": "ingest",
    "score": "ingest.score",
    "learn": "learner",
    "control": "deploy",
}
"""The sidecar's own processes, in the order of starting; each is `python -m <module>`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """How to start one child."""

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables added to the supervisor's own environment."""
    tells_ready: bool = False
    """True for the sidecar's own processes, which report when they are ready."""


def plan(
    settings: Settings, config: Path | None, *, without: Container[str] = ()
) -> list[ProcessSpec]:
    """Every child of `sidecar up`, in the order of starting; the engine only if there is a command
    for it.

    without: names of `MODULES` that cannot work on this machine and are not started.
    """
    specs = []
    if settings.engine.command:
        specs.append(
            ProcessSpec(name=ENGINE, command=settings.engine.command, env=dict(settings.engine.env))
        )
    arguments = ("--config", str(config)) if config is not None else ()
    specs += [
        ProcessSpec(name=name, command=own_python(module, *arguments), tells_ready=True)
        for name, module in MODULES.items()
        if name not in without
    ]
    return specs


def is_hopeless(lived_s: Sequence[float]) -> bool:
    """True if a child that was never ready is to be given up. lived_s: seconds of each life."""
    last = lived_s[-GIVE_UP_DEATHS:]
    return len(last) == GIVE_UP_DEATHS and sum(last) <= GIVE_UP_WITHIN_S


def describe_exit(code: int) -> str:
    """An exit code in words; negative codes are signals."""
    return f"killed by signal {-code}" if code < 0 else f"exited with {code}"
