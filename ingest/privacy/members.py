"""Decode JSON, and refuse what repeats a member of an object. Pure.

Decoding keeps the last of `{"a": "4111...", "a": "x"}`; the bytes have both. So the members of the
value are counted, and those of the bytes.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

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
