"""What a store takes on the disk, and how SQLite's file gives back what was deleted.

SQLite keeps the pages of deleted rows in a list of free pages and uses them again. A file that was
made with `auto_vacuum = INCREMENTAL` (all that this version makes) can be shortened step by step;
an older file only uses its pages again. PostgreSQL uses the space of deleted rows again after its
own autovacuum, and its files seldom shrink, so where they are over a limit the rows are added up
instead.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from sidecar.store.models import AnswerRow, ChoiceRow, DeadLetterRow, ExchangeRow, JudgeCallRow
from sidecar.store.tables import METADATA

STEP_PAGES = 256
"""Pages that one transaction gives back: 1 MiB."""
_INCREMENTAL = 2
_LARGE_COLUMNS = (
    (ExchangeRow.request_body, ExchangeRow.prompt_token_ids),
    (ChoiceRow.message_body, ChoiceRow.token_ids, ChoiceRow.logprobs),
    (AnswerRow.message_body, AnswerRow.token_ids, AnswerRow.logprobs),
    (JudgeCallRow.reply,),
    (DeadLetterRow.payload,),
)
"""By table."""


@dataclass(frozen=True, slots=True)
class Space:
    """Bytes of a store."""

    used: int
    """SQLite: pages that hold something. PostgreSQL: the files of all tables, with their indexes
    and the space of deleted rows; over the limit the large columns alone, as stored."""
    free: int
    """SQLite: pages that hold nothing. PostgreSQL: not known, 0."""


def space_of(session: Session, *, limit: int = 0) -> Space:
    """Measure the store: from the head of SQLite's file, or by the size of PostgreSQL's files.

    limit: bytes; 0: none. PostgreSQL's files keep the space of deleted rows, so when they are over
        it, the tables are read, though not the large values.
    """
    if session.get_bind().dialect.name == "postgresql":
        sizes = [func.pg_total_relation_size(name) for name in METADATA.tables]
        files: int = session.execute(select(sum(sizes[1:], sizes[0]))).scalar_one()
        return Space(_rows_bytes(session) if 0 < limit < files else files, 0)
    names = ("page_size", "page_count", "freelist_count")
    size, pages, free = (_pragma(session, name) for name in names)
    return Space((pages - free) * size, free * size)


def _rows_bytes(session: Session) -> int:
    sizes = (
        [func.coalesce(func.sum(func.pg_column_size(column)), 0) for column in columns]
        for columns in _LARGE_COLUMNS
    )
    return sum(
        int(size) for of_a_table in sizes for size in session.execute(select(*of_a_table)).one()
    )


def give_back(session: Session) -> bool:
    """Shorten SQLite's file by up to `STEP_PAGES` free pages, in the caller's write transaction.

    Returns: False when it cannot be shortened.
    """
    if session.get_bind().dialect.name == "postgresql":
        return False
    if _pragma(session, "auto_vacuum") != _INCREMENTAL or _pragma(session, "freelist_count") == 0:
        return False
    # The pages are moved while the (empty) result is read, which SQLAlchemy would not do.
    cursor = session.connection().connection.cursor()
    cursor.execute(f"PRAGMA incremental_vacuum({STEP_PAGES})")
    cursor.fetchall()
    cursor.close()
    return True


def _pragma(session: Session, name: str) -> int:
    number: int = session.execute(text(f"PRAGMA {name}")).scalar_one()
    return number
