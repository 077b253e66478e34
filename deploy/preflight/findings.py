"""The record that every check of a preflight yields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that does not work, or works less well than it could."""

    level: Level
    """`error`: a process fails, or a whole stage does nothing. `warning`: it runs, with less."""
    setting: str
    """The setting to change, such as `learner.device`."""
    text: str
    """What is wrong, why, and what to do."""
    cause: str = ""
    """A short name of the fault, for programs; empty where nothing asks for it."""


def error(setting: str, text: str, cause: str = "") -> Finding:
    return Finding("error", setting, text, cause)


def warning(setting: str, text: str, cause: str = "") -> Finding:
    return Finding("warning", setting, text, cause)
