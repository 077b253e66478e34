"""Cursor paging: a page goes on after the last row that was seen, whatever was added since. Pure.

A cursor is opaque to clients; inside it is the sort key of the last row as JSON.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

from fastapi import Query
from sqlalchemy import Select, tuple_
from sqlalchemy.orm import InstrumentedAttribute

from deploy.admin.json import UnreadableError, read_json
from deploy.admin.models import Page
from deploy.errors import DeployError

T = TypeVar("T")

MAX_LIMIT = 200
DEFAULT_LIMIT = 50
Limit = Annotated[int, Query(ge=1, le=MAX_LIMIT)]
Cursor = Annotated[str | None, Query()]


class BadCursorError(DeployError, ValueError):
    """The cursor was not made by this API."""


def encode_cursor(*key: str | float) -> str:
    """Name the place after the row with this sort key."""
    return base64.urlsafe_b64encode(json.dumps(key).encode()).decode()


def decode_cursor(cursor: str, *kinds: type) -> tuple[Any, ...]:
    """The sort key that a cursor holds, one value of each kind (`float` takes whole numbers too).

    Raises: BadCursorError.
    """
    try:
        key = read_json(base64.urlsafe_b64decode(cursor.encode()), "cursor")
    except (binascii.Error, UnreadableError) as error:
        raise BadCursorError("cursor: take it from next_cursor of the page before") from error
    accepted = [(int, float) if kind is float else (kind,) for kind in kinds]
    if not isinstance(key, list) or len(key) != len(kinds):
        raise BadCursorError("cursor: is of another listing")
    for value, kind in zip(key, accepted, strict=True):
        if not isinstance(value, kind) or isinstance(value, bool):
            raise BadCursorError("cursor: is of another listing")
    return tuple(key)


def newest_first(
    statement: Select[T],
    *,
    limit: int,
    cursor: str | None,
    key: Mapping[InstrumentedAttribute[Any], type],
) -> Select[T]:
    """The rows of one page and one more, behind the cursor's place.

    key: the sort key's columns and the kind of each, the same as in the cursor.
    Raises: BadCursorError.
    """
    if cursor is not None:
        place = decode_cursor(cursor, *key.values())
        statement = statement.where(tuple_(*key) < tuple_(*place))
    return statement.order_by(*(column.desc() for column in key)).limit(limit + 1)


def page(items: list[T], limit: int, cursor_of: Callable[[T], str]) -> Page[T]:
    """A page of at most `limit` of the items, which hold one more when there is a next page."""
    following = cursor_of(items[limit - 1]) if len(items) > limit else None
    return Page(items=items[:limit], next_cursor=following)
