"""Which parts of messages a judge sees, and when two messages look the same to it. Pure.

Ids of tool calls are drawn by the server and say nothing. A next action is shown without them; in
a trajectory, where results refer to calls, calls are numbered. Their arguments are written in one
way, as streams and whole replies differ in their spaces. Reasoning is shown when asked for. Images,
sound and files are shown by a placeholder (`media.py`), and speech by its transcript.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from ingest.errors import JudgeReplyError
from ingest.judge_prompt.media import without_media
from sidecar.replies.parts import WITHHELD, dumped

REASONING = ("reasoning", "reasoning_content")
"""Names under which vLLM and clients of it give an answer's reasoning: newer and older."""
_THOUGHTS = frozenset({"thinking", "redacted_thinking", "reasoning"})
"""Types of content parts that are reasoning."""
_MORE_THOUGHTS = (*REASONING, "thinking_blocks", "reasoning_details")


def shown_answer(message: Mapping[str, Any], *, show_reasoning: bool = False) -> dict[str, Any]:
    """Return the parts of an assistant message that the judge sees, as a next action.

    These are its content, with what a tool parser kept back of it, its refusal, its transcript, its
    tool calls by name and arguments, and, if asked for, its reasoning. An answer that says nothing
    has an empty content, never null.
    """
    shown = _said(message, show_reasoning=show_reasoning)
    calls = [_call(function) for _, function in _calls(message)]
    return {**shown, "tool_calls": calls} if calls else shown


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
            calls.append({"id": f"call_{count}", **_call(function)})
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
    made = {**shown}
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
    shown: dict[str, Any] = {}
    content = without_media(message.get("content"))
    if show_reasoning:
        thought = next((message[name] for name in REASONING if message.get(name)), None)
        shown = {} if thought is None else {"reasoning": thought}
    else:
        content = _plain(content)
    shown["content"] = "" if content is None else content
    if isinstance(shown["content"], str):
        shown["content"] += message.get(WITHHELD) or ""
    audio = message.get("audio")
    spoken = audio.get("transcript") if isinstance(audio, Mapping) else None
    for name, words in (("refusal", message.get("refusal")), ("transcript", spoken)):
        if words:
            shown[name] = words
    return shown


def _call(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments")
    with suppress(ValueError, TypeError, RecursionError):  # no JSON text: as it is
        arguments = dumped(json.loads(arguments or "", object_pairs_hook=unique_names))
    return {"name": function.get("name"), "arguments": arguments}


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
