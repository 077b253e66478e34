"""Read what clients told of a ramp's sessions, in the order in which it was stored.

A session counts once for outcomes and once for feedback, if all its requests were users', began
within the ramp and were routed to one arm. Where nobody tells, nothing is known.

Each record waits as a user's request does, so that a correction counts that comes meanwhile; what
comes later changes nothing. So the same records give the same evidence, also after a restart. Of a
voice and a target the newest counts; a session's value is the mean over its voices of the mean over
their targets. A record whose number is no success rate, and that says no success, says nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from statistics import fmean
from typing import Final, NamedTuple

from sqlalchemy import and_, case, func, or_, select
from sqlalchemy.orm import Session

from deploy.canary.live_turns import TURN_COLUMNS, Row
from deploy.evidence.live import ClientReportKind, Live, Turn
from deploy.records import Canary
from ingest.feedback.store import of_voice, voice
from sidecar.lines import Line, public_model
from sidecar.store.models import ExchangeRow, FeedbackRow

PAGE: Final = 100
"""Records that are read at once,"""
PAGES: Final = 8
"""and so many times in one tick."""
MOST_OF_SESSION: Final = 200
"""Records of one session and kind that are read: of each voice the newest before all others."""


class _Said(NamedTuple):
    """The fields of a record that are read."""

    seq: int
    session_id: str | None
    project: str
    key_id: str
    kind: ClientReportKind
    target_kind: str
    target: str
    received_at: float
    stored_at: float
    value: float | None
    """What it says, 0 (bad) to 1; None: nothing."""
    voice: str

    @property
    def teller(self) -> str:
        """The key that told it, where all that the key says is one voice; else empty."""
        return f"key {self.key_id}" if self.key_id and self.voice == self.key_id else ""


_VALUE = case(
    (FeedbackRow.kind == "feedback", (1.0 + FeedbackRow.score) / 2.0),
    (FeedbackRow.success.is_(True), 1.0),
    (FeedbackRow.success.is_(False), 0.0),
    (FeedbackRow.reward.between(0.0, 1.0), FeedbackRow.reward),
)
_COLUMNS = (
    *(getattr(FeedbackRow, name) for name in _Said._fields[:-2]),
    _VALUE.label("value"),
    voice().label("voice"),
)


class ClientReports:
    """Keeps how far one canary's ramp was read between ticks."""

    def __init__(self, wait_s: float, line: Line) -> None:
        """wait_s: seconds from storing a record to when it counts."""
        self._wait_s = wait_s
        self._line = line
        self._live: Live | None = None
        self._mark = 0

    def read(self, session: Session, canary: Canary, live: Live, now: float) -> bool:
        """Count what has waited long enough. live: of this ramp; another one is read anew.

        now: Unix seconds. Returns: True while more waits to be read.
        """
        if live is not self._live:
            self._live, self._mark = live, canary.ramp_after_told
        return all(self._read(session, canary, live, now) for _ in range(PAGES))

    def _read(self, session: Session, canary: Canary, live: Live, now: float) -> bool:
        newer = select(*_COLUMNS).where(FeedbackRow.seq > self._mark)
        rows = [_Said(*row) for row in session.execute(newer.order_by(FeedbackRow.seq).limit(PAGE))]
        # A time to come was written by a clock that was fast: nothing waits for it.
        page = list(takewhile(lambda row: not now - self._wait_s < row.stored_at <= now, rows))
        if not page:
            return False
        self._mark = page[-1].seq
        first: dict[tuple[str, ClientReportKind], _Said] = {}
        for row in page:
            if row.session_id and row.value is not None and self._line.has(row.project):
                first.setdefault((row.session_id, row.kind), row)
        turns = _turns(session, canary, {name for name, _ in first})
        for (name, kind), row in first.items():
            if name in turns:
                said = _said(session, name, kind, row.stored_at + self._wait_s)
                tellers = tuple(sorted({one.teller for one in said} - {""}))
                live.hear(kind, replace(turns[name], tellers=tellers), _mean(said))
        return len(page) == PAGE


def _mean(said: Iterable[_Said]) -> float:
    newest: dict[str, dict[tuple[str, str], float]] = {}
    for one in sorted(said, key=lambda one: (one.received_at, one.seq)):
        # A session has several names, and is one target.
        named = one.target_kind in ("session", "task")
        target = ("", "") if named else (one.target_kind, one.target)
        newest.setdefault(one.voice, {})[target] = one.value or 0.0
    return fmean(fmean(of.values()) for of in newest.values())


def _said(session: Session, name: str, kind: ClientReportKind, until: float) -> Sequence[_Said]:
    """Return what was told of a session and stored by `until` (Unix seconds)."""
    row, place = FeedbackRow, of_voice().label("place")
    known = and_(row.session_id == name, row.kind == kind, row.stored_at <= until)
    every = select(*_COLUMNS, place).where(known, _VALUE.is_not(None))
    newest = every.order_by(place, row.seq.desc()).limit(MOST_OF_SESSION)
    return [_Said(*found[:-1]) for found in session.execute(newest)]


def _turns(session: Session, canary: Canary, names: Collection[str]) -> Mapping[str, Turn]:
    """Return the first turn of each session that met one arm of the ramp alone."""
    row = ExchangeRow
    is_due = (row.arm == "canary") | (row.fallback_from == canary.candidate)
    in_ramp = (
        (row.public_model == public_model(canary.model))
        & (row.origin == "user")
        & (row.seq > canary.ramp_after_seq)
        & (row.started_at >= canary.ramp_began_at)
        & row.propensity.between(0.0, 1.0)
        & row.propensity.not_in((0.0, 1.0))
        & or_(
            (row.arm == "canary") & (row.adapter == canary.candidate),
            (row.arm == "champion") & (row.adapter == canary.champion),
            row.fallback_from.in_((canary.candidate, canary.champion)),
        )
    )
    due, inside = case((is_due, 1), else_=0), case((in_ramp, 1), else_=0)
    met = (
        select(func.min(row.seq))
        .where(row.session_id.in_(sorted(names)))
        .group_by(row.session_id)
        .having(func.min(inside) == 1, func.min(due) == func.max(due))
    )
    first = select(row.session_id, *TURN_COLUMNS).where(row.seq.in_(met))
    return {name: Row(*turn).turn(canary) for name, *turn in session.execute(first)}
