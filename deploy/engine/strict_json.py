"""Parse untrusted JSON strictly: input that two parsers could read differently is refused.

Python's parser accepts NaN, duplicate keys, lone surrogates (which no database stores) and nesting
up to the end of its stack. None of these belongs in an adapter folder.
"""

from __future__ import annotations

import json
import math
from typing import Any

MAX_DEPTH = 16
"""Deepest nesting. PEFT's configuration and a safetensors header have 3 levels."""
MAX_INTEGER_DIGITS = 20
"""Longest integer in digits: enough for 64 bits."""


def parse(data: bytes) -> Any:  # Any: JSON
    """Parse JSON. Raises: ValueError with the first defect, in one line."""
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_object,
            parse_constant=_refuse_constant,
            parse_float=_number,
            parse_int=_integer,
        )
    except RecursionError:
        raise ValueError(f"is nested deeper than {MAX_DEPTH} levels") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"is no JSON: {error.msg} at character {error.pos}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 at byte {error.start}") from error
    _check(value)
    return value


def shown(value: object) -> str:
    """Format an untrusted value for a message: one short ASCII line, quoted unless plain words."""
    plain = isinstance(value, str) and value.isascii() and value.isprintable()
    text = str(value) if plain else ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("has a duplicate key in one object")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"holds {name}, which is no JSON")


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"holds the number {shown(text)}, which is too large")
    return value


def _integer(text: str) -> int:
    if len(text) > MAX_INTEGER_DIGITS:
        raise ValueError(f"holds an integer of {len(text)} digits")
    return int(text)


def _check(value: Any) -> None:
    """Refuse deep nesting and lone surrogates. A loop, since recursion could exhaust the stack."""
    level = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                below += one.keys()
                below += one.values()
            elif isinstance(one, list):
                below += one
            elif isinstance(one, str) and not one.isascii():
                _check_text(one)
        level = below
        if not level:
            return
    raise ValueError(f"is nested deeper than {MAX_DEPTH} levels")


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"holds a lone surrogate in {shown(text)}") from error
