"""Move batches from the bus to the store: at least once from the bus, exactly once in the store.

One write transaction stores a batch, and only then it is committed on the bus. After a crash
between the two, the batch comes again and changes nothing. A record that cannot be read or stored
is kept whole in `dead_letter`, counted and logged; it never blocks later records. An exchange
whose token ids do not decode to its text is stored, marked, and never learned from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import structlog
from sqlalchemy.exc import StatementError
from sqlalchemy.orm import Session

from ingest.intake.bus import BusReader, Envelope
from ingest.intake.placing import Sessions
from ingest.sessions.arrival import arrival_of
from ingest.sessions.records import Arrival
from ingest.store.exchanges import dead_letter, save_exchange
from ingest.tokens.check import DISAGREES, NOT_CHECKED
from sidecar.bounds import bound
from sidecar.records import Exchange, decode_exchange
from sidecar.store.database import Database, count

STAGE = "consume"
TOKEN_STAGE = "token_check"
BOUND_STAGE = "bounded"
"""Counter rows: (stage, reason of `sidecar.bounds.bound`) -> stored exchanges."""
STORED = "stored"
REPEATED = "repeated"
POISON = "poison"
UNREADABLE = (msgspec.MsgspecError, ValueError, OverflowError)
"""Errors of bytes that are no record, or of a value that no row can hold."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumed:
    """Outcome of a batch; the three numbers add up to the records read."""

    stored: int
    repeated: int
    poison: int

    @property
    def read(self) -> int:
        return self.stored + self.repeated + self.poison


@dataclass(frozen=True, slots=True)
class _Read:
    """A record of the bus, parsed before the write lock is taken."""

    envelope: Envelope
    exchange: Exchange | None = None
    arrival: Arrival | None = None
    tokens: str = NOT_CHECKED
    error: Exception | None = None
    bounded: tuple[str, ...] = ()
    """What was changed for the store to hold it, as `sidecar.bounds.bound` says."""


@dataclass(slots=True)
class _Tally:
    outcomes: dict[str, int] = field(default_factory=lambda: {STORED: 0, REPEATED: 0, POISON: 0})
    tokens: Counter[str] = field(default_factory=Counter)
    """Outcomes of the token check of stored exchanges -> count."""
    bounded: Counter[str] = field(default_factory=Counter)


def consume(
    bus: BusReader,
    database: Database,
    *,
    limit: int,
    sessions: Sessions,
    now: float,
    check_tokens: Callable[[Exchange], str] = lambda _: NOT_CHECKED,
) -> Consumed:
    """Move one batch from the bus to the store.

    sessions: finds the session of each exchange, and whether it is held out.
    check_tokens: returns an outcome of `ingest.tokens.check`, which is counted.
    Raises: BusError or StoreError; nothing is lost then, and the batch comes again.
    """
    envelopes = bus.read(limit)
    if not envelopes:
        return Consumed(stored=0, repeated=0, poison=0)
    records = [_read(envelope, check_tokens) for envelope in envelopes]
    try:
        consumed = _store(database, records, sessions, now=now)
    except StatementError:
        # The database refused a row, and with it the whole batch. Stored one by one, only the
        # refused rows are dead-lettered.
        log.warning("batch_refused", records=len(envelopes))
        consumed = _store_one_by_one(database, records, sessions, now=now)
    bus.commit(envelopes[-1].position)
    return consumed


def _read(envelope: Envelope, check_tokens: Callable[[Exchange], str]) -> _Read:
    try:
        exchange, bounded = bound(decode_exchange(envelope.payload))
    except UNREADABLE as error:
        return _Read(envelope, error=error)
    return _Read(envelope, exchange, arrival_of(exchange), check_tokens(exchange), bounded=bounded)


def _store(
    database: Database, records: Sequence[_Read], sessions: Sessions, *, now: float
) -> Consumed:
    tally = _Tally()
    with database.write(alone=False) as session:
        for record in records:
            outcome = _save(session, record, sessions, now=now)
            tally.outcomes[outcome] += 1
            if outcome == STORED:
                tally.tokens[record.tokens] += 1
                tally.bounded.update(record.bounded)
        sessions.save_moves(session)
        for reason, number in tally.outcomes.items():
            count(session, STAGE, reason, number)
        for reason, number in tally.tokens.items():
            count(session, TOKEN_STAGE, reason, number)
        for reason, number in tally.bounded.items():
            count(session, BOUND_STAGE, reason, number)
    sessions.saved()
    return Consumed(**tally.outcomes)


def _store_one_by_one(
    database: Database, records: Sequence[_Read], sessions: Sessions, *, now: float
) -> Consumed:
    outcomes = {STORED: 0, REPEATED: 0, POISON: 0}
    for record in records:
        try:
            one = _store(database, [record], sessions, now=now)
        except StatementError as error:
            with database.write(alone=False) as session:
                _put_aside(session, record.envelope, error, now=now)
                count(session, STAGE, POISON)
            one = Consumed(stored=0, repeated=0, poison=1)
        outcomes = {reason: number + getattr(one, reason) for reason, number in outcomes.items()}
    return Consumed(**outcomes)


def _save(session: Session, record: _Read, sessions: Sessions, *, now: float) -> str:
    if record.exchange is None or record.arrival is None:
        assert record.error is not None
        _put_aside(session, record.envelope, record.error, now=now)
        return POISON
    exchange = record.exchange
    doubt = DISAGREES if record.tokens == DISAGREES else None
    place, held_out = sessions.place(record.arrival, now=now)
    try:
        saved = save_exchange(
            session, exchange, held_out=held_out, now=now, doubt=doubt, place=place
        )
    except UNREADABLE as error:
        _put_aside(session, record.envelope, error, now=now)
        return POISON
    if saved and doubt is not None:
        log.warning(
            "exchange_doubted",
            reason=doubt,
            exchange_id=exchange.exchange_id,
            stream=exchange.stream,
        )
    return STORED if saved else REPEATED


def _put_aside(session: Session, envelope: Envelope, error: Exception, *, now: float) -> None:
    reason = f"{type(error).__name__}: {error}"[:500]
    log.error("record_put_aside", position=envelope.position, reason=reason)
    dead_letter(session, envelope.payload, reason=reason, now=now)
