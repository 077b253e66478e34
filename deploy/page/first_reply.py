"""When did users get a rollback: told by each proxy, and measured on the traffic that was recorded.

Each process of a proxy writes when it took a routing table (`sidecar.routing.taken_report`): from
then on every new request follows it. The recorded requests show the same from the users' side: the
first one that the new champion answered, and those that the old one answered although they came in
later. Requests that were not recorded are not seen, nor is which proxy relayed one. All times are
by the clocks of the proxies.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from sidecar.lines import Line
from sidecar.store.models import ExchangeRow, TableTakenRow
from sidecar.store.models.capture import COUNTED

LOOKED_AT = 200
"""Exchanges of an adapter that are read: those that were in flight at the rollback, and the first
after it."""
MOST_PROXIES = 64
"""Processes that are shown: those that took a table last."""
MARGIN_S = 5.0
"""Exchanges are stored a little after they came in, by another clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstReply:
    """What the recorded traffic shows of a rollback."""

    exchange_id: str | None
    """The first request that came in after it and that its target answered; None: none yet."""
    after_s: float | None
    """From the rollback until that request came in."""
    first_byte_s: float | None
    """From the rollback until that request's first byte left; None: not known."""
    late_s: tuple[float, ...]
    """From the rollback until each request that the old champion still answered, of those read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Took:
    """What one process of a proxy told."""

    proxy: str
    after_s: float | None
    """From the rollback until it took that table; None: it has a later one, or not yet this one."""
    behind: bool
    """The newest table that it told of is older than the rollback."""
    taken_at: float
    """When it took its newest table."""


def proxies_took(session: Session, *, model: str, generation: int, at: float) -> list[Took]:
    """Say of each process of a proxy when it took the table of a rollback, the first first.

    generation: of the table that the rollback wrote. at: the rollback, Unix seconds.
    """
    newest = (
        select(TableTakenRow)
        .where(TableTakenRow.model == model)
        .order_by(TableTakenRow.taken_at.desc())
        .limit(MOST_PROXIES)
    )
    found = [
        Took(
            proxy=row.proxy,
            after_s=row.taken_at - at if row.generation == generation else None,
            behind=row.generation < generation,
            taken_at=row.taken_at,
        )
        for row in session.scalars(newest)
    ]
    return sorted(found, key=lambda one: (one.behind, one.taken_at))


def first_reply(session: Session, *, line: Line, to: str, left: str, at: float) -> FirstReply:
    """Look for the first reply by the target of a rollback. Reads a bounded number of rows.

    line: the line of adapters that was rolled back; the base answers others too.
    to, left: adapters, or "base". at: the rollback, Unix seconds.
    """
    edge = _first_stored_after(session, at - MARGIN_S)
    answered = _answered_after(session, line, to, edge, at)
    late = _answered_after(session, line, left, edge, at)
    if not answered:
        return FirstReply(
            exchange_id=None,
            after_s=None,
            first_byte_s=None,
            late_s=tuple(came - at for came, _, _ in late),
        )
    came, exchange_id, first_byte_s = answered[0]
    return FirstReply(
        exchange_id=exchange_id,
        after_s=came - at,
        first_byte_s=None if first_byte_s is None else came - at + first_byte_s,
        late_s=tuple(one - at for one, _, _ in late),
    )


def _answered_after(
    session: Session, line: Line, adapter: str, edge: int, at: float
) -> list[tuple[float, str, float | None]]:
    """Return (came in, exchange id, seconds to its first byte) of requests after `at`, in order."""
    statement = (
        select(
            ExchangeRow.started_at,
            ExchangeRow.exchange_id,
            ExchangeRow.timings,
            ExchangeRow.project,
        )
        .where(
            ExchangeRow.public_model == line.model,
            ExchangeRow.adapter == adapter,
            ExchangeRow.arm == "champion",
            ExchangeRow.seq >= edge,
            text(COUNTED),
        )
        .order_by(ExchangeRow.seq)
        .limit(LOOKED_AT)
    )
    rows = session.execute(statement).all()
    return sorted(
        (float(started_at), str(exchange_id), _first_byte(timings))
        for started_at, exchange_id, timings, project in rows
        # Left out here, so that a rare project does not make the query read all rows.
        if line.has(project) and isinstance(started_at, int | float) and started_at >= at
    )


def _first_byte(timings: object) -> float | None:
    found = timings.get("first_byte_s") if isinstance(timings, dict) else None
    known = isinstance(found, int | float) and not isinstance(found, bool)
    return float(found) if known and found is not None else None


def _first_stored_after(session: Session, at: float) -> int:
    """Return a `seq` before which nothing was stored after `at`: rows are stored in the order of
    `seq`, so halving finds it without an index on the time."""
    low, high = 0, session.scalar(select(func.max(ExchangeRow.seq))) or 0
    while low < high:
        middle = (low + high) // 2
        found = session.execute(
            select(ExchangeRow.seq, ExchangeRow.stored_at)
            .where(ExchangeRow.seq > middle)
            .order_by(ExchangeRow.seq)
            .limit(1)
        ).first()
        if found is None or not isinstance(found.stored_at, int | float) or found.stored_at >= at:
            high = middle
        else:
            low = found.seq
    return low
