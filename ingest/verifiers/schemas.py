"""JSON and JSON Schema, for texts and schemas that strangers wrote.

A schema of a request may say anything: a reference to another host is not followed, and one that
leads nowhere, in a circle, or is no schema at all, is the request's fault and no answer's. A
pattern in a schema is one of Python, which may take exponential time: call this in a process that
can be killed (`ingest.verifiers.child`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


class NotJsonError(ValueError):
    """The text is no JSON that a reader takes; the message says why."""


class NoSchemaError(ValueError):
    """The schema cannot be used; the message says why."""


def read_json(text: str) -> Any:  # Any: JSON
    """Decode a text. Raises: NotJsonError, also for a name twice in one object, NaN and Infinity:
    readers differ on them."""
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError as error:
        raise NotJsonError("nests too deeply") from error
    except ValueError as error:
        raise NotJsonError(str(error)) from error


def why_invalid(value: Any, schema: Any) -> str | None:  # Any: JSON
    """Return why a value does not fit a schema; None when it fits.

    Without `$schema` the schema is read as draft 2020-12.
    Raises: NoSchemaError.
    """
    from jsonschema import Draft202012Validator, SchemaError
    from jsonschema.exceptions import best_match
    from jsonschema.validators import validator_for
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    if not isinstance(schema, Mapping | bool):
        raise NoSchemaError("a JSON schema is an object")
    try:
        kind = validator_for(schema, default=Draft202012Validator)
        kind.check_schema(schema)
    except SchemaError as error:
        raise NoSchemaError(error.message) from error
    except (RecursionError, TypeError, ValueError) as error:
        raise NoSchemaError(f"{type(error).__name__}: {error}") from error
    try:
        # A registry of our own: jsonschema's default fetches what `$ref` names over the network.
        fault = best_match(kind(schema, registry=Registry()).iter_errors(value))
    except Unresolvable as problem:
        raise NoSchemaError(f"a reference leads nowhere: {problem}") from problem
    except RecursionError as problem:
        raise NoSchemaError("schema and value nest too deeply, or a reference is a circle") from (
            problem
        )
    if fault is None:
        return None
    where = "/".join(str(part) for part in fault.absolute_path)
    return f"{where}: {fault.message}" if where else str(fault.message)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has one name twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
