"""Read the exchanges of one session as rows of tokens (`ingest.sessions.rows`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from sqlalchemy import select
from sqlalchemy.orm import Session

from ingest.sessions.rows import SampledAnswer, TokenRow, TokenTurn, join_rows, parents_first
from ingest.store.exchanges import StoredExchange
from ingest.store.pages import decoded_columns, decoded_sizes, pages_of, read_pages
from sidecar.store.models import ExchangeRow

MOST_EXCHANGES: Final = 10_000
"""Exchanges of a session that are read, the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRows:
    """The rows of one session."""

    rows: list[TokenRow]
    damaged: int
    """Exchanges that could not be read. What continues one of them begins a row of its own."""


def load_rows(session: Session, session_id: str, *, limit: int = MOST_EXCHANGES) -> SessionRows:
    """Read the rows of a session, from its first `limit` exchanges.

    Held-out exchanges and those with an `untrainable_reason` are context only.
    """
    found = session.execute(
        select(
            ExchangeRow.seq,
            ExchangeRow.exchange_id,
            ExchangeRow.parent_id,
            *decoded_columns(),
        )
        .where(ExchangeRow.session_id == session_id)
        .order_by(ExchangeRow.seq)
        .limit(limit)
    ).all()
    sizes = {name: (seq, sum(decoded_sizes(*columns))) for seq, name, _, *columns in found}
    order = list(parents_first({name: parent for _, name, parent, *_ in found}))
    place = {name: at for at, name in enumerate(order)}
    damaged = 0

    def turns() -> Iterator[TokenTurn]:
        nonlocal damaged
        for page, unreadable in read_pages(session, pages_of(sizes[name] for name in order)):
            damaged += unreadable
            for one in sorted(page, key=lambda one: place[one.exchange.exchange_id]):
                yield _turn(one)

    return SessionRows(rows=join_rows(turns()), damaged=damaged)


def _turn(stored: StoredExchange) -> TokenTurn:
    exchange = stored.exchange
    return TokenTurn(
        exchange_id=exchange.exchange_id,
        parent=stored.place.parent,
        prompt_token_ids=exchange.prompt_token_ids,
        answers=[
            SampledAnswer(index=one.index, token_ids=one.token_ids, logprobs=one.logprobs)
            for one in exchange.choices
        ],
        trainable=(
            exchange.untrainable_reason is None
            and not stored.held_out
            and exchange.outcome == "ok"
            and exchange.status == 200
        ),
    )
