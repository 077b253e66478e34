"""Span attributes with the content of a request, in the form of the GenAI conventions. Pure.

They are made only with `telemetry.content`: text, reasoning and tool calls. For pictures and files
only their presence is recorded.

Source: `gen-ai-input-messages.json` and `gen-ai-output-messages.json` of
open-telemetry/semantic-conventions-genai: messages with a role and typed parts, as JSON strings.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from typing import Any

from sidecar.errors import UNREADABLE_JSON
from sidecar.records import Choice, Exchange

Part = dict[str, Any]  # Any: arguments and results of tools have any type


def content_attributes(exchange: Exchange) -> dict[str, str]:
    """Return `gen_ai.input.messages`, `gen_ai.output.messages` and, if there are tools,
    `gen_ai.tool.definitions`."""
    attributes = {"gen_ai.output.messages": _text([_output(one) for one in exchange.choices])}
    try:
        request = json.loads(exchange.request)
    except UNREADABLE_JSON:
        request = None
    if isinstance(request, dict):
        attributes["gen_ai.input.messages"] = _text(_input(request))
        if request.get("tools"):
            attributes["gen_ai.tool.definitions"] = _text(request["tools"])
    return attributes


def _input(request: dict[str, Any]) -> list[Part]:
    """Return the input of any surface: `messages` of chat and Anthropic's API, `input` of
    responses, `prompt` of completions, with system instructions from their own fields."""
    messages = []
    for key in ("system", "instructions"):
        if request.get(key):
            messages.append({"role": "system", "parts": list(_parts(request[key]))})
    said = request.get("messages", request.get("input", request.get("prompt")))
    if isinstance(said, str):
        messages.append({"role": "user", "parts": [_said(said)]})
    elif isinstance(said, list):
        messages += [_message(one) for one in said]
    return messages


def _message(item: object) -> Part:
    if not isinstance(item, dict):  # one prompt of a list
        return {"role": "user", "parts": [_said(str(item))]}
    if item.get("type") in (
        "function_call",
        "function_call_output",
    ):  # items of the responses surface
        role = "assistant" if item["type"] == "function_call" else "tool"
        return {"role": role, "parts": [_part(item)]}
    role = str(item.get("role", "user"))
    if role == "tool":
        response = item.get("content")
        return {
            "role": role,
            "parts": [_response(item.get("tool_call_id"), response)],
        }
    said = [*_parts(item.get("content")), *_parts(item.get("refusal"))]
    return {"role": role, "parts": [*_reasoning(item), *said, *_calls(item)]}


def _output(choice: Choice) -> Part:
    message = json.loads(choice.message)  # ours, so it is valid JSON
    return {**_message(message), "finish_reason": choice.finish_reason or ""}


def _parts(content: object) -> Iterable[Part]:
    if isinstance(content, str):
        yield _said(content)
    elif isinstance(content, list):
        for item in content:
            yield _part(item) if isinstance(item, dict) else _said(str(item))


def _part(item: dict[str, Any]) -> Part:
    kind = item.get("type")
    if kind in ("text", "input_text", "output_text"):
        return _said(item.get("text"))
    if kind == "thinking":
        return {"type": "reasoning", "content": item.get("thinking")}
    if kind == "tool_use":
        return _call(item.get("id"), item.get("name"), item.get("input"))
    if kind == "function_call":
        return _call(item.get("call_id"), item.get("name"), item.get("arguments"))
    if kind == "tool_result":
        return _response(item.get("tool_use_id"), item.get("content"))
    if kind == "function_call_output":
        return _response(item.get("call_id"), item.get("output"))
    return {"type": str(kind)}


def _reasoning(message: dict[str, Any]) -> Iterable[Part]:
    said = message.get("reasoning") or message.get("reasoning_content")
    if said:
        yield {"type": "reasoning", "content": said}


def _calls(message: dict[str, Any]) -> Iterable[Part]:
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            yield _call(call.get("id"), function.get("name"), function.get("arguments"))


def _call(call_id: object, name: object, arguments: object) -> Part:
    if isinstance(arguments, str):
        # A model may write anything here; invalid JSON is shown as text.
        with contextlib.suppress(*UNREADABLE_JSON):
            arguments = json.loads(arguments)
    return {"type": "tool_call", "id": call_id, "name": name, "arguments": arguments}


def _response(call_id: object, response: object) -> Part:
    return {"type": "tool_call_response", "id": call_id, "response": response}


def _said(text: object) -> Part:
    return {"type": "text", "content": text}


def _text(value: object) -> str:
    # ASCII: a lone surrogate, which JSON may hold, would make the export of a batch fail.
    return json.dumps(value)
