"""Which parts of messages a judge sees, and when two messages look the same to it. Pure.

Ids of tool calls are drawn by the server and say nothing. A next action is shown without them; in
a trajectory, where results refer to calls, calls are numbered. Reasoning is shown when asked for.
Images, sound and files are shown by a placeholder (`media.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from ingest.errors import JudgeReplyError
from ingest.judge_prompt.media import without_media

REASONING = ("reasoning", "reasoning_content")
"""Names under which vLLM and clients of it give an answer's reasoning: newer and older."""
_THOUGHTS = frozenset({"thinking", "redacted_thinking", "reasoning"})
"""Types of content parts that are reasoning."""
_MORE_THOUGHTS = (*REASONING, "thinking_blocks", "reasoning_details")


def shown_answer(message: Mapping[str, Any], *, show_reasoning: bool = False) -> dict[str, Any]:
    """Return the parts of an assistant message that the judge sees, as a next action.

    These are its content, its tool calls by name and arguments, and, if asked for, its reasoning.
    """
    shown = _said(message, show_reasoning=show_reasoning)
    calls = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    if calls:
        shown["tool_calls"] = [
            {"name": call.get("name"), "arguments": call.get("arguments")} for call in calls
        ]
    return shown


def shown_context(message: Mapping[str, Any], *, show_reasoning: bool = False) -> Mapping[str, Any]:
    """Return a message of the conversation as the judge sees it: whole, or without reasoning."""
    content = without_media(message.get("content"))
    if not show_reasoning:
        content = _plain(content)
    thinks = not show_reasoning and any(name in message for name in _MORE_THOUGHTS)
    if content is message.get("content") and not thinks:
        return message
    left_out = _MORE_THOUGHTS if thinks else ()
    kept = {name: value for name, value in message.items() if name not in left_out}
    return {**kept, "content": content} if "content" in kept else kept


def shown_trajectory(
    messages: Sequence[Mapping[str, Any]], *, show_reasoning: bool = False
) -> list[dict[str, Any]]:
    """Return the messages of a trajectory as the judge sees them, in the same order.

    Each has its role, content and name. Tool calls are numbered through the trajectory, and a
    tool's result names the number of its call: two trajectories that differ only in the ids that a
    server drew look the same.
    """
    numbers: dict[Any, str] = {}
    made: list[dict[str, Any]] = []
    count = 0
    for message in messages:
        shown: dict[str, Any] = {"role": message.get("role")}
        if message.get("name"):
            shown["name"] = message["name"]
        shown.update(_said(message, show_reasoning=show_reasoning))
        calls = []
        for call, function in _calls(message):
            count += 1
            if call is not None:
                numbers[str(call)] = f"call_{count}"
            calls.append(
                {
                    "id": f"call_{count}",
                    "name": function.get("name"),
                    "arguments": function.get("arguments"),
                }
            )
        if calls:
            shown["tool_calls"] = calls
        answered = message.get("tool_call_id")
        if answered is not None:
            shown["tool_call_id"] = numbers.get(str(answered))
        made.append(shown)
    return made


def looks(shown: Mapping[str, Any]) -> str:
    """Return a text that is equal for messages that look the same to the judge, or differ only in
    how the JSON of a tool call's arguments is written.

    shown: made by `shown_answer` or `shown_trajectory`.
    """
    made = {**shown, "content": shown.get("content") or ""}  # null in a whole reply, "" in a stream
    if "tool_calls" in made:
        made["tool_calls"] = [{**call} for call in made["tool_calls"]]
        for call in made["tool_calls"]:
            with suppress(ValueError, TypeError, RecursionError):  # no JSON text: as it is
                value = json.loads(call["arguments"], object_pairs_hook=unique_names)
                call["arguments"] = json.dumps(value, sort_keys=True)
    return json.dumps(made, sort_keys=True)


def unique_names(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of its members. Raises: JudgeReplyError when two have one name."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise JudgeReplyError("an object holds the same name twice")
    return found


def _said(message: Mapping[str, Any], *, show_reasoning: bool) -> dict[str, Any]:
    content = without_media(message.get("content"))
    if not show_reasoning:
        return {"content": _plain(content)}
    thought = next((message[name] for name in REASONING if message.get(name)), None)
    return {"content": content} if thought is None else {"reasoning": thought, "content": content}


def _plain(content: Any) -> Any:  # Any: JSON
    """Return the content without parts that are reasoning; the same object when it has none."""
    if not isinstance(content, list) or not any(map(_is_thought, content)):
        return content
    return [part for part in content if not _is_thought(part)]


def _is_thought(part: Any) -> bool:  # Any: JSON
    return isinstance(part, Mapping) and part.get("type") in _THOUGHTS


def _calls(message: Mapping[str, Any]) -> list[tuple[Any, Mapping[str, Any]]]:
    """Return the tool calls of a message: their ids and functions."""
    found = [
        (call.get("id"), call.get("function") or {})
        for call in message.get("tool_calls") or ()
        if isinstance(call, Mapping)
    ]
    legacy = message.get("function_call")
    return [*found, (None, legacy)] if isinstance(legacy, Mapping) else found
