"""Read the messages and tools that a caller of RULER gives. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ingest.errors import IngestError

# What the functions of RULER take and give: messages, trajectories, groups, scores.

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


def read_messages(messages: Sequence[Message], number: int) -> list[Mapping[str, Any]]:
    """Return the messages of a trajectory as mappings.

    number: of the trajectory, from 0, for the error's text.
    Raises: TrajectoriesError, which names the trajectory, the message and the defect.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise TrajectoriesError(f"trajectory {number} is no list of messages")
    if not messages:
        raise TrajectoriesError(f"trajectory {number} has no messages")
    return [_message(one, f"trajectory {number}, message {at}") for at, one in enumerate(messages)]


def read_tools(tools: object) -> list[Mapping[str, Any]]:
    """Return the definitions of tools as mappings; none for None.

    Raises: TrajectoriesError, which names the definition and the defect.
    """
    if tools is None:
        return []
    if isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Sequence):
        raise TrajectoriesError("tools is no list of definitions of tools")
    for at, one in enumerate(tools):
        if not isinstance(one, Mapping):
            raise TrajectoriesError(f"tool {at} is no definition as in a chat request")
        _check_json(one, f"tool {at}")
    return list(tools)


def _message(given: Message, name: str) -> Mapping[str, Any]:
    dump = getattr(given, "model_dump", None)
    found = dump(mode="json", exclude_none=True) if callable(dump) else given
    if isinstance(found, Mapping) and "role" not in found and "message" in found:
        found = found["message"]  # a choice
    if not isinstance(found, Mapping) or not isinstance(found.get("role"), str):
        raise TrajectoriesError(f"{name} is no chat message with a role")
    calls = found.get("tool_calls") or []
    if not isinstance(calls, list | tuple) or not all(
        isinstance(call, Mapping) and isinstance(call.get("function") or {}, Mapping)
        for call in calls
    ):
        raise TrajectoriesError(f"{name}: tool_calls is no list of calls of functions")
    _check_json(found, name)
    return found


def _check_json(found: Mapping[str, Any], name: str) -> None:
    try:
        json.dumps(found, sort_keys=True)  # sorted, as they are compared: names must be of one type
    except (TypeError, ValueError, RecursionError) as error:
        raise TrajectoriesError(f"{name} cannot be written as JSON: {error}") from None
