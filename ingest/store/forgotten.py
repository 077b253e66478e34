"""Names that were forgotten: records of them that arrive later are dropped.

A table of digests, so that the name itself is not kept: `name_digest`. It can be guessed from a
list of names, as any digest of a short text can.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from typing import Literal

from sqlalchemy import select
from sqlalchemy.orm import Session

from sidecar.feedback.record import Feedback
from sidecar.records import Exchange
from sidecar.store.database import insert_into
from sidecar.store.models import ForgottenRow

Kind = Literal["user", "session", "session_key", "exchange", "source", "told"]
"""`source`: who sends feedback; `told`: an id of a user's sessions and traces. Both are of feedback
alone."""
SKEW_S = 60.0
"""The clocks of two machines may differ by this much."""


def name_digest(kind: str, name: str) -> str:
    """Return what is kept of a name, 64 hex digits; "" for an empty name."""
    if not name:
        return ""
    text = f"{kind}\0{name}"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def save_forgotten(
    session: Session, kind: Kind, names: Collection[str], *, now: float, until: float | None
) -> None:
    """Have records of these names dropped when they arrive.

    until: requests that arrived later are recorded again, unix seconds; None: none is.
    Call it in a transaction that is alone: one that stores records either sees the names, or has
    ended before.
    """
    digests = sorted({name_digest(kind, name) for name in names} - {""})
    if not digests:
        return
    statement = insert_into(session, ForgottenRow)
    statement = statement.on_conflict_do_update(
        index_elements=["kind", "digest"], set_={"at": now, "until": statement.excluded.until}
    )
    session.execute(
        statement, [{"kind": kind, "digest": one, "at": now, "until": until} for one in digests]
    )


def any_forgotten(session: Session) -> bool:
    """Return True when a name was ever forgotten."""
    return session.scalar(select(ForgottenRow.at).limit(1)) is not None


def forgotten_among(session: Session, arrived: Mapping[str, tuple[Exchange, str]]) -> set[str]:
    """Return those of these records that belong to a forgotten name.

    arrived: exchange id -> record and the session that it was placed in.
    """
    if not arrived:
        return set()
    names = {one: list(_names(*found)) for one, found in arrived.items()}
    digests = {digest for digested in names.values() for digest in digested}
    rows = session.execute(
        select(ForgottenRow.digest, ForgottenRow.until).where(
            ForgottenRow.kind.in_(("user", "session", "session_key", "exchange")),
            ForgottenRow.digest.in_(sorted(digests)),
        )
    )
    until: dict[str, float | None] = {row.digest: row.until for row in rows}
    return {
        one
        for one, digested in names.items()
        for digest in digested
        if digest in until and _is_until(arrived[one][0].timings.started_at, until[digest])
    }


def forgotten_feedback(session: Session, records: Collection[Feedback]) -> set[str]:
    """Return the ids of feedback about what was forgotten, or that a forgotten user sent."""
    if not records or not any_forgotten(session):
        return set()
    digests = {
        one.feedback_id: [
            *(name_digest(kind, one.target) for kind in ("exchange", "session", "told")),
            name_digest("source", one.source),
        ]
        for one in records
    }
    rows = session.execute(
        select(ForgottenRow.digest, ForgottenRow.until).where(
            ForgottenRow.kind.in_(("exchange", "session", "told", "source")),
            ForgottenRow.digest.in_(sorted({one for names in digests.values() for one in names})),
        )
    )
    until: dict[str, float | None] = {row.digest: row.until for row in rows}
    return {
        one.feedback_id
        for one in records
        for digest in digests[one.feedback_id]
        if digest in until and _is_until(one.received_at, until[digest])
    }


def _names(exchange: Exchange, session_id: str) -> Iterator[str]:
    named = (
        ("user", exchange.user),
        ("session", session_id),
        ("session_key", exchange.session_key),
        ("exchange", exchange.exchange_id),
    )
    return (name_digest(kind, name) for kind, name in named if name)


def _is_until(at: float, until: float | None) -> bool:
    return until is None or at <= until
