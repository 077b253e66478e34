"""Cursor paging: a page continues after the last row of the page before. Pure.

Rows added meanwhile do not shift a page. A cursor is opaque to clients; it holds the sort key of
the last row as JSON, and the listing that it is of.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar, get_args

from fastapi import APIRouter, Depends, Query, Request
from sqlalchemy import Select, tuple_
from sqlalchemy.orm import InstrumentedAttribute

from deploy.admin.auth import caller
from deploy.admin.wire import PREFIX, TextRoute, UnreadableError, read_json
from deploy.errors import DeployError
from deploy.records import AdapterState
from ingest.store.groups import CLAIMED, SAMPLED, SAMPLING, SCORED, SET_ASIDE
from learner.runs.source import DROPPED, TRAINED

T = TypeVar("T")

MAX_LIMIT = 200
DEFAULT_LIMIT = 50
Limit = Annotated[int, Query(ge=1, le=MAX_LIMIT)]
EveryVersion = Annotated[int, Query(ge=1, le=10_000)]
"""Versions are some hundreds at most, and a table of all has one width."""
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


class Newest(NamedTuple):
    """A page of a listing, the newest first."""

    listing: str
    """As of `encode_cursor`."""
    key: Mapping[InstrumentedAttribute[Any], type]
    """Columns of the sort key with their types, as in the cursor."""
    limit: int
    cursor: str | None

    def select(self, statement: Select[T]) -> Select[T]:
        """Select the rows after the cursor, and one more. Raises: BadCursorError."""
        if self.cursor is not None:
            place = decode_cursor(self.cursor, self.listing, *self.key.values())
            statement = statement.where(tuple_(*self.key) < tuple_(*place))
        return statement.order_by(*(column.desc() for column in self.key)).limit(self.limit + 1)

    def following(self, rows: Sequence[Any]) -> str | None:
        """Return the cursor of the next page; None: the selected rows are the last ones."""
        if len(rows) <= self.limit:
            return None
        last = rows[self.limit - 1]
        return encode_cursor(self.listing, *(getattr(last, column.key) for column in self.key))


# Query parameters of the admin API, and the values that the listings filter by.

ADAPTER_STATES: tuple[str, ...] = get_args(AdapterState)
GROUP_STATUSES = (SAMPLING, SAMPLED, SCORED, CLAIMED, TRAINED, SET_ASIDE, DROPPED)
"""In the order in which a group goes through them."""
TASK_STATUSES = ("waiting", *GROUP_STATUSES[2:])
"""The same of groups of whole sessions."""


Project = Annotated[
    str | None,
    Query(max_length=64, description="whose line of adapters; without it the default line"),
]
OfProject = Annotated[
    str | None,
    Query(max_length=64, description="of whose line of adapters; without it of all lines"),
]
SHOWN = 100
"""Characters of an unknown name that the refusal repeats."""


class UnknownValueError(DeployError, ValueError):
    """The filter has no such value; the message names the known ones."""


class BadQueryError(DeployError, ValueError):
    """The query names a parameter twice, or one that this path does not have."""


def known_query(request: Request) -> None:
    """Refuse a query that would be read otherwise than it was meant. For every path of a router.

    Raises: BadQueryError.
    """
    known = [one.alias for one in request.scope["route"].dependant.query_params]
    takes = f"known: {', '.join(known)}" if known else "this path takes none"
    times = Counter(name for name, _ in request.query_params.multi_items())
    for name, count in times.items():
        if name not in known:
            raise BadQueryError(f"no such query parameter: {name[:SHOWN]}; {takes}")
        if count > 1:
            raise BadQueryError(f"query parameter {name} is given {count} times; give it once")


def refuse_unknown(name: str, value: str, known: Collection[str]) -> None:
    """Raises: UnknownValueError."""
    if value not in known:
        raise UnknownValueError(f"{name}: no such value: {value}; known: {', '.join(known)}")


def new_router() -> APIRouter:
    """Return a router below `/admin/v1` whose replies are JSON or text."""
    return APIRouter(
        prefix=PREFIX, route_class=TextRoute, dependencies=[Depends(caller), Depends(known_query)]
    )
