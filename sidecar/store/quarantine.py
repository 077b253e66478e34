"""The edge of the store: a column gives a value of its type, or its row goes into quarantine.

PostgreSQL keeps the types of its columns. SQLite does so in STRICT tables; an older file, or a
failing disk, may hold another value. Then the reading ends with `DamagedColumnError`, and
`Database` finds the damaged rows of the tables that it read, writes each one's name, the reason and
the time into the table `quarantine`, and lets the caller repeat. So no reader asks for types.

A row that others depend on stays, with a neutral value in the damaged column and a mark that keeps
it from being learned from (`KEPT`); any other one is deleted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import (
    JSON,
    Column,
    Float,
    ForeignKey,
    LargeBinary,
    String,
    Table,
    delete,
    literal_column,
    select,
    update,
)
from sqlalchemy.orm import Session
from sqlalchemy.sql.elements import ColumnElement

from sidecar.errors import DamagedColumnError
from sidecar.store.engines import checked_json
from sidecar.store.models import QuarantineRow
from sidecar.store.tables import METADATA, JsonArray, JsonObject, add_counts

STAGE: Final = "quarantine"
"""Counter rows: ("quarantine", reason) -> damaged rows."""
MAX_TEXT: Final = 2_000
"""Characters of a row that are kept."""
KEPT: Final[Mapping[str, Mapping[str, object]]] = {
    "exchange": {
        "selection": "unreadable",
        "untrainable_reason": "unreadable",
        "outcome": "ok",
        "status": 499,  # counts for no arm (`models.COUNTED`), and is not chosen
    },
    "choice": {},
    "answer_group": {},
    "answer": {"untrainable_reason": "unreadable"},
    "group_digest": {},
    "training_run": {},
    "adapter_version": {},
    "banned_digest": {},
    "forgotten": {},
    "canary": {"evidence": {}},  # one without steps is ended
}
"""Table -> columns that are set in its damaged rows; a row whose own name is damaged is deleted."""
_NEUTRAL: Final[Mapping[tuple[str, str], object]] = {
    ("adapter_version", "parent"): "base",
    ("adapter_version", "state"): "retired",
    ("answer_group", "status"): "set_aside",
    ("training_run", "status"): "failed",
    ("canary", "state"): "rolled_back",
}
_PERSONAL: Final = frozenset({"exchange_id", "session_id", "group_id", "session_digest", "payload"})
"""Tables with such a column hold what users said or did, of which no copy is made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DamagedRow:
    """A row of which some columns cannot be read."""

    table: Table
    rowid: int
    columns: tuple[str, ...]
    reason: str
    """The type that the first of them should hold: `text`, `integer`, `real`, `blob`, `json`."""
    stored: Mapping[str, object]
    """The row, its texts as bytes, and its blobs by their length alone."""

    @property
    def key(self) -> str:
        return ", ".join(_shown(self.stored[one.name]) for one in self.table.primary_key)


# Find damaged rows, and put them into quarantine.


def damaged_rows(connection: Any, statement: str) -> list[DamagedRow]:  # Any: the driver's own type
    """Find the damaged rows of the tables that a statement names; of all when those are sound."""
    tables = METADATA.sorted_tables
    named = [table for table in tables if table.name in statement]
    connection.create_function("sidecar_sound", 2, _is_sound, deterministic=True)
    text_factory, connection.text_factory = connection.text_factory, bytes
    try:
        return [row for one in named for row in _of_table(connection, one)] or [
            row for one in tables if one not in named for row in _of_table(connection, one)
        ]
    finally:
        connection.text_factory = text_factory


def _of_table(connection: Any, table: Table) -> Iterator[DamagedRow]:
    columns = list(table.columns)
    broken = [_broken(column) for column in columns]
    shown = [
        f'length("{one.name}")' if isinstance(one.type, LargeBinary) else f'"{one.name}"'
        for one in columns
    ]
    found = connection.execute(
        f'SELECT rowid, {", ".join([*broken, *shown])} FROM "{table.name}" '
        f"WHERE {' OR '.join(broken)}"
    )
    for rowid, *values in found.fetchall():
        flags, stored = values[: len(columns)], values[len(columns) :]
        lost = [column for column, flag in zip(columns, flags, strict=True) if flag]
        yield DamagedRow(
            table=table,
            rowid=rowid,
            columns=tuple(column.name for column in lost),
            reason=_kind(lost[0])[0],
            stored={one.name: value for one, value in zip(columns, stored, strict=True)},
        )


def _kind(column: Column[Any]) -> tuple[str, str]:
    """The reason, and SQLite's types that the column may hold."""
    if isinstance(column.type, JSON):
        return "json", "'text'"
    if isinstance(column.type, LargeBinary):
        return "blob", "'blob'"
    if isinstance(column.type, Float):
        return "real", "'real', 'integer'"
    return ("text", "'text'") if isinstance(column.type, String) else ("integer", "'integer'")


def _broken(column: Column[Any]) -> str:
    """The SQL that is 1 when the column cannot be read."""
    reason, types = _kind(column)
    wrong = f"typeof(\"{column.name}\") NOT IN ({types}, 'null')"
    if reason not in ("text", "json"):
        return f"({wrong})"
    shape = type(column.type).__name__
    return f"({wrong} OR NOT sidecar_sound(CAST(\"{column.name}\" AS BLOB), '{shape}'))"


def _is_sound(stored: bytes | None, shape: str) -> bool:
    try:
        text = (stored or b"").decode()
        if stored is not None and (kind := _SHAPES.get(shape)) is not None:
            checked_json(text, kind)
    except (UnicodeDecodeError, DamagedColumnError):
        return False
    return True


_SHAPES: Final[Mapping[str, type]] = {"JsonObject": dict, "JsonArray": list}


def put_into_quarantine(session: Session, rows: Iterable[DamagedRow], *, now: float) -> int:
    """Take damaged rows out of use, in the caller's write transaction. Returns: how many."""
    done = 0
    for row in rows:
        there: ColumnElement[bool] = literal_column("rowid") == row.rowid
        keys = {one.name for one in row.table.columns if one.primary_key or one.unique}
        if row.table.name in KEPT and not keys & set(row.columns):
            _mend(session, row, there)
        else:
            _delete(session, row.table, there)
            for child, key in _referring(row.table):  # to the name that it had
                _delete(session, child, key.parent.not_in(select(key.column)))
        personal = _PERSONAL & set(row.table.columns.keys())
        text = ", ".join(f"{name}={_shown(value)}" for name, value in row.stored.items())
        note(
            session,
            table=row.table.name,
            key=row.key,
            reason=row.reason,
            detail=f"no {row.reason} in {', '.join(row.columns)}",
            row=None if personal else text[:MAX_TEXT],
            now=now,
        )
        done += 1
    return done


def note(
    session: Session,
    *,
    table: str,
    key: str,
    reason: str,
    detail: str,
    now: float,
    row: str | None = None,
) -> None:
    """Record a damaged row, in the caller's write transaction. It is counted by its reason."""
    session.add(
        QuarantineRow(
            at=now, table_name=table, key=key[:255], reason=reason, detail=detail, row=row
        )
    )
    session.flush()
    add_counts(session.connection(), {(STAGE, reason): 1})
    import structlog  # not at the top: a rollback without control imports only what it uses

    structlog.get_logger().error(
        "row_quarantined", table=table, key=key, reason=reason, detail=detail
    )


def _mend(session: Session, row: DamagedRow, there: ColumnElement[bool]) -> None:
    """Set the damaged columns to neutral values, and mark the row."""
    table = row.table
    values = {name: _neutral(table.columns[name]) for name in row.columns} | dict(KEPT[table.name])
    session.execute(update(table).where(there).values(values))
    if table.name == "choice":  # its exchange is read with it
        exchange = METADATA.tables["exchange"]
        of_choice = select(table.c.exchange_id).where(there).scalar_subquery()
        session.execute(
            update(exchange).where(exchange.c.exchange_id == of_choice).values(KEPT["exchange"])
        )
    if table.name == "exchange" and row.stored["selection"] in (b"new", b"backlog"):
        counts = {("selection", "unreadable"): 1}
        if row.stored["selection"] == b"backlog":
            counts["selection", "backlog"] = -1
        add_counts(session.connection(), counts)


def _neutral(column: Column[Any]) -> object:
    if (known := _NEUTRAL.get((column.table.name, column.name))) is not None:
        return known
    if column.nullable:
        return None
    if isinstance(column.type, JsonObject | JsonArray):
        return {} if isinstance(column.type, JsonObject) else []
    if isinstance(column.type, LargeBinary):
        return b""
    return "" if isinstance(column.type, String) else 0


def _delete(session: Session, table: Table, where: ColumnElement[bool]) -> None:
    """Delete rows, and those that refer to them."""
    for child, key in _referring(table):
        _delete(session, child, key.parent.in_(select(key.column).where(where)))
    session.execute(delete(table).where(where))


def _referring(table: Table) -> Iterator[tuple[Table, ForeignKey]]:
    for child in METADATA.sorted_tables:
        yield from ((child, key) for key in child.foreign_keys if key.column.table is table)


def _shown(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
