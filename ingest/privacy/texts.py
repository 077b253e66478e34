"""Search and change the texts of a JSON value, also of JSON inside them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from typing import Any, Final, NamedTuple

import msgspec

from ingest.privacy import detectors as escapes
from ingest.privacy.detectors import Detectors
from sidecar.settings import Privacy

# Decode JSON, and refuse what repeats a member of an object. Pure.

_GAPS: Final = (b" :", b"\t:", b"\n:", b"\r:")
_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"(\s*+:)?', re.DOTALL)
"""A string of JSON, and the colon of a member's name."""


class RepeatedMemberError(ValueError):
    """An object has two members of one name."""


class _Name(str):
    """The name of a member, equal to no other: a dictionary then keeps both."""

    __slots__ = ()
    __eq__ = object.__eq__
    __hash__ = object.__hash__


def decoded(written: bytes | str) -> Any:  # Any: JSON
    """Raises: msgspec.MsgspecError; UnicodeError; RecursionError; RepeatedMemberError."""
    value = msgspec.json.decode(written)
    refuse_repeated(written if isinstance(written, bytes) else written.encode(), _members(value))
    return value


def refuse_repeated(data: bytes, members: int) -> None:
    """members: of all objects in the value of this JSON, once decoded.

    Raises: RepeatedMemberError when the bytes have more.
    """
    if data.count(b":") <= members or _at_most(data) <= members:  # nearly always
        return
    if sum(map(bool, _STRING.findall(data))) > members:
        raise RepeatedMemberError


def raw_members(written: bytes) -> dict[str, msgspec.Raw]:
    """Decode the outermost object only. Raises: as `decoded`."""
    named = _decode_members(written)
    members = {str(name): value for name, value in named.items()}
    if len(members) < len(named):
        raise RepeatedMemberError
    return members


_decode_members: Final = msgspec.json.Decoder(
    dict[_Name, msgspec.Raw], dec_hook=lambda _kind, name: _Name(name)
).decode


def _members(value: Any) -> int:  # Any: JSON
    """Return how many members all objects of a value have."""
    found = 0
    left = [value]
    while left:
        one = left.pop()
        kind = type(one)
        if kind is dict:
            found += len(one)
            left.extend(one.values())
        elif kind is list:
            left.extend(one)
    return found


def _at_most(data: bytes) -> int:
    """Return no less than the members in the bytes; more when a text in them has quotes.

    A quote within a text has an odd number of backslashes before it, the end of a name an even one.
    """
    ends = data.count(b'":') - data.count(b'\\":') + data.count(b'\\\\":')
    return ends + sum(map(data.count, _GAPS))


# Remember which parts of requests hold nothing that is searched for. Pure.

SEARCHED_BYTES = 16 * 2**20
"""Bytes of an exchange that are searched. One with more counts as flagged, unseen."""
MAX_BYTES: Final = 8 * 2**20
"""Memory of what is remembered: some 15,000 messages of ordinary size."""
ENTRY_BYTES: Final = 200
"""Memory of an entry besides its key."""
DIGESTED: Final = 512
"""Bytes of a part from which its digest stands for it."""


class Searched:
    """Parts of bodies by their bytes; the least recently used are dropped first. For one thread,
    and for one set of detectors."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._empty: dict[bytes, None] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._empty)

    def is_empty(self, written: bytes) -> bool:
        """True when no pattern matches in this part. False: it is to be searched."""
        key = _key(written)
        if key not in self._empty:
            return False
        self._empty[key] = self._empty.pop(key)  # now the most recently used
        return True

    def put(self, written: bytes) -> None:
        """Remember that no pattern matches in this part."""
        key = _key(written)
        if key in self._empty:
            return
        self._empty[key] = None
        self._bytes += ENTRY_BYTES + len(key)
        while self._bytes > self._max_bytes:
            oldest = next(iter(self._empty))
            del self._empty[oldest]
            self._bytes -= ENTRY_BYTES + len(oldest)


def _key(written: bytes) -> bytes:
    return written if len(written) < DIGESTED else blake2b(written, digest_size=32).digest()


BETWEEN = b"\n\0\n"
"""Between texts that are searched at once. No built-in pattern needs what stands behind it, so a
text holds a value or not, whatever its neighbours are: the first line of a private key matches."""
SPLIT_BYTES: Final = 4 * 1024
"""Bytes of a body from which its parts are remembered. To read a shorter one as a whole (40 us for
2 kB) takes no more time than to look up its parts."""
_NOT_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, RepeatedMemberError)
"""Why bytes are searched as they stand: decoded, a repeated member has its last value only."""
_ABOVE, _BELOW = 10**11, 10**20
"""An integer over the first may be a card number without quotes, and a float between them."""


class TooLargeError(ValueError):
    """There is more text than is searched."""


def kinds_in(
    bodies: Sequence[bytes],
    detectors: Detectors,
    *,
    max_bytes: int,
    searched: Searched | None = None,
) -> list[str]:
    """Return the kinds of which these bodies hold a value.

    bodies: JSON; one that is not is searched as it is.
    searched: what earlier calls with these detectors found. The result is the same without it.
    Raises: TooLargeError; TooManyError.
    """
    if sum(map(len, bodies)) > max_bytes:
        raise TooLargeError(f"over {max_bytes} bytes")
    if not detectors.built_in:  # a pattern of an operator may reach over several texts
        searched = None
    found: list[_Part] = []
    for body in bodies:
        try:
            if searched is None or len(body) < SPLIT_BYTES:
                found.append(_Part(b"", _texts(body)))
            else:
                found += _unknown_parts(body, searched)
        except _NOT_JSON:
            found.append(_Part(b"", [], body))
    matches = _may_match(found, detectors)
    kept = found if matches else []
    if searched is not None:
        kept = []
        for part in found:
            if matches and _may_match([part], detectors):
                kept.append(part)
            elif part.written:
                searched.put(part.written)
    return _kinds_in(kept, detectors) if kept else []


def _may_match(parts: Sequence[_Part], detectors: Detectors) -> bool:
    if detectors.may_match(_joined(parts)):
        return True
    undone = _undone(parts)
    return bool(undone) and detectors.may_match(undone)


def _kinds_in(parts: Sequence[_Part], detectors: Detectors) -> list[str]:
    kinds = detectors.kinds_in(_joined(parts))
    if undone := _undone(parts):
        kinds += [kind for kind in detectors.kinds_in(undone) if kind not in kinds]
    return kinds


class _Part(NamedTuple):
    """A part of a body, to be searched."""

    written: bytes
    """Names it in `Searched`; empty: it is not remembered."""
    texts: list[str]
    body: bytes | None = None
    """A body that is no JSON, in place of texts."""


def _joined(parts: Sequence[_Part]) -> bytes:
    """Return what is searched at once of these parts: bodies that are no JSON come first."""
    texts = [text for part in parts for text in part.texts]
    bodies = [part.body for part in parts if part.body is not None]
    return BETWEEN.join((*bodies, BETWEEN.decode().join(texts).encode("utf-8", "surrogatepass")))


def _undone(parts: Sequence[_Part]) -> bytes:
    """Return those texts again that have escapes, with the escapes undone; mostly empty."""
    found = [part.body for part in parts if part.body is not None]
    for part in parts:
        found += [one.encode("utf-8", "surrogatepass") for one in part.texts if "\\" in one]
    return BETWEEN.join(one for text in found for one in escapes.levels(text))


def _unknown_parts(body: bytes, searched: Searched) -> list[_Part]:
    """Return the parts of a body that may hold a value, in the order of `_texts`. Raises: one of
    `_NOT_JSON`."""
    found = []
    for written in _parts(body):
        if not searched.is_empty(written):
            found.append(_Part(written, _texts(written.removeprefix(_NAMES))))
    return found


def _parts(body: bytes) -> Iterator[bytes]:
    """Yield the parts of a body: the names of its members, the items of each member that is a list
    of objects (messages, tools), and each other member. Raises: one of `_NOT_JSON`."""
    if body[:1] != b"{":
        yield body
        return
    members = raw_members(body)
    yield _NAMES + msgspec.json.encode(list(members))
    for member in reversed(members.values()):
        value = bytes(member)
        if _OBJECTS.match(value):
            yield from map(bytes, reversed(_decode_items(member)))
        else:
            yield value


_decode_items: Final = msgspec.json.Decoder(list[msgspec.Raw]).decode
_OBJECTS: Final = re.compile(rb"\[\s*\{")
_NAMES: Final = b"names"
"""Before a list of names. No JSON begins so."""


def _texts(written: bytes) -> list[str]:
    """Return the texts of JSON. Raises: one of `_NOT_JSON`."""
    found, members = _walked(msgspec.json.decode(written))
    refuse_repeated(written, members)
    return found


def _walked(value: Any) -> tuple[list[str], int]:  # Any: JSON
    """Return the texts of a value, and how many members its objects have."""
    found: list[str] = []
    members = 0
    left = [value]
    while left:
        one = left.pop()
        kind = type(one)  # as decoded: no subclasses
        if kind is str:
            inner = _inner(one) if "\\" in one else None
            if inner is None:
                found.append(one)
            else:
                found += _walked(inner)[0]  # each level has twice the backslashes of the next
        elif kind is dict:
            members += len(one)
            left.extend(one.values())
            left.extend(one)
        elif kind is list:
            left.extend(one)
        elif (digits := _digits(one)) is not None:
            found.append(digits)
    return found, members


def _digits(value: Any) -> str | None:  # Any: JSON
    """Return the digits of a number that may be that of a card, without quotes."""
    kind = type(value)
    if kind is int and abs(value) > _ABOVE:
        return str(value)
    return str(int(value)) if kind is float and _ABOVE < abs(value) < _BELOW else None


def _inner(text: str) -> Any | None:  # Any: JSON
    """Decode a text that is JSON in itself with escapes, such as the arguments of a tool call."""
    first = text[:1]
    if first.isspace():
        first = text.lstrip()[:1]
    if first not in ("{", "[") or "\\" not in text:
        return None
    try:
        found = decoded(text)
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
        if (digits := _digits(value)) is not None:
            hidden = self._text(digits)
            return value if hidden == digits else hidden
        return value

    def body(self, body: bytes) -> bytes:
        """Replace in a body of JSON; in one that is not JSON, in its text. Raises: as `json`."""
        try:
            value = decoded(body)
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
            raise TooLargeError("there is more text than is searched")
        found = escapes.find(self._detectors, data)
        if not found:
            return data
        parts: list[bytes] = []
        end = 0
        for one in found:
            # The value as others have it who do not escape it.
            value = escapes.undone(data[one.start : one.end]).decode("utf-8", "replace")
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


# What the judge sees of a group: secrets and personal data are replaced by placeholders.


class NotRedactedError(ValueError):
    """The search failed, so the judge must not see the group."""


@dataclass(frozen=True, slots=True)
class View:
    """The arguments of RULER, redacted. Any: JSON."""

    context: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]]
    answers: Sequence[Mapping[str, Any]]


class JudgeView:
    """Redacts groups. One value has one placeholder in the whole group, so that answers stay
    comparable."""

    def __init__(self, settings: Privacy) -> None:
        self._detectors = Detectors(settings.hidden, settings.patterns)

    def __call__(self, seen: View) -> View:
        """Raises: NotRedactedError."""
        redaction = Redaction(self._detectors, max_bytes=SEARCHED_BYTES)
        try:
            return View(
                context=redaction.json(list(seen.context)),
                tools=redaction.json(list(seen.tools)),
                answers=redaction.json(list(seen.answers)),
            )
        except Exception as error:  # noqa: BLE001 - a defect costs this group; the message is left
            # out, because it may quote what users wrote
            raise NotRedactedError(
                f"the search for values to hide failed: {type(error).__name__}"
            ) from None


@cache
def default_view() -> JudgeView:
    """The view by the default settings: what a caller has that names no other."""
    return JudgeView(Privacy())
