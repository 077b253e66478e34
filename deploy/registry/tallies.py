"""Numbers of exchanges, from the durable counters (to count the rows would read them all) or of the
newest ones."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from ingest.grouping.selection import REHEARSAL, STAGE as SELECTION
from ingest.intake.consume import STAGE as CONSUME, STORED
from sidecar.lines import Line
from sidecar.store.models import CounterRow, ExchangeRow

NEWEST = 200
"""Exchanges that are looked at for which vLLM refuses our fields now."""
MENDED = 20
"""So many of its exchanges in a row with our fields: a vLLM that refuses one request in four is
taken for mended once in 300 looks."""


def exchanges(session: Session) -> int:
    """Return the number of users' exchanges that were ever stored."""
    rows = [session.get(CounterRow, one) for one in ((CONSUME, STORED), (SELECTION, REHEARSAL))]
    stored, rehearsed = (0 if row is None else row.count for row in rows)
    return stored - rehearsed


def of_stage(session: Session, stage: str) -> dict[str, int]:
    """Return the counters of one stage by reason, without zeros."""
    rows = session.scalars(
        select(CounterRow).where(CounterRow.stage == stage).order_by(CounterRow.reason)
    )
    return {row.reason: row.count for row in rows if row.count}


def fields_refused(session: Session) -> dict[str, int]:
    """Return for each vLLM (base URL) how many of the newest exchanges it answered without token
    ids and log-probabilities, because it fails when it is asked for them. One whose newest `MENDED`
    exchanges have them is left out."""
    newest = session.execute(
        select(ExchangeRow.replica, ExchangeRow.untrainable_reason)
        .order_by(ExchangeRow.seq.desc())
        .limit(NEWEST)
    )
    refused: dict[str, list[bool]] = {}
    for url, reason in newest:
        refused.setdefault(str(url), []).append(reason == "fields_refused")
    return {url: sum(ones) for url, ones in refused.items() if any(ones[:MENDED])}


@dataclass(frozen=True, slots=True, kw_only=True)
class Users:
    """What users got of late: the newest recorded requests of a line."""

    requests: int
    failed: int
    """Answered with an error of vLLM's or of the proxy's; a client's own error is none."""
    since: float | None
    """When the oldest of them came in, Unix seconds; None: there is none."""
    first_byte_s: float | None
    """Median time until the first byte of the reply."""
    first_byte_slow_s: float | None
    """The same of the slowest tenth (90th percentile)."""


def users(session: Session, line: Line) -> Users:
    """Return what the users of a line got, by its requests among the newest `NEWEST`."""
    row = ExchangeRow
    newest = session.execute(
        select(
            row.public_model,
            row.project,
            row.origin,
            row.status,
            row.outcome,
            row.started_at,
            row.timings,
        )
        .order_by(row.seq.desc())
        .limit(NEWEST)
    ).all()
    own = [
        one
        for one in newest
        if one.public_model == line.model and line.has(one.project) and one.origin == "user"
    ]
    told = [one.timings.get("first_byte_s") for one in own if isinstance(one.timings, dict)]
    times = sorted(s for s in told if isinstance(s, int | float) and math.isfinite(s))
    return Users(
        requests=len(own),
        failed=sum(one.outcome == "upstream_error" or one.status >= 500 for one in own),
        since=own[-1].started_at if own else None,
        first_byte_s=times[len(times) // 2] if times else None,
        first_byte_slow_s=times[len(times) * 9 // 10] if times else None,
    )
