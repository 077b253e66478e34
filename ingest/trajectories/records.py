"""What the functions of RULER take and give: messages, trajectories, groups, scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ingest.errors import IngestError

Message = Any
"""A chat message, or a choice that holds one: a mapping as the chat API has it, or an object of a
client library that can write itself as one (`model_dump`)."""


class TrajectoriesError(IngestError, ValueError):
    """The trajectories cannot be judged as they are; the message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryScore:
    """What the judge says of one trajectory."""

    score: float
    """Unitless, 0..1, comparable within its group only."""
    explanation: str
    """The judge's explanation, one line for each pass."""
    judged: bool = True
    """False: all trajectories are identical, so the judge was not asked; the score is 0.5."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One way in which an agent went about a task."""

    messages: Sequence[Message]
    """From the system message to the agent's last one."""
    reward: float | None = None
    """None: not known."""
    tools: Sequence[Mapping[str, Any]] | None = ()
    """Definitions of the tools that the agent could call, as in a chat request. None: it had none,
    as an empty list."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    logs: Sequence[str] = ()
    initial_policy_version: int | str | None = None
    """Version of the model that gave the first message, and the last one."""
    final_policy_version: int | str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryGroup:
    """Trajectories of one task."""

    trajectories: Sequence[Trajectory]
    exceptions: Sequence[BaseException | str] = ()
    """What went wrong while they were made, and while they were scored."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    logs: Sequence[str] = ()
