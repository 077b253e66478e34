"""What a store takes on the disk, and how SQLite's file gives back what was deleted.

SQLite keeps the pages of deleted rows in a list of free pages and uses them again. A file that was
made with `auto_vacuum = INCREMENTAL` (all that this version makes) can be shortened step by step;
an older file only uses its pages again. PostgreSQL uses the space of deleted rows again after its
own autovacuum, and its files seldom shrink, so there the rows are added up instead.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from sidecar.store.models import AnswerRow, ChoiceRow, DeadLetterRow, ExchangeRow, JudgeCallRow

STEP_PAGES = 256
"""Pages that one transaction gives back: 1 MiB."""
_INCREMENTAL = 2
_LARGE_COLUMNS = (
    ExchangeRow.request_body,
    ExchangeRow.prompt_token_ids,
    ChoiceRow.message_body,
    ChoiceRow.token_ids,
    ChoiceRow.logprobs,
    AnswerRow.message_body,
    AnswerRow.token_ids,
    AnswerRow.logprobs,
    JudgeCallRow.reply,
    DeadLetterRow.payload,
)


@dataclass(frozen=True, slots=True)
class Space:
    """Bytes of a store."""

    used: int
    """SQLite: pages that hold something. PostgreSQL: the large columns, as stored."""
    free: int
    """SQLite: pages that hold nothing. PostgreSQL: not known, 0."""


def space_of(session: Session) -> Space:
    """Measure the store. SQLite answers from the head of the file; PostgreSQL reads its tables,
    though not the large values."""
    if session.get_bind().dialect.name == "postgresql":
        used = sum(
            session.scalar(select(func.sum(func.pg_column_size(column)))) or 0
            for column in _LARGE_COLUMNS
        )
        return Space(int(used), 0)
    size, pages, free = (_pragma(session, name) for name in ("page_size", "page_count", _FREE))
    return Space((pages - free) * size, free * size)


_FREE = "freelist_count"


def give_back(session: Session) -> bool:
    """Shorten SQLite's file by up to `STEP_PAGES` free pages, in the caller's write transaction.

    Returns: False when it cannot be shortened.
    """
    if session.get_bind().dialect.name == "postgresql":
        return False
    if _pragma(session, "auto_vacuum") != _INCREMENTAL or _pragma(session, _FREE) == 0:
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
