"""Drop records that arrive after their user, session or exchange was forgotten."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy.orm import Session

from ingest.retention.deletion import remove_leftovers
from ingest.store.exchanges import StoredExchange
from ingest.store.forgotten import any_forgotten, forgotten_among, save_forgotten


def forgotten_of(session: Session, arrived: Sequence[StoredExchange], *, now: float) -> set[str]:
    """Return the ids of those that are not stored, delete what was stored of them before, and have
    feedback on them dropped when it comes."""
    if not any_forgotten(session):
        return set()
    named = {one.exchange.exchange_id: (one.exchange, one.session_id) for one in arrived}
    forgotten = forgotten_among(session, named)
    if forgotten:
        remove_leftovers(session, sorted(forgotten))
        save_forgotten(session, "exchange", forgotten, now=now, until=None)
    return forgotten
