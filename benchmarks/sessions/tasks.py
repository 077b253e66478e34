"""What a conversation is made from: the user's turns, and the tool calls that answer them. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

JsonObject = dict[str, Any]  # Any: a message, a tool, a request body


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a tool."""

    name: str
    arguments: Mapping[str, object]

    def text(self) -> str:
        """The call as a person writes it."""
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in self.arguments.items())})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One message of the user and the agent's work on it."""

    user: str
    steps: tuple[tuple[Call, ...], ...] = ()
    """The calls of each reply before the last one, which has only text."""
    new_tools: tuple[JsonObject, ...] = ()
    """Tools that the agent gets with this turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A scripted conversation."""

    name: str
    system: str
    tools: tuple[JsonObject, ...]
    turns: tuple[Turn, ...]
    world: str
    """What tools work on: the same call in the same world has the same result."""
    greeting: str = ""
    """What the agent's client shows as its first words, before any request."""
    result_words: int = 0
    """Extra length of each tool result."""


def in_steps(calls: Iterable[Call]) -> tuple[tuple[Call, ...], ...]:
    """Group calls into replies: one or two in each, by a rule that has no chance in it."""
    steps: list[tuple[Call, ...]] = []
    waiting: list[Call] = []
    for call in calls:
        waiting.append(call)
        if len(call.name) % 3 or len(waiting) == 2:
            steps.append(tuple(waiting))
            waiting = []
    return (*steps, tuple(waiting)) if waiting else tuple(steps)


def tool(name: str, description: str, parameters: Mapping[str, object]) -> JsonObject:
    """A tool in the form of chat completions; parameters: name -> JSON Schema."""
    schema = {"type": "object", "properties": dict(parameters)}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": schema},
    }


def compact(value: object) -> str:
    """JSON without white space, as vLLM writes the arguments of a call."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, default=str)
