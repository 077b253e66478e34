"""Make the parameters of a statement the same for SQLite and PostgreSQL. Pure.

PostgreSQL refuses a text with a NUL character, JSON with NaN or infinity; neither store takes half
of a surrogate pair; SQLite stores NaN as NULL. So a text is stored with U+FFFD in place of these
characters, and a number that is not finite is null in JSON. NaN is null in a column too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

REPLACEMENT = "\ufffd"
"""What stands for a character that a store cannot hold, and for bytes that are not UTF-8."""


def storable_text(value: str) -> str:
    """Return the text with U+FFFD for each NUL and each half of a surrogate pair."""
    if "\0" in value:
        value = value.replace("\0", REPLACEMENT)
    if value.isascii():
        return value
    try:
        value.encode()
    except UnicodeEncodeError:
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value


def storable(value: Any) -> Any:  # Any: a parameter of a statement
    """Return the parameter as both stores hold it."""
    if type(value) is str:
        return storable_text(value)
    if type(value) is float and math.isnan(value):
        return None
    return value


def storable_parameters(parameters: Any) -> Any:  # Any: as the driver takes them
    """Apply `storable` to the parameters of a statement: a mapping, a tuple, or a list of these."""
    if isinstance(parameters, Mapping):
        return {name: storable(value) for name, value in parameters.items()}
    if isinstance(parameters, list):
        return [storable_parameters(row) for row in parameters]
    return tuple(map(storable, parameters))


def to_json(value: Any) -> str:  # Any: JSON
    """Encode a JSON column: numbers that are not finite become null."""
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value))


def from_json(stored: Any) -> Any:  # Any: JSON, or what a faulty disk left of it
    """Decode a JSON column. Damaged text is read as None, which no such column holds.

    An error here would fail each query that meets the row; so the row's reader decides.
    """
    try:
        return json.loads(stored)
    except (ValueError, TypeError, RecursionError):
        return None


def _finite(value: Any) -> Any:  # Any: JSON
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value
