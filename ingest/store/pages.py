"""Read many exchanges, a bounded number of bytes at once; damaged ones are left out and logged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import structlog
from sqlalchemy.orm import Session

from ingest.errors import UnreadableExchangesError
from ingest.store.exchanges import StoredExchange, load_by_seq

PAGE: Final = 256
"""Exchanges read at once, at most."""
PAGE_BYTES: Final = 4 * 2**20
"""Stored bytes of bodies and prompt ids read at once, if one exchange has no more. Decoded they
take up to ten times as much."""
log = structlog.get_logger()


def pages_of(sizes: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Divide exchanges into pages, in their order. sizes: (seq, stored bytes) of each."""
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
