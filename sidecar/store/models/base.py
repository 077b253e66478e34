"""The base of every row class."""

from __future__ import annotations

from typing import Any, ClassVar

from sqlalchemy import JSON, Dialect, Float, Index, LargeBinary, String, TypeDecorator, text
from sqlalchemy.orm import DeclarativeBase

from sidecar.store.tables import METADATA


class Base(DeclarativeBase):
    """A row; its table belongs to the store's metadata."""

    metadata = METADATA
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        dict[str, Any]: JSON,
        list[Any]: JSON,
        bytes: LargeBinary,
        float: Float,
    }


class ReadableText(TypeDecorator[str]):
    """A text column whose values are texts also where a faulty disk made a blob or a number of one:
    with U+FFFD for bytes that are no UTF-8, as in any text. Who compares or sorts names need not
    ask; no name of an adapter has such a character (`sidecar.routing.table.is_adapter_name`).

    For tables with few rows: each value that is read costs a call.
    """

    impl = String
    cache_ok = True

    def process_result_value(self, value: Any, dialect: Dialect) -> str | None:
        if value is None or isinstance(value, str):
            return value
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def partial_index(name: str, *columns: str, where: str) -> Index:
    """An index of the rows for which `where` holds: the others cost it nothing.

    SQLite takes it only for a query whose WHERE states the condition in the same words, so queries
    use the same constant. `x IS NOT NULL` is implied by any comparison of x.

    The migrations state the condition for PostgreSQL too. Here that would make each process import
    SQLAlchemy's dialect of PostgreSQL, also an offline rollback.
    """
    return Index(name, *columns, sqlite_where=text(where))
