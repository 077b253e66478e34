"""Cursor paging: a page continues after the last row of the page before. Pure.

Rows added meanwhile do not shift a page. A cursor is opaque to clients; it holds the sort key of
the last row as JSON, and the listing that it is of.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from fastapi import Query
from sqlalchemy import Select, tuple_
from sqlalchemy.orm import InstrumentedAttribute

from deploy.admin.json import UnreadableError, read_json
from deploy.errors import DeployError

T = TypeVar("T")

MAX_LIMIT = 200
DEFAULT_LIMIT = 50
Limit = Annotated[int, Query(ge=1, le=MAX_LIMIT)]
Cursor = Annotated[str | None, Query()]


class BadCursorError(DeployError, ValueError):
    """The cursor was not made by this API."""


def encode_cursor(listing: str, *key: str | float) -> str:
    """Encode the position after the row with this sort key."""
    return base64.urlsafe_b64encode(json.dumps([listing, *key]).encode()).decode()


def decode_cursor(cursor: str, listing: str, *kinds: type) -> tuple[Any, ...]:
    """Decode a cursor to a sort key, one value of each kind (`float` accepts integers too).

    Raises: BadCursorError, also for one of another listing.
    """
    try:
        key = read_json(base64.urlsafe_b64decode(cursor.encode()), "cursor")
    except (binascii.Error, UnreadableError) as error:
        raise BadCursorError("cursor: use the previous page's next_cursor") from error
    accepted = [(int, float) if kind is float else (kind,) for kind in kinds]
    if not isinstance(key, list) or len(key) != 1 + len(kinds) or key[0] != listing:
        raise BadCursorError("cursor: is of another listing")
    for value, kind in zip(key[1:], accepted, strict=True):
        if not isinstance(value, kind) or isinstance(value, bool):
            raise BadCursorError("cursor: is of another listing")
    return tuple(key[1:])


def newest_first(
    statement: Select[T],
    listing: str,
    *,
    limit: int,
    cursor: str | None,
    key: Mapping[InstrumentedAttribute[Any], type],
) -> Select[T]:
    """Select one page of rows after the cursor, and one row more.

    listing: as of `encode_cursor`; key: columns of the sort key with their types, as in the cursor.
    Raises: BadCursorError.
    """
    if cursor is not None:
        place = decode_cursor(cursor, listing, *key.values())
        statement = statement.where(tuple_(*key) < tuple_(*place))
    return statement.order_by(*(column.desc() for column in key)).limit(limit + 1)
