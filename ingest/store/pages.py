"""Read many exchanges, a bounded number of bytes at once; damaged ones are left out and logged.

What is not read yet is counted by what it says of its size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import structlog
from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session

from ingest.errors import UnreadableExchangesError
from ingest.store.exchanges import StoredExchange, load_by_seq
from sidecar.store.arrays import ID_BYTES
from sidecar.store.frames import HEAD_BYTES, decoded_bytes, decoded_ids
from sidecar.store.models import AnswerRow, ExchangeRow, GroupRow

PAGE: Final = 256
"""Exchanges read at once, at most."""
PAGE_BYTES: Final = 32 * 2**20
"""Bytes of requests and packed prompt ids read at once, if one exchange has no more."""
log = structlog.get_logger()


def decoded_columns() -> tuple[ColumnElement[Any], ...]:  # Any: damaged ones are of any type
    """The columns that `decoded_sizes` takes. What an exchange says is not read for them."""
    body, ids = ExchangeRow.request_body, ExchangeRow.prompt_token_ids
    return (
        *(func.substr(body, 1, HEAD_BYTES), func.length(body)),
        *(func.substr(ids, 1, HEAD_BYTES), func.length(ids)),
    )


def decoded_sizes(
    body_head: bytes, body_bytes: int | None, ids_head: bytes, ids_bytes: int | None
) -> tuple[int, int]:
    """Return about how many bytes a request and its packed prompt ids take once they are read.

    They are stored as differences from others: the stored size says nothing about it.
    """
    return decoded_bytes(body_head, body_bytes or 0), decoded_ids(ids_head, ids_bytes or 0)


def stored_tokens(session: Session, group_id: str) -> tuple[int, int]:
    """Count the tokens of a group's prompt, and of all its answers, without reading them."""
    ids = ExchangeRow.prompt_token_ids
    prompt = session.execute(
        select(func.substr(ids, 1, HEAD_BYTES), func.length(ids))
        .join(GroupRow, GroupRow.exchange_id == ExchangeRow.exchange_id)
        .where(GroupRow.group_id == group_id)
    ).one_or_none()
    held = AnswerRow.token_ids
    answers = session.execute(
        select(func.substr(held, 1, HEAD_BYTES), func.length(held)).where(
            AnswerRow.group_id == group_id
        )
    )
    prompt_bytes = decoded_ids(*prompt) if prompt is not None else 0
    return prompt_bytes // ID_BYTES, sum(decoded_ids(*one) for one in answers) // ID_BYTES


def pages_of(sizes: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Divide exchanges into pages, in their order. sizes: (seq, bytes) of each."""
    pages: list[list[int]] = []
    total = 0
    for seq, size in sizes:
        total += size
        if not pages or total > PAGE_BYTES or len(pages[-1]) == PAGE:
            pages.append([])
            total = size
        pages[-1].append(seq)
    return pages


def read_pages(
    session: Session, pages: Iterable[Sequence[int]]
) -> Iterator[tuple[list[StoredExchange], int]]:
    """Yield the exchanges of each page, the oldest first, with the number of damaged ones that are
    left out of it."""
    for page in pages:
        left = list(page)
        found: list[StoredExchange] | None = None
        while found is None:
            try:
                found = load_by_seq(session, left)
            except UnreadableExchangesError as error:
                for seq, why in error.damage.items():
                    log.error("exchange_unreadable", seq=seq, why=why)
                left = [seq for seq in left if seq not in error.damage]
        yield found, len(page) - len(left)
