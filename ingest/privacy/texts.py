"""Search and change the texts of a JSON value, also of JSON inside its texts. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from ingest.privacy.detectors import Detectors

BETWEEN = b"\n\n"
"""Between texts that are searched at once: of the built-in patterns only that of a private key goes
beyond it."""
_NOT_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class TooLargeError(ValueError):
    """There is more text than is searched."""


def kinds_in(bodies: Sequence[bytes], detectors: Detectors, *, max_bytes: int) -> list[str]:
    """Return the kinds of which these bodies hold a value.

    bodies: JSON; one that is not is searched as it is.
    Raises: TooLargeError; TooManyError.
    """
    if sum(map(len, bodies)) > max_bytes:
        raise TooLargeError(f"over {max_bytes} bytes")
    texts: list[str] = []
    joined: list[bytes] = []
    for body in bodies:
        try:
            texts.extend(_texts(msgspec.json.decode(body)))
        except _NOT_JSON:
            joined.append(body)
    joined.append("\n\n".join(texts).encode("utf-8", "surrogatepass"))
    return detectors.kinds_in(BETWEEN.join(joined))


def _texts(value: Any) -> Iterator[str]:  # Any: JSON
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            inner = _inner(one)
            if inner is None:
                yield one
            else:
                left.append(inner)
        elif isinstance(one, dict):
            left.extend(one.values())
            left.extend(one)
        elif isinstance(one, list):
            left.extend(one)
        elif isinstance(one, int) and not isinstance(one, bool) and abs(one) > 10**11:
            yield str(one)  # a card number without quotes


def _inner(text: str) -> Any | None:  # Any: JSON
    """Decode a text that is JSON in itself with escapes, such as the arguments of a tool call."""
    first = text[:1]
    if first.isspace():
        first = text.lstrip()[:1]
    if first not in ("{", "[") or "\\" not in text:
        return None
    try:
        found = msgspec.json.decode(text)
    except _NOT_JSON:
        return None
    return found if isinstance(found, dict | list) else None


class Redaction:
    """Replaces values by placeholders; one value has the same placeholder in all that it is given.

    Placeholders say the kind and number the values of a kind: `<EMAIL_1>`.
    """

    def __init__(self, detectors: Detectors, *, max_bytes: int) -> None:
        self._detectors = detectors
        self._left = max_bytes
        self._numbers: dict[tuple[str, str], str] = {}
        self._counts: dict[str, int] = {}
        self.replaced = 0
        """Values that were replaced."""

    def json(self, value: Any) -> Any:  # Any: JSON
        """Return the value with placeholders; the same object when there is nothing to hide.

        Raises: TooLargeError; TooManyError; RecursionError.
        """
        if isinstance(value, str):
            return self._string(value)
        if isinstance(value, dict):
            before = self.replaced
            changed = {self.json(name): self.json(one) for name, one in value.items()}
            return value if self.replaced == before else changed
        if isinstance(value, list | tuple):
            before = self.replaced
            items = [self.json(one) for one in value]
            return value if self.replaced == before else items
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**11:
            text = str(value)
            hidden = self._text(text)
            return value if hidden == text else hidden
        return value

    def body(self, body: bytes) -> bytes:
        """Replace in a body of JSON; in one that is not JSON, in its text. Raises: as `json`."""
        try:
            value = msgspec.json.decode(body)
        except _NOT_JSON:
            return self._bytes(body)
        before = self.replaced
        changed = self.json(value)
        return msgspec.json.encode(changed) if self.replaced > before else body

    def _string(self, text: str) -> str:
        inner = _inner(text)
        if inner is None:
            return self._text(text)
        before = self.replaced
        changed = self.json(inner)
        return json.dumps(changed, ensure_ascii=False) if self.replaced > before else text

    def _text(self, text: str) -> str:
        data = text.encode("utf-8", "surrogatepass")
        changed = self._bytes(data)
        return text if changed is data else changed.decode("utf-8", "surrogatepass")

    def _bytes(self, data: bytes) -> bytes:
        self._left -= len(data)
        if self._left < 0:
            raise TooLargeError("there is more text than privacy.max_bytes")
        found = self._detectors.find(data)
        if not found:
            return data
        parts: list[bytes] = []
        end = 0
        for one in found:
            value = data[one.start : one.end].decode("utf-8", "replace")
            parts += [data[end : one.start], self._placeholder(one.kind, value).encode()]
            end = one.end
        self.replaced += len(found)
        parts.append(data[end:])
        return b"".join(parts)

    def _placeholder(self, kind: str, value: str) -> str:
        known = self._numbers.get((kind, value))
        if known is None:
            self._counts[kind] = self._counts.get(kind, 0) + 1
            known = self._numbers[kind, value] = f"<{kind}_{self._counts[kind]}>"
        return known
