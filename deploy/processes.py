"""What the supervisor decides, apart from how it is done: names, order, back-off. Pure."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from sidecar.backoff import Backoff

if TYPE_CHECKING:  # the command reads the names here before it knows whether it needs settings
    from sidecar.settings import Settings

RESTARTS = Backoff(first_s=0.5, last_s=30.0)

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


def plan(settings: Settings, config: Path | None) -> list[ProcessSpec]:
    """Every child of `sidecar up`, in the order of starting; the engine only when it is ours."""
    specs = []
    if settings.engine.command:
        specs.append(
            ProcessSpec(name=ENGINE, command=settings.engine.command, env=dict(settings.engine.env))
        )
    arguments = ("--config", str(config)) if config is not None else ()
    specs += [
        ProcessSpec(name=name, command=(sys.executable, "-m", module, *arguments))
        for name, module in MODULES.items()
    ]
    return specs


def describe_exit(code: int) -> str:
    """An exit code in words: negative ones are signals."""
    return f"killed by signal {-code}" if code < 0 else f"exited with {code}"
