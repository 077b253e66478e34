"""Caps by project and by near-identical prompt, and why a group was chosen. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ingest.grouping.features import Features, dump_choice
from ingest.grouping.preference import Draw

PROJECT_CAP: Final = "project_cap"
NEAR_CAP: Final = "near_prompt_cap"
Counts = Mapping[tuple[str, str], int]
"""("project", name) and ("near", key) -> groups lately, where there is a cap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupKeys:
    """What the groups of an exchange are counted by."""

    project: str
    near: str | None = None
    """Shared by near-identical prompts."""
    opening: str | None = None
    """Shared by steps with the same system prompt and tools."""

    def why_capped(self, counts: Counts, by_project: int, by_near: int) -> str | None:
        """Return the cap that the project, or the prompt, has reached; None: neither.

        by_project, by_near: the caps; 0: there is none.
        """
        if by_project and counts.get(("project", self.project), 0) >= by_project:
            return PROJECT_CAP
        if by_near and self.near is not None and counts.get(("near", self.near), 0) >= by_near:
            return NEAR_CAP
        return None

    def columns(self, drawn: Draw, features: Features | None) -> dict[str, object]:
        """Return the columns of a new group that say why it was chosen."""
        return {
            "project": self.project,
            "near_key": self.near,
            "opening_key": self.opening,
            "propensity": drawn.propensity,
            "chosen_because": dump_choice(features, drawn.reason),
        }
