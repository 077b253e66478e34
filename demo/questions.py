"""The demo's customers: 40 conversations for traffic, 20 questions held out for the exam.

All are made up. Held-out questions never reach the proxy: nothing can learn from them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("questions.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """A tool call that the shop's agent made before it asked the model for words."""

    tool: str
    arguments: dict[str, str]
    result: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What one customer says, turn by turn."""

    id: str
    turns: tuple[str, ...]
    stream: bool = False
    tools: tuple[dict[str, Any], ...] = ()
    looked_up: Lookup | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """The whole set."""

    system: str
    """The system prompt; it defines what a good answer is."""
    traffic: tuple[Conversation, ...]
    held_out: tuple[Conversation, ...]


def load_questions() -> Questions:
    """Read the set that ships with the demo."""
    data = json.loads(FILE.read_text(encoding="utf-8"))
    return Questions(
        system=data["system"],
        traffic=tuple(_conversation(item) for item in data["traffic"]),
        held_out=tuple(_conversation(item) for item in data["held_out"]),
    )


def _conversation(item: dict[str, Any]) -> Conversation:
    looked_up = item.get("looked_up")
    return Conversation(
        id=item["id"],
        turns=tuple(item["turns"]),
        stream=item.get("stream", False),
        tools=tuple(item.get("tools", ())),
        looked_up=Lookup(**looked_up) if looked_up else None,
    )
