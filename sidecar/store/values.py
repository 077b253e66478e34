"""Make the parameters of a statement the same for SQLite and PostgreSQL. Pure.

PostgreSQL refuses a text with a NUL character, JSON with NaN or infinity; neither store takes half
of a surrogate pair; SQLite stores NaN as NULL. So a text is stored with U+FFFD in place of these
characters, and a number that is not finite is null in JSON. NaN is null in a column too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from operator import is_not
from typing import Any

REPLACEMENT = "\ufffd"
"""What stands for a character that a store cannot hold, and for bytes that are not UTF-8."""


_encode = json.JSONEncoder(allow_nan=False).encode
"""`json.dumps` makes an encoder at each call with other arguments than its own."""


def is_storable_text(value: str) -> bool:
    """Return True for a text that every store holds as it is."""
    if "\0" in value:
        return False
    if value.isascii():  # nearly always
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def storable_text(value: str) -> str:
    """Return the text with U+FFFD for each NUL and each half of a surrogate pair."""
    if is_storable_text(value):
        return value
    return "".join(
        REPLACEMENT if letter == "\0" or "\ud800" <= letter <= "\udfff" else letter
        for letter in value
    )


def storable_parameters(parameters: Any) -> Any:  # Any: as the driver takes them
    """Return the parameters of a statement (a mapping, a tuple, or a list of these) as both stores
    hold them; the same object when nothing is to be changed."""
    if isinstance(parameters, list):
        changed = [storable_parameters(row) for row in parameters]
        return changed if any(map(is_not, changed, parameters)) else parameters
    if isinstance(parameters, Mapping):
        if _are_storable(parameters.values()):
            return parameters
        return {name: _storable(value) for name, value in parameters.items()}
    return parameters if _are_storable(parameters) else tuple(map(_storable, parameters))


def _are_storable(values: Collection[Any]) -> bool:
    # One check of all texts together: each statement of ingest comes here.
    texts = "".join([value for value in values if type(value) is str])
    return is_storable_text(texts) and not [
        value for value in values if type(value) is float and value != value
    ]


def _storable(value: Any) -> Any:  # Any: a parameter of a statement
    if isinstance(value, str):
        return storable_text(value)
    return None if value != value else value  # NaN is no number, also to itself


def to_json(value: Any) -> str:  # Any: JSON
    """Encode a JSON column: numbers that are not finite become null."""
    try:
        return _encode(value)
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
