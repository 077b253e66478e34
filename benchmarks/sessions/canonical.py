"""What of a request and its replies is the same however a client writes it. Pure.

It reads the bodies that `bodies` writes, for the reference finder and for the scoring; it is no
reader of what clients at large send.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from benchmarks.sessions.records import SentRequest
from benchmarks.sessions.tasks import JsonObject

Message = tuple[str, ...]
"""Role, text, then name and arguments of each call."""


def conversation(request: JsonObject) -> list[Message]:
    """The messages of a request of any surface, without system prompts."""
    found: list[Message] = []
    for item in request["messages"] if "messages" in request else request["input"]:
        for message in _of(item):
            if message[0] == "system":
                continue
            if found and message[0] == found[-1][0] == "assistant":  # one reply in several items
                text = " ".join(filter(None, (found[-1][1], message[1])))
                found[-1] = ("assistant", text, *found[-1][2:], *message[2:])
            else:
                found.append(message)
    return found


def reply(raw: bytes) -> Message:
    """A reply in the same form."""
    return next(_of(json.loads(raw)))


def setting(request: JsonObject) -> Message:
    """System prompt without its digits (some tell the time), and names of the tools."""
    prompts = [request.get("instructions"), request.get("system")]
    prompts += [one["content"] for one in request.get("messages", ()) if one["role"] == "system"]
    tools = [(one.get("function") or one)["name"] for one in request.get("tools", ())]
    return (re.sub(r"\d+", "#", " ".join(map(_text, prompts))), *tools)


def sender(one: SentRequest) -> Message:
    """Who sent a request, as far as the sidecar is told."""
    return (one.project, one.key_id, one.user, one.session_header, one.trace_id)


def _of(item: JsonObject) -> Iterator[Message]:
    kind, content = item.get("type"), item.get("content")
    if kind == "function_call":
        yield ("assistant", "", item["name"], _json(item["arguments"]))
    elif kind == "function_call_output":
        yield ("tool", _text(item["output"]))
    else:
        calls = [part for part in _parts(content) if part["type"] == "tool_use"]
        calls += [call["function"] for call in item.get("tool_calls", ())]
        for part in _parts(content):
            if part["type"] == "tool_result":
                yield ("tool", _text(part["content"]))
        if not any(part["type"] == "tool_result" for part in _parts(content)):
            named = [
                text
                for one in calls
                for text in (one["name"], _json(one.get("arguments", one.get("input"))))
            ]
            yield (item["role"], _text(content), *named)


def _parts(content: Any) -> list[JsonObject]:  # Any: text, parts or None
    return content if isinstance(content, list) else []


def _text(content: Any) -> str:  # Any: text, parts or None
    if isinstance(content, list):
        content = " ".join(part.get("text", "") for part in content)
    text = re.sub(r"\A\s*<think>.*?</think>", "", content or "", flags=re.DOTALL)
    return " ".join(text.split())


def _json(arguments: Any) -> str:  # Any: JSON, or the text of it
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    return json.dumps(arguments, sort_keys=True)
