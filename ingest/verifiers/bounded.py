"""Does a JSON text fit a schema that a stranger wrote, by bounded work in this process.

`schemas.why_invalid` says why, and belongs into a process that can be killed: a pattern may take
exponential time. Here patterns are not looked at, and the number of keywords that are applied is
limited; a text that takes more, and a schema that cannot be used, count as fitting: nobody knows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from ingest.verifiers.schemas import NotJsonError, read_json

MOST_BYTES = 64 * 2**10
"""Longest text and schema that are looked at."""
MOST_KEYWORDS = 2_000
"""Keywords of a schema that are applied to one text: some tenths of a second where each is a
reference, and far less in a usual schema."""
_NOT_APPLIED = frozenset({"pattern", "patternProperties", "uniqueItems"})
"""Keywords whose work the two limits do not bound."""
_ON_PATTERNS = frozenset({"additionalProperties", "unevaluatedProperties"})
"""Keywords that apply the patterns of `patternProperties`."""


class _TooMuchError(Exception):
    """The limit of keywords is reached."""


def fits(text: str, schema: Any) -> bool:  # Any: JSON
    """Return False when a text is no JSON, or does not fit a schema."""
    if len(text) > MOST_BYTES:
        return True
    try:
        value = read_json(text)
    except NotJsonError:
        return False
    try:
        written = json.dumps(schema, sort_keys=True)
    except (ValueError, TypeError, RecursionError):
        return True
    if len(written) > MOST_BYTES:
        return True
    check = _checker(written)
    return check is None or check(value)


@lru_cache(maxsize=256)
def _checker(written: str) -> Callable[[Any], bool] | None:
    """Return a check by a schema, as JSON; None when it cannot be used."""
    from jsonschema import Draft202012Validator, SchemaError
    from jsonschema.validators import extend, validator_for
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    schema = json.loads(written)
    try:
        kind = validator_for(schema, default=Draft202012Validator)
        kind.check_schema(schema)
        left = [0]
        with_patterns = '"patternProperties"' in written
        counted = {
            name: _nothing
            if name in _NOT_APPLIED or (with_patterns and name in _ON_PATTERNS)
            else _counting(keyword, left)
            for name, keyword in kind.VALIDATORS.items()
        }
        # A registry of our own: the library's default fetches what `$ref` names over the network.
        validator = extend(kind, counted)(schema, registry=Registry())
    except (SchemaError, RecursionError, TypeError, ValueError, LookupError, AttributeError):
        return None

    def check(value: Any) -> bool:
        left[0] = MOST_KEYWORDS
        try:
            return bool(validator.is_valid(value))
        except (
            _TooMuchError,
            Unresolvable,
            RecursionError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
        ):
            return True

    return check


def _nothing(*_: Any) -> Iterator[Any]:
    return iter(())


def _counting(keyword: Any, left: list[int]) -> Callable[..., Iterator[Any]]:
    def apply(*given: Any) -> Iterator[Any]:
        left[0] -= 1
        if left[0] < 0:
            raise _TooMuchError
        yield from keyword(*given) or ()

    return apply
