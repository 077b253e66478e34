"""The columns of a stored exchange that say where it stands in its session. Pure."""

from __future__ import annotations

import msgspec

from ingest.sessions.records import Place
from sidecar.store.database import check_id
from sidecar.store.models import ExchangeRow


def place_columns(place: Place) -> dict[str, object]:
    """The columns of a place, by name."""
    return {
        "session_id": place.session,
        "parent_id": place.parent,
        "turn": place.turn,
        "branch": place.branch,
        "segment": place.segment,
        "placed_by": place.how,
        "shares_opening": place.shares_opening,
    }


def place_of(row: ExchangeRow) -> Place:
    """Read a row. An exchange that no tree has placed, of an older store, is the root of a session.

    Raises: one of `sidecar.store.database.DAMAGE` when a column holds no such value.
    """
    columns = {
        "exchange_id": row.exchange_id,
        "session": check_id(msgspec.convert(row.session_id, str)),
        "parent": row.parent_id,
        "turn": row.turn,
        "branch": row.branch,
        "segment": row.segment,
        "how": row.placed_by or "root",
        "held_out": row.held_out,
        "shares_opening": row.shares_opening,
    }
    return msgspec.convert(columns, Place)
