"""JSON and JSON Schema, for texts and schemas that strangers wrote.

A schema of a request may say anything: a reference to another host is not followed, and one that
leads nowhere, in a circle, or is no schema at all, is the request's fault and no answer's. A
pattern in a schema is one of Python, which may take exponential time: call this in a process that
can be killed (`ingest.verifiers.child`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

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
    except _ODD as error:
        raise NoSchemaError(f"{type(error).__name__}: {error}") from error
    try:
        # A registry of our own: jsonschema's default fetches what `$ref` names over the network.
        fault = best_match(kind(schema, registry=Registry()).iter_errors(value))
    except Unresolvable as problem:
        raise NoSchemaError(f"a reference leads nowhere: {problem}") from problem
    except RecursionError as problem:  # `read_json` takes no value that is deep enough for it
        raise NoSchemaError("the schema nests too deeply, or a reference is a circle") from problem
    except _ODD as problem:  # for example a pattern that is none of Python's
        raise NoSchemaError(f"{type(problem).__name__}: {problem}") from problem
    if fault is None:
        return None
    where = "/".join(str(part) for part in fault.absolute_path)
    return f"{where}: {fault.message}" if where else str(fault.message)


_ODD = (
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
