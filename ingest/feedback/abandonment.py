"""Find sessions that were left in the middle: nothing followed for a while.

An answer is abandoned when something was still open (the client cut the reply, or the answer calls
tools), and no exchange of the session began after it until `feedback.abandoned_after_s` after its
end. That a session simply ends shows nothing.

Exchanges are looked at once, in the order in which they were stored, when they are old enough: a
page is a range of the table's key, and of a session only the nearest rows are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from ingest.feedback.signals import Signal
from ingest.feedback.store import ABANDONMENT, save_signals
from sidecar.store.database import Database, get_flag, set_flag
from sidecar.store.models import ChoiceRow, ExchangeRow

FLAG = "abandonment_seq"
"""Flag row: the newest exchange that was looked at, by `exchange.seq`."""
PAGE = 500
"""Exchanges that one pass looks at."""
NEAR = 16
"""Exchanges of a session, before and behind in the order of storing, among which the next one is
looked for: proxies deliver out of order by seconds."""
CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class _Seen:
    """A row of the page. Any: a damaged column holds anything."""

    seq: int
    exchange_id: str
    session_id: str
    stored_at: Any
    started_at: Any
    timings: Any
    outcome: str


def find_abandoned(database: Database, *, after_s: float, now: float) -> int:
    """Look at one page of exchanges. after_s: the window. now: Unix seconds.

    Returns: how many were looked at; fewer than `PAGE` when the pass has caught up.
    """
    with database.read() as session:
        begin = _number(get_flag(session, FLAG))
        page = _page(session, begin, settled=now - after_s, now=now)
        signals = _abandoned(session, page, after_s)
    if page:
        with database.write(alone=False) as session:
            save_signals(session, signals)
            set_flag(session, FLAG, str(page[-1].seq), now=now)
    return len(page)


def _page(session: Session, begin: int, *, settled: float, now: float) -> list[_Seen]:
    rows = session.execute(
        select(
            ExchangeRow.seq,
            ExchangeRow.exchange_id,
            ExchangeRow.session_id,
            ExchangeRow.stored_at,
            ExchangeRow.started_at,
            ExchangeRow.timings,
            ExchangeRow.outcome,
        )
        .where(ExchangeRow.seq > begin)
        .order_by(ExchangeRow.seq)
        .limit(PAGE)
    )
    page: list[_Seen] = []
    for row in rows:
        seen = _Seen(*row)
        # A time to come was written by a clock that was fast: nothing waits for it.
        if isinstance(seen.stored_at, float) and settled < seen.stored_at <= now:
            break
        page.append(seen)
    return page


def _abandoned(session: Session, page: list[_Seen], after_s: float) -> list[Signal]:
    names = [one.exchange_id for one in page]
    calls = set(
        session.scalars(
            select(ChoiceRow.exchange_id).where(
                ChoiceRow.exchange_id.in_(names), ChoiceRow.finish_reason == CALLS
            )
        )
    )
    began: dict[str, list[float]] = {}
    for one in page:
        if isinstance(one.started_at, float):
            began.setdefault(one.session_id, []).append(one.started_at)
    found: list[Signal] = []
    for one in page:
        cut = one.outcome == "cut"
        if not cut and one.exchange_id not in calls:
            continue
        total_s = one.timings.get("total_s") if isinstance(one.timings, dict) else None
        if not isinstance(one.started_at, float) or not isinstance(total_s, int | float):
            continue  # damaged: nothing is known of its time
        ended_at = one.started_at + total_s
        window = (one.started_at, ended_at + after_s)
        # Most are followed by another one of the page: no question is needed for them.
        if _any_within(began[one.session_id], window):
            continue
        if not _any_within(_near(session, one), window):
            found.append(
                Signal(
                    kind=ABANDONMENT,
                    exchange_id=one.exchange_id,
                    by_id=None,
                    session_id=one.session_id,
                    at=ended_at + after_s,
                    evidence={
                        "reason": "cut" if cut else "open_call",
                        "began_at": one.started_at,
                        "window_s": after_s,
                    },
                )
            )
    return found


def _near(session: Session, one: _Seen) -> Iterator[object]:
    """Yield when the nearest exchanges of the session began."""
    key = ExchangeRow.seq
    for bound, order in ((key > one.seq, key), (key < one.seq, key.desc())):
        # With both columns of its index stated, the rows are read in the order of the key.
        for held_out in (False, True):
            yield from session.scalars(
                select(ExchangeRow.started_at)
                .where(
                    ExchangeRow.session_id == one.session_id,
                    ExchangeRow.held_out == held_out,
                    bound,
                )
                .order_by(order)
                .limit(NEAR)
            )


def _any_within(times: Iterable[object], window: tuple[float, float]) -> bool:
    """Whether one of the times is after the window's beginning and not after its end."""
    begin, end = window
    return any(isinstance(at, float) and begin < at <= end for at in times)


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else 0
