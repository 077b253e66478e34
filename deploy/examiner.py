"""Who judges the gate, and whether it is the judge whose scores are the reward. Pure.

An adapter learns to please the judge of its groups. When the same judge decides the gate, the gate
sees that pleasing and not whether answers are better.
"""

from __future__ import annotations

from dataclasses import dataclass

from ingest.ruler.prompt import hash_of
from sidecar.settings import Settings

TO_DO = "name another model in gate_judge.model"


@dataclass(frozen=True, slots=True, kw_only=True)
class Examiner:
    """The judge of the gate."""

    model: str
    """A LiteLLM name; empty: there is none, and the gate waits, or compares whole tasks."""
    rubric_hash: str
    """Hash of the rubric for projects without one of their own."""
    passes: int
    own_judge: bool
    """True when another model, or the model at another address, gives the reward."""
    own_rubric: bool
    """True when the reward of every project is given by another rubric."""

    @property
    def warning(self) -> str:
        """Say that the reward marks its own exam, and what to do; empty when it does not."""
        if self.own_judge or not self.model:
            return ""
        rubric = "another rubric" if self.own_rubric else "one rubric"
        return (
            f"the judge {self.model} gives the reward and decides the gate, by {rubric}: an "
            f"adapter that learned to please it passes for better; {TO_DO}"
        )


def examiner_of(settings: Settings) -> Examiner:
    """Describe the judge of the gate that these settings name."""
    judge, gate = settings.judge, settings.judge_of_gate
    return Examiner(
        model="" if settings.tasks_are_examined else gate.model,
        rubric_hash=hash_of(gate),
        passes=gate.passes,
        own_judge=(gate.model, gate.api_base) != (judge.model, judge.api_base),
        own_rubric=all(
            hash_of(gate.of(project)) != hash_of(judge.of(project))
            for project in ("", *judge.projects, *gate.projects)
        ),
    )
