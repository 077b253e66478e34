"""Check the tool calls of an answer against the tools that its request offers. Pure.

Of JSON Schema these keywords are checked: `type`, `required`, `enum`, `const`, `properties`,
`additionalProperties: false` and `items`. What others say is not checked, so a call is called
invalid only where that is certain. `ingest` does not run tools.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from sidecar.replies.parts import answer_text

Fault = Literal["unknown_tool", "not_json", "against_schema", "unreadable"]
MOST_CALLS = 32
"""Calls of an answer that are looked at."""
MOST_ARGUMENTS = 65_536
"""Arguments of more characters are not looked at."""
MOST_VALUES = 2_000
"""Values of a call's arguments that are compared with the schema."""
DEEPEST = 16
_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
    "integer": (int, float),
    "number": (int, float),
}
LEAKED = ("<tool_call>", "<function=", "<|python_tag|>", "[TOOL_CALLS]", "<|tool_call")
"""Marks of a call that a model wrote and vLLM's tool parser did not read."""
ENDS = 2_000
"""Characters at each end of an answer in which the marks are looked for."""


def fault_of_calls(message: Mapping[str, Any], tools: object) -> Fault | None:
    """Return what is wrong with an answer's tool calls; None: nothing, or it has none.

    message: the assistant message. tools: `tools` of the request, as the client sent it.
    """
    calls = message.get("tool_calls")
    if not calls:
        offered = isinstance(tools, list) and bool(tools)
        return "not_json" if offered and leaks(answer_text(message)) else None
    if not isinstance(calls, list):
        return "unreadable"
    schemas = _schemas(tools)
    faults = (_fault(call, schemas) for call in calls[:MOST_CALLS])
    return next((fault for fault in faults if fault is not None), None)


def leaks(content: str) -> bool:
    """Return True when a text holds a tool call that the server did not read as one."""
    seen = content if len(content) <= 2 * ENDS else content[:ENDS] + content[-ENDS:]
    return any(mark in seen for mark in LEAKED)


def _schemas(tools: object) -> dict[str, object]:
    found: dict[str, object] = {}
    for tool in tools if isinstance(tools, list) else ():
        function = tool.get("function") if isinstance(tool, dict) else None
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            found[function["name"]] = function.get("parameters")
    return found


def _fault(call: object, schemas: Mapping[str, object]) -> Fault | None:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return "unreadable"
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or name not in schemas:
        return "unknown_tool"
    if arguments in (None, ""):
        value: object = {}
    elif isinstance(arguments, str):
        if len(arguments) > MOST_ARGUMENTS:
            return None
        try:
            value = msgspec.json.decode(arguments)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return "not_json"
    else:
        value = arguments
    if not isinstance(value, dict):
        return "not_json"
    return None if _Check().fits(value, schemas[name], 0) else "against_schema"


class _Check:
    def __init__(self) -> None:
        self._left = MOST_VALUES

    def fits(self, value: object, schema: object, depth: int) -> bool:
        self._left -= 1
        if not isinstance(schema, dict) or depth > DEEPEST or self._left < 0:
            return True
        if not _is_of(value, schema.get("type")):
            return False
        options = schema.get("enum")
        if isinstance(options, list) and not any(_equal(value, one) for one in options):
            return False
        if "const" in schema and not _equal(value, schema["const"]):
            return False
        if isinstance(value, dict):
            return self._object(value, schema, depth)
        if isinstance(value, list):
            return all(self.fits(one, schema.get("items"), depth + 1) for one in self._some(value))
        return True

    def _object(self, value: dict[str, Any], schema: dict[str, Any], depth: int) -> bool:
        known = schema.get("properties")
        known = known if isinstance(known, dict) else {}
        required = schema.get("required")
        if isinstance(required, list) and any(
            isinstance(name, str) and name not in value for name in required
        ):
            return False
        patterns = "patternProperties" in schema
        if schema.get("additionalProperties") is False and not patterns and value.keys() - known:
            return False
        return all(self.fits(one, known.get(name), depth + 1) for name, one in list(value.items()))

    def _some(self, values: Sequence[object]) -> Sequence[object]:
        return values[: max(0, self._left)]


def _equal(a: object, b: object, depth: int = 0) -> bool:
    """Compare as JSON Schema does: 1 and 1.0 are equal, 1 and true are not.

    Source: JSON Schema 2020-12 core, 4.2.2 (instance equality).
    """
    if depth > DEEPEST:
        return True
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(
            _equal(one, other, depth + 1) for one, other in zip(a, b, strict=True)
        )
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(
            _equal(one, b[name], depth + 1) for name, one in a.items()
        )
    return a == b


def _is_of(value: object, kind: object) -> bool:
    if isinstance(kind, list):  # of names: a list in it says nothing
        return any(isinstance(one, list) or _is_of(value, one) for one in kind)
    types = _TYPES.get(kind) if isinstance(kind, str) else None
    if types is None:
        return True
    if isinstance(value, bool) and bool not in types:
        return False
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, types)
