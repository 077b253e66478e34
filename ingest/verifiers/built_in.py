"""The built-in verifiers. Pure, but slow for hostile input: they run in `ingest.verifiers.child`.

A malformed answer is a wrong answer, never an error: it stays in its group, at the bottom.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

from ingest.verifiers.records import Case, Finding, does_not_apply, right, wrong

# JSON and JSON Schema, for texts and schemas that strangers wrote.

DEEPEST = 64
"""Levels of arrays and objects in a value. The check of one level by a schema that refers to itself
takes up to ten calls within each other, and Python allows 1,000."""


class NotJsonError(ValueError):
    """The text is no JSON that a reader takes; the message says why."""


class NoSchemaError(ValueError):
    """The schema cannot be used; the message says why."""


def read_json(text: str) -> Any:  # Any: JSON
    """Decode a text.

    Raises: NotJsonError, also for a name twice in one object, NaN and Infinity, on which readers
        differ, and for more than `DEEPEST` levels.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError as error:
        raise NotJsonError("nests too deeply") from error
    except ValueError as error:
        raise NotJsonError(str(error)) from error
    if _is_deep(value):
        raise NotJsonError(f"nests more than {DEEPEST} levels deep")
    return value


def why_invalid(value: Any, schema: Any) -> str | None:  # Any: JSON
    """Return why a value does not fit a schema; None when it fits.

    Without `$schema` the schema is read as draft 2020-12.
    Raises: NoSchemaError.
    """
    from jsonschema import Draft202012Validator, SchemaError
    from jsonschema.exceptions import best_match
    from jsonschema.validators import extend, validator_for
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    if not isinstance(schema, Mapping | bool):
        raise NoSchemaError("a JSON schema is an object")
    try:
        kind = validator_for(schema, default=Draft202012Validator)
        kind.check_schema(schema)
        kind = extend(kind, {"multipleOf": _multiple_of})
    except SchemaError as error:
        raise NoSchemaError(error.message) from error
    except ODD as error:
        raise NoSchemaError(f"{type(error).__name__}: {error}") from error
    try:
        # A registry of our own: jsonschema's default fetches what `$ref` names over the network.
        fault = best_match(kind(schema, registry=Registry()).iter_errors(value))
    except Unresolvable as problem:
        raise NoSchemaError(f"a reference leads nowhere: {problem}") from problem
    except RecursionError as problem:  # `read_json` takes no value that is deep enough for it
        raise NoSchemaError("the schema nests too deeply, or a reference is a circle") from problem
    except ODD as problem:  # for example a pattern that is none of Python's
        raise NoSchemaError(f"{type(problem).__name__}: {problem}") from problem
    if fault is None:
        return None
    where = "/".join(str(part) for part in fault.absolute_path)
    return f"{where}: {fault.message}" if where else str(fault.message)


ODD = (
    RecursionError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    re.error,
)
"""Errors of the libraries for schemas that hold the unexpected: `$schema: 5`, `$id: "http://["`."""


def _multiple_of(
    _validator: Any, divisor: Any, value: Any, _schema: Any
) -> Iterator[Any]:  # Any: JSON, and the library's types
    """Check `multipleOf` on decimal numbers: 19.99 is a multiple of 0.01, though not in binary."""
    from jsonschema import ValidationError

    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    try:
        fits = Fraction(str(value)) % Fraction(str(divisor)) == 0
    except (ValueError, OverflowError):  # 1e999 is read as infinity
        fits = False
    if not fits:
        yield ValidationError(f"{value!r} is not a multiple of {divisor}")


def _is_deep(value: Any) -> bool:  # Any: JSON
    level = [value]
    for _ in range(DEEPEST):
        level = [
            inner
            for one in level
            if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return False
    return any(isinstance(one, dict | list) for one in level)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has one name twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


class ToolCalls:
    """Checks calls against the request's tools."""

    version = "1"

    def __init__(self, *, required: bool = False) -> None:
        self._required = required
        why_invalid({}, {})  # the library is imported now: the first answer's time is not for that

    def verify(self, case: Case) -> Finding:
        """Find 1 when every call names a tool and has arguments that fit its schema."""
        tools = _parameters(case)
        if not case.tool_calls:
            if not tools:
                return does_not_apply("the request has no tools")
            asked = case.request.get("tool_choice")
            if self._required or asked == "required" or _forced_tool(case) is not None:
                return wrong("no tool is called, and one must be")
            return right("no tool is called")
        unchecked = ""
        for place, call in enumerate(case.tool_calls):
            try:
                why = _why_wrong(call, tools)
            except NoSchemaError as error:  # the request's fault: the call itself is JSON
                unchecked = f"the schema of {_name(call)} cannot be used: {error}"
                continue
            if why is not None:
                return wrong(f"call {place}: {why}")
        forced = _forced_tool(case)
        if forced is not None and any(_name(call) != forced for call in case.tool_calls):
            return wrong(f"the request asks for {forced}")
        return right(unchecked)


class JsonSchema:
    """Checks the content against a schema: the given one, or that of the request."""

    version = "1"

    def __init__(self, *, json_schema: Mapping[str, Any] | None = None) -> None:
        self._schema = json_schema
        why_invalid({}, {})  # as above

    def verify(self, case: Case) -> Finding:
        schema = self._schema if self._schema is not None else _asked_schema(case)
        if schema is None:
            return does_not_apply("the request has no response_format of JSON")
        if not case.content and case.tool_calls:
            return does_not_apply("the answer is a tool call")
        try:
            why = why_invalid(read_json(case.content), schema)
        except NotJsonError as error:
            return wrong(f"no JSON: {error}")
        except NoSchemaError as error:
            return does_not_apply(f"the schema cannot be used: {error}")
        return right() if why is None else wrong(why)


class Regex:
    """Searches the content for a pattern, by RE2: its time grows with the text alone."""

    version = "1"

    def __init__(self, *, pattern: str, must: str = "match") -> None:
        import re2

        from sidecar.settings.store import PROGRAM_BYTES

        options = re2.Options()
        options.log_errors = False
        options.max_mem = PROGRAM_BYTES
        self._pattern = re2.compile(pattern, options)
        self._must_match = must == "match"

    def verify(self, case: Case) -> Finding:
        """Find 1 when the content matches somewhere, or nowhere where it must not."""
        found = self._pattern.search(case.content) is not None
        if found == self._must_match:
            return right()
        return wrong("the pattern is found" if found else "the pattern is not found")


class Exact:
    """Compares the content with the expected texts."""

    version = "1"

    def __init__(
        self,
        *,
        texts: tuple[str, ...] = (),
        metadata: str = "",
        ignore_case: bool = False,
        strip: bool = True,
    ) -> None:
        self._texts = tuple(texts)
        self._metadata = metadata
        self._ignore_case = ignore_case
        self._strip = strip

    def verify(self, case: Case) -> Finding:
        texts = self._texts
        if self._metadata:
            metadata = case.request.get("metadata")
            expected = metadata.get(self._metadata) if isinstance(metadata, dict) else None
            if not isinstance(expected, str):
                return does_not_apply(f"the request's metadata has no text {self._metadata}")
            texts = (expected,)
        said = self._plain(case.content)
        return right() if said in {self._plain(one) for one in texts} else wrong("another text")

    def _plain(self, text: str) -> str:
        text = text.strip() if self._strip else text
        return text.casefold() if self._ignore_case else text


class Length:
    """Measures an answer against limits."""

    version = "1"

    def __init__(
        self,
        *,
        min_characters: int = 0,
        max_characters: int | None = None,
        min_tokens: int = 0,
        max_tokens: int | None = None,
        fade: float = 0.0,
    ) -> None:
        self._characters = (min_characters, max_characters)
        self._tokens = (min_tokens, max_tokens)
        self._fade = fade

    def verify(self, case: Case) -> Finding:
        """Find 1 within the limits; 0 below a minimum; beyond a maximum a score that falls."""
        measured = [("characters", len(case.content), *self._characters)]
        if self._tokens != (0, None):
            if case.tokens is None:
                return does_not_apply("the number of tokens is not known")
            measured.append(("tokens", case.tokens, *self._tokens))
        findings = [self._one(*one) for one in measured]
        return min(findings, key=lambda found: found.score or 0.0)

    def _one(self, unit: str, length: int, low: int, high: int | None) -> Finding:
        if length < low:
            return wrong(f"{length} {unit}, under {low}")
        if high is None or length <= high:
            return right(f"{length} {unit}")
        room = self._fade * high
        score = max(0.0, 1.0 - (length - high) / room) if room > 0 else 0.0
        return Finding(score=score, why=f"{length} {unit}, over {high}")


BUILT_IN = {
    "tool_calls": ToolCalls,
    "json_schema": JsonSchema,
    "regex": Regex,
    "exact": Exact,
    "length": Length,
}
"""Kind in the settings -> class."""


def _parameters(case: Case) -> dict[str, Any]:
    """Return the schema of each tool's arguments, by name; Any: JSON."""
    found: dict[str, Any] = {}
    for tool in case.tools:
        function = tool.get("function")
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            found[function["name"]] = function.get("parameters")
    return found


def _why_wrong(call: Any, tools: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a call, JSON. Raises: NoSchemaError when its schema is unusable."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return "it is no call of a function"
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or name not in tools:
        return f"no tool is named {str(name)[:100]}"
    if not isinstance(arguments, str):
        return "its arguments are no text"
    try:
        value = read_json(arguments or "{}")
    except NotJsonError as error:
        return f"its arguments are no JSON: {error}"
    if not isinstance(value, dict):
        return "its arguments are no object"
    schema = tools[name]
    return None if schema is None else why_invalid(value, schema)


def _name(call: Any) -> object:  # Any: JSON
    function = call.get("function") if isinstance(call, dict) else None
    return function.get("name") if isinstance(function, dict) else None


def _forced_tool(case: Case) -> str | None:
    name = _name(case.request.get("tool_choice"))
    return name if isinstance(name, str) else None


def _asked_schema(case: Case) -> Any:  # Any: JSON
    """Return the schema that the request asks for; None when it asks for none."""
    asked = case.request.get("response_format")
    if not isinstance(asked, dict):
        return None
    if asked.get("type") == "json_object":
        return {"type": "object"}
    named = asked.get("json_schema")
    if asked.get("type") != "json_schema" or not isinstance(named, dict):
        return None
    return named.get("schema")
