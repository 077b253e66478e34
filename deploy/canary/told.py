"""Read what clients told of a ramp's sessions, in the order in which it was stored.

A session counts once for outcomes and once for feedback, if all its requests were users', began
within the ramp and were routed to one arm. Where nobody tells, nothing is known.

Each record waits as a user's request does, so that a correction counts that comes meanwhile; what
comes later changes nothing. So the same records give the same evidence, also after a restart. Of a
voice and a target the newest counts; a session's value is the mean over its voices of the mean over
their targets.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from itertools import takewhile
from statistics import fmean
from typing import Final, NamedTuple

from sqlalchemy import case, func, or_, select
from sqlalchemy.orm import Session

from deploy.canary.live_turns import TURN_COLUMNS, Row
from deploy.evidence.live import TOLD, Live, ToldKind, Turn
from deploy.records import Canary
from ingest.feedback.store import voice
from sidecar.lines import Line, public_model
from sidecar.store.models import ExchangeRow, FeedbackRow

PAGE: Final = 100
"""Records that are read at once,"""
PAGES: Final = 8
"""and so many times in one tick."""
MOST_OF_SESSION: Final = 200
"""Records of one session that are read, the first."""


class _Said(NamedTuple):
    """The fields of a record that are read."""

    seq: int
    session_id: str | None
    project: str
    key_id: str
    target_kind: str
    target: str
    received_at: float
    stored_at: float
    success: bool | None
    reward: float | None
    score: float | None
    voice: str

    def value(self, kind: ToldKind, *, by_success: bool) -> float | None:
        """Return what it says, 0 (bad) to 1; None: nothing. by_success: numbers say nothing."""
        if kind == "feedback":
            return None if self.score is None else (1.0 + self.score) / 2.0
        if self.success is not None:
            return float(self.success)
        return None if by_success or self.reward is None or self.is_wide else self.reward

    @property
    def is_wide(self) -> bool:
        """Its number is no success rate."""
        return self.reward is not None and not 0.0 <= self.reward <= 1.0

    @property
    def teller(self) -> str:
        """The key that told it, where all that the key says is one voice; else empty."""
        return f"key {self.key_id}" if self.key_id and self.voice == self.key_id else ""


_COLUMNS = (
    *(getattr(FeedbackRow, name) for name in _Said._fields[:-1]),
    voice().label("voice"),
)


class Told:
    """Keeps how far one canary's ramp was read between ticks."""

    def __init__(self, wait_s: float, line: Line) -> None:
        """wait_s: seconds from storing a record to when it counts."""
        self._wait_s = wait_s
        self._line = line
        self._live: Live | None = None
        self._mark = 0
        self._wide = set[str]()
        """Projects with a number outside 0..1: they count by success alone."""

    def read(self, session: Session, canary: Canary, live: Live, now: float) -> bool:
        """Count what has waited long enough. live: of this ramp; another one is read anew.

        now: Unix seconds. Returns: True while more waits to be read.
        """
        if live is not self._live:
            self._live, self._mark, self._wide = live, canary.ramp_after_told, set()
        return all(self._read(session, canary, live, now) for _ in range(PAGES))

    def _read(self, session: Session, canary: Canary, live: Live, now: float) -> bool:
        newer = select(*_COLUMNS).where(FeedbackRow.seq > self._mark)
        rows = [_Said(*row) for row in session.execute(newer.order_by(FeedbackRow.seq).limit(PAGE))]
        # A time to come was written by a clock that was fast: nothing waits for it.
        page = list(takewhile(lambda row: not now - self._wait_s < row.stored_at <= now, rows))
        if not page:
            return False
        self._mark = page[-1].seq
        own = [row for row in page if row.session_id and self._line.has(row.project)]
        self._wide |= {row.project for row in own if row.is_wide}
        turns = _turns(session, canary, {row.session_id for row in own if row.session_id})
        said = _said(session, turns)
        for row in own:
            turn = turns.get(row.session_id or "")
            if turn is None:
                continue
            known = said[row.session_id or ""]
            known = [one for one in known if one.stored_at <= row.stored_at + self._wait_s]
            turn = replace(turn, tellers=tuple(sorted({one.teller for one in known} - {""})))
            for kind in TOLD:
                value = _value(known, kind, by_success=row.project in self._wide)
                if value is not None:
                    live.hear(kind, turn, value)
        return len(page) == PAGE


def _value(said: Iterable[_Said], kind: ToldKind, *, by_success: bool) -> float | None:
    newest: dict[str, dict[tuple[str, str], float]] = {}
    for one in sorted(said, key=lambda one: (one.received_at, one.seq)):
        value = one.value(kind, by_success=by_success)
        if value is not None:
            # A session has several names, and is one target.
            named = one.target_kind in ("session", "task")
            target = ("", "") if named else (one.target_kind, one.target)
            newest.setdefault(one.voice, {})[target] = value
    return fmean(fmean(of.values()) for of in newest.values()) if newest else None


def _said(session: Session, names: Collection[str]) -> Mapping[str, list[_Said]]:
    """Return the first records of each session, in the order in which they were stored."""
    place = func.row_number().over(partition_by=FeedbackRow.session_id, order_by=FeedbackRow.seq)
    every = (
        select(*_COLUMNS, place.label("place"))
        .where(FeedbackRow.session_id.in_(sorted(names)))
        .subquery()
    )
    found: dict[str, list[_Said]] = {name: [] for name in names}
    for row in session.execute(select(every).where(every.c.place <= MOST_OF_SESSION)):
        said = _Said(*row[:-1])
        found[said.session_id or ""].append(said)
    return found


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
