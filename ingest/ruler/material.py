"""Extract what RULER needs from a group: the request's messages and tools, and the answers.

Pure. A group comes from live traffic, so every part of its bodies is checked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ingest.errors import IngestError
from ingest.records import Group


class UnreadableGroupError(IngestError, ValueError):
    """A body is no valid chat request or assistant message: set the group aside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """Arguments of `score_answers`, taken from a group."""

    context: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...]
    answers: tuple[Mapping[str, Any], ...]
    """[G] assistant messages in the group's order."""


def read_material(group: Group) -> Material:
    """Decode a group's bodies. Raises: UnreadableGroupError, naming the body and the defect."""
    request = _object(group.request, "request")
    answers = [_object(answer.message, f"answer {answer.index}") for answer in group.answers]
    return Material(
        context=_objects(request.get("messages"), "messages"),
        tools=_objects(request.get("tools") or [], "tools"),
        answers=tuple(answers),
    )


def _object(body: bytes, name: str) -> Mapping[str, Any]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise UnreadableGroupError(f"{name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UnreadableGroupError(f"{name} is not a JSON object")
    return value


def _objects(value: Any, name: str) -> tuple[Mapping[str, Any], ...]:  # Any: decoded JSON
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise UnreadableGroupError(f"{name} is not a list of objects")
    return tuple(value)
