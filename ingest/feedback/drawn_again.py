"""Draw an exchange again whose user turns out to be discontent after it was left out.

A correction or a thumb down mostly comes later than `groups.settle_s`. With `groups.choose =
"prefer"` it raises the probability to be drawn, and the luck of an exchange is a hash that never
changes. So what was left out as `rate` is decided once more with the same luck: it is chosen where
it would have been, had the signal come in time. With `uniform` it is left out again.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from sqlalchemy import select
from sqlalchemy.orm import Session

from ingest.grouping.selection import RATE, STAGE
from ingest.store.exchanges import NEW, set_selection
from sidecar.store.database import count
from sidecar.store.models import ExchangeRow

NEWEST: Final = 32
"""Exchanges of a session that are drawn again at once, the newest: `groups.max_groups_per_session`
makes groups of few."""


def draw_again(session: Session, exchange_ids: Collection[str]) -> None:
    """Have those of these exchanges decided again that were not drawn, in the caller's write
    transaction. Each leaves the count of `rate` until then."""
    if not exchange_ids:
        return
    names = session.scalars(
        select(ExchangeRow.exchange_id).where(
            ExchangeRow.exchange_id.in_(sorted(exchange_ids)), ExchangeRow.selection == RATE
        )
    ).all()
    if names:
        set_selection(session, names, NEW)
        count(session, STAGE, RATE, -len(names))


def draw_session_again(session: Session, session_id: str) -> None:
    """The same for the newest exchanges of a session, for feedback on the whole of it."""
    names = session.scalars(
        select(ExchangeRow.exchange_id)
        .where(
            ExchangeRow.session_id == session_id,
            ExchangeRow.held_out.is_(False),  # others are never drawn, and the index knows it
            ExchangeRow.selection == RATE,
        )
        .order_by(ExchangeRow.seq.desc())
        .limit(NEWEST)
    ).all()
    draw_again(session, names)
