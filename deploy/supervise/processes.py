"""What the supervisor decides, apart from how it is done: names, order, back-off. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from sidecar.backoff import STEADY_S, Backoff
from sidecar.processes.children import own_python

if TYPE_CHECKING:  # the command reads the names here before it knows whether it needs settings
    from sidecar.settings import Settings

RESTARTS = Backoff(first_s=0.5, last_s=30.0)
GIVE_UP_DEATHS = 5
GIVE_UP_WITHIN_S = STEADY_S
"""A child that died so often before it ever worked, and lived for no longer than this in all those
lives together, is given up, and with it the start: another try will not help. One that worked once
is started again for ever."""

ENGINE = "engine"
"""The name of a vLLM that is ours."""
MODULES = {
    "proxy": "sidecar",
    "ingest": "ingest",
    "scoring": "ingest.scoring",
    "learner": "learner",
    "control": "deploy",
}
"""The sidecar's own processes, in the order of starting; each is `python -m <module>`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One child: how to start it."""

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the supervisor's own environment."""
    tells_ready: bool = False
    """It is a process of ours, which tells when it works."""


def plan(settings: Settings, config: Path | None) -> list[ProcessSpec]:
    """Every child of `sidecar up`, in the order of starting; the engine only when it is ours."""
    specs = []
    if settings.engine.command:
        specs.append(
            ProcessSpec(name=ENGINE, command=settings.engine.command, env=dict(settings.engine.env))
        )
    arguments = ("--config", str(config)) if config is not None else ()
    specs += [
        ProcessSpec(name=name, command=own_python(module, *arguments), tells_ready=True)
        for name, module in MODULES.items()
    ]
    return specs


def is_hopeless(lived_s: Sequence[float]) -> bool:
    """Whether to give up a child that never worked. lived_s: seconds of each of its lives."""
    last = lived_s[-GIVE_UP_DEATHS:]
    return len(last) == GIVE_UP_DEATHS and sum(last) <= GIVE_UP_WITHIN_S


def describe_exit(code: int) -> str:
    """An exit code in words: negative ones are signals."""
    return f"killed by signal {-code}" if code < 0 else f"exited with {code}"
