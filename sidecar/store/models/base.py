"""The base of every row class."""

from __future__ import annotations

from typing import Any, ClassVar

from sqlalchemy import JSON, Float, Index, LargeBinary, text
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


def partial_index(name: str, *columns: str, where: str) -> Index:
    """An index of the rows for which `where` holds: the others cost it nothing.

    SQLite takes it only for a query whose WHERE states the condition in the same words, so queries
    use the same constant. `x IS NOT NULL` is implied by any comparison of x.

    The migrations state the condition for PostgreSQL too. Here that would make each process import
    SQLAlchemy's dialect of PostgreSQL, also an offline rollback.
    """
    return Index(name, *columns, sqlite_where=text(where))
