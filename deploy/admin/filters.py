"""Query parameters of the admin API, and the values that the listings filter by.

An unknown or doubled one is refused: a list that was not filtered as asked would look like an
answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Annotated, get_args

from fastapi import Query, Request

from deploy.errors import DeployError
from deploy.records import AdapterState
from ingest.store.groups import CLAIMED, SAMPLED, SAMPLING, SCORED, SET_ASIDE
from learner.runs.source import DROPPED, TRAINED

ADAPTER_STATES: tuple[str, ...] = get_args(AdapterState)
GROUP_STATUSES = (SAMPLING, SAMPLED, SCORED, CLAIMED, TRAINED, SET_ASIDE, DROPPED)
"""In the order in which a group goes through them."""


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
