"""Conditions: the state of one part of the system, in words and for programs, in one table.

The process that observes a state writes it: score the judge's, ingest the bus's, the learner its
schedule's. What reads them (`deploy.conditions`) adds the states that rows of other tables already
say, such as a failed run. `sidecar status`, the page, `sidecar doctor`, `/readyz` and the metrics
render the same records; none of them reads the message.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from sidecar.store.database import insert_into
from sidecar.store.models import ConditionRow

State = Literal["ok", "look", "act"]
MOST_CHARACTERS = 500
"""Characters of another service's words that a message repeats."""


class Condition(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one part of the system."""

    kind: str
    """What it is about: `judge`, `bus`, `verifier policy`. One for each line and kind."""
    state: State = "ok"
    """`ok`; `look`: it goes on, and a person should know; `act`: something is stopped or lost."""
    code: str
    """A name for programs, such as `judge_away`."""
    message: str = ""
    """What is seen and why, for people: no capital letter and no full stop."""
    to_do: str = ""
    """What an operator does about it, in the same form."""
    since: float = 0.0
    """When the code became this one, in Unix seconds."""
    until: float | None = None
    """When it ends, or is tried again, by itself; None: not known."""
    line: str = ""
    """Name of the line of adapters; empty: of all."""
    at: float = 0.0
    """When it was last written, in Unix seconds."""
    data: Mapping[str, Any] = {}
    """Figures, and names for links: JSON."""


_FIELDS = Condition.__struct_fields__


def write(session: Session, one: Condition, *, now: float) -> None:
    """Write a condition in place of the one of its line and kind, in the caller's transaction.

    `since` is kept while the code stays; a condition that says it itself is believed.
    """
    if not one.since:
        before = read(session, one.kind, one.line)
        since = before.since if before is not None and before.code == one.code else now
        one = msgspec.structs.replace(one, since=since)
    values = {name: getattr(one, name) for name in _FIELDS} | {"at": now, "data": dict(one.data)}
    statement = insert_into(session, ConditionRow).values(values)
    session.execute(statement.on_conflict_do_update(index_elements=["line", "kind"], set_=values))


def clear(session: Session, kind: str, line: str = "") -> None:
    """Remove a condition: it is over, or its part is gone."""
    row = ConditionRow
    session.execute(delete(row).where(row.line == line, row.kind == kind))


def read(session: Session, kind: str, line: str = "") -> Condition | None:
    """Return a condition; None when nobody has written it."""
    row = session.get(ConditionRow, (line, kind), populate_existing=True)
    return None if row is None else _condition(row)


def read_all(session: Session) -> list[Condition]:
    """Return every condition that is stored, of all lines."""
    rows = session.scalars(select(ConditionRow).order_by(ConditionRow.kind, ConditionRow.line))
    return [_condition(row) for row in rows]


def _condition(row: ConditionRow) -> Condition:
    return Condition(**{name: getattr(row, name) for name in _FIELDS})
