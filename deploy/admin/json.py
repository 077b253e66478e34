"""Read untrusted JSON of admin requests, and show untrusted JSON of the store. Pure.

Python's JSON parser accepts more than the store, a reply or the call stack can hold: lone
surrogates, NUL, NaN, integers of any size, nesting of any depth. All are refused here, for every
route.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NoReturn
from urllib.parse import unquote_to_bytes

from starlette.responses import JSONResponse

from deploy.errors import DeployError

MAX_DEPTH = 16
"""Deepest nesting of a request; every body and cursor of this API is flat."""
MAX_SHOWN_DEPTH = 200
"""Deepest nesting of a shown value: Pydantic serialises 255 levels, the enclosing ones included."""
MAX_INTEGER = 2**63 - 1
"""Largest integer that a database column holds."""


class UnreadableError(DeployError, ValueError):
    """The request is malformed; the message names the place."""


class AsciiJSONResponse(JSONResponse):
    """JSON in ASCII: a lone surrogate that a client wrote into the store is sent escaped."""

    def render(self, content: Any) -> bytes:  # Any: JSON
        return json.dumps(content, separators=(",", ":")).encode()


def read_stored(data: bytes) -> dict[str, Any]:
    """Read a JSON object that a client wrote into the store, for a reply.

    Returns: the object; if it is no object or nested too deep, its text under `unreadable`.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict) and _depth(value) <= MAX_SHOWN_DEPTH:
        return value
    return {"unreadable": data.decode("utf-8", "replace")}


def read_json(data: bytes, where: str) -> Any:  # Any: JSON
    """Parse a JSON text. where: its name in the error. Raises: UnreadableError."""
    try:
        value = json.loads(
            data.decode(), parse_constant=_refuse_constant, object_pairs_hook=_unique
        )
    except _DoubledError as error:
        raise UnreadableError(f"{where}: has the name {error} twice; send it once") from None
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"{where}: is not readable JSON; send UTF-8 JSON") from error
    for one, depth in _walk(value):
        if depth > MAX_DEPTH:
            raise UnreadableError(f"{where}: is nested deeper than {MAX_DEPTH}; send it flat")
        if isinstance(one, str):
            check_text(one, where)
        elif isinstance(one, int | float) and not -MAX_INTEGER <= one <= MAX_INTEGER:
            raise UnreadableError(f"{where}: holds a number beyond 64 bits")
    return value


def check_text(text: str, where: str) -> None:
    """Check that the store and a reply can hold this text. Raises: UnreadableError."""
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise UnreadableError(f"{where}: holds a NUL or a lone surrogate; send UTF-8 text")


def check_quoted(quoted: bytes, where: str) -> None:
    """Check a percent-encoded path or query. Raises: UnreadableError."""
    try:
        text = unquote_to_bytes(quoted).decode()
    except UnicodeDecodeError as error:
        raise UnreadableError(f"{where}: is not UTF-8; send percent-encoded UTF-8") from error
    check_text(text, where)


class _DoubledError(ValueError):
    """A name is twice in one object."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object. Which of two values of a name was meant, nobody knows."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise _DoubledError(ascii(name[:64]))
        found[name] = value
    return found


def _walk(value: Any) -> Iterator[tuple[Any, int]]:
    """Yield every value inside a JSON value, member names too, with its depth. Not recursive."""
    waiting = [(value, 1)]
    while waiting:
        one, depth = waiting.pop()
        yield one, depth
        if isinstance(one, list):
            waiting += [(item, depth + 1) for item in one]
        elif isinstance(one, dict):
            waiting += [(item, depth + 1) for pair in one.items() for item in pair]


def _depth(value: Any) -> int:
    return max(depth for _, depth in _walk(value))


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
