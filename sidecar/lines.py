"""Lines of adapters: each has a champion, a canary, learner runs and a history of its own. Pure.

The default line has the name of the public model. A project of `serving.own_adapters` has a line of
its own, `<model>@@<project>`. The settings refuse a public model name with `@@`, and no project's
name has an `@`, so the name of a line says which model and which project it is of. The store's
`model` columns of adapters, aliases, canaries, runs and routing tables hold the name of the line.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from typing import Final

SEPARATOR: Final = "@@"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of adapters, and the projects whose traffic it answers and learns from."""

    name: str
    """What the store's `model` columns hold, and what the names of its adapters begin with."""
    others: frozenset[str] = frozenset()
    """Projects with lines of their own; empty in the line of a project."""

    @property
    def model(self) -> str:
        """The public model name; also vLLM's name of the base."""
        return public_model(self.name)

    @property
    def project(self) -> str | None:
        """The project whose line this is; None: the default line."""
        return project_of(self.name)

    def has(self, project: str | None) -> bool:
        """Return True if this line answers requests of a project. None: no project is known."""
        if self.project is not None:
            return project == self.project
        return project not in self.others


def lines_of(model: str, projects: Iterable[str]) -> tuple[Line, ...]:
    """Return the lines of a model: the default one, then those of projects, in their order."""
    own = tuple(dict.fromkeys(projects))
    default = Line(name=model, others=frozenset(own))
    return (default, *(Line(name=line_name(model, project)) for project in own))


def line_name(model: str, project: str | None) -> str:
    """Return the name of a project's line; of the default line for None."""
    return model if project is None else f"{model}{SEPARATOR}{project}"


def public_model(line: str) -> str:
    """Return the public model name of a line."""
    return line.partition(SEPARATOR)[0]


def line_of_adapter(adapter: str) -> str:
    """Return the name of the line that an adapter's name begins with; the whole of another name."""
    return adapter.rpartition("--v")[0] or adapter


def learner_of(line: str) -> str:
    """Return how the audit names the learner of a line."""
    project = project_of(line)
    return "learner" if project is None else f"learner of {project}"


PAUSED = "learner_paused"
"""Name of the flag by which operators pause learning; with `flag_of`, of a line."""


def flag_of(name: str, line: str) -> str:
    """Return the name of a line's row in the table `flag`; the default line's has no suffix.

    It has a digest and not the name, because the column holds 64 characters.
    """
    if project_of(line) is None:
        return name
    return f"{name}@{sha256(line.encode()).hexdigest()[:16]}"


def project_of(line: str) -> str | None:
    """Return the project of a line; None for the default line."""
    return line.partition(SEPARATOR)[2] or None
